"""LocalLauncher: workers are child processes on the head's own machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from clusterenv.config import thread_variables, usable_cores
from clusterenv.errors import ConfigError
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Launcher):
    """Starts workers as child processes of this one.

    Attributes:
        cpus: For each worker: how many threads BLAS, OpenMP and torch use in it. By default the cores are divided
            evenly; too many threads are the commonest reason for slow workers. Variables you have set yourself
            (OMP_NUM_THREADS and its like) are left alone.
        log_dir: Where to keep what workers print: in a directory per run, `run-<time>`, a file per worker. By default
            it is kept only for error messages.
    """

    cpus: int | None = None
    log_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None and (not isinstance(self.cpus, int) or self.cpus < 1):
            raise ConfigError(f"LocalLauncher.cpus must be an int of at least 1, or None, got {self.cpus!r}.")

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        """Start the workers and return at once."""
        environment = {
            **self._variables(num_workers),
            **os.environ,
            # The head's own path, so that whatever it can import, its workers can.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONUNBUFFERED": "1",
            TICKET_VARIABLE: msgspec.structs.replace(ticket, parent_pid=os.getpid()).encode(),
        }
        return ProcessFleet(
            lambda worker_index, log: _start(environment | {WORKER_VARIABLE: str(worker_index)}, log),
            num_workers,
            self.log_dir,
        )

    def render(self, num_workers: int) -> str:
        """Show the worker's command line, once for each."""
        variables = " ".join(f"{name}={value}" for name, value in self._variables(num_workers).items())
        return "\n".join(
            f"{variables} {WORKER_VARIABLE}={worker_index} {sys.executable} -m clusterenv.worker"
            for worker_index in range(num_workers)
        )

    def _variables(self, num_workers: int) -> dict[str, str]:
        return thread_variables(self.cpus or max(1, usable_cores() // num_workers))


def _start(environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterenv.worker"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Ctrl-C in the terminal is for the head, which then ends its workers in order. A group is enough for that. A
        # session of their own would make Linux share out the cores among sessions instead of among processes, and a
        # worker that yields while it waits for the head would not yield to it.
        process_group=0,
    )
