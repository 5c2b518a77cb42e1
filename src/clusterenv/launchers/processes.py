"""ProcessFleet: workers, each held by a child process of the head: the worker itself, or the client that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import BinaryIO

from clusterenv.errors import LaunchError
from clusterenv.launchers.worker_log import WorkerLog

StartProcess = Callable[[int, BinaryIO], "subprocess.Popen[bytes]"]


class ProcessFleet:
    """Child processes, and the files they write to."""

    def __init__(self, start: StartProcess, num_workers: int, log_dir: str | os.PathLike[str] | None = None) -> None:
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
        self._logs: list[WorkerLog] = []
        try:
            for worker_index in range(num_workers):
                self._logs.append(WorkerLog(log_dir, worker_index))
                self._processes.append(start(worker_index, self._logs[-1].file))
        except OSError as error:
            self.stop(timeout_s=0.0)
            raise LaunchError(f"Could not start worker {len(self._processes)} of {num_workers}: {error}.") from error
        except BaseException:
            self.stop(timeout_s=0.0)
            raise

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended."""
        statuses = enumerate(process.poll() for process in self._processes)
        return {worker_index: describe_exit(status) for worker_index, status in statuses if status is not None}

    def status(self) -> str:
        """Say nothing: a process is up as soon as it is started."""
        return ""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote."""
        return self._logs[worker_index].tail()

    def restart(self, worker_index: int) -> None:
        """Start a worker once more; its log goes on in the same file."""
        process = self._processes[worker_index]
        if process.poll() is None:
            process.kill()
            process.wait()
        try:
            self._processes[worker_index] = self._start(worker_index, self._logs[worker_index].file)
        except OSError as error:
            raise LaunchError(f"Could not start worker {worker_index} again: {error}.") from error

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end by themselves, then terminate, then kill them."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            wait_for(process, deadline)
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + min(1.0, timeout_s)
        for process in self._processes:
            if not wait_for(process, deadline):
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()


def wait_for(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for a process to end, until this moment of `time.monotonic`; False if it still runs."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def describe_exit(status: int) -> str:
    """Say how a process ended: its exit status, or minus the signal that killed it."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
