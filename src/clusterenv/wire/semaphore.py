"""Semaphores that live in shared memory: the cheapest wake-up between processes.

POSIX unnamed semaphores, through ctypes. They have no name, so nothing is left behind however the processes end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from collections.abc import Sequence

SIZE_BYTES = 64  # sem_t takes 32 on Linux; a cache line each keeps neighbours from slowing one another.

IS_SUPPORTED = sys.platform == "linux"  # macOS has no unnamed semaphores: ZeroMQ serves there.


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A counting semaphore at a place in shared memory.

    Attributes:
        address: Of that place.
    """

    def __init__(self, memory: memoryview, *, initialise: bool) -> None:
        """Use the semaphore at the start of `memory`, which must stay mapped while this object lives.

        Args:
            memory: At least `SIZE_BYTES` writable bytes.
            initialise: True for the one process that creates it.
        """
        # The ctypes array keeps the memory's buffer exported, and so mapped.
        self._place = (ctypes.c_char * SIZE_BYTES).from_buffer(memory)
        self.address = ctypes.addressof(self._place)
        self._deadline = _TimeSpec()
        self._deadline_pointer = ctypes.byref(self._deadline)
        if initialise and _libc.sem_init(self.address, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def post(self) -> None:
        """Let one waiter through."""
        _sem_post(self.address)

    def try_wait(self) -> bool:
        """Go through if that is possible at once."""
        return bool(_sem_trywait(self.address) == 0)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until let through; False if that took too long or a signal came.

        A caller loops anyway, and returning lets Python run its signal handlers, so that Ctrl-C is heard.
        """
        if _sem_trywait(self.address) == 0:
            return True
        end = time.time() + timeout_s  # POSIX wants the wall clock here; slices are short, so a jump does no harm.
        self._deadline.seconds = int(end)
        self._deadline.nanoseconds = int((end % 1.0) * 1e9)
        if _sem_timedwait(self.address, self._deadline_pointer) == 0:
            return True
        code = ctypes.get_errno()
        if code not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))
        return False

    def wait_eagerly(self, timeout_s: float, eager_s: float) -> bool:
        """Try again and again for `eager_s`, letting others run in between, and only then sleep.

        Falling asleep and being woken costs more than a short step takes. Yielding matters: where processes outnumber
        cores, one that holds its core while it looks keeps away the very process it waits for.
        """
        trywait, address, give_way, clock = _sem_trywait, self.address, os.sched_yield, time.perf_counter
        end = clock() + eager_s
        while True:
            if trywait(address) == 0:
                return True
            if clock() > end:
                return self.wait(timeout_s)
            give_way()


class Chain:
    """Several semaphores that are posted by one call into C.

    That is quick, and Python runs no signal handler meanwhile: after Ctrl-C either all were posted or none, and
    `posted` tells which.

    Attributes:
        posted: Has a zero for each that was posted, until it is cleared.
    """

    def __init__(self, semaphores: Sequence[Semaphore]) -> None:
        self.posted: list[int] = []
        self._semaphores = semaphores  # They keep their memory mapped.
        self._addresses = [each.address for each in semaphores]

    def post(self) -> None:
        """Let one waiter through at each."""
        self.posted.extend(map(_sem_post, self._addresses))


if IS_SUPPORTED:
    _libc = ctypes.CDLL(None, use_errno=True)
    for _name, _arguments in {
        "sem_init": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint),
        "sem_post": (ctypes.c_void_p,),
        "sem_trywait": (ctypes.c_void_p,),
        "sem_timedwait": (ctypes.c_void_p, ctypes.c_void_p),
    }.items():
        getattr(_libc, _name).argtypes = _arguments
    _sem_post, _sem_trywait, _sem_timedwait = _libc.sem_post, _libc.sem_trywait, _libc.sem_timedwait
