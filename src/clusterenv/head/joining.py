"""Joining: decides which processes may join as workers, by which key, and tells the others why not."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence
from typing import TypeAlias

from clusterenv.head.worker import Place, Worker
from clusterenv.wire import messages
from clusterenv.wire.compatibility import find_conflict, installed_versions
from clusterenv.wire.messages import PROTOCOL, Join, Ping, Refused, Register, Registered
from clusterenv.wire.rate_limited_log import RateLimitedLog
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_LAPSE_S = 10.0  # A process joins right after it registers; after this long, another may register instead.


class Admission(enum.Enum):
    """The decision on a request to register or to join."""

    ACCEPTED = enum.auto()
    DEFERRED = enum.auto()  # Until the worker in the place is given up: `Places.give_up` then accepts the request.
    REFUSED = enum.auto()


# With the reason to tell the worker, if it is a refusal.
Decision: TypeAlias = tuple[Admission, str]

_ACCEPTED: Decision = (Admission.ACCEPTED, "")


class Places:
    """The places of a run's workers.

    A place is vacant until a process registers a public key for it, which takes the run's ticket. From then on the
    place belongs to that key: only the key's owner can join, and rejoin after losing its connection. Once the worker is
    given up, its key is no longer valid and the place is vacant again.

    Attributes:
        keys: The worker index for each valid key. Always current; read-only for others.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.keys: dict[str, int] = {}
        self._workers = workers

    def register(self, index: int, key: str, now: float, *, is_cut_off: bool = False) -> Decision:
        """Decide whether a key gets a place.

        Args:
            index: The worker whose place is asked for.
            key: The public key.
            now: The time in seconds, of any monotonic clock.
            is_cut_off: Whether the worker in this place has lost its connection, and so will be given up.
        """
        place = self._find(index)
        if place is None:
            return self._no_such_worker(index)
        if self.keys.get(key, index) != index:
            return _refuse(f"its key already belongs to worker {self.keys[key]}")
        if place.has_joined:
            if key != place.key and not is_cut_off:
                return _refuse(f"worker {index} has joined already")
            place.next_key = key
            return Admission.DEFERRED, ""
        if place.key not in (None, key) and now - place.registered_at < _LAPSE_S:
            return _refuse(f"another process has just registered as worker {index}")
        self._grant(index, key, now)
        return _ACCEPTED

    def join(self, index: int, key: str) -> Decision:
        """Decide whether the owner of a key may join; if so, it has the place until it is given up."""
        place = self._find(index)
        if place is None:
            return self._no_such_worker(index)
        if place.has_joined:
            return _refuse(f"worker {index} has joined already")
        if place.key != key:
            return _refuse(f"it has not registered its key as that of worker {index}")
        place.has_joined = True
        return _ACCEPTED

    def give_up(self, index: int, now: float) -> bool:
        """Vacate a place, whatever its state; returns whether this accepts a deferred registration."""
        place = self._workers[index].place
        next_key = place.next_key
        if place.key is not None:
            del self.keys[place.key]
        self._workers[index].place = Place()
        if next_key is None or next_key in self.keys:
            return False
        self._grant(index, next_key, now)
        return True

    def _find(self, index: int) -> Place | None:
        return self._workers[index].place if 0 <= index < len(self._workers) else None

    def _grant(self, index: int, key: str, now: float) -> None:
        place = self._workers[index].place
        if place.key is not None:
            del self.keys[place.key]
        place.key, place.registered_at = key, now
        self.keys[key] = index

    def _no_such_worker(self, index: int) -> Decision:
        return _refuse(f"there is no worker {index}, this run has {len(self._workers)}")


class Joining:
    """Answers requests to register and to join.

    Attributes:
        by_peer: The workers that have joined, by their transport address.
    """

    def __init__(self, socket: HeadSocket, workers: Sequence[Worker]) -> None:
        self._socket = socket
        self._workers = workers
        self._versions = installed_versions()
        self._places = Places(workers)
        self.by_peer: dict[bytes, Worker] = {}
        self._refusals = RateLimitedLog(log)
        socket.authorised = self._places.keys

    def register(self, peer: bytes, register: Register) -> None:
        """Register a worker's own key, refuse it with a reason, or defer it until its predecessor is given up."""
        index = register.worker_index
        worker = self._workers[index] if 0 <= index < len(self._workers) else None
        if register.protocol != PROTOCOL:
            reason = _other_protocol(register.protocol)
            if worker is not None:
                worker.misfit = reason
            self._refuse(peer, f"a registration as worker {index}", reason)
            return
        is_cut_off = worker is not None and self._is_cut_off(worker)
        admission, reason = self._places.register(index, register.public_key, time.monotonic(), is_cut_off=is_cut_off)
        if admission is Admission.REFUSED:
            if worker is not None:
                worker.has_rival = True
            self._refuse(peer, f"a registration as worker {index}", reason)
        elif admission is Admission.ACCEPTED:
            self._socket.send(peer, [messages.encode(Registered())], waits=False)
        elif worker is not None:
            worker.place.waiting.append(peer)

    def welcome(self, peer: bytes, join: Join) -> Worker | None:
        """Let a worker join, or tell it why not; returns the worker if it has joined."""
        found = self._socket.find_peer(peer)
        if join.protocol != PROTOCOL:
            reason = _other_protocol(join.protocol)
        else:
            reason = find_conflict(self._versions, join.versions)
        if reason:
            if 0 <= join.worker_index < len(self._workers):
                self._workers[join.worker_index].misfit = reason
        elif (known := self.by_peer.get(peer)) is not None:
            reason = f"it has joined already, as worker {known.index}"
        else:
            _, reason = self._places.join(join.worker_index, found.key)
        if reason:
            self._refuse(peer, f"a worker (pid {join.pid} on {join.hostname})", reason)
            return None
        worker = self._workers[join.worker_index]
        worker.peer, worker.pid, worker.hostname = peer, join.pid, join.hostname
        worker.descriptor = found.descriptor
        worker.machine, worker.board = join.machine, join.board
        worker.has_neighbour, worker.may_miss, worker.num_missed = False, False, 0
        worker.incarnation += 1
        self.by_peer[peer] = worker
        log.info("%s joined", worker)
        return worker

    def strike_off(self, worker: Worker) -> None:
        """Drop a worker: messages it still sends are a stranger's, and a process waiting for its place gets it."""
        if worker.peer is not None:
            del self.by_peer[worker.peer]
        worker.peer = None
        worker.has_rival = False
        *others, last = worker.place.waiting or [b""]
        is_granted = self._places.give_up(worker.index, time.monotonic())
        if is_granted and not self._socket.send(last, [messages.encode(Registered())], waits=False):
            self._places.give_up(worker.index, time.monotonic())  # That process is gone already.
        for peer in others:
            worker.has_rival = True
            self._refuse(peer, f"a registration as worker {worker.index}", "another process has since registered")

    def _refuse(self, peer: bytes, whom: str, reason: str) -> None:
        self._refusals.warn("refused %s: %s", whom, reason)
        self._socket.send(peer, [messages.encode(Refused(reason))], waits=False)

    def _is_cut_off(self, worker: Worker) -> bool:
        """Whether a worker that has joined is gone, although its loss was not noticed yet.

        Then the process that registers is its successor: a job that was requeued while the learner learned.
        """
        return worker.peer is not None and not self._socket.send(worker.peer, [messages.encode(Ping())], waits=False)


def _other_protocol(protocol: int) -> str:
    return f"it speaks protocol {protocol}, the head {PROTOCOL}: install the head's clusterenv there"


def _refuse(reason: str) -> Decision:
    return Admission.REFUSED, reason
