"""Command: a program that runs in the background and is polled from time to time."""

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
    """A program that runs in the background until it exits or its time is up.

    Its output goes to files, because reading a pipe may block if the program has children; and to files in memory,
    because on a full disk a scheduler's answer would come out empty.

    Attributes:
        status: The exit status, once `poll` has seen the end.
        out: What the program wrote to standard output; empty until it has ended.
        err: What it wrote to standard error.
        has_timed_out: Whether it was killed, because its time was up or by `kill`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        timeout_s: float,
        *,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program; raise OSError if that is not possible."""
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
        """Return whether the program has ended; never wait."""
        if self.status is None:
            status = self._process.poll()
            if status is None:
                if time.monotonic() > self._ends_at:
                    self.kill()
                return False
            for file in self._files:
                file.seek(0)
            self.out, self.err = (file.read().decode(errors="replace").strip() for file in self._files)
            self.status = status  # Before the files are closed: after an interrupt here they must not be read again.
            self._close()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long for the program to end; return whether it has."""
        deadline = time.monotonic() + timeout_s
        while not self.poll():
            if time.monotonic() > deadline:
                return False
            wait_for(self._process, time.monotonic() + _POLL_S)
        return True

    def kill(self) -> None:
        """Kill the program and its process group, if it still runs; `poll` notices its end."""
        if self._process.poll() is None:
            self.has_timed_out = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        for file in self._files:
            file.close()


def _open_memory() -> BinaryIO:
    """Open a nameless file in memory, or a temporary one if the system does not have those."""
    try:
        return os.fdopen(os.memfd_create("clusterenv"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()
