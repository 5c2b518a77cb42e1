"""The shared-memory transport: nameless memory that holds mailboxes, semaphores and arrays.

The memory is a memfd: it has no name, so a killed process cannot leave it behind, and it is not bound by the size of
/dev/shm (64 MB in many containers). A worker on the same machine opens it through the head's /proc entry. Pages that
nobody touches take no memory, so mailboxes can be generous.

    a run's memory:  [ bell | desk of worker 0 | desk of worker 1 | ... | planes ]
    the bell:        two semaphores (open answers, ring)
    a desk:          a semaphore (go), a stop flag, the request's mailbox and the reply's, the names of infos
    a mailbox:       the message's length, the number of its call, the message

A message too large for its mailbox goes over the worker's ZeroMQ socket instead; the mailbox then says so. The
commonest messages need no bytes at all: a step whose actions are in the planes, and its answer if nothing but planes
was filled. They are plain: a length that says so, and the call's number. Infos that lie beside the planes add to the
length the generation of their names.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from typing import TYPE_CHECKING

from clusterenv.errors import WireError
from clusterenv.wire import memory_map, semaphore
from clusterenv.wire.info_planes import BOX_BYTES, MAX_GENERATION
from clusterenv.wire.messages import Offer
from clusterenv.wire.semaphore import Chain, Semaphore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NONCE_BYTES = 64
_MAILBOX_BYTES = 1 << 20
_HEADER = struct.Struct("<QQ")
_pack_into, _unpack = _HEADER.pack_into, _HEADER.unpack
_MAX_BYTES = _MAILBOX_BYTES - _HEADER.size
_BY_SOCKET = 2**64 - 1  # lengths no mailbox has: the message comes over the socket,
_PLAIN = 1 << 29  # or it is plain, and the rest is a generation
_GO, _STOP = 0, semaphore.SIZE_BYTES
_REQUEST = 2 * semaphore.SIZE_BYTES
_REPLY = _REQUEST + _MAILBOX_BYTES
_NAMES = _REPLY + _MAILBOX_BYTES
_DESK_BYTES = _NAMES + BOX_BYTES
_BELL_BYTES = 2 * semaphore.SIZE_BYTES

_MOMENT_S = 0.1
EAGER_S = 1e-3  # How long a worker looks for its next request before it sleeps; see docs/performance.md.


class SharedMemory:
    """Memory that this process made and others on the machine may open."""

    def __init__(self, size_bytes: int) -> None:
        """Make `size_bytes` of memory; its pages are zero."""
        self._descriptor: int | None = os.memfd_create("clusterenv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # The spare line lets an array of no elements begin at the very end.
        os.ftruncate(self._descriptor, _NONCE_BYTES + size_bytes + semaphore.SIZE_BYTES)
        # Whoever could shrink it would kill the head with the next access to what is gone.
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
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


def desks_bytes(num_workers: int) -> int:
    """Return how much of a run's memory the bell and the desks take."""
    return _BELL_BYTES + num_workers * _DESK_BYTES


def planes_memory(memory: memoryview, num_workers: int) -> memoryview:
    """Return what lies behind the desks in the run's memory."""
    return memory[desks_bytes(num_workers) :]


class Bell:
    """Wakes the head once, when the last of several workers has answered.

    Being woken by every worker would cost the head a switch each, on a core that another worker may need. The first
    semaphore holds one token less than answers are awaited. Each worker that answers takes one; the one that finds
    none left is the last, and rings.

    Attributes:
        open: The first semaphore.
        ring: The second.
    """

    def __init__(self, memory: memoryview, *, initialise: bool) -> None:
        self.open = Semaphore(memory, initialise=initialise)
        self.ring = Semaphore(memory[semaphore.SIZE_BYTES :], initialise=initialise)
        self._take_token = self.open.acquire

    def expect(self, num_answers: int) -> None:
        """Await this many answers."""
        for _ in range(num_answers - 1):
            self.open.post()

    def answer(self) -> None:
        """Note one answer."""
        if not self._take_token(False):
            self.ring.post()

    def silence(self) -> None:
        """Take back all tokens, when somebody who was to answer never will.

        An answer that comes after this rings at once. Then the bell has rung too early, and the head, which looks at
        the desks, goes on waiting.
        """
        while self.open.try_wait():
            pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have answered; False if that took too long."""
        return self.ring.wait(timeout_s)


class HeadDesk:
    """The head's side of one worker's desk.

    Attributes:
        go: Wakes the worker.
        request: The header of the request's mailbox.
        reply: The header of the reply's mailbox.
        names: Where the worker writes what its infos are called.
    """

    def __init__(self, memory: memoryview, worker_index: int) -> None:
        self._desk = desk = _desk_memory(memory, worker_index)
        self.go = Semaphore(desk[_GO:], initialise=True)
        self.request = desk[_REQUEST : _REQUEST + _HEADER.size]
        self.reply = desk[_REPLY : _REPLY + _HEADER.size]
        self.names = desk[_NAMES:]

    def post(self, frame: bytes, call: int) -> bool:
        """Hand over a request; False if it is too large, and must follow over the socket."""
        fits = _put(self._desk, _REQUEST, frame, call)
        self.go.post()
        return fits

    def find_plain(self, call: int) -> int | None:
        """Return the generation of the infos, if the reply to a call is plain; to be trusted as `take` is."""
        size, answered = _HEADER.unpack_from(self._desk, _REPLY)
        return size - _PLAIN if answered == call and 0 <= size - _PLAIN < MAX_GENERATION else None

    def take(self, call: int) -> bytes | None:
        """Return the reply to a call; None if there is none yet, b"" if it comes over the socket.

        Only to be trusted after the bell has rung or the worker has ended: before, it may be half written.

        Raises:
            WireError: The mailbox holds nonsense.
        """
        size, answered = _HEADER.unpack_from(self._desk, _REPLY)
        return _take(self._desk, _REPLY, size) if answered == call else None

    def stop(self) -> None:
        """Tell the worker to end as soon as it next looks."""
        self._desk[_STOP] = 1
        self.go.post()


class AllDesks:
    """The desks of all workers at once: starts a plain step and looks at its answers. This is the hot path.

    Attributes:
        under_way: Is not empty from the moment the workers are woken, until it is cleared.
        wait: Waits for the bell.
    """

    def __init__(self, bell: Bell, desks: Sequence[HeadDesk]) -> None:
        self._requests = [desk.request for desk in desks]
        self._replies = [desk.reply for desk in desks]
        # As `Bell.expect` does, and then to work.
        chain = Chain([bell.open] * (len(desks) - 1) + [desk.go for desk in desks])
        self.under_way = chain.posted
        self.wait = bell.ring.wait
        self._wake = chain.post

    def start_plain(self, call: int) -> None:
        """Start a plain step of all workers."""
        for request in self._requests:
            _pack_into(request, 0, _PLAIN, call)
        self._wake()

    def find_plain(self, call: int) -> list[int] | None:
        """Return the generations of the infos, if all replies are plain; to be trusted as `HeadDesk.take` is."""
        generations = []
        for reply in self._replies:
            size, answered = _unpack(reply)
            if answered != call or not 0 <= size - _PLAIN < MAX_GENERATION:
                return None
            generations.append(size - _PLAIN)
        return generations


class WorkerDesk:
    """The worker's side of its desk.

    Attributes:
        names: Where it writes what its infos are called.
    """

    def __init__(self, memory: memoryview, worker_index: int) -> None:
        self._desk = desk = _desk_memory(memory, worker_index)
        self.names = desk[_NAMES:]
        self._go = Semaphore(desk[_GO:], initialise=False)
        self._bell = Bell(memory, initialise=False)
        self._is_busy = False

    @property
    def is_stopped(self) -> bool:
        """Whether the head wants this worker to end."""
        return self._desk[_STOP] != 0

    def wait(self, timeout_s: float) -> bool:
        """Wait for a request, eagerly at first if the last wait was not in vain; for a moment at most.

        A signal does not end the sleep, but may be a wish to go that the caller must see.
        """
        self._is_busy = self._go.wait_eagerly(min(timeout_s, _MOMENT_S), EAGER_S if self._is_busy else 0.0)
        return self._is_busy

    def take(self) -> bytes | int:
        """Return the request that `wait` announced: its call if it is a plain step, b"" if it comes over the socket."""
        size, call = _HEADER.unpack_from(self._desk, _REQUEST)
        return call if size == _PLAIN else _take(self._desk, _REQUEST, size)

    def post_plain(self, call: int, generation: int) -> None:
        """Hand over a plain reply, with the generation of the infos beside the planes, or 0."""
        _HEADER.pack_into(self._desk, _REPLY, _PLAIN + generation, call)
        self._bell.answer()

    def post(self, frame: bytes, call: int, send_large: Callable[[bytes], None]) -> None:
        """Hand over a reply, by `send_large` if it is too large for the mailbox."""
        if not _put(self._desk, _REPLY, frame, call):
            send_large(frame)
        self._bell.answer()


def _desk_memory(memory: memoryview, worker_index: int) -> memoryview:
    start = desks_bytes(worker_index)
    return memory[start : start + _DESK_BYTES]


def _put(desk: memoryview, start: int, frame: bytes, call: int) -> bool:
    size = len(frame)
    fits = size <= _MAX_BYTES
    if fits:
        data = start + _HEADER.size
        desk[data : data + size] = frame
    # The header last: whoever finds the call's number there finds the message, too.
    _HEADER.pack_into(desk, start, size if fits else _BY_SOCKET, call)
    return fits


def _take(desk: memoryview, start: int, size: int) -> bytes:
    if size == _BY_SOCKET:
        return b""
    if size > _MAX_BYTES:
        raise WireError(f"A mailbox cannot hold {size} bytes.")
    start += _HEADER.size
    return bytes(desk[start : start + size])
