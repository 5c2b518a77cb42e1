"""The ZeroMQ transport: one ROUTER at the head, one DEALER per worker, encrypted and authenticated with CURVE.

The head has a key pair, which workers verify, and makes another for the run's ticket, which allows a worker to register
and nothing else. Each worker makes its own key pair, registers it, and is identified by it from then on. The head
answers ZeroMQ's authentication requests (ZAP) itself whenever it is in a call, so there is no extra thread.

A message is a header (`wire.messages`) followed by raw arrays, both cut into frames of at most `CHUNK_BYTES`: ZeroMQ
reads a whole frame from a stranger before authenticating it, and encrypts and keeps a whole frame for each worker. The
header ends with the first frame that is shorter than that; the number of frames of an array follows from its size.
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

_MAX_FRAME_BYTES = CHUNK_BYTES + 64  # Encryption adds 33 bytes to a frame.
_MAX_FRAMES = 1 << 16  # In a message from a worker: 16 GiB of arrays.
_FRAMES_AT_ONCE = 4096  # Read before the caller checks its deadline: a message may have a million empty frames.
_HEARTBEAT_MS = 1_000
_HANDSHAKE_MS = 3_000  # A peer that connects and stays silent is disconnected after this.
_WORKER_PATIENCE = 3  # A head that is silent for this many times `silence_s` is gone, or disconnected.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_EVENTS_ENDPOINT = "inproc://clusterenv.events"
_ENOUGH_EVENTS = 1000  # Read in one go: strangers may connect faster than their events can be read.
_ENOUGH_QUESTIONS = 100  # Authentication requests answered in one go: peers retry while the learner learns.
_MANY_PEERS = 10_000
_UNPOLLED = 16  # Messages to read in a row before polling the other sockets again.

# Plain numbers: combining enum members takes longer than sending.
_SNDMORE, _DONTWAIT, _EVENTS, _POLLIN = int(zmq.SNDMORE), int(zmq.DONTWAIT), int(zmq.EVENTS), int(zmq.POLLIN)
_SRCFD = int(zmq.SRCFD)
_EVENT = struct.Struct("=Hi")  # The beginning of a monitor's message: the event and its value, mostly a descriptor.

Frames = list[zmq.Frame]


def receive_event(monitor: zmq.Socket[Any]) -> tuple[int, int]:
    """Receive a socket's event and its value. pyzmq's own function would import asyncio into each worker."""
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

    ZeroMQ encrypts each frame as a whole, separately for each worker, and keeps the result until the worker's
    connection has accepted it. So frames are small: a thousand workers may pull at once, while other messages get
    through in between.
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
    """Send a message. With its checks, `send_multipart` takes three times as long."""
    for frame in frames[:-1]:
        socket.send(frame, flags | _SNDMORE, copy=False)
    socket.send(frames[-1], flags, copy=False)


def _is_large(array: Any) -> bool:
    return (array.nbytes if isinstance(array, np.ndarray) else len(array)) > CHUNK_BYTES


def _pieces(block: Any) -> list[Any]:
    view = block.reshape(-1).view(np.uint8) if isinstance(block, np.ndarray) else memoryview(block)
    return [view[start : start + CHUNK_BYTES] for start in range(0, max(1, len(view)), CHUNK_BYTES)]


def _join_header(frames: Frames) -> Frames:
    """Join the frames of the header, if there are several."""
    if not frames or len(frames[0]) < CHUNK_BYTES:
        return frames
    count = next((i for i, frame in enumerate(frames, 1) if len(frame) < CHUNK_BYTES), len(frames))
    return [zmq.Frame(b"".join([frame.buffer for frame in frames[:count]]), copy=False), *frames[count:]]


class Peer(NamedTuple):
    """A connected peer.

    Attributes:
        key: The public key with which it was accepted.
        descriptor: The descriptor of its connection in this process.
    """

    key: str
    descriptor: int


class HeadSocket:
    """Listens for workers; identifies them by routing ids that ZeroMQ chooses, so no worker can claim another's.

    Attributes:
        ticket: What workers need to find it.
        authorised: The public keys that are accepted besides the ticket's. The owner of the collection may change it;
            existing connections stay.
    """

    def __init__(self, addresses: tuple[Address, Address] | None, silence_s: float) -> None:
        """Start listening.

        Args:
            addresses: The address to bind, where port 0 is any free port, and the address for the ticket, where port 0
                is the port that was bound. None if workers are on this machine and connect through a socket file, or
                through the loopback interface if socket files are not supported.
            silence_s: A worker that sends nothing for this long, not even ZeroMQ's own heartbeat, is disconnected.

        Raises:
            ConfigError: The address cannot be bound.
        """
        head, opening = Keys.make(), Keys.make()
        self.authorised: Container[str] = frozenset()
        self._peers: dict[bytes, Peer] = {}
        self._begun: tuple[bytes, Frames] | None = None  # A message that is not fully read yet.
        self._is_excessive = False
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)  # Before any worker can connect: without it, ZeroMQ accepts every key.
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        # Without limit: where a peer ends whose queue is full, libzmq 4.3.5 aborts the process at its next heartbeat.
        self._socket.rcvhwm = 0
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
        # Without limit: if the queue were full, ZeroMQ's own thread would block until we read, and nothing would move.
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
        # In this order: a worker that never stops sending must not keep others from being authenticated.
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
        """Send to a worker; returns False if it is gone, or does not read.

        Arrays are not copied: they must not change until the worker has answered.

        Args:
            peer: The worker's routing id.
            frames: The message.
            waits: Whether to wait if the worker's queue is full, at most until the worker counts as silent, rather than
                drop this message.
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
        """Return the next message and its sender; None if nothing came in time, or it is too long to read in one go.

        The first frame is the whole header. A message with more frames than any worker needs is returned without
        frames. ZeroMQ's authentication requests are answered along the way.

        Args:
            timeout_s: How long to wait; None, after another message, reads one that is there already without polling.
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
        """Return the descriptors of connections that ended since the last call; they may have been reused since."""
        self._read_events()
        hangups, self._hangups = self._hangups, set()
        return hangups

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving the last messages this long to be sent. May be called again, even after an interrupt."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close(linger=int(linger_s * 1000))
        self._zap.close(linger=0)
        if self._local_endpoint is not None:
            remove_endpoint(self._local_endpoint)
        # With signals blocked: if interrupted, pyzmq would leak the context with its threads and descriptors.
        with _no_signals():
            self._context.term()

    def find_peer(self, peer: bytes) -> Peer:
        """Return what is known about a message's sender."""
        return self._peers.get(peer, Peer("", -1))

    def _bind(self, listen: Address, advertise: Address) -> str:
        self._socket.ipv6 = ":" in listen.host
        try:
            self._socket.bind(f"tcp://{listen}")  # For ZeroMQ, too, port 0 means any free port.
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
            except zmq.ZMQError:  # The directory's file system does not support sockets.
                remove_endpoint(self._local_endpoint)
                self._local_endpoint = None
            else:
                return self._local_endpoint
        return self._bind(Address(LOOPBACK), Address(LOOPBACK))

    def _take(self) -> tuple[bytes, Frames] | None:
        """Begin or continue to read a message; returns None if it is still not complete."""
        if self._begun is None:
            self._begun = self._socket.recv(copy=False).bytes, []
        peer, frames = self._begun
        for _ in range(_FRAMES_AT_ONCE):  # Not recv_multipart, which takes three times as long.
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
        self._unpolled = _UNPOLLED  # Poll the other sockets next.
        return None

    def _note_peer(self, peer: bytes, frame: zmq.Frame) -> None:
        if peer not in self._peers:
            if len(self._peers) >= _MANY_PEERS:
                self._peers.clear()  # Nothing is lost: each entry is restored by the peer's next message.
            self._peers[peer] = Peer(str(frame.get("User-Id")), int(frame.get(_SRCFD)))

    def _read_events(self) -> None:
        for _ in range(_ENOUGH_EVENTS):
            if not self._events.poll(0):
                return
            self._hangups.add(receive_event(self._events)[1])

    def _answer_zap(self) -> None:
        """Accept the ticket's key and registered ones, and label each connection with its key (RFC 27, ZAP)."""
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
    """Block signals, if the system can; Windows cannot, and needs not, as nothing would interrupt there."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class WorkerSocket:
    """Connects to the head named in the ticket, and to nobody else; with the ticket's key until `use` is called.

    Attributes:
        events: Reports connections made, refused and ended; for one other thread to read, until `end_events`.
    """

    def __init__(self, ticket: Ticket, context: zmq.Context[Any] | None = None) -> None:
        """Connect.

        Args:
            ticket: Names the head and the keys.
            context: A ZeroMQ context to share with other sockets; the caller must terminate it.
        """
        self._owns_context = context is None
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = "[" in ticket.endpoint
        self._socket.maxmsgsize = _MAX_FRAME_BYTES
        if ticket.parent_pid is None:
            # A child watches its parent process instead, which may be suspended for hours, by a debugger or Ctrl-Z.
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
        """Reconnect with this key pair. No message may be in transit."""
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
        """Stop reporting events; the final event, which says so, wakes the thread that reads them."""
        self._socket.disable_monitor()

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving the last messages this long to be sent."""
        # In this order: ZeroMQ waits forever to deliver the final event unless `events` is still open.
        self.end_events()
        self.events.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
        if self._owns_context:
            self._context.term()
