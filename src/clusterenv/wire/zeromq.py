"""The ZeroMQ transport: one ROUTER at the head, one DEALER a worker, encrypted and authenticated with CURVE.

Every run has two key pairs of its own: the head's, which workers insist on, and the workers', which the head insists
on. A message is a header frame (`wire.messages`) followed by raw array frames. The head answers ZeroMQ's questions
about keys (ZAP) itself whenever it is in a call, so there is no extra thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85

from clusterenv.errors import ConfigError
from clusterenv.wire.address import Address
from clusterenv.wire.complaints import Complaints
from clusterenv.wire.ticket import Ticket

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 31
_HEARTBEAT_MS = 1_000
_HANDSHAKE_MS = 10_000  # Whoever connects and says nothing is sent away after this.
_WORKER_PATIENCE = 3  # A head that is silent for so many times `silence_s` is gone, or cut off.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_EVENTS_ENDPOINT = "inproc://clusterenv.events"
_ENOUGH_EVENTS = 1000  # To read in one go: strangers may come faster than they can be counted.

_UNPOLLED = 16  # Messages to take, where there are many, before looking again whether somebody else wants something.
_CHUNK_BYTES = 1 << 18

Frames = list[zmq.Frame]


def cut(block: NDArray[np.uint8]) -> Frames:
    """Cut weights into frames, once for all workers that they are sent to.

    ZeroMQ encrypts a frame as a whole, for each worker anew, and keeps that until the worker's connection has taken
    it. So frames are small: a thousand workers may pull at once, and what others send comes in between.
    """
    view = block.data
    return [zmq.Frame(view[i : i + _CHUNK_BYTES], copy=False) for i in range(0, max(1, len(view)), _CHUNK_BYTES)]


class HeadSocket:
    """Listens for workers; knows them by routing ids that ZeroMQ chooses, so no worker can claim another's."""

    def __init__(self, listen: Address, advertise: Address, silence_s: float) -> None:
        """Listen.

        Args:
            listen: The interface and port to bind; port 0 takes a free one.
            advertise: What the ticket says; port 0 stands for the one that was bound.
            silence_s: A worker from which nothing came for this long, not even ZeroMQ's own heartbeat, is cut off.

        Raises:
            ConfigError: The address cannot be bound.
        """
        head_public, head_secret = zmq.curve_keypair()
        worker_public, worker_secret = zmq.curve_keypair()
        self._worker_key = bytes(z85.decode(worker_public))
        self._context = zmq.Context()
        self._keeper = self._context.socket(zmq.REP)
        self._keeper.linger = 0
        self._keeper.bind(_ZAP_ENDPOINT)  # Before any worker can knock: without it ZeroMQ lets everybody in.
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        self._socket.ipv6 = ":" in listen.host
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.heartbeat_timeout = int(silence_s * 1000)
        self._socket.sndtimeo = int(silence_s * 1000)
        self._socket.curve_server = True
        self._socket.curve_publickey = head_public
        self._socket.curve_secretkey = head_secret
        self._socket.zap_domain = b"clusterenv"
        self._hangups = 0
        self._unpolled = _UNPOLLED
        self._events = self._context.socket(zmq.PAIR)
        self._events.linger = 0
        # Without limit: when its queue is full, ZeroMQ's own thread waits for us to read, and nothing moves any more.
        self._events.rcvhwm = 0
        self._socket.monitor(_EVENTS_ENDPOINT, zmq.EVENT_DISCONNECTED)
        self._events.connect(_EVENTS_ENDPOINT)
        try:
            self._socket.bind(f"tcp://{listen}")  # ZeroMQ, too, reads port 0 as any that is free.
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"Cannot listen on {listen}: {error}. Pass ClusterEnv(listen=...): an address of this machine, and a "
                "port that is free, or none for a random one."
            ) from error
        port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._poller = zmq.Poller()
        # In this order: a worker that talks without end must not keep out others, whose keys are asked about.
        for source in (self._keeper, self._events, self._socket):
            self._poller.register(source, zmq.POLLIN)
        self._refusals = Complaints(log)
        self.ticket = Ticket(
            endpoint=f"tcp://{Address(advertise.host, advertise.port or port)}",
            head_key=head_public.decode(),
            public_key=worker_public.decode(),
            secret_key=worker_secret.decode(),
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
            self._socket.send_multipart([peer, *frames], 0 if waits else zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return not waits
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self, timeout_s: float) -> tuple[bytes, Frames] | None:
        """Return the next message and who sent it; None if nothing came in time.

        Questions of ZeroMQ about keys are answered on the way.
        """
        if self._unpolled < _UNPOLLED:
            self._unpolled += 1
            try:
                return self._take(zmq.DONTWAIT)
            except zmq.Again:
                pass
        for source, _ in self._poller.poll(int(timeout_s * 1000)):
            if source is self._keeper:
                self._answer_keeper()
            elif source is self._events:
                self._read_events()
            else:
                self._unpolled = 0
                return self._take(0)
        self._unpolled = _UNPOLLED
        return None

    def count_hangups(self) -> int:
        """Return how many connections have ended since the last time; ZeroMQ does not say whose."""
        self._read_events()
        count, self._hangups = self._hangups, 0
        return count

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving what was sent last this long to leave."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
        self._keeper.close(linger=0)
        self._context.term()

    def _take(self, flags: int) -> tuple[bytes, Frames]:
        peer = frame = self._socket.recv(flags, copy=False)
        frames = []
        while frame.more:  # As recv_multipart does, but that asks the socket, which takes three times as long.
            frame = self._socket.recv(copy=False)
            frames.append(frame)
        return peer.bytes, frames

    def _read_events(self) -> None:
        for _ in range(_ENOUGH_EVENTS):
            if not self._events.poll(0):
                return
            self._events.recv_multipart()
            self._hangups += 1

    def _answer_keeper(self) -> None:
        """Let in exactly the run's own key (RFC 27, ZAP)."""
        version, request_id, _domain, address, _identity, mechanism, *credentials = self._keeper.recv_multipart()
        is_ours = mechanism == b"CURVE" and credentials == [self._worker_key]
        if not is_ours:
            self._refusals.note("refused a connection from %s: it does not hold this run's key", address.decode())
        status, text = (b"200", b"OK") if is_ours else (b"400", b"not a worker of this run")
        self._keeper.send_multipart([version, request_id, status, text, b"", b""])


class WorkerSocket:
    """Connects to the head named in the ticket, and to nobody else.

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
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        if ticket.parent_pid is None:
            # A child watches its parent instead, which may be stopped in a debugger or by Ctrl-Z for hours.
            self._socket.heartbeat_ivl = _HEARTBEAT_MS
            self._socket.heartbeat_timeout = int(_WORKER_PATIENCE * ticket.silence_s * 1000)
        self._socket.curve_serverkey = ticket.head_key.encode()
        self._socket.curve_publickey = ticket.public_key.encode()
        self._socket.curve_secretkey = ticket.secret_key.encode()
        self.events = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_MONITOR_STOPPED
        )
        self._socket.connect(ticket.endpoint)

    def send(self, frames: Sequence[Any]) -> None:
        """Send to the head. Arrays are not copied: they must not change until the head has answered."""
        self._socket.send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Frames | None:
        """Return the head's next message; None if nothing came in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return self._socket.recv_multipart(copy=False)

    def end_events(self) -> None:
        """Tell of the last event, which is that there are no more: whoever listens is woken."""
        self._socket.disable_monitor()

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving what was sent last this long to leave."""
        # In this order: ZeroMQ tells of the last event as soon as somebody listens, and waits for ever if nobody does.
        self.end_events()
        self.events.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))
        if self._owns_context:
            self._context.term()
