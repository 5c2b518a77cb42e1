"""Relay: copies what a worker prints to its log, which may be full, slow or gone, and limits the log's size.

A worker's own output is a pipe, so that printing never fails. Its guardian writes the first megabytes to the log as
they come. After that, only the newest output is kept, and written when the worker pauses or ends, when it may matter.
If the head wants to show the output, it also goes to the head's standard error, line by line (`echo`).
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time

from clusterenv.worker.echo import Echo

_FIRST_BYTES = 4 << 20  # Written as they come.
_LIVE_BYTES = 8 << 20  # Beyond this, only the end is written, when the worker has ended.
_RESERVED_BYTES = 1 << 19  # For a worker that continues a log that earlier ones have filled.
_KEPT_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_SAFE_BYTES = select.PIPE_BUF  # This much can be written without blocking to a pipe or socket that is ready.
_PAUSE_S = 1.0  # Also how long to wait after a failed write.


class Relay:
    """One pipe of a worker, and where it leads."""

    def __init__(self, source: int, log: Sink, shown: tuple[Sink, Echo] | None) -> None:
        """Begin to relay.

        Args:
            source: The pipe's read end; it is made non-blocking.
            log: Where all output goes.
            shown: Where output is also shown line by line, and the `Echo` that makes the lines.
        """
        os.set_blocking(source, False)
        self.source = source
        self.is_open = True
        self._log = log
        self._shown = shown

    def read(self) -> None:
        """Read some of what the worker has printed; a limited amount, so that other pipes get their turn."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self.add(data)
        else:
            self.is_open = False

    def add(self, data: bytes) -> None:
        """Add output to be written."""
        self._log.add(data)
        if self._shown is not None:
            sink, echo = self._shown
            sink.add(echo.take(data, time.monotonic()))

    def finish(self, ends_at: float) -> None:
        """Read all that is left, for the sinks to write, without waiting for more output."""
        while self.is_open and self._has_input() and time.monotonic() < ends_at:
            self.read()
        if self._shown is not None:
            sink, echo = self._shown
            sink.add(echo.finish())

    def _has_input(self) -> bool:
        poll = select.poll()
        poll.register(self.source, select.POLLIN)
        return bool(poll.poll(0))


class Sink:
    """Writes to a log, or to the head's standard error, without blocking."""

    def __init__(self, descriptor: int, *, is_capped: bool = True) -> None:
        """Begin to write.

        Args:
            descriptor: The file; possibly shared with others, so its flags are not changed, nor is it truncated.
            is_capped: Whether to write only the first megabytes, and the end.
        """
        status = os.fstat(descriptor)
        self.descriptor = descriptor
        self._is_file = stat.S_ISREG(status.st_mode)
        self._is_capped = is_capped
        self._written = min(status.st_size, _LIVE_BYTES - _RESERVED_BYTES) if self._is_file and is_capped else 0
        self._kept = bytearray()  # What is not written yet.
        self._dropped = 0
        self._is_line_open = False
        self._write_at = 0.0  # Do not write before this time.

    def is_waited_for(self, now: float) -> bool:
        """Whether there is something to write as soon as the descriptor is ready."""
        return not self._is_file and self._is_due(now)

    def due_at(self, now: float) -> float | None:
        """When to call `write` at the latest, even without other events."""
        is_waiting = self._kept and self._may_write and not self.is_waited_for(now)
        return self._write_at if is_waiting else None

    def add(self, data: bytes) -> None:
        """Add output to be written."""
        self._kept += data
        excess = len(self._kept) - _KEPT_BYTES
        if excess > 0:
            del self._kept[:excess]
            self._dropped += excess
        if self._is_capped and self._written >= _FIRST_BYTES:
            self._write_at = time.monotonic() + _PAUSE_S

    def write(self) -> None:
        """Write what is due, as far as possible without blocking."""
        while self._is_due(time.monotonic()) and self._write_some():
            pass

    def finish(self, ends_at: float) -> None:
        """Write all that is left, as far as possible until `ends_at`."""
        self._written, self._write_at = 0, 0.0
        while self._kept and time.monotonic() < ends_at:
            if not self._write_some() and (self._write_at or not self._is_ready(ends_at - time.monotonic())):
                return  # Writing has failed, or the descriptor accepts nothing.

    @property
    def _may_write(self) -> bool:
        return not self._is_capped or self._written < _LIVE_BYTES

    def _is_due(self, now: float) -> bool:
        return bool(self._kept) and self._may_write and self._write_at <= now

    def _write_some(self) -> bool:
        """Write once; returns False if nothing could be written."""
        if not self._is_file and not self._is_ready(0.0):
            return False
        note = b""
        if self._dropped:
            line_end = b"\n" if self._is_line_open else b""
            note = line_end + b"[clusterenv: %d bytes of output were dropped here]\n" % self._dropped
        data = note + self._kept[: (_READ_BYTES if self._is_file else _SAFE_BYTES) - len(note)]
        if not self._is_capped:  # Shared with other writers: write whole lines, if they are not too long.
            data = data[: data.rfind(b"\n") + 1] or data
        try:
            count = os.write(self.descriptor, data)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF):  # Nobody will ever read it.
                self._kept.clear()
            self._write_at = time.monotonic() + _PAUSE_S  # A full disk may have space again later.
            return False
        self._written += count
        self._is_line_open = data[count - 1 : count] != b"\n"
        if count >= len(note):
            self._dropped = 0
            del self._kept[: count - len(note)]
        return True

    def _is_ready(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
