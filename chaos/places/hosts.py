"""Hosts of a network: each worker behind a link of its own, which can be cut, slow or lossy."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.host_launcher import HostFleet, HostLauncher
from tests.hosts import Host, connected_hosts
from tests.switch import Line, Switch, slow_network

from chaos.faults import Effect, Fault, Target, too_long
from chaos.places.place import BRIEF, Place, host_of
from clusterenv import Network
from clusterenv.wire.ticket import Ticket

CUT = Line(is_up=False)
SLOW = Line(delay_s=0.25)
LOSSY = Line(loss=0.1)


@contextlib.contextmanager
def open_hosts(transport: str, num_workers: int) -> Iterator[Place]:
    """Make a host for the head, and two for each worker: its lives are spent on them by turns."""
    names = ["head", *(f"w{number}" for number in range(2 * num_workers))]
    with (
        tempfile.TemporaryDirectory() as directory,
        connected_hosts(names, Path(directory)) as (head, *others),
        slow_network([head, *others]) as switch,
        head.entered(),
    ):
        links = _Links(others, switch)
        faults = [
            Fault("partition", "too long", Effect.LOSS, lambda target: links.change(too_long(target), target, CUT)),
            Fault(
                "partition",
                "brief",
                Effect.NONE,
                lambda target: links.change(BRIEF * target.silence_s, target, CUT),
            ),
            Fault("slow link", "delay", Effect.NONE, lambda target: links.change(target.silence_s, target, SLOW)),
            Fault("slow link", "loss", Effect.NONE, lambda target: links.change(target.silence_s, target, LOSSY)),
        ]
        launcher = _ByTurns(others, switch.address(others[0]))
        yield Place({"launcher": launcher, "network": Network(transport=transport)}, faults, call_s=10.0)


class _ByTurns(HostLauncher):
    """Starts the lives of worker i on host i and host n + i by turns, so that no two workers share a link."""

    def launch(self, ticket: Ticket, num_workers: int) -> HostFleet:
        self.fleet = _FleetByTurns(ticket, self._hosts, num_workers)
        return self.fleet


class _FleetByTurns(HostFleet):
    def __init__(self, ticket: Ticket, hosts: Sequence[Host], num_workers: int) -> None:
        super().__init__(ticket, hosts, num_workers)
        self._lives = [0] * num_workers

    def restart(self, worker_index: int) -> None:
        self._lives[worker_index] += 1
        self.next_host = worker_index + len(self._lives) * (self._lives[worker_index] % 2)
        super().restart(worker_index)


class _Links:
    """The links between hosts and the switch."""

    def __init__(self, hosts: Sequence[Host], switch: Switch) -> None:
        self._hosts = hosts
        self._switch = switch
        self._turn = threading.Lock()  # The switch is asked one thing at a time.

    def change(self, seconds: float, target: Target, line: Line) -> None:
        """Make a worker's link worse, or cut it, for a while."""
        host = host_of(target.pid, self._hosts)
        if host is None:
            return  # It has just ended; there is no link to speak of.
        self._set(line, host)
        time.sleep(seconds)
        self._set(Line(), host)

    def _set(self, line: Line, host: Host) -> None:
        with self._turn:
            self._switch.set(line, host)
