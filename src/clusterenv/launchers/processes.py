"""ProcessFleet: workers, each held by a child process of the head: the worker itself, or the client that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from clusterenv.errors import LaunchError

_TAIL_BYTES = 4096

StartProcess = Callable[[int, BinaryIO], "subprocess.Popen[bytes]"]


class ProcessFleet:
    """Child processes, and the files they write to."""

    def __init__(self, start: StartProcess, num_workers: int, log_dir: str | Path | None = None) -> None:
        """Start the workers.

        Args:
            start: Starts the process of one worker, which writes to the file it is given.
            num_workers: How many.
            log_dir: Where to keep what workers print, a file each. None: only for error messages.

        Raises:
            LaunchError: One cannot be started; those that were have been ended.
        """
        self._start = start
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[BinaryIO] = []
        try:
            for worker_index in range(num_workers):
                self._logs.append(_open_log(log_dir, worker_index))
                self._processes.append(start(worker_index, self._logs[-1]))
        except OSError as error:
            self.stop(timeout_s=0.0)
            raise LaunchError(f"Could not start worker {len(self._processes)} of {num_workers}: {error}.") from error
        except BaseException:
            self.stop(timeout_s=0.0)
            raise

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended."""
        statuses = enumerate(process.poll() for process in self._processes)
        return {worker_index: _describe(status) for worker_index, status in statuses if status is not None}

    def status(self) -> str:
        """Say nothing: a process is up as soon as it is started."""
        return ""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote."""
        log = self._logs[worker_index]
        if log.closed:
            return ""
        # The file's position is shared with the worker that writes it: read without moving it.
        size = os.fstat(log.fileno()).st_size
        data = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return data.decode(errors="replace").strip()

    def restart(self, worker_index: int) -> None:
        """Start a worker once more; its log goes on in the same file."""
        process = self._processes[worker_index]
        if process.poll() is None:
            process.kill()
            process.wait()
        try:
            self._processes[worker_index] = self._start(worker_index, self._logs[worker_index])
        except OSError as error:
            raise LaunchError(f"Could not start worker {worker_index} again: {error}.") from error

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


def _open_log(log_dir: str | Path | None, worker_index: int) -> BinaryIO:
    if log_dir is None:
        return tempfile.TemporaryFile()  # It has no name: nothing to remove, even if the head is killed.
    directory = Path(log_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return (directory / f"worker-{worker_index}.log").open("w+b")


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
