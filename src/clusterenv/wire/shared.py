"""The shared-memory transport: anonymous memory that holds mailboxes, semaphores and arrays.

The memory is a memfd: it has no name, so a killed process cannot leave it behind, and it is not limited by the size of
/dev/shm (64 MB in many containers). A worker on the same machine opens it through the head's /proc entry. Untouched
pages take no memory, so mailboxes can be generous.

    a run's memory:  [ bell | step buffers ]
    the bell:        two semaphores (tokens, ring)
    a mailbox:       memory of its own, for one incarnation of one worker:
                     [ a semaphore (go) | words | the request | the reply | the names of infos ]

The words of a mailbox are 64-bit numbers, each written atomically, and by one side only:

    0, 1  the call and size of the request          4  how many messages the head has sent over the socket
    2, 3  the call and size of the reply            5  how many steps and resets the worker has finished
                                                    6  whether the worker should end

A call number is written after everything that belongs to the call, and read before it. A message too large for its
mailbox goes over the worker's ZeroMQ socket, and a special size says so. The most common messages need no bytes at all:
a step whose actions are in the step buffers, and its answer if nothing but buffers was filled. Such messages are called
plain. The size of a plain request also encodes which of the two step buffers to fill, and that of a plain reply the
generation of the names of its infos.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import select
import signal
import weakref
from typing import TYPE_CHECKING

from clusterenv.errors import WireError
from clusterenv.wire import semaphore
from clusterenv.wire.info_planes import BOX_BYTES, MAX_GENERATION
from clusterenv.wire.messages import Offer, Step
from clusterenv.wire.semaphore import Chain, Semaphore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
if semaphore.IS_SUPPORTED:
    import fcntl  # Windows has none, and no use for it: there are memfds on Linux only.

_LINE_BYTES = semaphore.SIZE_BYTES
_NONCE_BYTES = 64
_MESSAGE_BYTES = 1 << 20  # The largest request or reply that fits a mailbox.
# Sizes that no message has:
_BY_SOCKET = 2**64 - 1  # The message comes over the socket.
_PLAIN = 1 << 29  # The message is plain.

_WORDS = _LINE_BYTES
_REQUEST = 2 * _LINE_BYTES
_REPLY = _REQUEST + _MESSAGE_BYTES
_NAMES = _REPLY + _MESSAGE_BYTES
MAILBOX_BYTES = _NAMES + BOX_BYTES
BELL_BYTES = 2 * _LINE_BYTES

_REQUEST_CALL, _REQUEST_SIZE, _REPLY_CALL, _REPLY_SIZE, _SENT, _PROGRESS, _STOP = range(7)

_MOMENT_S = 0.1
EAGER_S = 1e-3  # How long a worker polls for its next request before it sleeps; see docs/explanation/performance.md.


class SharedMemory:
    """Memory that this process made and others on the machine may open."""

    def __init__(self, size_bytes: int) -> None:
        """Make `size_bytes` of memory; its pages are zero.

        Raises:
            OSError: There is not enough memory.
        """
        self._descriptor: int | None = os.memfd_create("clusterenv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # The spare line lets an empty array start at the very end.
            os.ftruncate(self._descriptor, _NONCE_BYTES + size_bytes + semaphore.SIZE_BYTES)
            # If a process could shrink the memory, the head's next access would crash it.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            whole = _map_file(self._descriptor)
        except BaseException:
            self.close()
            raise
        nonce = secrets.token_bytes(16)
        whole[: len(nonce)] = nonce
        self.memory = whole[_NONCE_BYTES:]
        self.inode = os.fstat(self._descriptor).st_ino
        self.offer = Offer(f"/proc/{os.getpid()}/fd/{self._descriptor}", nonce)

    def close(self) -> None:
        """Keep other processes from opening it; arrays that point into the memory keep its pages alive."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SharedMemories:
    """All the memory that a run shares."""

    def __init__(self, deferred: contextlib.AbstractContextManager[None]) -> None:
        """Begin without any.

        Args:
            deferred: Defers Ctrl-C, which could otherwise leave unrecorded memory open.
        """
        self._memories: list[SharedMemory] = []
        self._deferred = deferred

    def share(self, size_bytes: int) -> SharedMemory:
        """Make memory that workers on this machine can open, until `unshare` or `close`."""
        with self._deferred:
            memory = SharedMemory(size_bytes)
            self._memories.append(memory)
        return memory

    def unshare(self, memory: SharedMemory | None) -> None:
        """Release memory early."""
        if memory is not None and memory in self._memories:
            with self._deferred:
                self._memories.remove(memory)
                memory.close()

    def close(self) -> None:
        """Release all memory."""
        with self._deferred:
            for memory in self._memories:
                memory.close()
            self._memories.clear()


class WorkerProcess:
    """A process on this machine that maps a worker's mailbox, and so must be that worker."""

    def __init__(self, pid: int, memory: SharedMemory) -> None:
        """Open a handle on the process.

        Raises:
            OSError: There is no such process, or it does not map the memory.
        """
        if pid == os.getpid():  # It maps the memory, too.
            raise OSError("this is the head itself")
        self._handle: int | None = os.pidfd_open(pid)
        try:
            with open(f"/proc/{pid}/maps") as maps:
                if not any(f" {memory.inode} " in line and "/memfd:" in line for line in maps):
                    raise OSError(f"process {pid} does not map that memory")
        except OSError:
            self.forget()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, and can no longer write to the memory."""
        if self._handle is None:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """Kill the process, which may be suspended and would otherwise resume later."""
        if self._handle is not None and not self.has_ended:
            with contextlib.suppress(ProcessLookupError):  # It has ended since.
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def forget(self) -> None:
        """Close the handle."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def open_offer(offer: Offer) -> memoryview | None:
    """Open the head's memory; None if this process cannot reach it."""
    try:
        return open_memory(offer)
    except OSError:
        return None


def open_memory(offer: Offer) -> memoryview:
    """Open the head's memory.

    Raises:
        OSError: This process cannot open it.
    """
    descriptor = os.open(offer.address, os.O_RDWR | os.O_CLOEXEC)
    try:
        whole = _map_file(descriptor)
    finally:
        os.close(descriptor)
    if bytes(whole[: len(offer.nonce)]) != offer.nonce:
        raise OSError(f"{offer.address} is not the head's memory here")
    return whole[_NONCE_BYTES:]


def _map_file(descriptor: int) -> memoryview:
    """Map a whole file, shared and writable; it is unmapped once nothing refers to the memory.

    Python's own `mmap` keeps a duplicate of the descriptor until it is closed, and it cannot be closed while an array
    points into it. A learner that keeps an observation after `close()` would thus leak a descriptor; here it keeps only
    the pages.
    """
    size = os.fstat(descriptor).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"Cannot map {size} bytes of shared memory: {os.strerror(code)}")
    array = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


class Bell:
    """Wakes the head once, when the last of several workers has answered.

    Being woken by every worker would cost the head a context switch each, on a core that another worker may need. The
    first semaphore holds one token fewer than the number of awaited answers. Each worker that answers takes a token;
    the one that finds none left is the last, and rings.

    Attributes:
        tokens: The first semaphore.
        ring: The second.
    """

    def __init__(self, memory: memoryview, *, initialise: bool) -> None:
        self.tokens = Semaphore(memory, initialise=initialise)
        self.ring = Semaphore(memory[semaphore.SIZE_BYTES :], initialise=initialise)
        self._take_token = self.tokens.acquire

    def expect(self, num_answers: int) -> None:
        """Await this many answers."""
        for _ in range(num_answers - 1):
            self.tokens.post()

    def answer(self) -> None:
        """Note one answer."""
        if not self._take_token(False):
            self.ring.post()

    def silence(self) -> None:
        """Take back all tokens, because a worker will never give its answer.

        The next answer then rings at once. That may be too early, but the head checks the mailboxes, and goes on
        waiting.
        """
        while self.tokens.try_wait():
            pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until all have answered; returns False on timeout."""
        return self.ring.wait(timeout_s)


class HeadMailbox:
    """The head's side of one worker's mailbox.

    Attributes:
        go: Wakes the worker.
        words: See the top of this file.
        names: Where the worker writes the names of its infos.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.go = Semaphore(memory, initialise=True)
        self.words = memory[_WORDS : _WORDS + _LINE_BYTES].cast("Q")
        self.names = memory[_NAMES:]

    @property
    def progress(self) -> int:
        """How many steps and resets the worker has finished."""
        return self.words[_PROGRESS]

    def post(self, frame: bytes, call: int) -> bool:
        """Post a request; returns False if it is too large and must be sent over the socket and `announce`d."""
        if len(frame) > _MESSAGE_BYTES:
            return False
        _write(self._memory, _REQUEST, frame)
        self._start(len(frame), call)
        return True

    def announce(self, call: int | None) -> None:
        """Announce a message sent over the socket: a call's request or, with None, a message for this worker alone."""
        self.words[_SENT] += 1
        if call is None:
            self.go.post()
        else:
            self._start(_BY_SOCKET, call)

    def take(self, call: int) -> int | bytes | None:
        """Return the reply to a call: the generation of the infos if it is plain, b"" if it comes over the socket.

        Returns None if there is no reply yet.

        Raises:
            WireError: The mailbox holds a size that no reply has.
        """
        if self.words[_REPLY_CALL] != call:
            return None
        _fence()
        size = self.words[_REPLY_SIZE]
        generation = size - _PLAIN
        return generation if 0 <= generation < MAX_GENERATION else _read(self._memory, _REPLY, size)

    def stop(self) -> None:
        """Tell the worker to end as soon as it checks its mailbox."""
        self.words[_STOP] = 1
        self.go.post()

    def _start(self, size: int, call: int) -> None:
        self.words[_REQUEST_SIZE] = size
        _fence()
        self.words[_REQUEST_CALL] = call
        self.go.post()


class AllMailboxes:
    """The mailboxes of all workers together: starts a plain step and checks its answers. This is the hot path.

    Attributes:
        woken: Not empty from the moment the workers are woken until it is cleared.
        wait: Waits for the bell.
    """

    def __init__(self, bell: Bell, mailboxes: Sequence[HeadMailbox]) -> None:
        self._words = [mailbox.words for mailbox in mailboxes]
        # Posts the tokens as `Bell.expect` does, and then wakes the workers.
        chain = Chain([bell.tokens] * (len(mailboxes) - 1) + [mailbox.go for mailbox in mailboxes])
        self.woken = chain.posted
        self.wait = bell.ring.wait
        self._wake = chain.post

    def start_plain(self, call: int, buffer: int) -> None:
        """Start a plain step on all workers, into this one of the two step buffers."""
        size = _PLAIN + buffer
        try:
            for words in self._words:
                words[_REQUEST_SIZE] = size
            _fence()
            for words in self._words:
                words[_REQUEST_CALL] = call
            self._wake()
        except BaseException:
            if not self.woken:  # Interrupted before any worker was woken: none may find the request later.
                for words in self._words:
                    words[_REQUEST_CALL] = words[_REPLY_CALL]
            raise

    def find_plain(self, call: int) -> list[int] | None:
        """Return the generations of the infos, if all replies are plain."""
        generations = []
        for words in self._words:
            if words[_REPLY_CALL] != call:
                return None
            _fence()
            generation = words[_REPLY_SIZE] - _PLAIN
            if not 0 <= generation < MAX_GENERATION:
                return None
            generations.append(generation)
        return generations


class WorkerMailbox:
    """The worker's side of its mailbox.

    Attributes:
        names: Where the worker writes the names of its infos.
    """

    def __init__(self, mailbox: memoryview, bell: memoryview) -> None:
        self._memory = mailbox
        self._words = mailbox[_WORDS : _WORDS + _LINE_BYTES].cast("Q")
        self.names = mailbox[_NAMES:]
        self._go = Semaphore(mailbox, initialise=False)
        self._bell = Bell(bell, initialise=False)
        self._is_busy = False
        self._last_call = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the head wants this worker to end."""
        return self._words[_STOP] != 0

    @property
    def num_sent(self) -> int:
        """How many messages the head has sent over the socket."""
        return self._words[_SENT]

    def wait(self, timeout_s: float) -> bool:
        """Wait for a request, for a moment at most; polls at first if the last wait was successful.

        The wait is short because a signal does not end it, but may ask the worker to leave.
        """
        self._is_busy = self._go.wait_eagerly(min(timeout_s, _MOMENT_S), EAGER_S if self._is_busy else 0.0)
        return self._is_busy

    def take(self) -> Step | bytes | int | None:
        """Return the request that was not taken yet, or only its call number if it comes over the socket."""
        words = self._words
        call = words[_REQUEST_CALL]
        if call == self._last_call:
            return None
        _fence()
        self._last_call = call
        size = words[_REQUEST_SIZE]
        if _PLAIN <= size < _PLAIN + 2:
            return Step(call, size - _PLAIN, None)
        return _read(self._memory, _REQUEST, size) or call

    def tick(self) -> None:
        """Note that a step or a reset is finished."""
        self._words[_PROGRESS] += 1

    def post_plain(self, call: int, generation: int) -> None:
        """Post a plain reply, with the generation of the names of its infos, or 0 without infos."""
        words = self._words
        words[_REPLY_SIZE] = _PLAIN + generation
        _fence()
        words[_REPLY_CALL] = call
        self._bell.answer()

    def post(self, frame: bytes, call: int, send_large: Callable[[bytes], None]) -> None:
        """Post a reply, using `send_large` if it is too large for the mailbox."""
        fits = len(frame) <= _MESSAGE_BYTES
        if fits:
            _write(self._memory, _REPLY, frame)
        self._words[_REPLY_SIZE] = len(frame) if fits else _BY_SOCKET
        _fence()
        self._words[_REPLY_CALL] = call
        if not fits:
            send_large(frame)
        self._bell.answer()


def _write(memory: memoryview, start: int, frame: bytes) -> None:
    memory[start : start + len(frame)] = frame


def _read(memory: memoryview, start: int, size: int) -> bytes:
    if size == _BY_SOCKET:
        return b""
    if size > _MESSAGE_BYTES:
        raise WireError(f"A mailbox cannot hold {size} bytes.")
    return bytes(memory[start : start + size])


def _make_fence() -> Callable[[], object]:
    """Return a memory fence, which keeps writes in order on processors that do not, such as ARM."""
    if not semaphore.IS_SUPPORTED or platform.machine() in ("x86_64", "i686"):
        return lambda: None
    own = Semaphore(memoryview(bytearray(_LINE_BYTES)), initialise=True)

    def fence() -> None:
        own.post()  # Earlier writes become visible before this,
        own.try_wait()  # and later writes after this.

    return fence


_fence = _make_fence()
