"""Echo: prefixes a worker's output lines with its name for the head's standard error, and limits their number."""

from __future__ import annotations

from collections import deque

_LINE_BYTES = 2000  # Longer lines are cut, so that a line fits one write that no other worker's can interleave.
_BURST_LINES = 100
_LINES_PER_S = 10.0
_LAST_LINES = 20  # When a worker ends, what it said last may matter most.


class Echo:
    """Splits output into lines and limits their rate: a burst of a hundred, ten per second in the long run.

    Does no I/O; the time is passed in.
    """

    def __init__(self, worker_index: int) -> None:
        self._prefix = b"[worker %d] " % worker_index
        self._unfinished = bytearray()
        self._allowance = float(_BURST_LINES)
        self._seen_at: float | None = None
        self._num_withheld = 0
        self._withheld: deque[bytes] = deque(maxlen=_LAST_LINES)

    def take(self, data: bytes, now: float) -> bytes:
        """Return what to show of this output; an incomplete line waits for its end."""
        *lines, rest = (self._unfinished + data).split(b"\n")
        self._unfinished = rest[: _LINE_BYTES + 1]  # One byte more shows that it is too long.
        if self._seen_at is not None:
            self._allowance = min(_BURST_LINES, self._allowance + (now - self._seen_at) * _LINES_PER_S)
        self._seen_at = now
        return b"".join(self._pass(bytes(line)) for line in lines)

    def finish(self) -> bytes:
        """Return what is left when the worker has ended, including the last withheld lines."""
        lines = [*self._withheld, *([bytes(self._unfinished)] if self._unfinished else [])]
        note = self._note(self._num_withheld - len(self._withheld))
        self._unfinished.clear()
        self._withheld.clear()
        self._num_withheld = 0
        return note + b"".join(map(self._shape, lines))

    def _pass(self, line: bytes) -> bytes:
        if self._allowance < 1.0:
            self._num_withheld += 1
            self._withheld.append(line[: _LINE_BYTES + 1])
            return b""
        self._allowance -= 1.0
        note = self._note(self._num_withheld)
        self._num_withheld = 0
        self._withheld.clear()
        return note + self._shape(line)

    def _shape(self, line: bytes) -> bytes:
        # A progress bar rewrites its line with carriage returns: keep what a terminal would finally show.
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        mark = b" [...]" if len(line) > _LINE_BYTES else b""
        return self._prefix + line[:_LINE_BYTES] + mark + b"\n"

    def _note(self, count: int) -> bytes:
        if count <= 0:
            return b""
        return self._prefix + b"[clusterenv: %d lines are left out here; log_dir= keeps more of them]\n" % count
