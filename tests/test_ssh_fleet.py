"""What an SSH fleet does with processes at the other end of its connections."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from clusterenv import SSHLauncher
from clusterenv.launchers.base import Fleet
from clusterenv.wire.address import Address
from clusterenv.wire.zeromq import HeadSocket
from tests.conftest import descendants, wait_until_gone
from tests.sshd import CLOSED_PORT, PORT, Sshd, sshd

__all__ = ["sshd"]

SLEEP = "sleep 1000 #"  # Instead of Python, where only the process matters.


@pytest.fixture
def socket() -> Iterator[HeadSocket]:
    """A head's socket for fleets that are looked at without a ClusterEnv."""
    socket = HeadSocket((Address("127.0.0.1"), Address("127.0.0.1")), 10.0)
    yield socket
    socket.close()


Launch = Callable[[SSHLauncher], Fleet]


@pytest.fixture
def launch(socket: HeadSocket, sshd: Sshd) -> Iterator[Launch]:
    """Launches all workers a launcher is for; at the end of the test they are stopped, if they have not been."""
    fleets = []

    def launch(launcher: SSHLauncher) -> Fleet:
        fleets.append(launcher.launch(socket.ticket, launcher.suggested_workers))
        return fleets[-1]

    yield launch
    for fleet in fleets:
        fleet.stop(timeout_s=0.0)


def wait_for(condition: Callable[[], Any], socket: HeadSocket, deadline_s: float = 30.0) -> None:
    """Look every so often, as a head does while workers are missing."""
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at, "it did not happen in time"
        socket.receive(0.02)


def running(*words: str) -> list[int]:
    """Find this test's processes whose command lines hold these words, one after another."""
    found = []
    for pid in descendants():
        with suppress(OSError):  # It ended meanwhile.
            if "\0".join(words) in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def await_workers(count: int, socket: HeadSocket) -> list[int]:
    """Wait until so many sleep, and return their process ids."""
    wait_for(lambda: len(running("sleep", "1000")) == count, socket)
    return running("sleep", "1000")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_stopping_ends_workers_that_do_not_want_to(sshd: Sshd, socket: HeadSocket, launch: Launch) -> None:
    stubborn = sshd.launcher({"host1": 2}, setup=["trap '' TERM"], python=SLEEP)
    fleet = launch(stubborn)
    pids = await_workers(2, socket)
    fleet.stop(timeout_s=0.0)
    assert wait_until_gone(pids) == []


def test_stopping_ends_workers_whose_connection_is_lost(sshd: Sshd, socket: HeadSocket, launch: Launch) -> None:
    fleet = launch(sshd.launcher(["host1"], python=SLEEP))
    (worker,) = await_workers(1, socket)
    os.kill(parent_of(parent_of(worker)), signal.SIGKILL)  # The server's side of the connection.
    wait_for(fleet.exits, socket)
    assert fleet.exits() == {0: "ssh lost the connection to host1, exit status 255"}
    assert running("sleep", "1000") == [worker], "without a terminal it outlives the connection"
    fleet.stop(timeout_s=0.0)
    assert wait_until_gone([worker]) == []


def test_stopping_ends_workers_whose_client_was_killed(sshd: Sshd, socket: HeadSocket, launch: Launch) -> None:
    fleet = launch(sshd.launcher(["host1"], python=SLEEP))
    (worker,) = await_workers(1, socket)
    (client,) = running("ssh", "-F")
    os.kill(client, signal.SIGKILL)
    wait_for(fleet.exits, socket)
    assert fleet.exits() == {0: "the ssh client that held it on host1 was killed by SIGKILL"}
    fleet.stop(timeout_s=0.0)
    assert wait_until_gone([worker]) == []


def test_workers_that_could_not_be_replaced_are_ended_all_the_same(
    sshd: Sshd, socket: HeadSocket, launch: Launch
) -> None:
    """The host is lost for a while: the client breaks, and so does that of the replacement."""
    fleet = launch(sshd.launcher(["host1"], python=SLEEP))
    (worker,) = await_workers(1, socket)
    whole = sshd.config.read_text()
    sshd.config.write_text(whole.replace(f"Port {PORT}", f"Port {CLOSED_PORT}"))
    fleet.restart(0)
    wait_for(fleet.exits, socket)
    assert "ssh could not connect to host1" in fleet.exits()[0]
    sshd.config.write_text(whole)
    fleet.stop(timeout_s=0.0)
    assert wait_until_gone([worker]) == []


def test_a_client_that_cannot_be_run_is_told_by_exits(
    sshd: Sshd, socket: HeadSocket, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet = launch(sshd.launcher(["host1"], python=SLEEP))
    (worker,) = await_workers(1, socket)
    with monkeypatch.context() as here:
        here.setenv("PATH", str(tmp_path))
        fleet.restart(0)
        wait_for(fleet.exits, socket)
        assert fleet.exits()[0].startswith("could not be started: ssh cannot be run")
    fleet.restart(0)
    wait_for(lambda: not fleet.status(), socket)
    assert fleet.exits() == {}
    assert wait_until_gone([worker]) == [], "its successor has ended it"


def test_stopping_while_still_logging_in_leaves_nothing(sshd: Sshd, socket: HeadSocket, launch: Launch) -> None:
    with sshd.frozen():
        fleet = launch(sshd.launcher({"host1": 3}, python=SLEEP))
        assert fleet.status() == "logging in to host1 (3)"
    fleet.stop(timeout_s=0.0)
    assert wait_until_gone(running("sleep", "1000")) == []


def test_more_workers_than_a_server_lets_in_at_once_all_start(sshd: Sshd, socket: HeadSocket, launch: Launch) -> None:
    fleet = launch(sshd.launcher({"host1": 15}, python=SLEEP))
    wait_for(lambda: not fleet.status(), socket)
    await_workers(15, socket)
    assert fleet.exits() == {}


@pytest.mark.parametrize(("cpus", "expected"), [(3, "3"), (None, str(max(1, len(os.sched_getaffinity(0)) // 2)))])
def test_threads_are_limited(sshd: Sshd, socket: HeadSocket, launch: Launch, cpus: int | None, expected: str) -> None:
    launcher = sshd.launcher({"host1": 2}, cpus=cpus, python='echo "threads: $OMP_NUM_THREADS"; exit #')
    fleet = launch(launcher)
    wait_for(lambda: len(fleet.exits()) == 2, socket)
    assert f"threads: {expected}" in fleet.log_tail(0)
