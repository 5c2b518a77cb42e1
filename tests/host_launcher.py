"""Workers on the hosts of `tests.hosts`, as a launcher for other machines would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

from clusterenv.config import thread_variables
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests.hosts import Host
from tests.launchers import OwnLauncher


class HostLauncher(OwnLauncher):
    """Starts worker i on host i, and over again from the first.

    Attributes:
        fleet: What was launched last.
    """

    def __init__(self, hosts: Sequence[Host], route_to: str) -> None:
        self.route_to: str | None = route_to
        self._hosts = hosts

    def launch(self, ticket: Ticket, num_workers: int) -> HostFleet:
        self.fleet = HostFleet(ticket, self._hosts, num_workers)
        return self.fleet


class HostFleet(ProcessFleet):
    """Workers on hosts. Whoever is restarted is only forgotten: behind a cut link nobody could end it.

    Attributes:
        started: Every process that was ever started: a worker each.
        ticket: What they were given.
        next_host: Where the next worker is started; goes round.
    """

    def __init__(self, ticket: Ticket, hosts: Sequence[Host], num_workers: int) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.next_host = 0
        self.ticket = ticket
        self._hosts = hosts
        super().__init__(self._start_on_next, num_workers)

    def restart(self, worker_index: int) -> None:
        self._processes[worker_index] = self._start_on_next(worker_index, self._logs[worker_index].file)

    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        for process in self.started:
            process.kill()
            process.wait()

    def _start_on_next(self, worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
        host = self._hosts[self.next_host % len(self._hosts)]
        self.next_host += 1
        environment = os.environ | thread_variables(1)
        environment |= {TICKET_VARIABLE: self.ticket.encode(), WORKER_VARIABLE: str(worker_index)}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = host.command(sys.executable, "-m", "clusterenv.worker")
        self.started.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )
        return self.started[-1]
