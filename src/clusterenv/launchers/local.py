"""LocalLauncher: workers are child processes on the head's own machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from clusterenv.config import thread_variables, usable_cores
from clusterenv.errors import ConfigError
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import SHOWN_VARIABLE, TICKET_VARIABLE, WORKER_VARIABLE, Ticket

_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class LocalLauncher(Launcher):
    """Starts workers as child processes of this one.

    Attributes:
        cpus: How many threads BLAS, OpenMP and torch use in each worker. By default the cores are divided evenly; too
            many threads are the most common reason for slow workers. Variables you have set yourself (OMP_NUM_THREADS
            and the like) are left alone.
        log_dir: Where to keep the workers' output: one directory per run, `run-<time>`, with one file per worker. By
            default output is kept only for error messages.
        show_output: Whether to also show the workers' output on this process's standard error, each line prefixed with
            `[worker <index>]`; very large output is shown only in part. Linux only.
    """

    cpus: int | None = None
    log_dir: str | os.PathLike[str] | None = None
    show_output: bool = True

    def __post_init__(self) -> None:
        if self.cpus is not None and (not isinstance(self.cpus, int) or self.cpus < 1):
            raise ConfigError(f"LocalLauncher.cpus must be an int of at least 1, or None, got {self.cpus!r}.")

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        """Start the workers and return immediately."""
        environment = {
            **self._variables(num_workers),
            **os.environ,
            # The head's own path, so that its workers can import whatever it can.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONUNBUFFERED": "1",
            TICKET_VARIABLE: msgspec.structs.replace(ticket, parent_pid=os.getpid()).encode(),
        }
        return ProcessFleet(
            lambda worker_index, log: _start(
                environment | {WORKER_VARIABLE: str(worker_index)}, log, shows_output=self.show_output
            ),
            num_workers,
            self.log_dir,
        )

    def render(self, num_workers: int) -> str:
        """Show the command line of each worker."""
        variables = " ".join(f"{name}={value}" for name, value in self._variables(num_workers).items())
        return "\n".join(
            f"{variables} {WORKER_VARIABLE}={worker_index} {sys.executable} -m clusterenv.worker"
            for worker_index in range(num_workers)
        )

    def _variables(self, num_workers: int) -> dict[str, str]:
        return thread_variables(self.cpus or max(1, usable_cores() // num_workers))


def _start(environment: dict[str, str], log: BinaryIO, *, shows_output: bool) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        shown = []
        if shows_output and sys.platform == "linux":
            with contextlib.suppress(OSError):  # This process has no standard error.
                # Not 2 itself: that is the log in the worker.
                shown = [os.dup(_STDERR)]
                stack.callback(os.close, shown[0])
                environment = environment | {SHOWN_VARIABLE: str(shown[0])}
        return _run_worker(environment, log, shown)


def _run_worker(environment: dict[str, str], log: BinaryIO, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterenv.worker"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=descriptors,
        # Ctrl-C in the terminal is for the head, which then stops its workers in order. A process group is enough for
        # that. With a session per worker, Linux would divide the cores among sessions instead of among processes, and a
        # worker that yields while it waits for the head would not yield to the head.
        process_group=0,
    )
