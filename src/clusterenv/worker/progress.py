"""LoopProgress: whether a worker gets anywhere; if it does not, its Python stacks go to its log."""

from __future__ import annotations

import faulthandler
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

_STDERR = 2
_SHARE = 0.9  # Of `hang_s`: the stacks must be in the log when the head gives the worker up.
_REARM_SHARE = 0.1
_LONGEST_S = 1e6  # The timer takes no infinity.


@dataclass(eq=False)
class LoopProgress:
    """What the worker's loop has done so far.

    Attributes:
        count: How many steps, resets and other calls it has finished.
        is_busy: Whether it is at one now.
    """

    count: int = 0
    is_busy: bool = False


class StackDumper:
    """Writes the stacks of all Python threads to the standard error, once per hang. For a thread that looks often."""

    def __init__(self, progress: LoopProgress, hang_s: float) -> None:
        """Watch from now on.

        Args:
            progress: Of the loop.
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
        """See whether anything was finished since the last time."""
        if now >= self._rearm_at:
            # For C code that holds the interpreter's lock, under which this thread does not run: then nobody renews
            # the timer, and its own thread, which needs no lock, writes the stacks.
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
            log.warning("nothing was finished for %.3g s; this worker is at:", now - self._since)
            faulthandler.dump_traceback(_STDERR)

    def close(self) -> None:
        """Stop the timer."""
        faulthandler.cancel_dump_traceback_later()
