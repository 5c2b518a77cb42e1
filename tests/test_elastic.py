"""Workers that come late, and workers that are asked to leave."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import ClusterEnv, Decision, Faults, Network, Timeouts
from clusterenv.errors import BudgetSpent, ConfigError, LaunchError, WorkerLost
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests.conftest import Backend, wait_until_gone
from tests.launchers import OwnLauncher, start_module
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


class Marked(gym.Wrapper[Any, Any, Any, Any]):
    """An environment by which a policy knows the worker that it has come to."""

    def __init__(self, mark: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        os.environ["MARK"] = mark


def test_a_worker_that_comes_while_the_agents_structure_changes_twice_acts_with_the_last(tmp_path: Path) -> None:
    class Growing(Linear):
        """A policy of ever more layers, which comes to the worker in question when it is let."""

        def __init__(self) -> None:
            super().__init__()
            self.layers: list[list[int]] = [[]]

        def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
            decision = super().act(obs, state)
            return decision._replace(extras={"depth": np.full(len(obs), len(self.layers), np.float32)})

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if os.environ["MARK"] == "late":
                depth = len(self.layers)
                gate = tmp_path / f"{depth} may come"
                (tmp_path / f"{depth} comes").touch()
                if gate.exists():
                    gate.read_text()  # It waits until somebody has written there.
                    gate.unlink()

    for depth in (1, 2):
        os.mkfifo(tmp_path / f"{depth} may come")
    launcher, agent = Gated(tmp_path), Growing()
    makers = [partial(Marked, "early"), partial(Marked, "late")]
    with (
        ClusterEnv(makers, num_workers=2, faults=Faults(min_workers=1), launcher=launcher) as envs,
        envs.stream(agent, 8, max_lag=1000) as stream,
    ):
        next(stream)
        launcher.open()
        for depth in (1, 2):
            while not (tmp_path / f"{depth} comes").exists():
                next(stream)
            agent.layers = [*agent.layers, []]
            next(stream)  # The other one has it now.
            (tmp_path / f"{depth} may come").write_text("go")
        rollout = next(rollout for rollout in stream if rollout.env_indices[0] == 1)
        assert rollout.versions.tolist() == [3]
        assert set(rollout.extras["depth"].ravel().tolist()) == {3.0}


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


class Returning(OwnLauncher):
    """A launcher whose workers all start at once, and again only when somebody lets them."""

    def __init__(self) -> None:
        self.may_return = False

    def launch(self, ticket: Ticket, num_workers: int) -> ReturningFleet:
        self.fleet = ReturningFleet(self, ticket, num_workers)
        return self.fleet


class ReturningFleet(ProcessFleet):
    """As a cluster that is full: whoever is to be started again waits for room, and says so."""

    def __init__(self, launcher: Returning, ticket: Ticket, num_workers: int) -> None:
        self._waiting: set[int] = set()
        self._launcher = launcher
        super().__init__(
            lambda worker_index, log: start_module("clusterenv.worker", ticket, worker_index, log), num_workers
        )

    def restart(self, worker_index: int) -> None:
        self._waiting.add(worker_index)

    def exits(self) -> dict[int, str]:
        if self._launcher.may_return:
            for worker_index in self._waiting:
                super().restart(worker_index)
            self._waiting.clear()
        return {index: how for index, how in super().exits().items() if index not in self._waiting}

    def status(self) -> str:
        return f"no room for {len(self._waiting)}" if self._waiting else ""


class Attendant(logging.Handler):
    """Lets a launcher's workers return when it is said that they are missed."""

    def __init__(self, launcher: Returning, words: str) -> None:
        super().__init__()
        self._launcher = launcher
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        self._launcher.may_return = self._launcher.may_return or self._words in record.getMessage()

    def __enter__(self) -> None:
        logging.getLogger("clusterenv").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("clusterenv").removeHandler(self)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_stream_that_has_lost_all_workers_waits_and_says_so_and_goes_on(transport: str) -> None:
    launcher = Returning()
    network = Network(transport=transport)
    with (
        Attendant(launcher, "waiting for 2 of 2 workers: no room for 2"),
        ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=2, launcher=launcher, network=network) as envs,
        envs.stream(Linear(), 8) as stream,
    ):
        for _ in range(10):
            next(stream)
        pids = envs.worker_pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while len(envs.losses) < 2:
            next(stream)
        assert launcher.may_return
        assert not set(pids) & set(envs.worker_pids)


def test_a_step_that_has_lost_all_workers_waits_and_says_so_and_goes_on() -> None:
    launcher = Returning()
    with (
        Attendant(launcher, "waiting for 2 of 2 workers: no room for 2"),
        ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=2, launcher=launcher) as envs,
    ):
        envs.reset(seed=1)
        for pid in envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        *_, truncated, infos = envs.step(np.zeros(NUM_ENVS, np.int64))
        assert truncated.all()
        assert infos["worker_lost"].all()


def test_a_rollout_that_has_lost_all_workers_waits_and_says_so_and_goes_on() -> None:
    launcher = Returning()
    with (
        Attendant(launcher, "waiting for 2 of 2 workers: no room for 2"),
        ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=2, launcher=launcher) as envs,
    ):
        envs.reset(seed=1)
        for pid in envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        rollout = envs.rollout(Linear(), 8)
        assert rollout.rewards.shape == (8, NUM_ENVS)
        assert len(envs.losses) == 2


@pytest.mark.parametrize("call", ["step", "rollout"])
def test_other_calls_wait_for_lost_workers_no_longer_than_they_may(call: str) -> None:
    timeouts, faults = Timeouts(join_s=9.0), Faults(max_restarts=2)
    with ClusterEnv(
        "CartPole-v1", NUM_ENVS, num_workers=2, launcher=Returning(), timeouts=timeouts, faults=faults
    ) as envs:
        envs.reset(seed=1)
        for pid in envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="did not join within 9 s"):
            envs.rollout(Linear(), 8) if call == "rollout" else envs.step(np.zeros(NUM_ENVS, np.int64))


def test_a_stream_waits_for_lost_workers_no_longer_than_it_may() -> None:
    timeouts = Timeouts(join_s=9.0)
    faults = Faults(max_restarts=2)
    with ClusterEnv(
        "CartPole-v1", NUM_ENVS, num_workers=2, launcher=Returning(), timeouts=timeouts, faults=faults
    ) as envs:
        stream = envs.stream(Linear(), 8)
        next(stream)
        for pid in envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="did not join within 9 s"):
            exhaust(stream)


@pytest.mark.slow
def test_a_stream_with_enough_workers_waits_for_the_others_as_long_as_it_takes() -> None:
    launcher = Returning()
    timeouts = Timeouts(join_s=9.0)
    faults = Faults(min_workers=1, max_restarts=1)
    with ClusterEnv(Leisurely, NUM_ENVS, num_workers=2, launcher=launcher, timeouts=timeouts, faults=faults) as envs:
        agent = Linear()
        with envs.stream(agent, 4) as stream:
            while {worker.state for worker in envs.workers} != {"ready"}:
                next(stream)
            os.kill(envs.worker_pids[1], signal.SIGKILL)
            while envs.workers[1].state == "ready":
                next(stream)
            until = time.monotonic() + 1.3 * timeouts.join_s
            while time.monotonic() < until:
                assert next(stream).env_indices.tolist() == [0, 1]
            with pytest.raises(LaunchError, match="Missing: 1"):
                envs.rollout(agent, 4)  # It needs all.
        with envs.stream(agent, 8) as stream:
            launcher.may_return = True
            while next(stream).env_indices[0] != 2:
                pass
        assert envs.rollout(agent, 4).num_envs == NUM_ENVS


def test_a_worker_that_is_asked_to_leave_a_stream_delivers_the_rollout_it_is_at(
    remote: Backend, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)

    class Slow(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if os.path.exists(gate):
                with open(gate, "rb") as file:
                    os.unlink(gate)
                    file.read()
            return super().step(action)

    with ClusterEnv([lambda: Slow(gym.make("CartPole-v1"))], **remote | {"num_workers": 1}) as envs:
        with envs.stream(Linear(), 8, in_flight=1) as stream:
            (pid,) = envs.worker_pids
            with open(gate, "wb"):  # It is in its first step.
                os.kill(pid, signal.SIGTERM)
            assert next(stream).rewards.shape == (8, 1)
            assert envs.worker_pids == (pid,)
            assert envs.stats["rollouts_lost"] == 0
            next(stream)
        assert envs.worker_pids != (pid,)
        assert "SIGTERM" in envs.losses[0].reason


def test_stats_say_how_many_workers_there_were() -> None:
    launcher = Returning()
    faults = Faults(min_workers=1)
    with (
        ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=2, launcher=launcher, faults=faults) as envs,
        envs.stream(Linear(), 8) as stream,
    ):
        while envs.stats["workers"] < 2:
            next(stream)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        while envs.stats["workers"] > 1:
            next(stream)
        assert 0 < envs.stats["workers_mean"] < 2
        hours = envs.stats["worker_hours"]
        next(stream)
        assert envs.stats["worker_hours"] > hours
    hours = envs.stats["worker_hours"]
    assert envs.stats["worker_hours"] == hours, "the run has ended"


class Leisurely(gym.Wrapper[Any, Any, Any, Any]):
    """Takes a while over each step, so that hours are spent and the machine is not."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        threading.Event().wait(0.1)  # Not a wait of the test's: what it is about.
        return super().step(action)


def test_workers_are_ended_when_the_run_has_used_its_hours(remote: Backend) -> None:
    faults = Faults(max_worker_hours=12 / 3600)
    with ClusterEnv(Leisurely, NUM_ENVS, faults=faults, **remote) as envs:
        pids = envs.worker_pids
        envs.reset(seed=1)
        actions = np.zeros(NUM_ENVS, np.int64)
        with pytest.raises(BudgetSpent, match=r"max_worker_hours=0\.00333333\).* 0 had been started again"):
            exhaust(envs.step(actions) for _ in itertools.count())
        assert wait_until_gone(pids, 0.0) == []
        with pytest.raises(BudgetSpent):
            envs.step(actions)
        with pytest.raises(BudgetSpent):
            envs.rollout(Linear(), 4)


def test_a_stream_ends_when_the_run_has_used_its_hours() -> None:
    faults = Faults(max_worker_hours=12 / 3600)
    with ClusterEnv(Leisurely, NUM_ENVS, num_workers=2, faults=faults) as envs, pytest.raises(BudgetSpent):
        exhaust(envs.stream(Linear(), 8))


@pytest.mark.parametrize("hours", [0, -1.0, float("nan"), "8"])
def test_hours_that_are_none_are_refused(hours: Any) -> None:
    with pytest.raises(ConfigError, match=r"Faults\.max_worker_hours must be a positive number"):
        Faults(max_worker_hours=hours)


def exhaust(items: Iterable[object]) -> None:
    """Take what there is until there is no more."""
    deque(items, maxlen=0)
