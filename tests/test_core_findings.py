"""What strangers found when they tried the core: each was wrong once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import ClusterEnv, EveryUpdate, Network
from clusterenv.errors import PolicyError, WorkerFailed
from tests.conftest import Backend, wait_until_gone
from tests.interruption import count_lines, is_interrupted, spread_lines
from tests.policies import Linear

ACTIONS = np.zeros(4, np.int64)


class Tally(gym.Env[Any, Any]):
    """Shows how often it was reset, and stepped since; says text in its infos."""

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, gate: str = "") -> None:
        self._gate = gate
        self._resets = self._steps = 0
        self.color = "none"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._wait()
        self._resets, self._steps = self._resets + 1, 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self.show(), 1.0, False, False, {"said": "text"}

    def show(self) -> Any:
        return np.array([self._resets, self._steps], np.float64)

    def paint(self, color: str) -> str:
        self._wait()
        self.color = color
        return color

    def _wait(self) -> None:
        if self._gate and os.path.exists(self._gate):
            with open(self._gate, "rb") as gate:
                gate.read()


def truth(envs: ClusterEnv) -> Any:
    return np.array(envs.call("show"))


def test_infos_that_are_not_numbers_cost_no_tenth_of_a_second() -> None:
    with ClusterEnv(Tally, 4, num_workers=2, network=Network(transport="shm")) as envs:
        envs.reset(seed=1)
        took_s = []
        for _ in range(100):
            began = time.monotonic()
            envs.step(ACTIONS)
            took_s.append(time.monotonic() - began)
        assert sorted(took_s)[50] < 0.09, "half of them, at least: the others may have waited for a core"


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


@pytest.mark.parametrize("what", ["reset", "set_attr", "rollout"])
def test_one_that_takes_over_for_a_worker_that_had_answered_has_what_the_others_have(
    remote: Backend, what: str, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    with ClusterEnv([Tally, lambda: Tally(gate)], **remote, sync=EveryUpdate()) as envs:
        envs.reset_async(seed=1)
        first = envs.worker_pids[0]
        writer = open(gate, "wb")  # noqa: SIM115 - the second worker is in its reset until this is closed
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone([first]) == []
        os.unlink(gate)
        writer.close()
        envs.reset_wait()
        if what == "reset":
            np.testing.assert_array_equal(envs.step(ACTIONS[:2])[0][:, 0], truth(envs)[:, 0])
        elif what == "set_attr":
            envs.set_attr("color", "red")
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            assert envs.get_attr("color") == ("red", "red")
        else:
            assert envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3).num_steps == 3


def test_an_interrupted_step_spoils_no_comparison_of_policies(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, 4)
        for line in spread_lines(count_lines(lambda: envs.step(ACTIONS)), 12):
            is_interrupted(lambda: envs.step(ACTIONS), line)
            agent.nudge()
            assert envs.rollout(agent, 4).num_steps == 4
        assert envs.losses == ()


class Bits(gym.Env[Any, Any]):
    observation_space = gym.spaces.MultiBinary(3)
    action_space = gym.spaces.MultiBinary(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.int8), {}

    def step(self, action: Any) -> Any:
        return np.ones(3, np.int8), 0.0, False, False, {}


def test_spaces_come_from_workers_as_they_are(remote: Backend) -> None:
    with ClusterEnv(Bits, 2, **remote) as envs:
        assert envs.single_observation_space == gym.spaces.MultiBinary(3)
        assert envs.single_action_space == gym.spaces.MultiBinary(2)


def test_a_seed_that_was_refused_is_not_remembered(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerFailed, match="Seed must be"):
            envs.reset(seed=-3)
        envs.reset(seed=2)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        assert envs.step(ACTIONS)[4]["worker_lost"].tolist() == [False, False, True, True]


def test_actions_of_the_wrong_shape_are_a_policy_error_wherever_the_policy_runs(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **backend) as envs, pytest.raises(PolicyError, match="shape"):
        envs.rollout(lambda obs: np.zeros(1, np.int64), 3)


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
