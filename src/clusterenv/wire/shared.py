"""The shared-memory transport: nameless memory that holds mailboxes, semaphores and arrays.

The memory is a memfd: it has no name, so a killed process cannot leave it behind, and it is not bound by the size of
/dev/shm (64 MB in many containers). A worker on the same machine opens it through the head's /proc entry. Pages that
nobody touches take no memory, so mailboxes can be generous.

    a run's memory:  [ desk of worker 0 | desk of worker 1 | ... | planes ]
    a desk:          two semaphores (go, done), a stop flag, the request's mailbox and the reply's

A message too large for its mailbox goes over the worker's ZeroMQ socket instead; the mailbox then says so.
"""

from __future__ import annotations

import os
import secrets
import struct
from typing import TYPE_CHECKING

from clusterenv.errors import WireError
from clusterenv.wire import memory_map, semaphore
from clusterenv.wire.messages import Offer
from clusterenv.wire.semaphore import Semaphore

if TYPE_CHECKING:
    from collections.abc import Callable

_NONCE_BYTES = 64
_MAILBOX_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")
_BY_SOCKET = 2**64 - 1  # a length no mailbox has: the message comes over the socket
_GO, _DONE, _STOP = 0, semaphore.SIZE_BYTES, 2 * semaphore.SIZE_BYTES
_REQUEST = 3 * semaphore.SIZE_BYTES
_REPLY = _REQUEST + _MAILBOX_BYTES
DESK_BYTES = _REPLY + _MAILBOX_BYTES

EAGER_S = 200e-6  # How long a worker looks for its next request before it sleeps; see docs/performance.md.


class SharedMemory:
    """Memory that this process made and others on the machine may open."""

    def __init__(self, size_bytes: int) -> None:
        """Make `size_bytes` of memory; its pages are zero."""
        self._descriptor: int | None = os.memfd_create("clusterenv", os.MFD_CLOEXEC)
        # The spare line lets an array of no elements begin at the very end.
        os.ftruncate(self._descriptor, _NONCE_BYTES + size_bytes + semaphore.SIZE_BYTES)
        whole = memory_map.map_file(self._descriptor)
        nonce = secrets.token_bytes(16)
        whole[: len(nonce)] = nonce
        self.memory = whole[_NONCE_BYTES:]
        self.offer = Offer(f"/proc/{os.getpid()}/fd/{self._descriptor}", nonce)

    def close(self) -> None:
        """Let no one else in; arrays that point into the memory keep its pages until they are gone."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_offer(offer: Offer) -> memoryview | None:
    """Open the head's memory; None if it is not reachable from this process."""
    try:
        descriptor = os.open(offer.address, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        whole = memory_map.map_file(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return whole[_NONCE_BYTES:] if bytes(whole[: len(offer.nonce)]) == offer.nonce else None


def desk_memory(memory: memoryview, worker_index: int) -> memoryview:
    """Return one worker's desk in the run's memory."""
    return memory[worker_index * DESK_BYTES : (worker_index + 1) * DESK_BYTES]


def planes_memory(memory: memoryview, num_workers: int) -> memoryview:
    """Return what lies behind the desks in the run's memory."""
    return memory[num_workers * DESK_BYTES :]


class HeadDesk:
    """The head's side of one worker's desk."""

    def __init__(self, desk: memoryview) -> None:
        self._desk = desk
        self._go = Semaphore(desk[_GO:], initialise=True)
        self._done = Semaphore(desk[_DONE:], initialise=True)

    def post(self, frame: bytes) -> bool:
        """Hand over a request; False if it is too large, and must follow over the socket."""
        fits = _put(self._desk, _REQUEST, frame)
        self._go.post()
        return fits

    def wait(self, timeout_s: float) -> bool:
        """Wait for the reply; False if it has not come yet."""
        return self._done.wait(timeout_s)

    def take(self) -> bytes | None:
        """Return the reply that `wait` announced; None if it comes over the socket.

        Raises:
            WireError: The mailbox holds nonsense.
        """
        return _take(self._desk, _REPLY)

    def stop(self) -> None:
        """Tell the worker to end as soon as it next looks."""
        self._desk[_STOP] = 1
        self._go.post()


class WorkerDesk:
    """The worker's side of its desk."""

    def __init__(self, desk: memoryview) -> None:
        self._desk = desk
        self._go = Semaphore(desk[_GO:], initialise=False)
        self._done = Semaphore(desk[_DONE:], initialise=False)

    @property
    def is_stopped(self) -> bool:
        """Whether the head wants this worker to end."""
        return self._desk[_STOP] != 0

    def wait(self, timeout_s: float) -> bool:
        """Wait for a request, eagerly at first."""
        return self._go.wait_eagerly(timeout_s, EAGER_S)

    def take(self) -> bytes | None:
        """Return the request that `wait` announced; None if it comes over the socket."""
        return _take(self._desk, _REQUEST)

    def post(self, frame: bytes, send_large: Callable[[bytes], None]) -> None:
        """Hand over a reply, by `send_large` if it is too large for the mailbox."""
        if not _put(self._desk, _REPLY, frame):
            send_large(frame)
        self._done.post()


def _put(desk: memoryview, start: int, frame: bytes) -> bool:
    size = len(frame)
    if size > _MAILBOX_BYTES - _LENGTH.size:
        _LENGTH.pack_into(desk, start, _BY_SOCKET)
        return False
    _LENGTH.pack_into(desk, start, size)
    start += _LENGTH.size
    desk[start : start + size] = frame
    return True


def _take(desk: memoryview, start: int) -> bytes | None:
    (size,) = _LENGTH.unpack_from(desk, start)
    if size == _BY_SOCKET:
        return None
    if size > _MAILBOX_BYTES - _LENGTH.size:
        raise WireError(f"A mailbox cannot hold {size} bytes.")
    start += _LENGTH.size
    return bytes(desk[start : start + size])
