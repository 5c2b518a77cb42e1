"""With on_env_error="reset" an exception of one environment costs one episode, and says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clusterenv import ClusterEnv, Faults, NativeVector
from clusterenv.errors import ConfigError, WorkerFailed
from tests.conftest import Backend
from tests.numbered import EPISODE, INSTANCE, STEP, Fault, Numbered, make_numbered, read_rows
from tests.worlds import World

ACTIONS = np.zeros(3, np.int64)


def faulty(tmp_path: Path, place: Any, after: int, **options: Any) -> list[Any]:
    """Three environments, of which the second raises once."""
    fault = Fault("raise", place, after=after, once=str(tmp_path / "once"))
    return make_numbered(3, {1: [fault]}, **options)


def step_on(envs: ClusterEnv) -> None:
    for _ in range(100):
        envs.step(ACTIONS)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("wide", [False, True])
def test_an_exception_in_a_step_truncates_its_episode_only(
    backend: Backend, mode: AutoresetMode, wide: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    makers = faulty(tmp_path, "step", 1, wide=wide)
    with ClusterEnv(makers, **backend, autoreset_mode=mode, faults=Faults(on_env_error="reset")) as envs:
        envs.reset(seed=1)
        before = read_rows(envs.step(ACTIONS)[0])
        with caplog.at_level(logging.WARNING):
            observations, rewards, terminated, truncated, infos = envs.step(ACTIONS)
        rows = read_rows(observations)
        assert (rewards[1], terminated[1], truncated[1]) == (0.0, False, True)
        assert infos["_env_error"].tolist() == [False, True, False]
        assert infos["env_error"][1] == "RuntimeError: a fault in the step"
        assert "environment 1 raised" in caplog.text
        assert rows[[0, 2], STEP].tolist() == [2, 2], "the others were stepped"
        if mode is AutoresetMode.SAME_STEP:
            final = infos["final_obs"][1]
            assert ((final["numbers"] if wide else final) == before[1]).all()
            assert rows[1, [EPISODE, STEP]].tolist() == [1, 0]
        else:
            assert (rows[1] == before[1]).all(), "what was seen last is seen once more"
            if mode is AutoresetMode.DISABLED:
                following = envs.reset(options={"reset_mask": truncated | terminated})[0]
            else:
                following = envs.step(ACTIONS)[0]
            assert read_rows(following)[1, [EPISODE, STEP]].tolist() == [1, 0]
        assert envs.stats["env_errors"] == 1


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_reset_that_fails_twice_makes_the_environment_anew_with_its_attributes(
    backend: Backend, mode: AutoresetMode
) -> None:
    class Brittle(Numbered):
        """Cannot be reset again once its first episode is over."""

        def reset(self, **options: Any) -> Any:
            if self._episode == 0:
                raise ValueError("worn out")
            return super().reset(**options)

    makers = [lambda: Numbered(0), lambda: Brittle(1), lambda: Numbered(2)]
    with ClusterEnv(makers, **backend, autoreset_mode=mode, faults=Faults(on_env_error="reset")) as envs:
        first = read_rows(envs.reset(seed=1)[0])
        envs.set_attr("tag", ["a", "b", "c"])
        for _ in range(30):
            observations, _, _, _, infos = envs.step(ACTIONS)
            rows = read_rows(observations)
            if "env_error" in infos:
                break
        assert infos["env_error"][1] == "ValueError: worn out"
        assert rows[1, [EPISODE, STEP]].tolist() == [0, 0]
        assert rows[1, INSTANCE] != first[1, INSTANCE]
        assert rows[0, INSTANCE] == first[0, INSTANCE]
        assert envs.get_attr("tag") == ("a", "b", "c")


def test_an_exception_in_the_first_reset_is_survived(backend: Backend, tmp_path: Path) -> None:
    with ClusterEnv(faulty(tmp_path, "reset", 0), **backend, faults=Faults(on_env_error="reset")) as envs:
        observations, infos = envs.reset(seed=1)
        assert infos["_env_error"].tolist() == [False, True, False]
        assert read_rows(observations)[:, STEP].tolist() == [0, 0, 0]
        assert envs.stats["env_errors"] == 1
        assert "env_error" not in envs.step(ACTIONS)[4]


@pytest.mark.parametrize("place", ["step", "reset"])
def test_an_environment_that_always_fails_ends_the_run(remote: Backend, place: Any) -> None:
    makers = make_numbered(3, {2: [Fault("raise", place, after=1)]})
    with ClusterEnv(makers, **remote, faults=Faults(on_env_error="reset")) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerFailed, match=rf"(?s)a fault in the {place}.*raised 6 times in a row") as caught:
            step_on(envs)
        assert caught.value.env_indices == (2,)


def test_an_exception_now_and_then_never_ends_the_run(backend: Backend) -> None:
    class Moody(Numbered):
        def reset(self, **options: Any) -> Any:
            self._age = getattr(self, "_age", 0)
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            self._age += 1
            if self._age % 10 == 0:
                raise RuntimeError("not now")
            return super().step(action)

    with ClusterEnv([lambda: Moody(0)] * 3, **backend, faults=Faults(on_env_error="reset")) as envs:
        envs.reset(seed=1)
        for _ in range(150):
            envs.step(ACTIONS)
        assert envs.stats["env_errors"] > 20


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_rollout_counts_a_failed_episode_as_truncated(backend: Backend, mode: AutoresetMode, tmp_path: Path) -> None:
    with ClusterEnv(
        faulty(tmp_path, "step", 1), **backend, autoreset_mode=mode, faults=Faults(on_env_error="reset")
    ) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 5)
        assert rollout.truncations[1].tolist() == [False, True, False]
        assert rollout.rewards[1].tolist() == [2.0, 0.0, 2.0]
        (failed,) = [info for info in rollout.episodes.infos if "env_error" in info]
        assert failed["env_error"] == "RuntimeError: a fault in the step"
        seen = rollout.transitions()
        ends = np.flatnonzero(seen.truncated & (seen.obs[:, 0] == 1))
        assert (seen.next_obs[ends[0]] == seen.obs[ends[0]]).all(), "what was seen last is seen once more"
        assert envs.stats["env_errors"] == 1


def test_an_observation_that_does_not_fit_is_an_error_of_its_environment(backend: Backend) -> None:
    class Growing(World):
        def step(self, action: Any) -> Any:
            return np.zeros(5, np.float32), *super().step(action)[1:]

    makers: list[Any] = [lambda: World(longest_episode=99), lambda: Growing(longest_episode=99)]
    with ClusterEnv(makers, **backend, faults=Faults(on_env_error="reset")) as envs:
        envs.reset(seed=1)
        _, _, _, truncated, infos = envs.step(np.zeros(2, np.int64))
        assert truncated.tolist() == [False, True]
        assert "SpaceMismatch" in infos["env_error"][1]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_native_vector_environment_begins_anew_as_a_whole(mode: AutoresetMode, tmp_path: Path) -> None:
    fault = Fault("raise", "step", after=2, once=str(tmp_path / "once"))

    def make(num_envs: int) -> Any:
        return SyncVectorEnv([lambda: Numbered(0, [fault])] * num_envs, autoreset_mode=mode)

    with ClusterEnv(
        NativeVector(make), 3, num_workers=1, autoreset_mode=mode, faults=Faults(on_env_error="reset")
    ) as envs:
        envs.reset(seed=1)
        envs.step(ACTIONS)
        before = envs.step(ACTIONS)[0]
        observations, rewards, _, truncated, infos = envs.step(ACTIONS)
        assert truncated.all()
        assert not rewards.any()
        assert infos["_env_error"].all()
        if mode is AutoresetMode.SAME_STEP:
            assert (np.stack(infos["final_obs"]) == before).all()
            assert (observations[:, STEP] == 0).all()
        else:
            assert (observations == before).all()
            if mode is AutoresetMode.NEXT_STEP:
                assert (envs.step(ACTIONS)[0][:, STEP] == 0).all()
            else:
                assert (envs.reset(options={"reset_mask": truncated})[0][:, STEP] == 0).all()


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="on_env_error"):
        ClusterEnv(World, 2, num_workers=0, faults=Faults(on_env_error="ignore"))
