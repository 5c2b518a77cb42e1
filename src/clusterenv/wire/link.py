"""Link: how a worker's connection to the head is, as ZeroMQ's events and a knock at the head's door tell it."""

from __future__ import annotations

import logging
import socket as sockets
import time
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from clusterenv.wire.ticket import Ticket

log = logging.getLogger(__name__)

_REFUSED_S = 3.0  # A door that nobody opens: the head's process has ended.
_PATIENCE = 6  # No door at all for so many times `silence_s`: the head's machine is off, or the network cut.
_KNOCK_S = 2.0


class Link:
    """Follows one connection. All methods are for one thread, which need not be the socket's own; attributes for all.

    Attributes:
        was_lost: Whether the connection was made, and has ended since.
        verdict: Why there is no hope of a connection any more; empty while there is.
    """

    def __init__(self, events: zmq.Socket[Any], ticket: Ticket) -> None:
        self.was_lost = False
        self.verdict = ""
        self._events = events
        self._endpoint = ticket.endpoint
        self._silent_s = _PATIENCE * ticket.silence_s
        self._is_up = False
        self._refused_since: float | None = None
        self._silent_since: float | None = None

    def watch(self, timeout_s: float) -> None:
        """Listen to events for this long; while there is no connection, knock."""
        if not self._events.poll(int(timeout_s * 1000)):
            if not self._is_up and not self.verdict:
                self._knock(time.monotonic())
            return
        event = recv_monitor_message(self._events)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_up = True
            self._refused_since = self._silent_since = None
        elif event == zmq.EVENT_DISCONNECTED:
            self.was_lost = self.was_lost or self._is_up
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.verdict = f"the head at {self._endpoint} does not know this ticket: it is another run's"

    def _knock(self, now: float) -> None:
        """See whether anybody listens at the head's address, without saying a word."""
        address = urlsplit(self._endpoint)
        try:
            sockets.create_connection((address.hostname or "", address.port or 0), _KNOCK_S).close()
        except ConnectionRefusedError:
            self._silent_since = None
            self._refused_since = self._refused_since or now
            if now - self._refused_since >= _REFUSED_S:
                self.verdict = f"nobody listens at {self._endpoint}: the head has ended"
        except OSError as error:
            self._refused_since = None
            problem = f"{self._endpoint} cannot be reached from {sockets.gethostname()} ({error})"
            if self._silent_since is None:
                self._silent_since = now
                log.warning("%s; trying for another %g s", problem, self._silent_s)
            elif now - self._silent_since >= self._silent_s:
                self.verdict = (
                    f"{problem}. If the head has another address for this network, pass it on the head: "
                    "ClusterEnv(listen=..., advertise=...)"
                )
        else:
            self._refused_since = self._silent_since = None
