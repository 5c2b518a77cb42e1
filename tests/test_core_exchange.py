"""recv after a recv that failed: nothing that nobody sent to, and nothing of the others is lost."""

from __future__ import annotations

import os
from pathlib import Path

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
