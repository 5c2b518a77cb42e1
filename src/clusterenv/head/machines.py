"""Machines: which workers share one, so that one of them gets weights over the network for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from clusterenv.head.worker import Worker
from clusterenv.wire.arrays import CHUNK_BYTES
from clusterenv.wire.messages import BoardAddress, Copy

_MAX_MISSED = 3  # Weights that did not reach a worker in this way, or others by it, before it is left out.


class Shares:
    """Who gets a version's weights over the network, and who from a worker on its machine.

    Attributes:
        num_spared: How many get them without the network.
    """

    def __init__(self) -> None:
        self.num_spared = 0
        self._copies: dict[Worker, tuple[int, Copy, bool]] = {}

    def add(self, carrier: Worker, others: Sequence[Worker], copy: Copy) -> None:
        """Let a worker get weights for others."""
        self.num_spared += len(others)
        self._copies[carrier] = carrier.incarnation, copy, True
        for worker in others:
            self._copies[worker] = worker.incarnation, copy, False

    def copy_for(self, worker: Worker) -> Copy | None:
        """Return what to tell a worker; None if this concerned its predecessor, or nobody."""
        incarnation, copy, _ = self._copies.get(worker, (-1, None, True))
        return copy if incarnation == worker.incarnation else None

    def travels_to(self, worker: Worker) -> bool:
        """Whether the weights are to be sent to this worker."""
        incarnation, _, is_carrier = self._copies.get(worker, (-1, None, True))
        return is_carrier or incarnation != worker.incarnation


class Machines:
    """Knows which workers have found that they can read each other's boards (`wire.board`)."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._carriers: dict[str, Worker] = {}  # Who it was last, by machine: its memory is there already.
        self._complaints: dict[str, list[Worker]] = {}  # Who did not get the newest weights by them.

    def find_neighbour(self, worker: Worker) -> BoardAddress | None:
        """Return the board of somebody that says it is on the same machine, for a worker to try."""
        others = (other for other in self._workers if other is not worker and self._is_like(other, worker))
        return next((other.board for other in others), None)

    def note_trial(self, worker: Worker, neighbour: BoardAddress | None, *, has_succeeded: bool) -> None:
        """Note whether a worker could read a neighbour's board; then that one most likely can read its own."""
        worker.has_neighbour |= has_succeeded  # Somebody else may have found it before it answered.
        if has_succeeded:
            for other in self._workers:
                if other.board == neighbour and self._is_like(other, worker):
                    other.has_neighbour = True

    def find_mates(self, worker: Worker, among: Iterable[Worker]) -> list[Worker]:
        """Return a worker and those of the others that can share what is sent to it."""
        groups = self._group(among) if self._group([worker]) else {}
        return groups.get(worker.machine, [worker])

    def share(self, workers: Iterable[Worker], size_bytes: int, digest: Callable[[], bytes]) -> Shares:
        """Decide who gets weights for whom.

        Weights of one frame are sent to everybody: that takes no longer than to look for them.

        Args:
            workers: Who takes them.
            size_bytes: Of the weights.
            digest: Returns their SHA-256, which is computed if it is needed.
        """
        shares = Shares()
        if size_bytes <= CHUNK_BYTES:
            return shares
        found = b""
        for machine, mates in self._group(workers).items():
            if len(mates) > 1:
                found = found or digest()
                self._complaints[machine] = []
                last = self._carriers.get(machine, mates[0])
                carrier = last if last in mates else min(mates, key=lambda mate: mate.num_missed)
                assert carrier.board is not None, "it has one"
                self._carriers[machine] = carrier
                others = [mate for mate in mates if mate is not carrier]
                shares.add(carrier, others, Copy(carrier.board, size_bytes, found))
                for mate in others:
                    mate.may_miss = True
        return shares

    def count_copies(self, size_bytes: int) -> int:
        """Return how often weights of this size would be sent if everybody took them."""
        if size_bytes <= CHUNK_BYTES:
            return len(self._workers)
        groups = self._group(self._workers)
        return len(self._workers) - sum(len(mates) - 1 for mates in groups.values())

    def note_missing(self, worker: Worker) -> None:
        """Note that a worker did not find what another one was to keep for it.

        If several say so of the same weights it is the other one's fault, and not theirs.
        """
        worker.may_miss = False
        carrier = self._carriers.get(worker.machine)
        if carrier is None:  # It is lost.
            return
        worker.num_missed += 1
        complaints = self._complaints[worker.machine]
        complaints.append(worker)
        if len(complaints) == 2:
            carrier.num_missed += 1
            if carrier.num_missed == _MAX_MISSED:
                self.note_lost(carrier)

    def note_lost(self, worker: Worker) -> None:
        """Note that weights cannot be had by a worker any more: what others did not get was not their fault."""
        if self._carriers.get(worker.machine) is worker:
            del self._carriers[worker.machine]
            for other in self._workers:
                if other.machine == worker.machine and other is not worker:
                    other.num_missed = 0

    def _group(self, workers: Iterable[Worker]) -> dict[str, list[Worker]]:
        groups: dict[str, list[Worker]] = {}
        for worker in workers:
            can_share = worker.has_neighbour and worker.mailbox is None and worker.num_missed < _MAX_MISSED
            if can_share and worker.is_ready and worker.board is not None:
                groups.setdefault(worker.machine, []).append(worker)
        return groups

    def _is_like(self, other: Worker, worker: Worker) -> bool:
        is_here = other.board is not None and other.peer is not None
        return is_here and bool(worker.machine) and other.machine == worker.machine
