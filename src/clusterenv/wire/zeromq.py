"""The ZeroMQ transport: one ROUTER at the head, one DEALER a worker, encrypted and authenticated with CURVE.

The head has a key pair, which workers insist on, and makes another for the run's ticket, which opens the way to
register and no more. Each worker makes its own, registers it, and is known by it from then on. The head answers
ZeroMQ's questions about keys (ZAP) itself whenever it is in a call, so there is no extra thread.

A message is a header (`wire.messages`) followed by raw arrays, both cut into frames of at most `CHUNK_BYTES`: ZeroMQ
takes a whole frame from a stranger before it asks who that is, and encrypts and keeps a whole one for each worker. The
header ends with the first frame that is shorter than that; how many frames an array has follows from its size.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import struct
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85

from clusterenv.errors import ConfigError
from clusterenv.wire.address import LOOPBACK, Address, make_local_endpoint
from clusterenv.wire.arrays import CHUNK_BYTES
from clusterenv.wire.endpoint import remove_endpoint
from clusterenv.wire.rate_limited_log import RateLimitedLog
from clusterenv.wire.ticket import Ticket

log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = CHUNK_BYTES + 64  # Encryption adds 33 to a frame.
_MAX_FRAMES = 1 << 16  # In a message from a worker: 16 GiB of arrays.
_FRAMES_AT_ONCE = 4096  # To read before the caller may look at its deadline: a message may have a million empty ones.
_HEARTBEAT_MS = 1_000
_HANDSHAKE_MS = 3_000  # Whoever connects and says nothing is sent away after this.
_WORKER_PATIENCE = 3  # A head that is silent for this many times `silence_s` is gone, or cut off.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_EVENTS_ENDPOINT = "inproc://clusterenv.events"
_ENOUGH_EVENTS = 1000  # To read in one go: strangers may come faster than they can be counted.
_ENOUGH_QUESTIONS = 100  # About keys, likewise: whoever waits while the learner learns tries again and again.
_MANY_PEERS = 10_000
_UNPOLLED = 16  # Messages to take, where there are many, before looking again whether somebody else wants something.

# Plain numbers: to combine members of an enum takes longer than to send.
_SNDMORE, _DONTWAIT, _EVENTS, _POLLIN = int(zmq.SNDMORE), int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN)
_SRCFD = int(zmq.SRCFD)
_EVENT = struct.Struct("=Hi")  # What a monitor's message begins with: the event and its value, mostly a descriptor.

Frames = list[zmq.Frame]


def receive_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Receive an event of a socket: which one, and its value. pyzmq's own way would import asyncio into each worker."""
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value


class Keys(NamedTuple):
    """A CURVE key pair, in Z85."""

    public: str
    secret: str

    @staticmethod
    def make() -> Keys:
        """Make a new pair."""
        public, secret = zmq.curve_keypair()
        return Keys(public.decode(), secret.decode())


def cut(block: NDArray[np.uint8]) -> Frames:
    """Cut weights into frames, once for all workers that they are sent to.

    ZeroMQ encrypts a frame as a whole, for each worker anew, and keeps that until the worker's connection has taken
    it. So frames are small: a thousand workers may pull at once, and what others send comes in between.
    """
    return [zmq.Frame(piece, copy=False) for piece in _pieces(block)]


def _cut_message(frames: Sequence[Any]) -> Sequence[Any]:
    """Cut a header and arrays (numpy's, or bytes) into frames. Nearly always nothing needs to be cut."""
    header, arrays = frames[0], frames[1:]
    if len(header) < CHUNK_BYTES and not any(_is_large(array) for array in arrays):
        return frames
    pieces: list[Any] = list(_pieces(header))
    if not len(header) % CHUNK_BYTES and len(header):
        pieces.append(b"")
    for array in arrays:
        pieces += _pieces(array) if _is_large(array) else (array,)
    return pieces


def _send_frames(socket: zmq.Socket[Any], frames: Sequence[Any], flags: int) -> None:
    """Send a message. What `send_multipart` checks takes three times as long."""
    for frame in frames[:-1]:
        socket.send(frame, flags | _SNDMORE, copy=False)
    socket.send(frames[-1], flags, copy=False)


def _is_large(array: Any) -> bool:
    return (array.nbytes if isinstance(array, np.ndarray) else len(array)) > CHUNK_BYTES


def _pieces(block: Any) -> list[Any]:
    view = block.reshape(-1).view(np.uint8) if isinstance(block, np.ndarray) else memoryview(block)
    return [view[start : start + CHUNK_BYTES] for start in range(0, max(1, len(view)), CHUNK_BYTES)]


def _join_header(frames: Frames) -> Frames:
    """Put the frames of the header together, if there are several."""
    if not frames or len(frames[0]) < CHUNK_BYTES:
        return frames
    count = next((i for i, frame in enumerate(frames, 1) if len(frame) < CHUNK_BYTES), len(frames))
    return [zmq.Frame(b"".join([frame.buffer for frame in frames[:count]]), copy=False), *frames[count:]]


class Peer(NamedTuple):
    """Somebody who is connected.

    Attributes:
        key: The public key by which it was let in.
        descriptor: Of its connection, in this process.
    """

    key: str
    descriptor: int


class HeadSocket:
    """Listens for workers; knows them by routing ids that ZeroMQ chooses, so no worker can claim another's.

    Attributes:
        ticket: What workers need to find it.
        authorised: The public keys that are let in besides the ticket's. Their owner changes them at will; connections
            that are there already stay.
    """

    def __init__(self, addresses: tuple[Address, Address] | None, silence_s: float) -> None:
        """Listen.

        Args:
            addresses: The interface and port to bind, port 0 being any that is free; and what the ticket says, port 0
                standing for the one that was bound. None: workers are on this machine and come in by a socket file, or
                by the loopback interface where there are no such files.
            silence_s: A worker from which nothing came for this long, not even ZeroMQ's own heartbeat, is cut off.

        Raises:
            ConfigError: The address cannot be bound.
        """
        head, opening = Keys.make(), Keys.make()
        self.authorised: Container[str] = frozenset()
        self._peers: dict[bytes, Peer] = {}
        self._begun: tuple[bytes, Frames] | None = None  # A message of which more frames are to be read.
        self._is_excessive = False
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)  # Before any worker can connect: without it ZeroMQ lets everybody in.
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = _MAX_FRAME_BYTES
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.heartbeat_timeout = int(silence_s * 1000)
        self._socket.sndtimeo = int(silence_s * 1000)
        self._socket.curve_server = True
        self._socket.curve_publickey = head.public.encode()
        self._socket.curve_secretkey = head.secret.encode()
        self._socket.zap_domain = b"clusterenv"
        self._hangups: set[int] = set()
        self._unpolled = _UNPOLLED
        self._events = self._context.socket(zmq.PAIR)
        self._events.linger = 0
        # Without limit: when its queue is full, ZeroMQ's own thread waits for us to read, and nothing moves any more.
        self._events.rcvhwm = 0
        self._socket.monitor(_EVENTS_ENDPOINT, zmq.EVENT_DISCONNECTED)
        self._events.connect(_EVENTS_ENDPOINT)
        self._local_endpoint: str | None = None
        try:
            endpoint = self._bind_local() if addresses is None else self._bind(*addresses)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        # In this order: a worker that talks without end must not keep out others, whose keys are asked about.
        for source in (self._zap, self._events, self._socket):
            self._poller.register(source, zmq.POLLIN)
        self._refusals = RateLimitedLog(log)
        self.ticket = Ticket(
            endpoint=endpoint,
            head_key=head.public,
            public_key=opening.public,
            secret_key=opening.secret,
            silence_s=silence_s,
        )

    def send(self, peer: bytes, frames: Sequence[Any], *, waits: bool = True) -> bool:
        """Send to a worker; False if it is gone, or takes nothing.

        Arrays are not copied: they must not change until the worker has answered.

        Args:
            peer: The worker.
            frames: The message.
            waits: Whether to wait if the worker has not read the last thousand messages, at most until it counts as
                silent, rather than drop this one.
        """
        try:
            _send_frames(self._socket, [peer, *_cut_message(frames)], 0 if waits else _DONTWAIT)
        except zmq.Again:
            return not waits
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self, timeout_s: float | None) -> tuple[bytes, Frames] | None:
        """Return the next message and who sent it; None if nothing came in time, or too much to read in one go.

        The first frame is the whole header. A message of more frames than any worker needs has none.
        Questions of ZeroMQ about keys are answered on the way.

        Args:
            timeout_s: How long to wait; None takes what lies there after another message, if anything does.
        """
        if self._unpolled < _UNPOLLED:
            self._unpolled += 1
            if self._begun is not None or int(self._socket.get(_EVENTS)) & _POLLIN:
                return self._take()
            self._unpolled = _UNPOLLED
        if timeout_s is None:
            return None
        for source, _ in self._poller.poll(int(timeout_s * 1000)):
            if source is self._zap:
                self._answer_zap()
            elif source is self._events:
                self._read_events()
            else:
                self._unpolled = 0
                return self._take()
        self._unpolled = _UNPOLLED
        return None

    def take_hangups(self) -> set[int]:
        """Return the descriptors of connections that have ended since the last time; others may have them by now."""
        self._read_events()
        hangups, self._hangups = self._hangups, set()
        return hangups

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving what was sent last this long to leave. May be called again, even if it was interrupted."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close(linger=int(linger_s * 1000))
        self._zap.close(linger=0)
        if self._local_endpoint is not None:
            remove_endpoint(self._local_endpoint)
        # Without signals: pyzmq forgets a context whose end was interrupted, with its threads and descriptors.
        with _no_signals():
            self._context.term()

    def find_peer(self, peer: bytes) -> Peer:
        """Return what is known of the sender of the last message."""
        return self._peers.get(peer, Peer("", -1))

    def _bind(self, listen: Address, advertise: Address) -> str:
        self._socket.ipv6 = ":" in listen.host
        try:
            self._socket.bind(f"tcp://{listen}")  # ZeroMQ, too, reads port 0 as any that is free.
        except zmq.ZMQError as error:
            raise ConfigError(
                f"Cannot listen on {listen}: {error}. Pass ClusterEnv(network=Network(listen=...)): an address of this "
                "machine, and a port that is free, or none for a random one."
            ) from error
        port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return f"tcp://{Address(advertise.host, advertise.port or port)}"

    def _bind_local(self) -> str:
        self._local_endpoint = make_local_endpoint()
        if self._local_endpoint is not None:
            try:
                self._socket.bind(self._local_endpoint)
            except zmq.ZMQError:  # The directory's file system has no sockets.
                remove_endpoint(self._local_endpoint)
                self._local_endpoint = None
            else:
                return self._local_endpoint
        return self._bind(Address(LOOPBACK), Address(LOOPBACK))

    def _take(self) -> tuple[bytes, Frames] | None:
        """Read a message, or go on with one; None if even then there is more of it."""
        if self._begun is None:
            self._begun = self._socket.recv(copy=False).bytes, []
        peer, frames = self._begun
        for _ in range(_FRAMES_AT_ONCE):  # Not recv_multipart: it asks the socket for more, which takes thrice as long.
            frame = self._socket.recv(copy=False)
            frames.append(frame)
            if not frame.more:
                self._note_peer(peer, frame)
                is_excessive = self._is_excessive or len(frames) > _MAX_FRAMES
                self._begun, self._is_excessive = None, False
                return peer, [] if is_excessive else _join_header(frames)
        if len(frames) > _MAX_FRAMES:
            self._is_excessive = True
            frames.clear()
        self._unpolled = _UNPOLLED  # The next look is at others.
        return None

    def _note_peer(self, peer: bytes, frame: zmq.Frame) -> None:
        if peer not in self._peers:
            if len(self._peers) >= _MANY_PEERS:
                self._peers.clear()  # Nothing is lost: with the next message of a peer it comes again.
            self._peers[peer] = Peer(str(frame.get("User-Id")), int(frame.get(_SRCFD)))

    def _read_events(self) -> None:
        for _ in range(_ENOUGH_EVENTS):
            if not self._events.poll(0):
                return
            self._hangups.add(receive_event(self._events)[1])

    def _answer_zap(self) -> None:
        """Let in the ticket's key and those that were registered, and note whose a connection is (RFC 27, ZAP)."""
        for _ in range(_ENOUGH_QUESTIONS):
            if not self._zap.poll(0):
                return
            version, request_id, _domain, address, _identity, mechanism, *credentials = self._zap.recv_multipart()
            key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
            is_known = key == self.ticket.public_key or key in self.authorised
            if not is_known:
                self._refusals.warn("refused a connection from %s: it does not hold this run's key", address.decode())
            status, text = (b"200", b"OK") if is_known else (b"400", b"not a worker of this run")
            self._zap.send_multipart([version, request_id, status, text, key.encode(), b""])


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """Hold signals back, where there is a way to; Windows has none, and nothing of its own that would interrupt."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class WorkerSocket:
    """Connects to the head named in the ticket, and to nobody else; with the ticket's key until it uses another.

    Attributes:
        events: Tells of connections made, refused and ended; for one other thread to listen to, until `end_events`.
    """

    def __init__(self, ticket: Ticket, context: zmq.Context[Any] | None = None) -> None:
        """Connect.

        Args:
            ticket: Says where to, and with which keys.
            context: ZeroMQ's threads, if several sockets share them: then it is the caller's to end.
        """
        self._owns_context = context is None
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in ticket.endpoint
        self._socket.maxmsgsize = _MAX_FRAME_BYTES
        if ticket.parent_pid is None:
            # A child watches its parent instead, which may be stopped in a debugger or by Ctrl-Z for hours.
            self._socket.heartbeat_ivl = _HEARTBEAT_MS
            self._socket.heartbeat_timeout = int(_WORKER_PATIENCE * ticket.silence_s * 1000)
        self._socket.curve_serverkey = ticket.head_key.encode()
        self._socket.curve_publickey = ticket.public_key.encode()
        self._socket.curve_secretkey = ticket.secret_key.encode()
        self.events = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_MONITOR_STOPPED
        )
        self._endpoint = ticket.endpoint
        self._socket.connect(ticket.endpoint)

    def use(self, keys: Keys) -> None:
        """Connect once more, with this key pair. Nothing may be on its way."""
        self._socket.disconnect(self._endpoint)
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.connect(self._endpoint)

    def send(self, frames: Sequence[Any]) -> None:
        """Send to the head. Arrays are not copied: they must not change until the head has answered."""
        _send_frames(self._socket, _cut_message(frames), 0)

    def receive(self, timeout_s: float) -> Frames | None:
        """Return the head's next message; None if nothing came in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return _join_header(self._socket.recv_multipart(copy=False))

    def end_events(self) -> None:
        """Tell of the last event, which is that there are no more: whoever listens is woken."""
        self._socket.disable_monitor()

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving what was sent last this long to leave."""
        # In this order: ZeroMQ tells of the last event as soon as somebody listens, and waits forever if nobody does.
        self.end_events()
        self.events.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
        if self._owns_context:
            self._context.term()
