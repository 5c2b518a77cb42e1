"""Workers that come late, and workers that are asked to leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import ClusterEnv, Faults, Network, Timeouts
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests.conftest import Backend
from tests.launchers import OwnLauncher
from tests.policies import Linear

NUM_ENVS = 4


class Gated(OwnLauncher):
    """A launcher whose last worker starts when somebody opens the gate."""

    def __init__(self, directory: Path) -> None:
        self.gate = directory / "gate"
        os.mkfifo(self.gate)

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            waits = f"read _ <'{self.gate}';" if worker_index == num_workers - 1 else ""
            environment = os.environ | {TICKET_VARIABLE: ticket.encode(), WORKER_VARIABLE: str(worker_index)}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            command = ["bash", "-c", f"{waits} exec {sys.executable} -m clusterenv.worker"]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

        return ProcessFleet(start, num_workers)

    def open(self) -> None:
        self.gate.write_text("go\n")


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_stream_begins_with_those_who_are_there_and_takes_in_who_comes_later(transport: str, tmp_path: Path) -> None:
    launcher = Gated(tmp_path)
    with ClusterEnv(
        "CartPole-v1",
        NUM_ENVS,
        num_workers=2,
        faults=Faults(min_workers=1),
        launcher=launcher,
        network=Network(transport=transport),
    ) as envs:
        agent = Linear()
        with envs.stream(agent, 8) as stream:
            for _ in range(5):
                assert next(stream).env_indices.tolist() == [0, 1]
            launcher.open()
            while next(stream).env_indices[0] != 2:
                pass
        assert envs.losses == ()
        assert envs.rollout(agent, 4).num_envs == NUM_ENVS


def test_other_calls_wait_for_all(tmp_path: Path) -> None:
    launcher = Gated(tmp_path)
    with ClusterEnv(
        "CartPole-v1",
        NUM_ENVS,
        num_workers=2,
        faults=Faults(min_workers=1),
        launcher=launcher,
        timeouts=Timeouts(join_s=60),
    ) as envs:
        launcher.open()
        observations, _ = envs.reset(seed=1)
        with ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=0) as reference:
            np.testing.assert_array_equal(observations, reference.reset(seed=1)[0])
        _, _, _, truncations, infos = envs.step(np.zeros(NUM_ENVS, dtype=np.int64))
        assert not truncations.any()
        assert infos == {}
        assert envs.losses == ()


def test_a_worker_that_never_comes_is_named_by_the_call_that_needs_it(tmp_path: Path) -> None:
    launcher = Gated(tmp_path)
    with ClusterEnv(
        "CartPole-v1",
        NUM_ENVS,
        num_workers=2,
        faults=Faults(min_workers=1),
        launcher=launcher,
        timeouts=Timeouts(join_s=8),
    ) as envs:
        with pytest.raises(LaunchError, match="Missing: 1"):
            envs.reset(seed=1)
        launcher.open()
        envs.reset(seed=1)


def test_too_many_or_too_few_to_begin_with_are_refused() -> None:
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match="min_workers"):
            ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=2, faults=Faults(min_workers=wrong))


def test_a_worker_that_is_asked_to_leave_answers_first(remote: Backend, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)

    class Slow(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            with open(gate, "rb") as file:
                file.read()
            return super().step(action)

    makers = [lambda: gym.make("CartPole-v1"), lambda: Slow(gym.make("CartPole-v1"))]
    with ClusterEnv(makers, **remote) as envs:
        envs.reset(seed=1)
        envs.step_async(np.zeros(2, dtype=np.int64))
        with open(gate, "wb"):
            os.kill(envs.worker_pids[1], signal.SIGTERM)
        _, rewards, _, truncations, infos = envs.step_wait()
        assert rewards.tolist() == [1, 1]
        assert not truncations.any()
        assert infos == {}
        envs.step_async(np.zeros(2, dtype=np.int64))
        _, _, _, truncations, infos = envs.step_wait()
        assert truncations.tolist() == [False, True]
        assert infos["worker_lost"].tolist() == [False, True]
        assert "SIGTERM" in envs.losses[0].reason
