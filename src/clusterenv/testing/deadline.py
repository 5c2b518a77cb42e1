"""A deadline for code of others, which may hang."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator


class DeadlinePassed(BaseException):
    """What was tried has taken too long. Not an Exception: what hangs may be in a loop that catches all of those."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlinePassed in the block after so many seconds; in other threads than the main one there is no deadline.

    A timer that somebody else has set, such as a test framework's, is in force again afterwards, and if it is due
    earlier, it is left alone.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    theirs_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    if 0 < theirs_s <= seconds:
        yield
        return

    def stop(*_: object) -> None:
        raise DeadlinePassed

    began_at = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if theirs_s > 0:
            left_s = theirs_s - (time.monotonic() - began_at)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3), interval_s)
