"""Follower: a process, since the head has no thread, that shows remote workers' output on the head's standard error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from clusterenv.launchers.processes import WorkerLog, uninterrupted, wait_for

_END_S = 3.0


class Follower:
    """Follows workers' logs until it is closed or the head ends."""

    def __init__(self, logs: Sequence[WorkerLog] = ()) -> None:
        """Start the process, with one log per worker in index order; raise OSError if it cannot be started."""
        descriptors = [log.file.fileno() for log in logs]
        with uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "clusterenv.worker.follow", *map(str, descriptors)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                bufsize=0,  # Otherwise close() would try again to write what a process that has ended did not read.
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C in the terminal is for the head.
            )

    def add(self, path: Path, worker_index: int | None) -> None:
        """Follow one more log as soon as it exists: one worker's, or that of all, as `srun --label` writes it."""
        assert self._process.stdin is not None
        name = f"{'-' if worker_index is None else worker_index} ".encode() + os.fsencode(path) + b"\n"
        with uninterrupted(), contextlib.suppress(BrokenPipeError):  # The process has ended and shows nothing more.
            self._process.stdin.write(name)

    def close(self) -> None:
        """Let the process show what is left, then end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not wait_for(self._process, time.monotonic() + _END_S):
            self._process.kill()
            self._process.wait()
