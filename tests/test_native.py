"""Native vector environments on the workers: their own speed, in Gymnasium's layout."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from clusterenv import ClusterEnv, NativeVector
from clusterenv.errors import ClusterEnvError, ConfigError, WorkerFailed
from tests.conftest import Backend, wait_until_gone
from tests.worlds import TroubledWorld, World, WorldError, assert_same

AnyVector = VectorEnv[Any, Any, Any]


def make_native(num_envs: int, **options: Any) -> AnyVector:
    return gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point", **options)


def make_worlds(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Callable[[int], AnyVector]:
    return lambda num_envs: SyncVectorEnv([lambda: World(infos="sparse")] * num_envs, autoreset_mode=mode)


def with_float64_rewards(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    return (answer[0], answer[1].astype(np.float64), *answer[2:])


def test_each_worker_hosts_the_native_environment_of_its_shards_size(backend: Backend) -> None:
    sizes = [2, 1] if backend["num_workers"] else [3]
    starts = [0, *np.cumsum(sizes)[:-1]]
    theirs = [make_native(size) for size in sizes]
    rng = np.random.default_rng(1)
    with ClusterEnv(NativeVector("CartPole-v1"), 3, **backend) as ours:
        assert ours.observation_space == make_native(3).observation_space
        assert ours.action_space == make_native(3).action_space
        assert ours.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        resets = [each.reset(seed=9 + int(start)) for each, start in zip(theirs, starts, strict=True)]
        assert_same(ours.reset(seed=9), (np.concatenate([reset[0] for reset in resets]), {}))
        for step in range(200):
            actions = rng.integers(2, size=3)
            shards = np.split(actions, starts[1:])
            answers = [each.step(shard) for each, shard in zip(theirs, shards, strict=True)]
            merged = [np.concatenate(parts) for parts in list(zip(*answers, strict=True))[:4]]
            assert_same(ours.step(actions), with_float64_rewards((*merged, {})), f"step {step}")


def test_arguments_reach_the_native_environment(backend: Backend) -> None:
    with ClusterEnv(NativeVector("CartPole-v1", sutton_barto_reward=True), 2, **backend) as envs:
        assert repr(envs) == "ClusterEnv(CartPole-v1, num_envs=2)"
        envs.reset(seed=1)
        assert envs.step(np.array([0, 1]))[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_callables_vectors_together_equal_one_large_vector(backend: Backend, mode: AutoresetMode) -> None:
    theirs = make_worlds(mode)(5)
    rng = np.random.default_rng(2)
    with ClusterEnv(NativeVector(make_worlds(mode)), 5, autoreset_mode=mode, **backend) as ours:
        assert_same(ours.reset(seed=4), theirs.reset(seed=4))
        for step in range(15):
            actions = rng.integers(4, size=5)
            answer = theirs.step(actions)
            assert_same(ours.step(actions), answer, f"step {step}")
            is_over: NDArray[np.bool_] = answer[2] | answer[3]
            if mode == AutoresetMode.DISABLED and is_over.any():
                ours_again = ours.reset(options={"reset_mask": is_over.copy()})
                assert_same(ours_again, theirs.reset(options={"reset_mask": is_over.copy()}))
        assert_same(ours.reset(seed=[5, 3, 1, 9, 7]), theirs.reset(seed=[5, 3, 1, 9, 7]))  # type: ignore[arg-type]  # SyncVectorEnv takes lists
        one = np.array([False, True, False, False, False])
        ours_again = ours.reset(options={"reset_mask": one.copy()})
        assert_same(ours_again, theirs.reset(options={"reset_mask": one.copy()}))
        assert_same(ours.step(actions), theirs.step(actions), "the step after a partial reset")


def test_calls_and_attributes_reach_the_environments_inside(backend: Backend) -> None:
    with ClusterEnv(NativeVector(make_worlds()), 3, **backend) as envs:
        assert envs.call("describe", "we are", shout=True) == ("WE ARE WORLD 0",) * 3
        envs.set_attr("label", ["a", "b", "c"])
        assert envs.get_attr("label") == ("a", "b", "c")
        assert envs.render() == (None, None, None)


def test_an_exception_names_the_whole_shard(remote: Backend) -> None:
    def make(num_envs: int) -> AnyVector:
        return SyncVectorEnv([lambda: TroubledWorld("step" if num_envs == 1 else "nowhere")] * num_envs)

    with ClusterEnv(NativeVector(make), 3, **remote) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerFailed, match="broke in its step") as caught:
            envs.step([0, 0, 0])
        assert (caught.value.worker_index, caught.value.env_indices) == (1, (2,))
        assert type(caught.value.__cause__) is WorldError
        envs.reset(seed=1)
        envs.step([0, 0, 0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda num_envs: SyncVectorEnv([World] * (num_envs + 1)), "environments"),
        (lambda num_envs: World(), "VectorEnv"),
        (make_worlds(AutoresetMode.SAME_STEP), "autoreset_mode"),
    ],
)
def test_what_does_not_fit_is_refused(backend: Backend, make: Any, words: str) -> None:
    with pytest.raises(ClusterEnvError, match=words):
        ClusterEnv(NativeVector(make), 3, **backend)


def test_an_id_without_a_vector_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match="Acrobot-v1"):
        NativeVector("Acrobot-v1")
    with pytest.raises(ConfigError, match="callable"):
        NativeVector(make_worlds(), size=3)


@pytest.mark.slow
class TestEnvPool:
    """The adapter for EnvPool's environments."""

    def test_it_equals_envpool_itself_whatever_the_number_of_workers(self, backend: Backend) -> None:
        envpool = pytest.importorskip("envpool")
        from clusterenv.adapters.envpool import EnvPool

        pool = envpool.make_gymnasium("CartPole-v1", num_envs=3, env_seed=[7, 8, 9])
        rng = np.random.default_rng(3)
        with ClusterEnv(EnvPool("CartPole-v1"), 3, **backend) as ours:
            assert ours.single_observation_space.shape == (4,)
            assert_same(ours.reset(seed=7)[0], pool.reset()[0])
            for _ in range(60):
                actions = rng.integers(2, size=3)
                answer = ours.step(actions)
                assert_same(answer[:4], with_float64_rewards(pool.step(actions)[:4]))
                assert answer[0] in ours.observation_space

    def test_episodes_restart_on_the_next_step(self, backend: Backend) -> None:
        pytest.importorskip("envpool")
        from clusterenv.adapters.envpool import EnvPool

        with ClusterEnv(EnvPool("CartPole-v1"), 3, **backend) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
            envs.reset(seed=1)
            is_over = np.zeros(3, np.bool_)
            num_restarts = 0
            for _ in range(60):
                _, rewards, terminations, truncations, _ = envs.step(np.zeros(3, np.int64))
                assert not (terminations | truncations)[is_over].any()
                assert (rewards == np.where(is_over, 0.0, 1.0)).all()
                num_restarts += int(is_over.sum())
                is_over = terminations | truncations
        assert num_restarts > 3

    def test_infos_have_a_value_and_a_mask_per_environment(self, backend: Backend) -> None:
        pytest.importorskip("envpool")
        from clusterenv.adapters.envpool import EnvPool

        with ClusterEnv(EnvPool("CartPole-v1"), 3, **backend) as envs:
            for infos in (envs.reset(seed=1)[1], envs.step(np.zeros(3, np.int64))[4]):
                assert "elapsed_step" in infos
                for key, value in infos.items():
                    assert len(value) == 3
                    assert key.startswith("_") or infos[f"_{key}"].tolist() == [True] * 3

    def test_the_same_seed_gives_the_same_episodes_and_other_seeds_others(self, backend: Backend) -> None:
        pytest.importorskip("envpool")
        from clusterenv.adapters.envpool import EnvPool

        with ClusterEnv(EnvPool("CartPole-v1"), 3, **backend) as envs:
            first, again, other = (envs.reset(seed=seed)[0] for seed in (1, 1, 5))
        assert_same(first, again)
        assert not (first == other).all(axis=1).any()
        assert len(np.unique(first, axis=0)) == 3

    def test_some_may_be_reset_and_the_others_keep_their_observation(self, backend: Backend) -> None:
        pytest.importorskip("envpool")
        from clusterenv.adapters.envpool import EnvPool

        with ClusterEnv(EnvPool("CartPole-v1"), 3, **backend) as envs:
            envs.reset(seed=1)
            before = envs.step(np.zeros(3, np.int64))[0]
            after, infos = envs.reset(options={"reset_mask": np.array([False, False, True])})
            assert_same(after[:2], before[:2])
            assert not (after[2] == before[2]).all()
            assert infos["_elapsed_step"].tolist() == [False, False, True]


def test_no_warning_tells_of_a_mode_that_cannot_travel(remote: Backend) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with ClusterEnv(NativeVector("CartPole-v1"), 4, **remote) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


class Rolling(gym.vector.VectorEnv[Any, Any, Any]):
    """Counts its steps; all its episodes end with the second; leaves by an exception when it is told to."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium wants it so

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
        self.single_action_space = gym.spaces.Discrete(3)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._count = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._count = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        if (np.asarray(actions) == 2).any():
            raise SystemExit("told to leave")
        self._count += 1
        ended = np.full(self.num_envs, self._count == 2)
        return self._observe(), np.ones(self.num_envs), ended, np.zeros(self.num_envs, np.bool_), {}

    def _observe(self) -> Any:
        return np.full((self.num_envs, 1), float(self._count))


def test_a_native_step_that_fails_leaves_all_rows_and_flags_as_they_were(remote: Backend) -> None:
    with ClusterEnv(NativeVector(Rolling), 4, **remote) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        seen, _, terminated, _, _ = envs.step(np.zeros(4, np.int64))
        assert terminated.all()
        with pytest.raises(WorkerFailed):
            envs.step(np.array([0, 0, 2, 0]))
        newest: Any = envs._backend.newest
        np.testing.assert_array_equal(newest.observations[0][2:], seen[2:])
        assert newest.terminations[2:].all()


class Ticking(gym.vector.VectorEnv[Any, Any, Any]):
    """Shows how many steps each episode has; an action of 1 ends it."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium wants it so

    def __init__(self, num_envs: int, mode: AutoresetMode) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._counts = np.zeros(num_envs)
        self._ended = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        self._counts[mask], self._ended[mask] = 0, False
        return self._counts[:, None].copy(), {}

    def step(self, actions: Any) -> Any:
        begins = self._ended if self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP else np.False_
        self._counts = np.where(begins, 0.0, self._counts + 1)
        self._ended = (np.asarray(actions) == 1) & ~begins
        return (
            self._counts[:, None].copy(),
            np.ones(self.num_envs),
            self._ended.copy(),
            np.zeros(self.num_envs, bool),
            {},
        )


def lose(envs: ClusterEnv, index: int) -> None:
    pid = envs.workers[index].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []


def test_a_reset_of_some_native_environments_does_not_hide_that_the_others_were_lost(remote: Backend) -> None:
    mode = AutoresetMode.DISABLED
    vector = NativeVector(lambda num_envs: Ticking(num_envs, mode))
    with ClusterEnv(vector, 4, autoreset_mode=mode, **remote) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.zeros(4, np.int64))
        seen, _, terminated, *_ = envs.step(np.array([0, 1, 0, 0]))
        lose(envs, 0)
        shown, _ = envs.reset(options={"reset_mask": terminated})
        np.testing.assert_array_equal(shown[[0, 2, 3]], seen[[0, 2, 3]])
        shown, _, _, truncated, infos = envs.step(np.zeros(4, np.int64))
        assert truncated.tolist() == [True, False, False, False]
        assert infos["worker_lost"].tolist() == [True, False, False, False]
        np.testing.assert_array_equal(shown[0], seen[0])


def test_an_episode_that_ends_in_its_first_step_after_a_loss_is_told(remote: Backend) -> None:
    vector = NativeVector(lambda num_envs: Ticking(num_envs, AutoresetMode.NEXT_STEP))
    with ClusterEnv(vector, 4, **remote) as envs:
        envs.reset(seed=0)
        envs.step(np.array([0, 1, 0, 0]))  # Environment 1 has ended; 0 goes on.
        lose(envs, 0)
        *_, truncated, _ = envs.step(np.zeros(4, np.int64))
        assert truncated.tolist() == [True, False, False, False]
        _, _, terminated, _, _ = envs.step(np.array([1, 0, 0, 0]))
        assert terminated.tolist() == [True, False, False, False]
