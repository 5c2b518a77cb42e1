"""Inbox: what comes from the socket, and to whom it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import zmq

from clusterenv.errors import WireError
from clusterenv.head.calm import Calm
from clusterenv.head.door import Door
from clusterenv.head.roster import Member, Roster
from clusterenv.wire import messages
from clusterenv.wire.complaints import Complaints
from clusterenv.wire.messages import Join, Reply
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

Accept = Callable[[Member, Reply, Sequence[zmq.Frame]], None]


class Inbox:
    """Reads messages: those who join go to the door, workers' replies to whoever listens, nonsense nowhere."""

    def __init__(self, socket: HeadSocket, roster: Roster, door: Door, calm: Calm) -> None:
        self._socket = socket
        self._roster = roster
        self._door = door
        self._calm = calm
        self._refusals = Complaints(log)

    def listen(self, timeout_s: float, accept: Accept) -> bool:
        """Wait for one message. Nonsense is logged and harms nobody.

        Args:
            timeout_s: How long; Ctrl-C waits for it, too.
            accept: Deals with a worker's reply and the frames that came with it; may raise WireError.

        Returns:
            Whether one came.
        """
        with self._calm:
            received = self._socket.receive(timeout_s)
            if received is None:
                return False
            peer, frames = received
            member = self._roster.find(peer)
            try:
                self._deliver(peer, member, frames, accept)
            except WireError as error:
                # As text: a log handler that keeps the error would keep the whole hub by its traceback.
                self._refusals.note("refused a message from %s: %s", "a stranger" if member is None else member, error)
            return True

    def _deliver(self, peer: bytes, member: Member | None, frames: Sequence[zmq.Frame], accept: Accept) -> None:
        if not frames:
            raise WireError("an empty message")
        reply = messages.decode_reply(frames[0].buffer)
        if isinstance(reply, Join):
            self._door.welcome(peer, reply)
        elif member is None:
            raise WireError(f"{type(reply).__name__} from somebody who has not joined")
        else:
            accept(member, reply, frames[1:])
