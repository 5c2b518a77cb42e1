"""Calls to the API server in the background: one thread decides, others wait, and tell it through a queue."""

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
    """What others than the thread that decides do.

    Attributes:
        num_changes: How many calls that change something are under way.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(_AT_ONCE)

    def put(self, work: Callable[[], None]) -> None:
        """Give the thread that decides something to do; any thread or signal handler may."""
        self._inbox.put(work)

    def take(self, timeout_s: float) -> None:
        """Do what was given, if anything is in this time: the thread that decides calls it, again and again."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=timeout_s)()

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """Do something in a thread of its own. Should it fail, so does the thread that decides."""
        thread = threading.Thread(target=self._heard, args=(work,), daemon=True)
        thread.start()
        return thread

    def ask(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Make a call, and then go on with what it returned: it may be a refusal."""

        def work() -> None:
            result: Any
            try:
                result = call()
            except Refusal as refusal:
                result = refusal
            self.put(partial(then, result))

        self._pool.submit(self._heard, work)

    def change(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do the same with a call that changes something: all of these are waited for in the end."""

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
