"""Ownership: environments belong to the process that made them, and to one thread at a time."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType

from clusterenv.errors import ConcurrentUse


class Ownership:
    """Keeps forked processes and other threads out of a block. The thread inside the block may enter it again."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._thread: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the environments."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise ConcurrentUse(
                f"These environments belong to process {self._pid}, and this is a forked copy of it (process "
                f"{os.getpid()}): two processes cannot share one connection to the workers. Make a ClusterEnv in "
                "each process."
            )
        if not self._lock.acquire(blocking=False) and not self._take_over():
            raise ConcurrentUse(
                "Another thread is in a call on these environments. Only one thread at a time may use them: hand them "
                "over when the call has returned, or make a ClusterEnv per thread."
            )
        self._thread = threading.get_ident()

    def _take_over(self) -> bool:
        """Take over the lock of a thread that is not in a call: Ctrl-C kept that thread from releasing it."""
        frame = sys._current_frames().get(self._thread or 0)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("clusterenv."):
                return False
            frame = frame.f_back
        self._lock = threading.RLock()
        return self._lock.acquire(blocking=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:  # noqa: SIM105 - in every step, and `suppress` takes ten times as long
            self._lock.release()
        except RuntimeError:
            pass  # Another thread has taken it over.
