"""Watchdog: ends a worker whose head is gone, even while an environment holds the worker's own thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from clusterenv.wire.link import Link

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_GRACE_S = 2.0


class Watchdog:
    """A thread that watches the parent process, or the connection to a head elsewhere.

    Attributes:
        head_is_gone: The loop should end in order, and has a few seconds for it.
    """

    def __init__(self, link: Link, parent_pid: int | None, wake: Callable[[], None]) -> None:
        """Begin to watch.

        Args:
            link: The connection; from now on this thread's.
            parent_pid: Of the head, if this worker is its child.
            wake: Makes something happen to the link.
        """
        self.head_is_gone = False
        self._link = link
        self._wake = wake
        self._parent_pid = parent_pid
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    @property
    def connection_was_lost(self) -> bool:
        """Whether the head no longer knows this worker, though it may still live."""
        return self._link.was_lost

    def stop(self) -> None:
        """Stop watching."""
        self._is_done.set()
        self._wake()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.is_set():
            self._link.watch(_LOOK_S)
            reason = self._link.verdict
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                reason = "its parent has ended"
            if reason:
                log.warning("this worker ends: %s", reason)
                self.head_is_gone = True
                if not self._is_done.wait(_GRACE_S):
                    os._exit(1)
