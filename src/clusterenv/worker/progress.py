"""LoopProgress: whether a worker makes progress; if it hangs, its Python stacks are written to its log."""

from __future__ import annotations

import faulthandler
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

_STDERR = 2
_SHARE = 0.9  # Of `hang_s`: the stacks must be in the log before the head gives the worker up.
_REARM_SHARE = 0.1
_LONGEST_S = 1e6  # The timer does not accept infinity.


@dataclass(eq=False)
class LoopProgress:
    """What the worker's loop has done so far.

    Attributes:
        count: How many steps, resets and other calls it has finished.
        is_busy: Whether one is running now.
    """

    count: int = 0
    is_busy: bool = False


class StackDumper:
    """Writes the stacks of all Python threads to standard error, once per hang; `look` must be called often."""

    def __init__(self, progress: LoopProgress, hang_s: float) -> None:
        """Watch from now on.

        Args:
            progress: The progress of the worker's loop.
            hang_s: The head gives up a worker that has finished nothing for this long.
        """
        self._progress = progress
        self._after_s = _SHARE * min(hang_s, _LONGEST_S)
        self._count = -1
        self._since = 0.0
        self._has_dumped = False
        self._rearm_at = 0.0
        self._looked_at: float | None = None

    def look(self, now: float) -> None:
        """Check whether anything was finished since the last call."""
        if now >= self._rearm_at:
            # While C code holds the interpreter lock, this thread does not run and cannot renew the timer. Then the
            # timer's own thread, which does not need the lock, writes the stacks.
            faulthandler.dump_traceback_later(self._after_s, file=_STDERR)
            self._rearm_at = now + _REARM_SHARE * self._after_s
        has_fired = self._looked_at is not None and now - self._looked_at >= self._after_s
        self._looked_at = now
        progress = self._progress
        if not progress.is_busy or progress.count != self._count:
            self._count, self._since, self._has_dumped = progress.count, now, False
        elif has_fired:
            self._has_dumped = True
        elif not self._has_dumped and now - self._since >= self._after_s:
            self._has_dumped = True
            log.warning("nothing was finished for %.3g s; the stacks of this worker are:", now - self._since)
            faulthandler.dump_traceback(_STDERR)

    def close(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
