"""Rollouts: what workers collect by themselves is what stepping by hand would have given."""

from __future__ import annotations

import os
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterenv import ClusterEnv, Rollout
from clusterenv.errors import ConfigError, PolicyError, WorkerFailed
from clusterenv.rollout import map_tree
from tests.conftest import Backend
from tests.policies import Calendar, Hashing, StepCounter
from tests.tally import Tally
from tests.worlds import World, assert_same, make_factories

OBSERVATIONS: list[spaces.Space[Any]] = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Discrete(7, start=2),
    spaces.Dict(camera=spaces.Box(0, 255, (2, 2), np.uint8), speed=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64)])),
]
ACTIONS: list[spaces.Space[Any]] = [
    spaces.Discrete(4),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(3),
    spaces.Box(-2.0, 2.0, (2,), np.float32),
    spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(-1, 1, (1,), np.float32)])),
]


def collect_by_hand(factories: Any, mode: AutoresetMode, policy: Any, num_steps: int, seed: int) -> list[Any]:
    """Step a SyncVectorEnv with the same policy; `[(obs, action, reward, terminated, truncated, infos), ...]`."""
    envs = SyncVectorEnv(factories, autoreset_mode=mode)
    obs, _ = envs.reset(seed=seed)
    steps = []
    for _ in range(num_steps):
        action = policy(obs)
        following, *rest = envs.step(action)
        steps.append((obs, action, *rest))
        obs = following
    steps.append((obs,))
    envs.close()
    return steps


def assert_rollout_is(rollout: Rollout, steps: list[Any]) -> None:
    for t, (obs, action, reward, terminated, truncated, _) in enumerate(steps[:-1]):
        assert_same(map_tree(lambda part, t=t: part[t], rollout.obs), obs, f"obs {t}")
        assert_same(map_tree(lambda part, t=t: part[t], rollout.actions), action, f"action {t}")
        assert_same(rollout.rewards[t], reward, f"reward {t}")
        assert_same(rollout.terminations[t], terminated, f"terminated {t}")
        assert_same(rollout.truncations[t], truncated, f"truncated {t}")
    assert_same(rollout.next_obs, steps[-1][0], "next_obs")


@given(
    st.sampled_from(OBSERVATIONS),
    st.sampled_from(ACTIONS),
    st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_a_rollout_is_what_stepping_by_hand_gives(
    observation: Any, action: Any, mode: AutoresetMode, num_envs: int, num_steps: int, seed: int
) -> None:
    factories = make_factories(num_envs, observation_space=observation, action_space=action, infos="sparse")
    policy = Hashing(action)
    expected = collect_by_hand(factories, mode, deepcopy(policy), num_steps, seed)
    with ClusterEnv(factories, num_workers=0, autoreset_mode=mode) as envs:
        envs.reset(seed=seed)
        assert_rollout_is(envs.rollout(policy, num_steps), expected)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("pair", [(0, 0), (1, 3), (3, 4)], ids=["box", "image", "nested"])
def test_a_rollout_does_not_depend_on_workers_or_transport(
    backend: Backend, mode: AutoresetMode, pair: tuple[int, int]
) -> None:
    observation, action = OBSERVATIONS[pair[0]], ACTIONS[pair[1]]
    factories = make_factories(5, observation_space=observation, action_space=action)
    policy = Hashing(action)
    expected = collect_by_hand(factories, mode, deepcopy(policy), 20, 3)
    with ClusterEnv(factories, autoreset_mode=mode, **backend) as envs:
        envs.reset(seed=3)
        first = envs.rollout(policy, 13)
        assert_rollout_is(first, [*expected[:13], (expected[13][0],)])
        assert_rollout_is(envs.rollout(policy, 7), expected[13:])
        assert_rollout_is(first, [*expected[:13], (expected[13][0],)])  # the caller's own: later ones leave it alone


def calendars(num_envs: int) -> list[Any]:
    return [lambda index=index: Calendar(index) for index in range(num_envs)]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_transitions_lead_from_each_step_to_the_true_next_one(backend: Backend, mode: AutoresetMode) -> None:
    with ClusterEnv(calendars(5), autoreset_mode=mode, **backend) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            rollout = envs.rollout(Hashing(envs.single_action_space), 9)
            moves = rollout.transitions()
            assert len(moves.rewards) == rollout.valid.sum()
            assert (moves.next_obs[:, 0] == moves.obs[:, 0]).all()
            assert (moves.next_obs[:, 1] == moves.obs[:, 1]).all()
            assert (moves.next_obs[:, 2] == moves.obs[:, 2] + 1).all()
            assert (moves.rewards == moves.next_obs[:, 2]).all()
            is_last = moves.terminated | moves.truncated
            assert is_last.sum() == len(rollout.finals.steps)
            assert (rollout.finals.obs == moves.next_obs[is_last]).all()
            if mode is AutoresetMode.DISABLED:
                envs.reset()


def test_every_action_is_valid_except_where_an_environment_is_reset(backend: Backend) -> None:
    with ClusterEnv(calendars(4), **backend) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Hashing(envs.single_action_space), 30)
    done = rollout.terminations | rollout.truncations
    assert rollout.valid[0].all()
    assert (rollout.valid[1:] == ~done[:-1]).all()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episodes_are_counted_across_rollouts(backend: Backend, mode: AutoresetMode) -> None:
    with ClusterEnv(calendars(5), autoreset_mode=mode, **backend) as envs:
        envs.reset(seed=1)
        rollouts = [envs.rollout(Hashing(envs.single_action_space), 3) for _ in range(8)]
    assert sum(len(rollout.episodes) for rollout in rollouts) > 20
    for rollout in rollouts:
        episodes = rollout.episodes
        done = rollout.terminations | rollout.truncations
        assert_same((episodes.steps, episodes.env_indices), np.nonzero(done))
        assert (rollout.finals.obs[:, 2] == episodes.lengths).all()
        assert (episodes.returns == episodes.lengths * (episodes.lengths + 1) / 2).all()
        assert [info["episode_number"] for info in episodes.infos] == rollout.finals.obs[:, 1].tolist()


def test_an_episode_whose_beginning_was_not_seen_is_not_reported(backend: Backend) -> None:
    with ClusterEnv([lambda: World(longest_episode=1)] * 2, **backend) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 2)
        assert rollout.valid.tolist() == [[False, False], [True, True]]
        assert rollout.episodes.lengths.tolist() == [1, 1]
    with ClusterEnv(calendars(2), **backend) as envs:
        envs.reset(seed=3)
        envs.step(np.zeros(2, np.int64))
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 12)
        assert (rollout.finals.obs[:, 1] > 1).sum() <= len(rollout.episodes) < len(rollout.finals.steps) + 1
        assert (rollout.episodes.returns == rollout.episodes.lengths * (rollout.episodes.lengths + 1) / 2).all()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_recurrent_state_starts_anew_with_every_episode(backend: Backend, mode: AutoresetMode) -> None:
    with ClusterEnv(calendars(5), autoreset_mode=mode, **backend) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            rollout = envs.rollout(StepCounter(), 11)
            counts = np.where(rollout.valid, rollout.count, 0)
            steps = np.where(rollout.valid, rollout.obs[:, :, 2] + 1, 0)
            assert (counts == steps).all()
            assert (np.where(rollout.valid, rollout.states["count"][:, :, 0], 0) == np.maximum(steps - 1, 0)).all()
            envs.reset()


def test_without_autoreset_a_finished_environment_rests_until_it_is_reset(backend: Backend) -> None:
    with ClusterEnv(calendars(3), autoreset_mode=AutoresetMode.DISABLED, **backend) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Hashing(envs.single_action_space), 6)
        lengths = rollout.valid.sum(axis=0)
        assert (lengths <= 4).all()
        assert (rollout.valid == (np.arange(6)[:, None] < lengths)).all()
        assert (rollout.terminations | rollout.truncations).sum() == 3
        assert (rollout.next_obs[:, 2] == lengths).all()
        assert not envs.rollout(Hashing(envs.single_action_space), 2).valid.any()
        envs.reset(options={"reset_mask": np.array([True, False, True])})
        assert envs.rollout(Hashing(envs.single_action_space), 1).valid.tolist() == [[True, False, True]]


def test_without_copy_a_rollout_is_overwritten_by_the_next(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, copy=False, **backend) as envs:
        envs.reset(seed=1)
        policy = Hashing(envs.single_action_space)
        first = envs.rollout(policy, 5)
        kept = first.obs.copy()
        second = envs.rollout(policy, 5)
        assert (first.obs == second.obs).all()
        assert not (first.obs == kept).all()


def test_step_and_rollout_may_take_turns(backend: Backend) -> None:
    with ClusterEnv(calendars(4), **backend) as envs:
        obs, _ = envs.reset(seed=1)
        for _ in range(3):
            rollout = envs.rollout(Hashing(envs.single_action_space), 4)
            assert (rollout.obs[0] == obs).all()
            obs, *_ = envs.step(np.zeros(4, np.int64))
            same = (obs[:, 1] == rollout.next_obs[:, 1]) & (obs[:, 2] == rollout.next_obs[:, 2] + 1)
            assert (same | (obs[:, 2] == 0)).all()


def test_native_vector_environments_are_collected_too(backend: Backend) -> None:
    from clusterenv.adapters.envpool import EnvPool  # It takes a second, which other tests need not wait for.

    with ClusterEnv(EnvPool("CartPole-v1"), 6, **backend) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Hashing(envs.single_action_space), 60)
        done = rollout.terminations | rollout.truncations
        assert (rollout.valid[1:] == ~done[:-1]).all()
        assert (rollout.rewards[rollout.valid] == 1).all()
        assert (rollout.episodes.returns == rollout.episodes.lengths).all()
        assert len(rollout.episodes) == done.sum() > 0


def test_an_environment_that_was_never_reset_is_reset_first(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        assert (np.abs(envs.rollout(Hashing(envs.single_action_space), 1).obs) <= 0.05).all()


def test_spaces_without_a_fixed_size_are_refused_with_a_way_out(backend: Backend) -> None:
    with (
        ClusterEnv(lambda: World(spaces.Text(5)), 2, **backend) as envs,
        pytest.raises(ConfigError, match=r"choose actions on the head"),
    ):
        envs.rollout(lambda obs: np.zeros(2, np.int64), 1)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (
            np.zeros((2, 1), np.int64),
            r"must have shape \(1,\).*got shape \(2, 1\)|must have shape \(2,\).*got shape \(2, 1\)",
        ),
        (np.full(2, 0.5), "a dtype that fits int64"),
    ],
    ids=["wrong shape", "wrong dtype"],
)
def test_actions_that_do_not_fit_are_refused(action: Any, words: str) -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs, pytest.raises(PolicyError, match=words):
        envs.rollout(lambda obs: action, 1)


def test_an_exception_in_the_policy_arrives_with_its_traceback_and_the_run_goes_on(remote: Backend) -> None:
    def stumble(obs: Any, when: bool) -> Any:
        if when:
            raise KeyError("the policy stumbled")
        return np.zeros(len(obs), np.int64)

    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.rollout(stumble, 2, values={"when": False})
        with pytest.raises(WorkerFailed, match="the policy stumbled") as caught:
            envs.rollout(stumble, 2, values={"when": True})
        assert isinstance(caught.value.__cause__, KeyError)
        assert "stumble" in caught.value.remote_traceback
        envs.reset(seed=1)
        assert envs.rollout(stumble, 2, values={"when": False}).num_steps == 2


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_after_an_exception_in_the_policy_episodes_go_on_where_they_stood(
    backend: Backend, mode: AutoresetMode
) -> None:
    def stumble(obs: Any, day: int) -> Any:
        if (obs[:, 2] == day).any():
            raise KeyError("the policy stumbled")
        return np.zeros(len(obs), np.int64)

    with ClusterEnv(calendars(2), autoreset_mode=mode, **backend) as envs:
        envs.reset(seed=1)
        with pytest.raises((WorkerFailed, KeyError), match="the policy stumbled"):
            envs.rollout(stumble, 4, values={"day": 2})
        rollout = envs.rollout(stumble, 12, values={"day": -1})
    (first, second), episodes = rollout.obs[:2, :, 1:], rollout.episodes
    assert (first[:, 1] == 2).any()
    assert ((second - first == [0, 1]).all(axis=1) | (second == [first[0, 0] + 1, 0]).all(axis=1)).all()
    assert len(episodes) > 4
    assert (rollout.finals.obs[:, 2] == episodes.lengths).all()
    assert (episodes.returns == episodes.lengths * (episodes.lengths + 1) / 2).all()


def test_an_exception_in_an_environment_names_it(remote: Backend) -> None:
    class Fragile(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise ValueError("a leg broke")

    factories = [lambda: gym.make("CartPole-v1")] * 3 + [lambda: Fragile(gym.make("CartPole-v1"))]
    with ClusterEnv(factories, **remote) as envs:
        with pytest.raises(WorkerFailed, match="a leg broke") as caught:
            envs.rollout(Hashing(envs.single_action_space), 2)
        assert caught.value.env_indices == (3,)


def test_a_rollout_waits_for_no_call_under_way(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        envs.reset_async(seed=1)
        with pytest.raises(AlreadyPendingCallError):
            envs.rollout(Hashing(envs.single_action_space), 1)
        envs.reset_wait()


def test_a_rollout_has_at_least_one_step() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs, pytest.raises(ConfigError, match="num_steps"):
        envs.rollout(Hashing(envs.single_action_space), 0)


def test_a_rollout_with_tensors_may_change_its_device_and_refuses_transitions(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 4).to_torch()
        assert rollout.to_torch("cpu").obs.shape == (4, 2, 4)
        with pytest.raises(TypeError, match="before to_torch"):
            rollout.transitions()


class Gated(gym.Env[Any, Any]):
    """Terminates with its first step; its second waits until somebody opens the gate."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        if self._count == 2:
            with open(self._path, "rb") as gate:
                gate.read()
        return np.full(1, float(self._count)), 0.0, True, False, {}


def test_a_rollout_under_way_leaves_what_the_learner_saw_last_alone(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ClusterEnv([lambda: Gated(str(gate))], num_workers=1) as envs:
        envs.reset(seed=0)
        before: Any = envs._backend.newest
        seen: list[Any] = []

        def look_and_open() -> None:
            with open(gate, "wb"):  # Opens when the environment waits there, a step and a reset into the rollout.
                seen.append((before.observations[0].copy(), before.terminations.copy()))

        opener = threading.Thread(target=look_and_open)
        opener.start()
        envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
        opener.join()
    observations, terminations = seen[0]
    assert not terminations.any()
    np.testing.assert_array_equal(observations, 0.0)


def test_a_rollout_after_one_that_failed_knows_whose_episode_was_over(backend: Backend) -> None:
    class Short(Tally):
        """Its second step ends the first one's episode, and makes the second one raise, once."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self._index, self._has_raised = index, False

        def step(self, action: Any) -> Any:
            observation, reward, _, _, _ = super().step(action)
            if self._steps == 2 and self._index == 1 and not self._has_raised:
                self._has_raised = True
                raise RuntimeError("once")
            return observation, reward, self._steps == 2 and self._index == 0, False, {}

    kinds = dict(backend, num_workers=min(1, backend["num_workers"]))
    with ClusterEnv([lambda: Short(0), lambda: Short(1)], **kinds) as envs:
        envs.reset(seed=1)
        with pytest.raises(RuntimeError, match="once"):
            envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 5)
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
        assert rollout.valid[0].tolist() == [False, True], "the first step of the first one is a reset"
