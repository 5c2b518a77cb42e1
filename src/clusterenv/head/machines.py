"""Machines: which workers share a machine, so that one of them receives weights over the network for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from clusterenv.head.worker import Worker
from clusterenv.wire.arrays import CHUNK_BYTES
from clusterenv.wire.messages import BoardAddress, Copy

_MAX_MISSED = 3  # After this many failed hand-overs, to a worker or from it, the worker is left out.


class Shares:
    """Which workers get a version's weights over the network, and which from a worker on their machine.

    Attributes:
        num_spared: How many workers get the weights without the network.
    """

    def __init__(self) -> None:
        self.num_spared = 0
        self._copies: dict[Worker, tuple[int, Copy, bool]] = {}

    def add(self, carrier: Worker, others: Sequence[Worker], copy: Copy) -> None:
        """Let one worker, the carrier, receive the weights for others."""
        self.num_spared += len(others)
        self._copies[carrier] = carrier.incarnation, copy, True
        for worker in others:
            self._copies[worker] = worker.incarnation, copy, False

    def copy_for(self, worker: Worker) -> Copy | None:
        """Return which copy a worker should use; None if there is none, or it was meant for its predecessor."""
        incarnation, copy, _ = self._copies.get(worker, (-1, None, True))
        return copy if incarnation == worker.incarnation else None

    def travels_to(self, worker: Worker) -> bool:
        """Whether to send the weights to this worker."""
        incarnation, _, is_carrier = self._copies.get(worker, (-1, None, True))
        return is_carrier or incarnation != worker.incarnation


class Machines:
    """Tracks which workers can read each other's boards (`wire.board`)."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._carriers: dict[str, Worker] = {}  # The last carrier of each machine: its memory is allocated already.
        self._complaints: dict[str, list[Worker]] = {}  # Who did not get the newest weights from that carrier.

    def find_neighbour(self, worker: Worker) -> BoardAddress | None:
        """Return the board of another worker that claims to be on the same machine, for a worker to try."""
        others = (other for other in self._workers if other is not worker and self._is_like(other, worker))
        return next((other.board for other in others), None)

    def note_trial(self, worker: Worker, neighbour: BoardAddress | None, *, has_succeeded: bool) -> None:
        """Note whether a worker could read a neighbour's board; if so, most likely the reverse works, too."""
        worker.has_neighbour |= has_succeeded  # Another worker may have read its board before it answered.
        if has_succeeded:
            for other in self._workers:
                if other.board == neighbour and self._is_like(other, worker):
                    other.has_neighbour = True

    def find_mates(self, worker: Worker, among: Iterable[Worker]) -> list[Worker]:
        """Return a worker together with the workers in `among` that can share what is sent to it."""
        groups = self._group(among) if self._group([worker]) else {}
        return groups.get(worker.machine, [worker])

    def share(self, workers: Iterable[Worker], size_bytes: int, digest: Callable[[], bytes]) -> Shares:
        """Decide which workers receive weights for others on their machine.

        Weights that fit one frame are sent to every worker: that takes no longer than looking for them.

        Args:
            workers: The workers that load the weights.
            size_bytes: The size of the weights.
            digest: Returns the SHA-256 of the weights; called only if needed.
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
        """Return how many copies of weights of this size would be sent if all workers pulled."""
        if size_bytes <= CHUNK_BYTES:
            return len(self._workers)
        groups = self._group(self._workers)
        return len(self._workers) - sum(len(mates) - 1 for mates in groups.values())

    def note_missing(self, worker: Worker) -> None:
        """Note that a worker did not find the weights that its machine's carrier should have kept for it.

        If several workers miss the same weights, the carrier is at fault.
        """
        worker.may_miss = False
        carrier = self._carriers.get(worker.machine)
        if carrier is None:  # The carrier is lost.
            return
        worker.num_missed += 1
        complaints = self._complaints[worker.machine]
        complaints.append(worker)
        if len(complaints) == 2:
            carrier.num_missed += 1
            if carrier.num_missed == _MAX_MISSED:
                self.note_lost(carrier)

    def note_lost(self, worker: Worker) -> None:
        """Note that a carrier is lost: the weights that others missed were not their fault."""
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
