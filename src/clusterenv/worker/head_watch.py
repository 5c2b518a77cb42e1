"""HeadWatch: ends a worker whose head is gone, even while an environment blocks the worker's main thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from clusterenv.wire.endpoint import ReachabilityProbe, remove_endpoint
from clusterenv.wire.ticket import Ticket
from clusterenv.wire.zeromq import receive_event
from clusterenv.worker.guardian import Guardian
from clusterenv.worker.progress import LoopProgress, StackDumper

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_LOOKS_PER_HANG = 20  # Look more often if `hang_s` is short: the stacks must be written before it is over.
_GRACE_S = 1.5
_BETWEEN_TRIES_S = 0.5


class HeadWatch:
    """A thread that watches the connection to the head and, through the guardian or by itself, the head's process.

    Attributes:
        head_is_gone: Whether the loop should end in an orderly way, for which it has a moment.
    """

    def __init__(
        self, link: Link, ticket: Ticket, guardian: Guardian | None, progress: LoopProgress, wake: Callable[[], None]
    ) -> None:
        """Begin to watch.

        Args:
            link: The connection; from now on used by this thread only.
            ticket: Says how long to wait, and which process is the parent.
            guardian: The process that guards this one, if there is one.
            progress: The progress of the worker's loop; if it stalls, the stacks are written to the log.
            wake: Makes the link report an event, which wakes this thread.
        """
        self.head_is_gone = False
        self._link = link
        self._wake = wake
        self._parent_pid = ticket.parent_pid
        self._endpoint = ticket.endpoint
        self._guardian = guardian
        self._stacks = StackDumper(progress, ticket.hang_s)
        self._look_s = min(_LOOK_S, ticket.hang_s / _LOOKS_PER_HANG)
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="head watch")
        self._thread.start()

    @property
    def connection_was_lost(self) -> bool:
        """Whether the connection was lost, so that the head, if it still lives, no longer knows this worker."""
        return self._link.was_lost

    def stop(self) -> None:
        """Stop watching."""
        self._is_done.set()
        self._wake()
        self._thread.join()
        self._stacks.close()

    def _watch(self) -> None:
        while not self._is_done.is_set():
            self._link.watch(self._look_s)
            self._stacks.look(time.monotonic())
            if self._guardian is not None:
                self._guardian.beat()
            if reason := self._link.verdict or self._death_of_head():
                log.warning("this worker ends: %s", reason)
                self.head_is_gone = True
                if self._guardian is not None:
                    self._guardian.tell_head_is_gone()
                if not self._is_done.wait(_GRACE_S):
                    os._exit(1)

    def _death_of_head(self) -> str:
        if self._guardian is not None:
            return "the head's process has ended" if self._guardian.says_head_is_gone() else ""
        if self._parent_pid in (None, os.getppid()):
            return ""
        remove_endpoint(self._endpoint)
        return "its parent has ended"


class Link:
    """The state of a worker's connection, from ZeroMQ's events and test connections.

    Only one thread may call the methods, not necessarily the socket's; any thread may read the attributes.

    Attributes:
        was_lost: Whether the connection was established and has ended since.
        verdict: Why there is no longer any hope of a connection; empty while there is.
        endpoint: The head's address.
    """

    def __init__(self, events: zmq.Socket[Any], ticket: Ticket) -> None:
        self.was_lost = False
        self.verdict = ""
        self._events = events
        self.endpoint = ticket.endpoint
        self._probe = ReachabilityProbe(ticket.endpoint, ticket.silence_s)
        self._is_up = False
        self._was_up = False
        self._tried_at = time.monotonic()

    def watch(self, timeout_s: float) -> None:
        """Wait for events for this long; while there is no connection, probe the head every so often."""
        if self._events.poll(int(timeout_s * 1000)):
            self._note(receive_event(self._events)[0])
        now = time.monotonic()
        if not self._is_up and not self.verdict and now - self._tried_at >= _BETWEEN_TRIES_S:
            self._tried_at = now
            is_known = bool(self._probe.problem)
            self.verdict = self._probe.try_once(now)
            if self._probe.problem and not is_known:
                log.warning("%s; trying for another %g s", self._probe.problem, self._probe.patience_s)

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_up = self._was_up = True
            self._probe.forget()
        elif event == zmq.EVENT_DISCONNECTED:
            self.was_lost = self.was_lost or self._is_up
            self._is_up = False
        elif event in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_RETRIED):
            # The worker reconnects with its own key; ZeroMQ does not report that the first connection has ended.
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if self._was_up:  # This worker was given up, and its key is no longer valid.
                self.was_lost = True
            else:
                self.verdict = f"the head at {self.endpoint} does not know this ticket: it is another run's"
