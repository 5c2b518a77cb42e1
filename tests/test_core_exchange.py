"""send and recv: no action is changed; after a recv that failed, nothing is received that nobody sent to, or lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import ClusterEnv, Timeouts
from clusterenv.errors import ConfigError, WorkerFailed
from tests.conftest import Backend
from tests.counted import STEP, Mishap, make_counted, rows_of


def test_results_of_others_are_received_after_a_failure_and_nothing_else(remote: Backend, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    mishaps = {
        0: [Mishap("wait", str(tmp_path / "waited"), gate=gate)],
        3: [Mishap("raise", str(tmp_path / "raised"))],
    }
    with ClusterEnv(make_counted(4, mishaps), **remote, timeouts=Timeouts(call_s=20, close_s=1)) as envs:
        envs.reset(seed=1)
        envs.send([0] * 4, range(4))
        with pytest.raises(WorkerFailed, match="a mishap in the step"):
            envs.recv()  # Environment 0 is still in its step.
        open(gate, "wb").close()
        observations, rewards, _, _, infos = envs.recv()
        assert infos["env_id"].tolist() == [0, 1]
        assert rows_of(observations)[:, STEP].tolist() == rewards.tolist() == [1, 1]
        with pytest.raises(ConfigError, match="nothing to wait for"):
            envs.recv()
        envs.send([0, 0], [2, 3])
        observations, _, _, _, infos = envs.recv()
        assert infos["env_id"].tolist() == [2, 3]
        assert rows_of(observations)[:, STEP].tolist() == list(envs.get_attr("count")[2:])


def test_after_a_failure_only_what_was_sent_to_is_received(remote: Backend, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    mishaps = {
        0: [Mishap("wait", str(tmp_path / "waited"), gate=gate)],
        3: [Mishap("raise", str(tmp_path / "raised"))],
    }
    with ClusterEnv(make_counted(4, mishaps), **remote, timeouts=Timeouts(call_s=20, close_s=1)) as envs:
        envs.reset(seed=1)
        envs.send([0] * 4, range(4))
        with pytest.raises(WorkerFailed, match="a mishap in the step"):
            envs.recv()
        envs.send([0, 0], [2, 3])
        *_, infos = envs.recv()
        assert infos["env_id"].tolist() == [2, 3], "environment 0 is still in its step"
        with pytest.raises(ConfigError, match="have an action already"):
            envs.send([0, 0], [0, 1])
        open(gate, "wb").close()
        *_, infos = envs.recv()
        assert infos["env_id"].tolist() == [0, 1]


class Acted(gym.Env[Any, Any]):
    """Keeps its last action."""

    observation_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, dtype: str = "i8") -> None:
        self.action_space = gym.spaces.Box(0, 5, (), np.dtype(dtype).type)
        self.last: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.last = action
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("dtype", "actions"),
    [
        ("i8", np.array([1.9, 2.9])),
        ("i8", np.array([1.0, 2.0])),
        ("u1", np.array([1, 258])),
        ("i8", np.array([1 + 2j, 2])),
        ("f4", np.array([1 + 2j, 2])),
        ("f4", np.array(["1", "2"])),
    ],
)
def test_actions_that_the_dtype_of_the_space_would_change_are_refused(
    backend: Backend, dtype: str, actions: Any
) -> None:
    with ClusterEnv([lambda: Acted(dtype)] * 2, **backend) as envs:
        envs.reset(seed=1)
        with pytest.raises(ConfigError, match="cast them first"):
            envs.send(actions, [0, 1])
        assert envs.get_attr("last") == (None, None)


@pytest.mark.parametrize(
    ("dtype", "actions", "expected"),
    [
        ("u1", [1, 2], [1, 2]),
        ("i8", np.array([True, False]), [1, 0]),
        ("f4", [0.1, 2], [np.float32(0.1), 2.0]),
        ("f4", [1, 2], [1.0, 2.0]),
    ],
)
def test_numbers_as_a_list_has_them_become_the_dtype_of_the_space(
    backend: Backend, dtype: str, actions: Any, expected: list[Any]
) -> None:
    with ClusterEnv([lambda: Acted(dtype)] * 2, **backend) as envs:
        envs.reset(seed=1)
        envs.send(actions, [0, 1])
        num_received = 0
        while num_received < 2:
            num_received += len(envs.recv()[1])
        last = envs.get_attr("last")
        assert [np.asarray(action).dtype for action in last] == [np.dtype(dtype)] * 2
        assert list(last) == expected
