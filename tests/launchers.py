"""What tests need to launch workers their own way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket


class OwnLauncher:
    """The rest of a launcher for which only `launch` matters."""

    suggested_workers: int | None = None
    queues: bool = False
    route_to: str | None = None

    def render(self, num_workers: int) -> str:
        return type(self).__name__


def start_module(
    module: str, ticket: Ticket, worker_index: int, log: BinaryIO, before: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a module of this project, with a worker's ticket; `before` is a command that runs it."""
    environment = os.environ | {TICKET_VARIABLE: ticket.encode(), WORKER_VARIABLE: str(worker_index)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.Popen([*before, sys.executable, "-m", module], env=environment, stdout=log, stderr=log)
