"""Calls to the API server in the background: one thread decides, others wait, and report to it through a queue."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from clusterenv.launchers.kubernetes.api import Refusal

_AT_ONCE = 16  # Requests under way.


class Background:
    """The work of all threads but the one that decides.

    Attributes:
        num_changes: How many calls that change something are pending.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def put(self, work: Callable[[], None]) -> None:
        """Give the thread that decides something to do; any thread or signal handler may call this."""
        self._inbox.put(work)

    def take(self, timeout_s: float) -> None:
        """Do the next thing given, if any within this time; the thread that decides calls this repeatedly."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=timeout_s)()

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """Do something in a separate thread; if it fails, so does the thread that decides."""
        thread = threading.Thread(target=self._heard, args=(work,), daemon=True)
        thread.start()
        return thread

    def ask(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Make a call, and then continue with its result, which may be a refusal."""

        def work() -> None:
            result: Any
            try:
                result = call()
            except Refusal as refusal:
                result = refusal
            self.put(partial(then, result))

        self._pool.submit(self._heard, work)

    def change(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do the same with a call that changes something; these calls are waited for at the end."""

        def finish(result: Any) -> None:
            self.num_changes -= 1
            then(result)

        self.num_changes += 1
        self.ask(call, finish)

    def _heard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the thread that decides raises it
            self.put(partial(_raise, error))


def _raise(error: BaseException) -> None:
    raise error
