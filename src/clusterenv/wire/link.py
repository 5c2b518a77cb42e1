"""Link: how a worker's connection to the head is, as ZeroMQ's events and a knock at the head's door tell it."""

from __future__ import annotations

import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from clusterenv.wire.endpoint import Knocker
from clusterenv.wire.ticket import Ticket

_BETWEEN_KNOCKS_S = 0.5


class Link:
    """Follows one connection. All methods are for one thread, which need not be the socket's own; attributes for all.

    Attributes:
        was_lost: Whether the connection was made, and has ended since.
        verdict: Why there is no hope of a connection any more; empty while there is.
        endpoint: Where the head is.
    """

    def __init__(self, events: zmq.Socket[Any], ticket: Ticket) -> None:
        self.was_lost = False
        self.verdict = ""
        self._events = events
        self.endpoint = ticket.endpoint
        self._knocker = Knocker(ticket.endpoint, ticket.silence_s)
        self._is_up = False
        self._was_up = False
        self._knocked_at = time.monotonic()

    def watch(self, timeout_s: float) -> None:
        """Listen to events for this long; while there is no connection, knock now and then."""
        if self._events.poll(int(timeout_s * 1000)):
            self._note(recv_monitor_message(self._events)["event"])
        now = time.monotonic()
        if not self._is_up and not self.verdict and now - self._knocked_at >= _BETWEEN_KNOCKS_S:
            self._knocked_at = now
            self.verdict = self._knocker.knock(now)

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_up = self._was_up = True
            self._knocker.forget()
        elif event == zmq.EVENT_DISCONNECTED:
            self.was_lost = self.was_lost or self._is_up
            self._is_up = False
        elif event in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_RETRIED):
            # It connects once more, with a key of its own; ZeroMQ does not tell that the first connection has ended.
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if self._was_up:  # By then this worker was given up, and its key is not valid any more.
                self.was_lost = True
            else:
                self.verdict = f"the head at {self.endpoint} does not know this ticket: it is another run's"
