"""LocalLauncher: workers are child processes on the head's own machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from clusterenv.config import usable_cores
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket

_TAIL_BYTES = 4096
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class LocalLauncher:
    """Starts workers as child processes of this one.

    Attributes:
        threads_per_worker: How many threads BLAS, OpenMP and torch may use in a worker. By default the cores
        are shared out
            evenly; too many threads are the commonest reason for slow workers. Variables you have set yourself
            (OMP_NUM_THREADS and its like) are left alone.
        log_dir: Where to keep what workers print, a file each. By default it is kept only for error messages.
    """

    threads_per_worker: int | None = None
    log_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if self.threads_per_worker is not None and self.threads_per_worker < 1:
            raise ConfigError(f"LocalLauncher.threads_per_worker must be at least 1, got {self.threads_per_worker}.")

    def launch(self, ticket: Ticket, num_workers: int) -> LocalFleet:
        """Start the workers and return at once."""
        fleet = LocalFleet()
        environment = self._environment(msgspec.structs.replace(ticket, parent_pid=os.getpid()), num_workers)
        try:
            for worker_index in range(num_workers):
                log = self._open_log(worker_index)
                fleet.add(_start(environment | {WORKER_VARIABLE: str(worker_index)}, log), log)
        except OSError as error:
            fleet.stop(timeout_s=0.0)
            raise LaunchError(f"Could not start worker {len(fleet)} of {num_workers}: {error}.") from error
        return fleet

    def _environment(self, ticket: Ticket, num_workers: int) -> dict[str, str]:
        threads = str(self.threads_per_worker or max(1, usable_cores() // num_workers))
        return {
            **dict.fromkeys(_THREAD_VARIABLES, threads),
            **os.environ,
            # The head's own path, so that whatever it can import, its workers can.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONUNBUFFERED": "1",
            TICKET_VARIABLE: ticket.encode(),
        }

    def _open_log(self, worker_index: int) -> BinaryIO:
        if self.log_dir is None:
            return tempfile.TemporaryFile()  # It has no name: nothing to remove, even if the head is killed.
        directory = Path(self.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / f"worker-{worker_index}.log").open("w+b")


class LocalFleet:
    """Child processes, and the files they write to."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[BinaryIO] = []

    def __len__(self) -> int:
        return len(self._processes)

    def add(self, process: subprocess.Popen[bytes], log: BinaryIO) -> None:
        """Take charge of one more worker."""
        self._processes.append(process)
        self._logs.append(log)

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended."""
        statuses = enumerate(process.poll() for process in self._processes)
        return {worker_index: _describe(status) for worker_index, status in statuses if status is not None}

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote."""
        log = self._logs[worker_index]
        if log.closed:
            return ""
        # The file's position is shared with the worker that writes it: read without moving it.
        size = os.fstat(log.fileno()).st_size
        data = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return data.decode(errors="replace").strip()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end by themselves, then terminate, then kill them."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            _wait(process, deadline)
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + min(1.0, timeout_s)
        for process in self._processes:
            if not _wait(process, deadline):
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()


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


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
