"""send and recv: each worker at its own pace, and every environment's own story still exact."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Timeouts
from clusterenv.errors import CallTimeout, ConfigError, WorkerFailed
from tests.conftest import Backend
from tests.tally import Tally, truth

NUM_ENVS = 5
ACTIONS = np.zeros(4, np.int64)


def test_each_environment_goes_through_what_it_would_in_lockstep(backend: Backend) -> None:
    actions = np.random.default_rng(1).integers(0, 2, (60, NUM_ENVS))
    reference = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * NUM_ENVS)
    reference.reset(seed=7)
    wanted = [reference.step(row) for row in actions]
    reference.close()
    with ClusterEnv("CartPole-v1", NUM_ENVS, **backend) as envs:
        envs.reset(seed=7)
        step = np.zeros(NUM_ENVS, np.int64)
        envs.send(actions[0], np.arange(NUM_ENVS))
        while (step < len(actions)).any():
            observations, rewards, terminations, truncations, info = envs.recv()
            ids = info["env_id"]
            for row, env_id in enumerate(ids):
                expected = wanted[step[env_id]]
                np.testing.assert_array_equal(observations[row], expected[0][env_id])
                assert (rewards[row], terminations[row], truncations[row]) == tuple(
                    part[env_id] for part in expected[1:4]
                )
            step[ids] += 1
            going_on = ids[step[ids] < len(actions)]
            if len(going_on):
                envs.send(actions[step[going_on], going_on], going_on)
        envs.step(actions[0])


def test_actions_may_come_one_environment_at_a_time(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        for env_id in (1, 3, 0):
            envs.send([0], [env_id])
        *_, info = envs.recv()
        assert info["env_id"].tolist() == [0, 1]
        envs.send([1, 1, 1], [2, 0, 1])
        seen: set[int] = set()
        while seen != {0, 1, 2, 3}:
            *_, info = envs.recv()
            seen |= set(info["env_id"].tolist())


def test_a_slow_worker_does_not_hold_the_others_back(remote: Backend, tmp_path: Any) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)

    class Slow(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            with open(gate, "rb"):  # Until somebody opens the other end.
                pass
            return super().step(action)

    makers = [lambda: gym.make("CartPole-v1"), lambda: Slow(gym.make("CartPole-v1"))]
    with ClusterEnv(makers, **remote) as envs:
        envs.reset(seed=1)
        envs.send([0, 0], [0, 1])
        for _ in range(5):
            *_, info = envs.recv()
            assert info["env_id"].tolist() == [0]
            envs.send([0], [0])
        envs.recv()
        with pytest.raises(CallTimeout):
            envs.recv(timeout=0.05)
        with open(gate, "wb"):
            pass
        *_, info = envs.recv()
        assert info["env_id"].tolist() == [1]


def test_infos_come_with_their_rows(remote: Backend) -> None:
    class Talking(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {"said": int(action) + 10}

    with ClusterEnv(lambda: Talking(gym.make("CartPole-v1")), 4, **remote) as envs:
        envs.reset(seed=1)
        envs.send([1, 0], [2, 3])
        *_, info = envs.recv()
        assert info["env_id"].tolist() == [2, 3]
        assert info["said"].tolist() == [11, 10]
        assert info["_said"].tolist() == [True, True]


def test_a_lost_workers_rows_come_back_truncated(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        first, _ = envs.reset(seed=1)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        envs.send([0, 0], [2, 3])
        observations, rewards, _, truncations, info = envs.recv()
        assert info["env_id"].tolist() == [2, 3]
        assert info["worker_lost"].all()
        assert truncations.all()
        assert not rewards.any()
        np.testing.assert_array_equal(observations, first[2:])
        envs.send([0, 0, 0, 0], [0, 1, 2, 3])
        seen: set[int] = set()
        while seen != {0, 1, 2, 3}:
            *_, info = envs.recv()
            assert "worker_lost" not in info
            seen |= set(info["env_id"].tolist())
        assert len(envs.losses) == 1


def test_misuse_is_refused_with_a_reason(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        envs.reset(seed=1)
        with pytest.raises(ConfigError, match="nothing to wait for"):
            envs.recv()
        with pytest.raises(ConfigError, match="different indices below 4"):
            envs.send([0], [4])
        with pytest.raises(ConfigError, match="different indices"):
            envs.send([0, 0], [1, 1])
        with pytest.raises(ConfigError, match=r"shape \(2,\)"):
            envs.send([0], [1, 2])
        envs.send([0, 0, 0, 0], [0, 1, 2, 3])
        with pytest.raises(ConfigError, match="have an action already"):
            envs.send([0], [1])
        with pytest.raises(AlreadyPendingCallError):
            envs.step(np.zeros(4, dtype=np.int64))


def test_an_exception_reaches_recv(remote: Backend) -> None:
    class Failing(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise RuntimeError("no way")

    makers = [lambda: gym.make("CartPole-v1"), lambda: Failing(gym.make("CartPole-v1"))]
    with ClusterEnv(makers, **remote, timeouts=Timeouts(call_s=20)) as envs:
        envs.reset(seed=1)
        envs.send([0], [1])
        with pytest.raises(WorkerFailed, match="no way"):
            envs.recv()
        envs.reset(seed=1)


def test_after_steps_of_one_worker_all_rows_are_shown_as_they_are(remote: Backend) -> None:
    def still(obs: Any) -> Any:
        return np.zeros(len(obs), np.int64)

    with ClusterEnv(Tally, 4, **remote) as envs:
        envs.reset(seed=1)
        for start in (0, 2, 0, 0, 2):
            envs.send(ACTIONS[:2], [start, start + 1])
            envs.recv()
            mask = np.array([True, False, False, False])
            np.testing.assert_array_equal(envs.reset(options={"reset_mask": mask})[0], truth(envs))
            envs.send(ACTIONS[:2], [start, start + 1])
            envs.recv()
            before = truth(envs)
            rollout = envs.rollout(still, 3)
            np.testing.assert_array_equal(rollout.obs[0], before)
            np.testing.assert_array_equal(rollout.next_obs, truth(envs))
            np.testing.assert_array_equal(envs.step(ACTIONS)[0], truth(envs))
