"""The ZeroMQ transport: one ROUTER at the head, one DEALER a worker, encrypted and authenticated with CURVE.

Every run has two key pairs of its own: the head's, which workers insist on, and the workers', which the head insists
on. A message is a header frame (`wire.messages`) followed by raw array frames. The head answers ZeroMQ's questions
about keys (ZAP) itself whenever it is in a call, so there is no extra thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85

from clusterenv.wire.ticket import Ticket

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 31
_HEARTBEAT_MS = 2_000
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

Frames = list[zmq.Frame]


class HeadSocket:
    """Listens for workers; knows them by routing ids that ZeroMQ chooses, so no worker can claim another's."""

    def __init__(self, address: str = "127.0.0.1") -> None:
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
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.curve_server = True
        self._socket.curve_publickey = head_public
        self._socket.curve_secretkey = head_secret
        self._socket.zap_domain = b"clusterenv"
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._keeper, zmq.POLLIN)
        self.ticket = Ticket(
            endpoint=f"tcp://{address}:{port}",
            head_key=head_public.decode(),
            public_key=worker_public.decode(),
            secret_key=worker_secret.decode(),
        )

    def send(self, peer: bytes, frames: Sequence[Any]) -> bool:
        """Send to a worker; False if it is gone.

        Arrays are not copied: they must not change until the worker has answered.
        """
        try:
            self._socket.send_multipart([peer, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self, timeout_s: float) -> tuple[bytes, Frames] | None:
        """Return the next message and who sent it; None if nothing came in time.

        Questions of ZeroMQ about keys are answered on the way.
        """
        for source, _ in self._poller.poll(int(timeout_s * 1000)):
            if source is self._keeper:
                self._answer_keeper()
            else:
                peer, *frames = self._socket.recv_multipart(copy=False)
                return peer.bytes, frames
        return None

    def close(self) -> None:
        """Close at once; nothing is waited for."""
        self._socket.close(linger=0)
        self._keeper.close(linger=0)
        self._context.term()

    def _answer_keeper(self) -> None:
        """Let in exactly the run's own key (RFC 27, ZAP)."""
        version, request_id, _domain, address, _identity, mechanism, *credentials = self._keeper.recv_multipart()
        is_ours = mechanism == b"CURVE" and credentials == [self._worker_key]
        if not is_ours:
            log.warning("refused a connection from %s: it does not hold this run's key", address.decode())
        status, text = (b"200", b"OK") if is_ours else (b"400", b"not a worker of this run")
        self._keeper.send_multipart([version, request_id, status, text, b"", b""])


class WorkerSocket:
    """Connects to the head named in the ticket, and to nobody else."""

    def __init__(self, ticket: Ticket) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.curve_serverkey = ticket.head_key.encode()
        self._socket.curve_publickey = ticket.public_key.encode()
        self._socket.curve_secretkey = ticket.secret_key.encode()
        self._socket.connect(ticket.endpoint)

    def send(self, frames: Sequence[Any]) -> None:
        """Send to the head. Arrays are not copied: they must not change until the head has answered."""
        self._socket.send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Frames | None:
        """Return the head's next message; None if nothing came in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return self._socket.recv_multipart(copy=False)

    def close(self, linger_s: float = 0.0) -> None:
        """Close, giving what was sent last this long to leave."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()
