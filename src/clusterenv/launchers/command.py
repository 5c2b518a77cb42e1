"""Command: a program that runs in the background, and is looked at now and then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from clusterenv.launchers.processes import wait_for

_POLL_S = 0.05


class Command:
    """A program that runs in the background until it answers, or its time is up.

    It writes to files: whoever reads a pipe may have to wait, if the program has children. They are in memory: a full
    disk must not make a scheduler's answer an empty one.

    Attributes:
        status: How it ended, once `poll` has seen it.
        out: What it printed; empty until then.
        err: What it printed as errors.
        has_timed_out: Whether it was ended because its time was up, or by `kill`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        timeout_s: float,
        *,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; raises OSError if that is not possible."""
        self.status: int | None = None
        self.out = self.err = ""
        self.has_timed_out = False
        self._ends_at = time.monotonic() + timeout_s
        self._files = (_open_memory(), _open_memory())
        try:
            with _open_memory() as given:
                given.write(stdin.encode())
                given.seek(0)
                self._process = subprocess.Popen(
                    arguments,
                    env=environment,
                    stdin=given,
                    stdout=self._files[0],
                    stderr=self._files[1],
                    process_group=0,  # Ctrl-C in the terminal is for the head.
                )
        except BaseException:
            self._close()
            raise

    def poll(self) -> bool:
        """Return whether it has ended; never waits."""
        if self.status is None:
            status = self._process.poll()
            if status is None:
                if time.monotonic() > self._ends_at:
                    self.kill()
                return False
            for file in self._files:
                file.seek(0)
            self.out, self.err = (file.read().decode(errors="replace").strip() for file in self._files)
            self.status = status  # Before the files are closed: if this is interrupted, they are not read again.
            self._close()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait this long for its end; returns whether it has ended."""
        deadline = time.monotonic() + timeout_s
        while not self.poll():
            if time.monotonic() > deadline:
                return False
            wait_for(self._process, time.monotonic() + _POLL_S)
        return True

    def kill(self) -> None:
        """End it and what it has started, if it has not ended; `poll` sees it."""
        if self._process.poll() is None:
            self.has_timed_out = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        for file in self._files:
            file.close()


def _open_memory() -> BinaryIO:
    """Open a file without a name or a place on a disk, where the system has such."""
    try:
        return os.fdopen(os.memfd_create("clusterenv"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()
