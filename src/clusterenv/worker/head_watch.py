"""HeadWatch: ends a worker whose head is gone, even while an environment holds the worker's own thread."""

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
_LOOKS_PER_HANG = 20  # With a short `hang_s`, look more often: the stacks are due before it is over.
_GRACE_S = 1.5
_BETWEEN_TRIES_S = 0.5


class HeadWatch:
    """A thread that watches the connection to the head, and, through the guardian or on its own, the head's process.

    Attributes:
        head_is_gone: The loop should end in order, and has a moment for it.
    """

    def __init__(
        self, link: Link, ticket: Ticket, guardian: Guardian | None, progress: LoopProgress, wake: Callable[[], None]
    ) -> None:
        """Begin to watch.

        Args:
            link: The connection; from now on this thread's.
            ticket: Says how long to wait, and whose child this is.
            guardian: The process that guards this one, where there is one.
            progress: Of the worker's loop; while it makes none, its stacks are written to the log.
            wake: Makes something happen to the link.
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
        """Whether the head no longer knows this worker, though it may still live."""
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

    All methods are for one thread, which need not be the socket's own; attributes for all.

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
        self._probe = ReachabilityProbe(ticket.endpoint, ticket.silence_s)
        self._is_up = False
        self._was_up = False
        self._tried_at = time.monotonic()

    def watch(self, timeout_s: float) -> None:
        """Listen to events for this long; while there is no connection, try one now and then."""
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
            # It connects once more, with a key of its own; ZeroMQ does not tell that the first connection has ended.
            self._is_up = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if self._was_up:  # By then this worker was given up, and its key is not valid any more.
                self.was_lost = True
            else:
                self.verdict = f"the head at {self.endpoint} does not know this ticket: it is another run's"
