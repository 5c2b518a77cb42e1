"""What every launcher must do, whatever it starts workers with. Its own tests run this suite over it.

A test module inherits from `LauncherContract` and says how to make its launcher:

    class TestLocalLauncher(LauncherContract):
        def make_launcher(self, log_dir: Path) -> Launcher:
            return LocalLauncher(log_dir=log_dir)

Workers must run on the kernel of the test (in namespaces of it, if need be), so that their process ids mean something
here and the conftest finds what they leave behind.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import msgspec
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Faults, Timeouts
from clusterenv.errors import LaunchError, WorkerLost
from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.wire import messages
from clusterenv.wire.address import choose_addresses
from clusterenv.wire.messages import Join, Register, Registered, Stop
from clusterenv.wire.ticket import TICKET_VARIABLE, Ticket
from clusterenv.wire.zeromq import HeadSocket
from tests.conftest import descendants, wait_until_gone
from tests.interruption import Interruption
from tests.policies import Linear
from tests.worlds import Talker, assert_same, make_factories

NUM_WORKERS = 2
DEADLINE_S = 60.0
SLOW_S = 2.0
AT_ONCE_S = 0.2  # Starting a program may take as long where others have the cores; waiting for it takes SLOW_S.

# Runs another program; takes its time as long as a certain file exists.
SLOW_PROGRAM = """#!{python} -IS
import os, sys, time
if os.path.exists({switch!r}):
    time.sleep({slow_s})
os.execv({program!r}, [{program!r}, *sys.argv[1:]])
"""


class Door:
    """The head's socket and no more of a head: sees workers join, and can tell them to stop.

    Attributes:
        longest_s: The longest time that the fleet took to answer while somebody waited for a worker.
    """

    def __init__(self, address: str) -> None:
        self.longest_s = 0.0
        self._socket = HeadSocket(choose_addresses(address, None, None), silence_s=10.0)
        self.ticket = self._socket.ticket
        self._keys: set[str] = set()
        self._socket.authorised = self._keys
        self._peers: dict[int, bytes] = {}

    def await_join(self, fleet: Fleet) -> Join:
        """Return who joins next."""
        joins: list[Join] = []
        self.wait_until(lambda: bool(joins), fleet, joins)
        return joins[0]

    def await_exit(self, fleet: Fleet, worker_index: int) -> str:
        """Return how a worker ended, once it has."""
        self.wait_until(lambda: worker_index in fleet.exits(), fleet)
        return fleet.exits()[worker_index]

    def wait_until(self, is_true: Callable[[], bool], fleet: Fleet, joins: list[Join] | None = None) -> None:
        """Keep the door, as a head does while it waits."""
        ends_at = time.monotonic() + DEADLINE_S
        while not is_true():
            self.longest_s = max(self.longest_s, time_call(fleet.exits), time_call(fleet.status))
            assert time.monotonic() < ends_at, f"in vain: {fleet.exits()} {fleet.status()} {fleet.log_tail(0)}"
            received = self._socket.receive(0.1)
            if received is None:
                continue
            peer, frames = received
            message = messages.decode_reply(frames[0].buffer)
            if isinstance(message, Register):
                self._keys.add(message.public_key)
                self._socket.send(peer, [messages.encode(Registered())])
            elif joins is not None:
                assert isinstance(message, Join)
                self._peers[message.worker_index] = peer
                joins.append(message)

    def dismiss(self) -> None:
        """Tell all who joined to stop."""
        for peer in self._peers.values():
            self._socket.send(peer, [messages.encode(Stop())])

    def close(self) -> None:
        self._socket.close()


class LauncherContract:
    """Inherit and define `make_launcher`; the rest only if it differs."""

    address: ClassVar[str] = "127.0.0.1"  # Where the head listens for this launcher's workers.
    options: ClassVar[dict[str, Any]] = {}  # What ClusterEnv is told besides the launcher.
    deaths: ClassVar[tuple[str, ...]] = ("killed by SIGKILL",)  # How `exits` may describe a killed worker.
    programs: ClassVar[tuple[str, ...]] = ()  # What the launcher runs, beside Python.
    stride: ClassVar[int] = 1  # How many lines of a launch lie between those before which it is interrupted.

    def make_launcher(self, log_dir: Path) -> Launcher:
        """Return the launcher under test; it keeps its logs there."""
        raise NotImplementedError

    @pytest.fixture
    def launcher(self, tmp_path: Path) -> Launcher:
        return self.make_launcher(tmp_path / "logs")

    @pytest.fixture
    def door(self) -> Iterator[Door]:
        door = Door(self.address)
        yield door
        door.close()

    @pytest.fixture
    def switch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A file that, as long as it exists, makes all programs slow that the launcher runs."""
        directory, switch = tmp_path / "slow", tmp_path / "switch"
        directory.mkdir()
        for name in self.programs:
            program = shutil.which(name)
            assert program is not None, name
            (directory / name).write_text(
                SLOW_PROGRAM.format(python=sys.executable, switch=str(switch), slow_s=SLOW_S, program=program)
            )
            (directory / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
        return switch

    def open(
        self, launcher: Launcher, env: Any, num_envs: int | None = None, faults: Faults | None = None
    ) -> ClusterEnv:
        timeouts = Timeouts(join_s=DEADLINE_S, call_s=DEADLINE_S)
        options = {"launcher": launcher, "timeouts": timeouts, "faults": faults or Faults(), **self.options}
        return ClusterEnv(env, num_envs, num_workers=NUM_WORKERS, **options)

    def test_environments_step_as_in_one_process(self, launcher: Launcher) -> None:
        factories = make_factories(5)
        theirs = SyncVectorEnv(factories)
        with self.open(launcher, factories) as ours:
            assert len(set(ours.worker_pids)) == NUM_WORKERS
            assert_same(ours.reset(seed=7), theirs.reset(seed=7))
            theirs.action_space.seed(7)
            for _ in range(20):
                actions = theirs.action_space.sample()
                assert_same(ours.step(actions), theirs.step(actions))

    def test_a_policy_acts_on_the_workers(self, launcher: Launcher) -> None:
        agent = Linear(seed=3)
        with self.open(launcher, "CartPole-v1", 5) as envs:
            envs.reset(seed=3)
            rollout = envs.rollout(agent, 12)
            agent.nudge(size=1.0)
            later = envs.rollout(agent, 12)
        assert rollout.rewards.shape == (12, 5)
        for part in (rollout, later):
            assert np.isin(part.actions, (0, 1)).all()
        np.testing.assert_array_equal(later.obs[0], rollout.next_obs)
        logprobs, _ = Linear(seed=3).evaluate(rollout.obs, rollout.actions)
        np.testing.assert_allclose(rollout.extras["logprob"], logprobs, rtol=1e-5, atol=1e-6)

    def test_a_worker_that_dies_is_named(self, launcher: Launcher) -> None:
        with self.open(launcher, make_factories(5), faults=Faults(on_loss="raise")) as envs:
            envs.reset(seed=1)
            os.kill(envs.worker_pids[1], signal.SIGKILL)
            with pytest.raises(WorkerLost) as caught:
                envs.step(np.zeros(5, np.int64))
        assert caught.value.worker_index == 1
        assert caught.value.env_indices == (3, 4)

    def test_a_worker_that_dies_is_replaced(self, launcher: Launcher) -> None:
        with self.open(launcher, make_factories(5)) as envs:
            envs.reset(seed=1)
            pids = envs.worker_pids
            os.kill(pids[1], signal.SIGKILL)
            *_, truncated, infos = envs.step(np.zeros(5, np.int64))
            assert infos["worker_lost"].tolist() == [False, False, False, True, True]
            assert truncated[3:].all()
            envs.step(np.zeros(5, np.int64))
            assert envs.worker_pids[0] == pids[0]
            assert envs.worker_pids[1] != pids[1]
            assert [loss.worker_index for loss in envs.losses] == [1]

    def test_no_more_workers_are_started_again_than_allowed(self, launcher: Launcher) -> None:
        with self.open(launcher, make_factories(5), faults=Faults(max_restarts=0)) as envs:
            envs.reset(seed=1)
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            with pytest.raises(WorkerLost, match=r"max_restarts=0\) allows are used up"):
                envs.step(np.zeros(5, np.int64))

    def test_a_worker_that_ended_can_be_started_again(self, launcher: Launcher, door: Door) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        try:
            joins = {join.worker_index: join for join in (door.await_join(fleet), door.await_join(fleet))}
            assert sorted(joins) == [0, 1]
            assert fleet.exits() == {}
            os.kill(joins[1].pid, signal.SIGKILL)
            assert any(death in door.await_exit(fleet, 1) for death in self.deaths), fleet.exits()
            assert list(fleet.exits()) == [1], "the other one lives on"
            fleet.restart(1)
            assert fleet.exits() == {}
            again = door.await_join(fleet)
            assert again.worker_index == 1
            assert again.pid != joins[1].pid
            os.kill(again.pid, signal.SIGKILL)
            door.await_exit(fleet, 1)
            assert wait_until_gone([joins[0].pid], 0.0) == [joins[0].pid]
        finally:
            fleet.stop(0.0)
        assert wait_until_gone([joins[0].pid], 0.0) == []

    def test_a_worker_that_lives_can_be_replaced(self, launcher: Launcher, door: Door) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        try:
            joins = {join.worker_index: join for join in (door.await_join(fleet), door.await_join(fleet))}
            os.kill(joins[0].pid, signal.SIGSTOP)  # It hangs.
            fleet.restart(0)
            again = door.await_join(fleet)
            assert again.worker_index == 0
            assert again.pid != joins[0].pid
            assert wait_until_gone([joins[0].pid]) == [], "the old one was ended"
            assert fleet.exits() == {}
        finally:
            fleet.stop(0.0)

    @pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
    def test_the_head_is_never_kept_waiting(
        self, launcher: Launcher, door: Door, switch: Path, fate: signal.Signals
    ) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        try:
            joins = {join.worker_index: join for join in (door.await_join(fleet), door.await_join(fleet))}
            switch.touch()
            os.kill(joins[1].pid, fate)
            if fate == signal.SIGKILL:
                door.await_exit(fleet, 1)
            assert time_call(lambda: fleet.restart(1)) < AT_ONCE_S
            assert fleet.exits() == {}
            assert door.await_join(fleet).pid != joins[1].pid
            assert door.longest_s < AT_ONCE_S
            assert wait_until_gone([joins[1].pid]) == []
        finally:
            switch.unlink(missing_ok=True)
            fleet.stop(0.0)

    def test_an_interrupt_while_it_starts_leaves_nothing(self, launcher: Launcher, door: Door) -> None:
        line, has_come = 0, True
        servers = set(descendants())
        while has_come:
            interruption = Interruption(line, "launchers/")
            try:
                with interruption:
                    fleet = launcher.launch(door.ticket, NUM_WORKERS)
                fleet.stop(0.0)
                has_come = False
            except KeyboardInterrupt:
                assert wait_until_gone(sorted(set(descendants()) - servers)) == [], f"before line {line}"
            assert interruption.has_come == has_come
            line += self.stride
        assert line > 20, "a launch has as many lines"

    def test_a_stop_that_is_interrupted_can_be_repeated(self, launcher: Launcher, door: Door) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        pids = [door.await_join(fleet).pid for _ in range(NUM_WORKERS)]
        os.kill(pids[0], signal.SIGSTOP)
        for line in (0, 3, 10, 20, 40):
            with suppress(KeyboardInterrupt), Interruption(line, "launchers/"):
                fleet.stop(0.0)
        fleet.stop(0.0)
        assert wait_until_gone(pids) == []

    def test_what_workers_print_appears_on_request_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        working, temporary = tmp_path / "working", tmp_path / "temporary"
        launcher: Any = self.make_launcher(tmp_path / "logs")
        launcher = dataclasses.replace(launcher, log_dir=None, show_output=True)
        for directory in (working, temporary):
            directory.mkdir()
        monkeypatch.chdir(working)
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with self.open(launcher, [Talker] * NUM_WORKERS) as envs:
            envs.reset(seed=1)
            envs.apply(lambda env: env.say("good morning"), [0])
            envs.apply(lambda env: env.write("no line's end"), [1])
            os.kill(envs.worker_pids[1], signal.SIGKILL)
            envs.step(np.zeros(NUM_WORKERS, np.int64))
            envs.apply(lambda env: env.say("here again"), [1])
        shown = capfd.readouterr().err
        assert "[worker 0] good morning\n" in shown
        assert shown.index("[worker 1] no line's end") < shown.index("[worker 1] here again\n")
        assert not [*working.iterdir(), *temporary.iterdir()]

    def test_two_runs_keep_their_logs_apart(self, launcher: Launcher, door: Door, tmp_path: Path) -> None:
        fleets = []
        try:
            for _ in range(2):
                fleets.append(launcher.launch(door.ticket, 1))
                door.await_join(fleets[-1])
        finally:
            for fleet in fleets:
                fleet.stop(0.0)
        assert len([path for path in (tmp_path / "logs").rglob("*") if path.is_file()]) == 2

    def test_logs_that_cannot_be_written_are_refused(self, tmp_path: Path, door: Door) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(LaunchError, match=r"Cannot keep .*Name a directory"):
            self.make_launcher(tmp_path / "file" / "logs").launch(door.ticket, 1)

    def test_a_worker_that_cannot_start_says_why(self, launcher: Launcher, door: Door) -> None:
        nowhere = msgspec.structs.replace(door.ticket, endpoint="tcp://nowhere in particular")
        fleet = launcher.launch(nowhere, NUM_WORKERS)
        try:
            for worker_index in range(NUM_WORKERS):
                assert "exit status 1" in door.await_exit(fleet, worker_index)
                assert "ZMQError" in fleet.log_tail(worker_index)
        finally:
            fleet.stop(0.0)

    def test_workers_that_are_told_to_stop_are_not_killed(self, launcher: Launcher, tmp_path: Path) -> None:
        class Farewell(gym.Wrapper[Any, Any, Any, Any]):
            def close(self) -> None:
                (tmp_path / f"closed by {os.getpid()}").touch()

        with self.open(launcher, [lambda: Farewell(gym.make("CartPole-v1"))] * 4) as envs:
            pids = envs.worker_pids
            assert fleet_is_alive(pids)
        assert {f"closed by {pid}" for pid in pids} <= {path.name for path in tmp_path.iterdir()}

    def test_stop_leaves_nothing_and_may_be_repeated(self, launcher: Launcher, door: Door) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        pids = [door.await_join(fleet).pid for _ in range(NUM_WORKERS)]
        assert fleet_is_alive(pids)
        door.dismiss()
        fleet.stop(5.0)
        assert wait_until_gone(descendants(), 0.0) == []
        fleet.stop(5.0)
        fleet.stop(0.0)
        assert sorted(fleet.exits()) in ([], [0, 1])

    def test_stop_ends_workers_that_hang(self, launcher: Launcher, door: Door) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        pids = [door.await_join(fleet).pid for _ in range(NUM_WORKERS)]
        os.kill(pids[0], signal.SIGSTOP)
        began_at = time.monotonic()
        fleet.stop(0.2)
        assert wait_until_gone(descendants()) == []
        assert time.monotonic() - began_at < 30.0

    def test_the_secret_is_in_no_command_line(self, launcher: Launcher, door: Door) -> None:
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        try:
            door.await_join(fleet)
            commands = [Path(f"/proc/{pid}/cmdline") for pid in descendants()]
            lines = [path.read_bytes() for path in commands if path.exists()]
        finally:
            fleet.stop(0.0)
        assert any(b"clusterenv.worker" in line for line in lines)
        for line in [*lines, launcher.render(NUM_WORKERS).encode()]:
            assert not tells_secret(line, door.ticket)

    def test_what_will_run_can_be_shown(self, launcher: Launcher) -> None:
        text = launcher.render(NUM_WORKERS)
        assert "clusterenv.worker" in text
        assert f"{TICKET_VARIABLE}=" not in text


def fleet_is_alive(pids: Any) -> bool:
    """Whether all these processes run."""
    return wait_until_gone(list(pids), 0.0) == list(pids)


def time_call(call: Callable[[], object]) -> float:
    """Return how many seconds a call took, without those in which other programs had the core."""
    before = time.monotonic() - _waited_for_a_core_s()
    call()
    return time.monotonic() - _waited_for_a_core_s() - before


def _waited_for_a_core_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def tells_secret(text: bytes, ticket: Ticket) -> bool:
    """Whether whoever reads this can pose as a worker."""
    return ticket.secret_key.encode() in text or ticket.encode()[:40].encode() in text
