"""Semaphores that live in shared memory: the cheapest wake-up between processes.

These are POSIX unnamed semaphores, so nothing is left behind however the processes end. They are created by the C
library, through ctypes, and then posted and waited for by the C code behind Python's own `multiprocessing`, which takes
an eighth of the time ctypes would. Its `SemLock` is meant for named semaphores, but its `_rebuild` accepts the address
of any semaphore.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]  # typeshed has none
import ctypes
import operator
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SIZE_BYTES = 64  # sem_t takes 32 on Linux; with a cache line each, neighbours do not slow each other down.

_SemLock: Any = getattr(_multiprocessing, "SemLock", None)
# macOS has no unnamed semaphores; ZeroMQ is used there.
IS_SUPPORTED = sys.platform == "linux" and hasattr(_SemLock, "_rebuild")

_KIND_SEMAPHORE = 1
_OVERFLOW = (ValueError, OSError)


class Semaphore:
    """A counting semaphore at a given address in shared memory.

    Attributes:
        acquire: Takes one count if there is one; waits for it if the first argument is true.
        release: Adds one count. Raises if the semaphore is full.
    """

    def __init__(self, memory: memoryview, *, initialise: bool) -> None:
        """Use the semaphore at the start of `memory`, which must stay mapped while this object lives.

        Args:
            memory: At least `SIZE_BYTES` writable bytes.
            initialise: True for the one process that creates it.
        """
        # The ctypes array keeps the memory's buffer exported, and so mapped.
        self._place = (ctypes.c_char * SIZE_BYTES).from_buffer(memory)
        address = ctypes.addressof(self._place)
        if initialise and _libc.sem_init(address, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")
        lock = _SemLock._rebuild(address, _KIND_SEMAPHORE, _SemLock.SEM_VALUE_MAX, None)
        # The lock must never be freed: that would call sem_close, which is for named semaphores only.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lock))
        self.acquire: Callable[..., bool] = lock.acquire
        self.release: Callable[[], None] = lock.release

    def post(self) -> None:
        """Add one count; a full semaphore is left as it is."""
        try:  # noqa: SIM105 - this is quicker
            self.release()
        except _OVERFLOW:
            pass

    def try_wait(self) -> bool:
        """Take one count if there is one."""
        return self.acquire(False)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is a count to take; returns False on timeout. Ctrl-C interrupts it."""
        return self.acquire(True, timeout_s)

    def wait_eagerly(self, timeout_s: float, eager_s: float) -> bool:
        """Keep trying for `eager_s`, letting other processes run in between, and only then sleep.

        Falling asleep and waking up takes longer than a short step. Yielding matters: if processes outnumber cores, one
        that keeps its core busy may prevent the very process it waits for from running.
        """
        acquire, give_way, clock = self.acquire, os.sched_yield, time.perf_counter
        end = clock() + eager_s
        while not acquire(False):
            if clock() > end:
                return acquire(True, timeout_s)
            give_way()
        return True


class Chain:
    """Several semaphores that are posted by one call into C.

    That is fast, and Python runs no signal handler meanwhile: after Ctrl-C, either all were posted or none, and
    `posted` tells which.

    Attributes:
        posted: Has one entry per semaphore posted, until it is cleared.
    """

    def __init__(self, semaphores: Sequence[Semaphore]) -> None:
        self.posted: list[None] = []
        self._semaphores = semaphores  # They keep their memory mapped.
        self._releases = [each.release for each in semaphores]

    def post(self) -> None:
        """Add one count to each."""
        releases = iter(self._releases)
        while True:
            try:
                self.posted.extend(map(operator.call, releases))
            except _OVERFLOW:
                continue  # Continue with the next one: nobody waits for a semaphore that is full.
            return


if IS_SUPPORTED:
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
