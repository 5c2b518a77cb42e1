"""Recording: the datasets hold the very episodes that stepping single environments gives, and nothing is lost."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterenv import AdaptiveSync, ClusterEnv, Faults, NativeVector, Recorder, Rollout
from clusterenv.cli import main
from clusterenv.errors import ConfigError, RecordingError
from clusterenv.recording.dataset import write
from clusterenv.recording.pieces import Piece
from clusterenv.rollout import map_tree
from tests.conftest import Backend
from tests.policies import Hashing, Linear, Table
from tests.script import ROOT, run_script
from tests.worlds import World, make_factories

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")

OBSERVATIONS: list[spaces.Space[Any]] = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(0, 255, (40, 36, 3), np.uint8),  # What Minari would make a JPEG of.
    spaces.Discrete(7, start=2),
    spaces.Dict(
        speed=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(2)]),
        camera=spaces.Box(0, 255, (2, 2), np.uint8),
    ),
]
ACTIONS: list[spaces.Space[Any]] = [
    spaces.Discrete(4),
    spaces.MultiDiscrete([3, 4]),
    spaces.Box(-2.0, 2.0, (2,), np.float32),
    spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(-1, 1, (1,), np.float32)])),
]
MODES = list(AutoresetMode)


@dataclass
class Plain:
    """An episode, as a loop over a single environment sees it."""

    seed: int | None
    observations: list[Any]
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminations: list[bool] = field(default_factory=list)
    truncations: list[bool] = field(default_factory=list)
    cut: str | None = None


def play(
    env: gym.Env[Any, Any], policy: Hashing, mode: AutoresetMode, lengths: Sequence[int], seeds: Sequence[int]
) -> list[Plain]:
    """Step an environment as often as rollouts of these lengths do.

    Without autoreset it is reset between rollouts if it has to be, each time with the next seed.
    """
    batched = batch_space(env.action_space)
    observation, _ = env.reset(seed=seeds[0])
    played: list[Plain] = []
    episode: Plain | None = Plain(seeds[0], [observation])
    for index, num_steps in enumerate(lengths):
        if mode is AutoresetMode.DISABLED and episode is None:
            observation, _ = env.reset(seed=seeds[index])
            episode = Plain(seeds[index], [observation])
        for _ in range(num_steps):
            if episode is None:
                if mode is AutoresetMode.NEXT_STEP:
                    observation, _ = env.reset()
                    episode = Plain(None, [observation])
                continue
            action = policy(map_tree(lambda part: np.asarray(part)[None], observation))
            observation, reward, terminated, truncated, _ = env.step(next(iter(iterate(batched, action))))
            episode.observations.append(observation)
            episode.actions.append(map_tree(lambda part: part[0], action))
            episode.rewards.append(float(reward))
            episode.terminations.append(bool(terminated))
            episode.truncations.append(bool(truncated))
            if terminated or truncated:
                played.append(episode)
                episode = None
                if mode is AutoresetMode.SAME_STEP:
                    observation, _ = env.reset()
                    episode = Plain(None, [observation])
    if episode is not None and episode.rewards:
        episode.truncations[-1] = True
        played.append(replace(episode, cut="recording ended"))
    return played


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare arrays in every bit, and trees whatever the order of their keys."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs)
        for key in theirs:
            assert_equal(ours[key], theirs[key])
    elif isinstance(theirs, tuple):
        for our, their in zip(ours, theirs, strict=True):
            assert_equal(our, their)
    else:
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def assert_is(recorded: Any, metadata: dict[str, Any], plain: Plain) -> None:
    def stack(values: list[Any]) -> Any:
        return map_tree(lambda *parts: np.stack([np.asarray(part) for part in parts]), *values)

    assert_equal(recorded.observations, stack(plain.observations))
    assert_equal(recorded.actions, stack(plain.actions))
    assert recorded.rewards.tolist() == plain.rewards
    assert recorded.terminations.tolist() == plain.terminations
    assert recorded.truncations.tolist() == plain.truncations
    assert (metadata.get("seed"), metadata.get("cut")) == (plain.seed, plain.cut)


def load(path: Path) -> Any:
    """Load a dataset as users of Minari do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(path.parent))
        return minari.load_dataset(path.name)


def by_environment(path: Path, num_envs: int) -> list[list[tuple[Any, dict[str, Any]]]]:
    dataset = load(path)
    metadata = list(dataset.storage.get_episode_metadata(range(dataset.total_episodes)))
    found: list[list[tuple[Any, dict[str, Any]]]] = [[] for _ in range(num_envs)]
    for episode, about in zip(dataset.iterate_episodes(), metadata, strict=True):
        found[int(about["env_index"])].append((episode, about))
    return found


def add_rollouts(
    envs: ClusterEnv, recorder: Recorder, policy: Any, lengths: Sequence[int], seeds: Sequence[int]
) -> None:
    """Record rollouts of these lengths; without autoreset, reset what has ended with the next seed before each."""
    envs.reset(seed=seeds[0])
    ended = np.zeros(envs.num_envs, np.bool_)
    for index, num_steps in enumerate(lengths):
        if envs.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            envs.reset(seed=seeds[index], options={"reset_mask": ended})
            ended[:] = False
        rollout = envs.rollout(policy, num_steps)
        ended |= (rollout.terminations | rollout.truncations).any(axis=0)
        recorder.add(rollout)


@given(
    st.sampled_from(OBSERVATIONS),
    st.sampled_from(ACTIONS),
    st.sampled_from(MODES),
    st.integers(1, 4),
    st.integers(1, 9),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_recorded_episodes_are_those_of_a_loop_over_a_single_environment(
    tmp_path_factory: pytest.TempPathFactory,
    observation: Any,
    action: Any,
    mode: AutoresetMode,
    num_envs: int,
    longest: int,
    lengths: list[int],
    seed: int,
) -> None:
    factories = make_factories(
        num_envs, observation_space=observation, action_space=action, infos="sparse", longest_episode=longest
    )
    seeds = [seed + 100 * index for index in range(len(lengths))]
    path = tmp_path_factory.mktemp("law") / "worlds-v0"
    with ClusterEnv(factories, num_workers=0, autoreset_mode=mode) as envs:
        recorder = Recorder(envs, path)
        add_rollouts(envs, recorder, Hashing(action), lengths, seeds)
        del recorder
    # Here, and not in a process of its own as close() does it: there are many of these.
    (path / "data").mkdir()
    write([Piece(piece) for piece in path.rglob("*.piece")], path / "data", path.name)
    for index, recorded in enumerate(by_environment(path, num_envs)):
        own_seeds = [seed + index for seed in seeds]
        expected = play(factories[index](), Hashing(action), mode, lengths, own_seeds)
        assert len(recorded) == len(expected)
        for (episode, metadata), plain in zip(recorded, expected, strict=True):
            assert_is(episode, metadata, plain)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_dataset_is_the_same_for_any_number_of_workers_and_any_transport(
    tmp_path: Path, mode: AutoresetMode, remote: Backend
) -> None:
    factories = make_factories(5, infos="sparse", longest_episode=6)
    lengths, seeds = [4, 1, 7, 3, 9], [11, 200, 300, 400, 500]
    policy = Hashing(spaces.Discrete(4))
    alone, many = tmp_path / "alone-v0", tmp_path / "many-v0"
    for path, backend in ((alone, {"num_workers": 0}), (many, {**remote, "num_workers": 3})):
        with ClusterEnv(factories, autoreset_mode=mode, **backend) as envs, Recorder(envs, path) as recorder:
            add_rollouts(envs, recorder, policy, lengths, seeds)
    ours, theirs = load(many), load(alone)
    assert ours.total_steps == theirs.total_steps > 0
    for our, their in zip(ours.iterate_episodes(), theirs.iterate_episodes(), strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            assert_equal(getattr(our, name), getattr(their, name))
    count = range(ours.total_episodes)
    assert list(ours.storage.get_episode_metadata(count)) == list(theirs.storage.get_episode_metadata(count))


def test_a_stream_gives_each_environments_episodes_without_a_gap(tmp_path: Path, remote: Backend) -> None:
    factories = make_factories(4, infos="none", longest_episode=7)
    policy = Hashing(spaces.Discrete(4))
    counts = np.zeros(4, np.int64)
    with ClusterEnv(factories, **remote) as envs, Recorder(envs, tmp_path / "stream-v0") as recorder:
        envs.reset(seed=5)
        with envs.stream(policy, num_steps=6) as stream:
            while counts.min() < 3:  # Who is slow may be long in coming.
                rollout = next(stream)
                counts[rollout.env_indices] += 1
                recorder.add(rollout)
    for index, recorded in enumerate(by_environment(tmp_path / "stream-v0", 4)):
        expected = play(factories[index](), policy, AutoresetMode.NEXT_STEP, [6] * int(counts[index]), [5 + index])
        assert len(recorded) == len(expected) > 0
        for (episode, metadata), plain in zip(recorded, expected, strict=True):
            assert_is(episode, metadata, plain)


class Uneven(gym.Env[Any, Any]):
    """Has episodes of 3 steps, of which the last raises, and then of 2; observes their number.

    Args:
        gate: The named pipe at which the first step waits for a writer; "" for none.
    """

    observation_space = spaces.Box(0, 1000, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, gate: str) -> None:
        self._gate = gate
        self._number = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._number += 1
        self._num_steps = 0
        return np.array([self._number]), {}

    def step(self, action: Any) -> Any:
        if self._gate:
            Path(self._gate).open("rb").close()
            self._gate = ""
        self._num_steps += 1
        if self._number == 0 and self._num_steps == 3:
            raise RuntimeError("in the first episode")
        return np.array([self._number]), 1.0, self._number > 0 and self._num_steps == 2, False, {}


def test_two_rollouts_of_one_worker_side_by_side_are_recorded_one_after_the_other(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    factories = [lambda: Uneven(""), lambda: Uneven(str(gate))]
    faults = Faults(on_env_error="reset")
    with (
        ClusterEnv(factories, num_workers=2, faults=faults) as envs,
        Recorder(envs, tmp_path / "twice-v0") as recorder,
    ):
        envs.reset(seed=0)
        with envs.stream(lambda obs: np.zeros(len(obs), np.int64), 4, min_envs=2) as stream:
            rollout = next(stream)
            recorder.add(rollout)
            gate.open("wb").close()
    assert rollout.env_indices.tolist() == [0, 0]
    recorded = by_environment(tmp_path / "twice-v0", 2)[0]
    assert [episode.observations[0, 0] for episode, _ in recorded] == [0, 1, 2]
    assert [len(episode) for episode, _ in recorded] == [3, 2, 1]
    assert ["error" in about for _, about in recorded] == [True, False, False]


def test_an_episode_that_was_lost_with_its_worker_is_truncated_where_it_was_cut(
    tmp_path: Path, remote: Backend
) -> None:
    factories = make_factories(2, infos="none", longest_episode=10**6)
    policy = Hashing(spaces.Discrete(4))
    with ClusterEnv(factories, **remote) as envs, Recorder(envs, tmp_path / "lost-v0") as recorder:
        envs.reset(seed=5)
        recorder.add(envs.rollout(policy, 7))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        recorder.add(envs.rollout(policy, 4))
        (loss,) = envs.losses
    kept, lost = by_environment(tmp_path / "lost-v0", 2)
    (first,) = play(factories[0](), policy, AutoresetMode.NEXT_STEP, [7, 4], [5])
    assert [len(episode) for episode, _ in kept] == [11]
    assert_is(*kept[0], first)
    (before,) = play(factories[1](), policy, AutoresetMode.NEXT_STEP, [7], [6])
    (after,) = play(factories[1](), policy, AutoresetMode.NEXT_STEP, [4], [loss.seeds[0]])
    assert len(lost) == 2
    assert_is(*lost[0], replace(before, cut="worker lost"))
    assert_is(*lost[1], after)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_episode_that_begins_with_a_loss_which_a_step_has_told_of_has_its_seed(
    tmp_path: Path, remote: Backend, mode: AutoresetMode
) -> None:
    factories = make_factories(2, infos="none", longest_episode=10**6)
    policy = Hashing(spaces.Discrete(4))
    path = tmp_path / "told-v0"
    with ClusterEnv(factories, autoreset_mode=mode, **remote) as envs, Recorder(envs, path) as recorder:
        envs.reset(seed=5)
        recorder.add(envs.rollout(policy, 7))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        truncations = envs.step(policy)[3]
        assert truncations.tolist() == [False, True]
        recorder.add(envs.rollout(policy, 4))
        (loss,) = envs.losses
    recorded = by_environment(path, 2)[1]
    assert [about.get("seed") for _, about in recorded] == [6, loss.seeds[0]]
    assert recorded[0][1]["cut"] == "worker lost"


def test_an_episode_whose_environment_raised_is_truncated_and_says_so(tmp_path: Path) -> None:
    class Troubled(World):
        num_steps = 0

        def step(self, action: Any) -> Any:
            self.num_steps += 1
            if self.num_steps == 3:
                raise RuntimeError("the simulator is unstable")
            return super().step(action)

    faults = Faults(on_env_error="reset")
    options = {"num_workers": 0, "faults": faults}
    with ClusterEnv(lambda: Troubled(longest_episode=10**6), **options) as envs:  # type: ignore[arg-type]  # mypy joins the values' types
        envs.reset(seed=0)
        with Recorder(envs, tmp_path / "troubled-v0") as recorder:
            recorder.add(envs.rollout(Hashing(spaces.Discrete(4)), 8))
    ((first, metadata), *others) = by_environment(tmp_path / "troubled-v0", 1)[0]
    assert len(first) == 3
    assert (first.terminations[-1], first.truncations[-1], first.rewards[-1]) == (False, True, 0.0)
    assert "the simulator is unstable" in metadata["error"]
    assert all("error" not in about for _, about in others)


def test_a_rollout_that_failed_costs_the_episode_that_it_was_in_and_none_after_it(tmp_path: Path) -> None:
    class Clock(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1000, (1,), np.int64)
        action_space = spaces.Discrete(2)
        now = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.left = 5
            return np.array([self.now]), {}

        def step(self, action: Any) -> Any:
            self.now += 1
            self.left -= 1
            if self.now == 9:
                raise RuntimeError("only once")
            return np.array([self.now]), 1.0, self.left == 0, False, {}

    path = tmp_path / "failed-v0"
    with ClusterEnv(Clock, num_workers=0, autoreset_mode="SameStep") as envs, Recorder(envs, path) as recorder:
        envs.reset(seed=0)
        recorder.add(envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 7))
        with pytest.raises(RuntimeError, match="only once"):
            envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 7)
        recorder.add(envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 12))
        recording = recorder.close()
    recorded = [(each.observations[:, 0].tolist(), about.get("cut")) for each, about in by_environment(path, 1)[0]]
    assert recorded == [
        (steps(0, 5), None),
        (steps(5, 7), "interrupted"),
        (steps(10, 15), None),
        (steps(15, 20), None),
        (steps(20, 21), "recording ended"),
    ]
    assert recording is not None
    assert recording.num_left_out == 1


def rollouts_of_one(path: Path, order: Sequence[int | str]) -> list[tuple[list[int], str | None]]:
    """Record some of five rollouts of 4 steps, in this order; "reset" resets before the next.

    Returns the recorded episodes' step numbers, and why they were cut.
    """

    class Clock(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 1000, (1,), np.int64)
        action_space = spaces.Discrete(2)
        now = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.left = 6
            return np.array([self.now]), {}

        def step(self, action: Any) -> Any:
            self.now += 1
            self.left -= 1
            return np.array([self.now]), 1.0, self.left == 0, False, {}

    with ClusterEnv(Clock, num_workers=0, autoreset_mode="SameStep") as envs, Recorder(envs, path) as recorder:
        envs.reset(seed=0)
        made: list[Rollout] = []
        for entry in order:
            if entry == "reset":
                envs.reset(seed=0)
                continue
            while len(made) <= int(entry):
                made.append(envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 4))
            recorder.add(made[int(entry)])
    return [(episode.observations[:, 0].tolist(), about.get("cut")) for episode, about in by_environment(path, 1)[0]]


def steps(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1, 2], [(steps(0, 6), None), (steps(6, 12), None)]),
        ([0, 0, 1, 1, 2, 0], [(steps(0, 6), None), (steps(6, 12), None)]),
        ([1, 2], [(steps(6, 12), None)]),
        ([0, 2, 3], [(steps(0, 4), "interrupted"), (steps(12, 16), "recording ended")]),
        ([0, "reset", 1, 2], [(steps(0, 4), "interrupted"), (steps(4, 10), None), (steps(10, 12), "recording ended")]),
        ([0, 1, "reset", 2], [(steps(0, 6), None), (steps(6, 8), "interrupted"), (steps(8, 12), "recording ended")]),
        # As many steps are there as the episode had, but not its own.
        ([0, "reset", 2], [(steps(0, 4), "interrupted"), (steps(10, 12), "recording ended")]),
    ],
    ids=["all", "some twice", "from the middle on", "one missing", "reset", "reset later", "reset and one missing"],
)
def test_only_steps_that_follow_one_another_make_an_episode(
    tmp_path: Path, order: Sequence[int | str], expected: list[tuple[list[int], str | None]]
) -> None:
    assert rollouts_of_one(tmp_path / "clock-v0", order) == expected


def test_each_step_says_which_policy_has_made_it(tmp_path: Path) -> None:
    agent = Linear()
    kept: list[Rollout] = []
    with ClusterEnv("CartPole-v1", num_envs=2, num_workers=1, sync=AdaptiveSync(1e-9)) as envs:
        envs.reset(seed=1)
        with Recorder(envs, tmp_path / "cart-v0") as recorder:
            for _ in range(6):
                kept.append(envs.rollout(agent, 8))
                recorder.add(kept[-1])
                agent.nudge()
    for env_index, recorded in enumerate(by_environment(tmp_path / "cart-v0", 2)):
        valid = np.concatenate([rollout.valid[:, env_index] for rollout in kept])

        def column(name: str, env_index: int = env_index, valid: Any = valid) -> Any:
            return np.concatenate([getattr(rollout, name)[:, env_index] for rollout in kept])[valid]

        def per_rollout(name: str, env_index: int = env_index, valid: Any = valid) -> Any:
            return np.concatenate([np.repeat(getattr(rollout, name)[env_index], 8) for rollout in kept])[valid]

        for name, expected in {
            "logprob": column("logprob"),
            "value": column("value"),
            "policy_version": per_rollout("versions"),
            "policy_age": per_rollout("ages"),
            "policy_divergence": per_rollout("divergences"),
        }.items():
            assert_equal(np.concatenate([episode.infos[name] for episode, _ in recorded]), expected)
        assert len(np.unique(per_rollout("versions"))) > 1


def test_an_agent_that_is_replaced_within_an_episode_leaves_what_both_have_returned(tmp_path: Path) -> None:
    factories = make_factories(1, longest_episode=10**6)
    with ClusterEnv(factories, num_workers=0) as envs, Recorder(envs, tmp_path / "two-v0") as recorder:
        envs.reset(seed=0)
        recorder.add(envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3))
        recorder.add(envs.rollout(Table(), 3))
    ((episode, _),) = by_environment(tmp_path / "two-v0", 1)[0]
    assert len(episode) == 6
    assert "logprob" not in episode.infos


def test_the_environment_can_be_made_again_from_the_dataset_with_its_arguments(tmp_path: Path) -> None:
    with ClusterEnv("FrozenLake-v1", num_workers=1, env_kwargs={"is_slippery": False}) as envs:
        with Recorder(envs, tmp_path / "lake-v3") as recorder:
            recorder.add(envs.rollout(lambda obs: np.ones(len(obs), np.int64), 30))
        assert envs.spec is not None
    dataset = load(tmp_path / "lake-v3")
    assert dataset.id == "lake-v3"
    assert dataset.env_spec.kwargs["is_slippery"] is False
    env = dataset.recover_environment()
    assert (env.observation_space, env.action_space) == (dataset.observation_space, dataset.action_space)
    env.close()


def test_a_dataset_below_minaris_own_directory_is_called_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with ClusterEnv("CartPole-v1", num_workers=0) as envs, Recorder(envs, tmp_path / "cart" / "random-v1") as recorder:
        recorder.add(envs.rollout(Linear(), 30))
    recording = recorder.close()
    assert recording is not None
    assert recording.dataset_id == "cart/random-v1"
    assert list(minari.list_local_datasets()) == ["cart/random-v1"]
    assert minari.load_dataset("cart/random-v1").total_steps > 20


def test_what_is_learned_from_a_dataset_acts_as_the_policy_that_made_it(tmp_path: Path) -> None:
    direction = np.array([0.1, 0.4, 1.0, 0.6])

    def expert(obs: Any) -> Any:
        return (obs @ direction > 0).astype(np.int64)

    with (
        ClusterEnv("CartPole-v1", num_envs=4, num_workers=1) as envs,
        Recorder(envs, tmp_path / "expert-v0") as recorder,
    ):
        envs.reset(seed=0)
        for _ in range(5):
            recorder.add(envs.rollout(expert, 200))
    dataset = load(tmp_path / "expert-v0")
    obs = np.concatenate([episode.observations[:-1] for episode in dataset.iterate_episodes()]).astype(np.float64)
    actions = np.concatenate([episode.actions for episode in dataset.iterate_episodes()])
    assert len(obs) == dataset.total_steps > 3000
    assert_equal(actions, expert(obs))
    seen, unseen = np.s_[:2000], np.s_[2000:]
    inputs = obs / obs.std(axis=0)
    weights = np.zeros(4)
    for _ in range(2000):  # Logistic regression.
        chances = 1 / (1 + np.exp(-inputs[seen] @ weights))
        weights += 5.0 * inputs[seen].T @ (actions[seen] - chances) / 2000
    assert np.mean((inputs[unseen] @ weights > 0) == actions[unseen]) > 0.95


def test_a_native_vector_environment_is_recorded_like_any_other(tmp_path: Path) -> None:
    with ClusterEnv(NativeVector("CartPole-v1"), num_envs=4, num_workers=2) as envs:
        envs.reset(seed=3)
        with Recorder(envs, tmp_path / "native-v0") as recorder:
            rollouts = [envs.rollout(Linear(), 40) for _ in range(3)]
            for rollout in rollouts:
                recorder.add(rollout)
    lengths = sorted(int(length) for rollout in rollouts for length in rollout.episodes.lengths)
    recorded = [entry for entries in by_environment(tmp_path / "native-v0", 4) for entry in entries]
    assert sorted(len(episode) for episode, about in recorded if "cut" not in about) == lengths
    assert all(episode.terminations[:-1].sum() == 0 for episode, _ in recorded)


KILLED = """
import os, signal, sys
import numpy as np
from clusterenv import ClusterEnv, Recorder
from tests.policies import Calendar

with ClusterEnv([Calendar] * 2, num_workers=0) as envs:
    envs.reset(seed=0)
    recorder = Recorder(envs, sys.argv[1])
    for _ in range(3):
        recorder.add(envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 10))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_everything_that_was_added_can_be_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "killed-v0"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (piece,) = path.rglob("*.piece")
    with piece.open("ab") as file:
        file.write(piece.read_bytes()[:50])  # And a record that was cut off.
    with (
        ClusterEnv("CartPole-v1", num_workers=0) as envs,
        pytest.raises(ConfigError, match=r"clusterenv merge .*killed"),
    ):
        Recorder(envs, path)
    assert main(["merge", str(path), "--out", str(path)]) == 0
    assert "episodes" in capsys.readouterr().out
    dataset = load(path)
    ends = [about for about in dataset.storage.get_episode_metadata(range(len(dataset))) if "cut" not in about]
    assert dataset.total_steps == sum(len(episode) for episode in dataset.iterate_episodes())
    assert len(ends) > 10


def test_pieces_of_several_runs_are_merged_into_one_dataset(tmp_path: Path) -> None:
    for run, seed in enumerate((1, 2)):
        with ClusterEnv("CartPole-v1", num_workers=0) as envs:
            envs.reset(seed=seed)
            recorder = Recorder(envs, tmp_path / f"run-v{run}")
            recorder.add(envs.rollout(Linear(), 60))
            (piece,) = (tmp_path / f"run-v{run}").rglob("*.piece")
            piece.rename(tmp_path / f"{run}.piece")
            with pytest.raises(ConfigError, match="no pieces"):
                recorder.close()
    assert (
        main(["merge", str(tmp_path / "0.piece"), str(tmp_path / "1.piece"), "--out", str(tmp_path / "both-v0")]) == 0
    )
    dataset = load(tmp_path / "both-v0")
    seeds = [about.get("seed") for about in dataset.storage.get_episode_metadata(range(len(dataset)))]
    assert [seed for seed in seeds if seed is not None] == [1, 2]


def test_relative_paths_are_those_of_the_directory_in_which_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ClusterEnv("CartPole-v1", num_workers=0) as envs:
        envs.reset(seed=0)
        with Recorder(envs, "sets/closed-v0") as recorder:
            recorder.add(envs.rollout(Linear(), 5))
            os.chdir("elsewhere")
        assert recorder.path == tmp_path / "sets" / "closed-v0"
        os.chdir(tmp_path)
        envs.reset(seed=0)
        Recorder(envs, "sets/left-v0").add(envs.rollout(Linear(), 5))
    os.chdir("elsewhere")
    assert main(["merge", "../sets/left-v0", "--out", "merged-v0"]) == 0
    assert load(tmp_path / "sets" / "closed-v0").total_steps == 5
    assert load(tmp_path / "elsewhere" / "merged-v0").total_steps == 5


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let the disk take no more of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_only_the_rollouts_it_did_not_take(tmp_path: Path) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", num_workers=0) as envs, Recorder(envs, tmp_path / "full-v0") as recorder:
        envs.reset(seed=0)
        recorder.add(envs.rollout(agent, 40))
        (piece,) = (tmp_path / "full-v0").rglob("*.piece")
        with files_of_at_most(piece.stat().st_size + 700):
            with pytest.raises(RecordingError, match=r"full-v0.*Those before it are there"):
                recorder.add(envs.rollout(agent, 40))
            envs.rollout(agent, 10)  # The run goes on.
        recorder.add(envs.rollout(agent, 40))  # And when there is room again, the recording.
    recorded = by_environment(tmp_path / "full-v0", 1)[0]
    assert sum(about.get("cut") == "interrupted" for _, about in recorded) == 1
    assert sum(len(episode) for episode, _ in recorded) > 30


TOO_LARGE = """
import json, os, resource, sys
from clusterenv import ClusterEnv, Recorder
from clusterenv.errors import RecordingError
from tests.policies import Linear

with ClusterEnv("CartPole-v1", num_workers=0) as envs:
    recorder = Recorder(envs, sys.argv[1])
    recorder.add(envs.rollout(Linear(), 400))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    recorder.close()
except RecordingError as error:
    print(json.dumps(str(error)), flush=True)
"""


def test_a_dataset_that_does_not_fit_leaves_the_pieces_for_another_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In a process of its own: HDF5 has a lot to say about a file that it cannot close.
    (error,) = run_script(TOO_LARGE, str(tmp_path / "large-v0"))
    assert "Nothing that was recorded is lost" in error
    assert "clusterenv merge" in error
    assert not (tmp_path / "large-v0" / "data").exists()
    assert main(["merge", str(tmp_path / "large-v0"), "--out", str(tmp_path / "elsewhere-v0")]) == 0
    assert load(tmp_path / "elsewhere-v0").total_steps > 300
    capsys.readouterr()
    assert main(["merge", str(tmp_path / "large-v0"), "--out", str(tmp_path / "elsewhere-v0")]) == 2
    assert "There is a dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("done-v0", "There is a dataset at .*done-v0 already"),
        ("unnumbered", "such as unnumbered-v0"),
        ("file/below-v0", "Nothing can be recorded to .*Not a directory"),
    ],
)
def test_a_path_that_cannot_be_a_new_dataset_is_refused_before_anything_runs(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "file").touch()
    with ClusterEnv("CartPole-v1", num_workers=0) as envs:
        with Recorder(envs, tmp_path / "done-v0") as recorder:
            recorder.add(envs.rollout(Linear(), 30))
        with pytest.raises(ConfigError, match=text):
            Recorder(envs, tmp_path / name)
    assert load(tmp_path / "done-v0").total_steps > 20


@pytest.mark.parametrize(
    "space",
    [
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Text(5),
        spaces.Dict({"a/b": spaces.Discrete(2)}),
        spaces.Box(0, 1, (0,), np.float32),
    ],
    ids=str,
)
def test_spaces_that_minari_cannot_hold_are_refused(tmp_path: Path, space: Any) -> None:
    with (
        ClusterEnv(make_factories(1, observation_space=space), num_workers=0) as envs,
        pytest.raises(ConfigError, match="The observation"),
    ):
        Recorder(envs, tmp_path / "odd-v0")
    assert not (tmp_path / "odd-v0").exists()


def test_what_is_not_a_rollout_of_these_environments_is_refused(tmp_path: Path) -> None:
    with (
        ClusterEnv("CartPole-v1", num_workers=0) as envs,
        ClusterEnv("CartPole-v1", num_workers=0) as others,
        Recorder(envs, tmp_path / "own-v0") as recorder,
    ):
        with pytest.raises(ConfigError, match="takes rollouts"):
            recorder.add(envs.reset(seed=0))  # type: ignore[arg-type]  # that is the mistake
        with pytest.raises(ConfigError, match="of another ClusterEnv"):
            recorder.add(others.rollout(Linear(), 3))
        rollout = envs.rollout(Linear(), 3)
        with pytest.raises(ConfigError, match="This rollout's observation is float64"):
            recorder.add(replace(rollout, obs=rollout.obs.astype(np.float64)))
        with pytest.raises(ConfigError, match="ClusterEnv whose rollouts"):
            Recorder(gym.make("CartPole-v1"), tmp_path / "other-v0")  # type: ignore[arg-type]  # that is the mistake
        recorder.add(rollout)
    with pytest.raises(ConfigError, match="closed"):
        recorder.add(rollout)
    recording = recorder.close()
    assert recording is not None
    assert recording.num_steps == 3


def test_without_minari_one_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)  # What Python itself does for a module that cannot be imported.
    with (
        ClusterEnv("CartPole-v1", num_workers=0) as envs,
        pytest.raises(ConfigError, match=r"no h5py: pip install 'clusterenv-rl\[minari\]'"),
    ):
        Recorder(envs, tmp_path / "none-v0")


def test_an_error_of_the_run_itself_is_what_is_raised_and_the_dataset_is_there(tmp_path: Path) -> None:
    def run(envs: ClusterEnv) -> None:
        with Recorder(envs, tmp_path / "cut-v0") as recorder:
            recorder.add(envs.rollout(Linear(), 50))
            raise ZeroDivisionError

    with ClusterEnv("CartPole-v1", num_workers=0) as envs, pytest.raises(ZeroDivisionError):
        run(envs)
    assert load(tmp_path / "cut-v0").total_steps > 40


def test_pieces_that_cannot_be_deleted_hide_no_error_of_the_run_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(envs: ClusterEnv, path: Path, error: type[Exception] | None) -> Recorder:
        (path / "elsewhere").mkdir(parents=True)
        (path / "pieces").symlink_to(path / "elsewhere")
        envs.reset(seed=0)
        with Recorder(envs, path) as recorder:
            recorder.add(envs.rollout(Linear(), 5))
            if error is not None:
                raise error
        return recorder

    with ClusterEnv("CartPole-v1", num_workers=0) as envs:
        with pytest.raises(RecordingError, match=r"complete, but .*pieces cannot be deleted"):
            run(envs, tmp_path / "whole-v0", None)
        with pytest.raises(ZeroDivisionError):
            run(envs, tmp_path / "cut-v0", ZeroDivisionError)
    assert "pieces cannot be deleted" in caplog.text
    assert [load(tmp_path / name).total_steps for name in ("whole-v0", "cut-v0")] == [5, 5]


@pytest.mark.parametrize("printed", ["print('a banner')", "import atexit; atexit.register(print, 'a farewell')"])
def test_what_others_print_while_a_dataset_is_written_is_not_taken_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(printed)
    with ClusterEnv("CartPole-v1", num_workers=0) as envs:
        envs.reset(seed=0)
        recorder = Recorder(envs, tmp_path / "noisy-v0")
        recorder.add(envs.rollout(Linear(), 5))
        monkeypatch.syspath_prepend(tmp_path)
        if "atexit" in printed:
            with pytest.raises(RecordingError, match="a farewell"):
                recorder.close()
            (tmp_path / "sitecustomize.py").unlink()
        recording = recorder.close()
    assert recording is not None
    assert recording.num_steps == 5


def test_one_who_forgets_to_close_is_told_how_to_have_the_dataset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterEnv("CartPole-v1", num_workers=0) as envs, caplog.at_level(logging.WARNING):
        recorder = Recorder(envs, tmp_path / "forgotten-v0")
        recorder.add(envs.rollout(Linear(), 50))
        del recorder
    assert f"clusterenv merge {tmp_path}/forgotten-v0 --out" in caplog.text
    assert main(["merge", str(tmp_path / "forgotten-v0"), "--out", str(tmp_path / "forgotten-v0")]) == 0
    assert load(tmp_path / "forgotten-v0").total_steps > 40
