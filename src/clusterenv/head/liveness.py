"""Liveness: finds lost workers: their launcher says so, nothing can be sent to them, or they hang."""

from __future__ import annotations

from collections.abc import Sequence

from clusterenv.config import Timeouts
from clusterenv.head.worker import Worker, WorkerState
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.messages import Ping
from clusterenv.wire.zeromq import HeadSocket

_SUSPICION_S = 3.0  # How long to ping the workers whose connection may have ended.
_ASK_EVERY_S = 0.1
_LAST_WORDS_S = 1.0  # How long the launcher has to report how a worker ended after its connection did.


class Liveness:
    """Watches over the workers of one run."""

    def __init__(self, socket: HeadSocket, fleet: Fleet, workers: Sequence[Worker], timeouts: Timeouts) -> None:
        self._socket = socket
        self._workers = workers
        self._fleet = fleet
        self._timeouts = timeouts
        self._suspects: dict[Worker, float] = {}  # Until when to keep pinging each.
        self._asked_at = 0.0

    def suspect(self, worker: Worker, now: float) -> None:
        """Note that a worker's connection may have ended."""
        self._suspects[worker] = now + _SUSPICION_S

    def look(self, now: float) -> list[tuple[Worker, str]]:
        """Return the workers that are lost, and why."""
        exits = self._fleet.exits()
        self._find_cut_off(now)
        lost = []
        for worker in self._workers:
            if worker.state is not WorkerState.LOST and (reason := self._find_loss(worker, exits, now)):
                lost.append((worker, reason))
        return lost

    def _find_loss(self, worker: Worker, exits: dict[int, str], now: float) -> str:
        if worker.index in exits and (worker.cut_at is not None or not worker.has_rival):
            return f"it ended ({exits[worker.index]}){'' if worker.peer else ' before it joined'}"
        if worker.cut_at is not None and now - worker.cut_at > _LAST_WORDS_S:
            return f"its connection was lost (silent for {self._timeouts.silence_s:g} s, or closed)"
        if worker.mailbox is not None and worker.mailbox.progress != worker.progress:
            worker.progress, worker.progress_at = worker.mailbox.progress, now
        if not worker.is_ready or not worker.owed:
            return ""
        if now - max(worker.progress_at, worker.owed[0].since) > self._timeouts.call_s:
            return (
                f"it hangs: it has finished no step or reset for {self._timeouts.call_s:g} s. "
                "Timeouts(call_s=...) gives it longer"
            )
        return ""

    def _find_cut_off(self, now: float) -> None:
        """Find out whose connection has ended: ZeroMQ reports that one has, and then refuses to send to it.

        Its descriptor may have been reused by another connection, so the worker is pinged to make sure. Only suspects
        are pinged, and not too often: unread messages pile up until ZeroMQ stops reading from that worker at all,
        heartbeats included.
        """
        if hangups := self._socket.take_hangups():
            for worker in self._workers:
                if worker.peer is not None and worker.descriptor in hangups:
                    self.suspect(worker, now)
        if not self._suspects or now - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = now
        for worker, until in list(self._suspects.items()):
            if now > until or worker.peer is None or worker.cut_at is not None:
                del self._suspects[worker]
            # A worker that shares memory may not read its socket for hours: the ping must not block until it does.
            elif not self._socket.send(worker.peer, [messages.encode(Ping())], waits=False):
                worker.cut_at = now
                del self._suspects[worker]
