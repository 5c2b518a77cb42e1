"""A deadline for other people's code, which may hang."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator


class DeadlinePassed(BaseException):
    """The deadline has passed; not an Exception, because code that hangs may be in a loop that catches those."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlinePassed in the block after this many seconds; there is no deadline outside the main thread.

    A timer that was already set, such as a test framework's, is restored afterwards; if it is due earlier, it is left
    alone.
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
