"""Roster: who is here, what each worker hosts, and which answer it owes. Pure bookkeeping, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterenv.errors import WireError


@dataclass(eq=False, repr=False)
class Member:
    """One worker as the head knows it.

    Attributes:
        peer: The transport's address of the worker; None until it has joined, and when it is lost.
        is_ready: Whether it has made its environments.
        is_late: Whether the run began without it, and it is still to come for the first time.
        owes: The number of the call it has not answered yet.
        num_parts: How many steps of the rollout it owes have come already.
        has_rival: Whether another one came for its place and was sent away: what ends may be either of them.
    """

    index: int
    start: int
    stop: int
    peer: bytes | None = None
    pid: int | None = None
    hostname: str = ""
    is_ready: bool = False
    is_late: bool = False
    owes: int | None = None
    num_parts: int = 0
    has_rival: bool = False

    @property
    def env_indices(self) -> tuple[int, ...]:
        """The environments it hosts."""
        return tuple(range(self.start, self.stop))

    def __str__(self) -> str:
        """Name it as an error should."""
        where = "" if self.pid is None else f" (pid {self.pid} on {self.hostname})"
        envs = (
            f"environment {self.start}"
            if self.stop - self.start == 1
            else f"environments {self.start} to {self.stop - 1}"
        )
        return f"worker {self.index}{where}, {envs}"


class Roster:
    """All workers of a run, in the order of their environments."""

    def __init__(self, shards: list[tuple[int, int]]) -> None:
        self.members = [Member(index, start, stop) for index, (start, stop) in enumerate(shards)]
        self._by_peer: dict[bytes, Member] = {}

    def join(self, worker_index: int, peer: bytes, pid: int, hostname: str) -> Member:
        """Take a worker in.

        Raises:
            WireError: There is no such worker, or it is here already.
        """
        member = self.find_index(worker_index)
        if member is None:
            raise WireError(f"there is no worker {worker_index}, this run has {len(self.members)}")
        if member.peer is not None:
            member.has_rival = member.has_rival or peer != member.peer
            raise WireError(f"worker {worker_index} has joined already")
        if peer in self._by_peer:
            raise WireError(f"it has joined already, as worker {self._by_peer[peer].index}")
        member.peer, member.pid, member.hostname = peer, pid, hostname
        self._by_peer[peer] = member
        return member

    def find_index(self, worker_index: int) -> Member | None:
        """Return the worker of this number, if the run has so many."""
        return self.members[worker_index] if 0 <= worker_index < len(self.members) else None

    def find(self, peer: bytes) -> Member | None:
        """Return the worker behind an address, if it has joined."""
        return self._by_peer.get(peer)

    def lose(self, member: Member) -> None:
        """Note that a worker is gone: whatever still comes from its address is a stranger's."""
        if member.peer is not None:
            del self._by_peer[member.peer]
        member.peer = member.owes = None
        member.is_ready = member.has_rival = False

    def owe(self, call: int, members: Sequence[Member]) -> None:
        """Note that these workers now owe an answer to this call."""
        for member in members:
            member.owes = call
            member.num_parts = 0

    def settle(self, member: Member, call: int) -> None:
        """Note that a worker has answered.

        Raises:
            WireError: It owes no answer, or the answer to another call.
        """
        if member.owes != call:
            raise WireError(f"worker {member.index} answered call {call}, but owes {member.owes}")
        member.owes = None

    def present(self) -> list[Member]:
        """Return the workers that are here and have environments."""
        return [member for member in self.members if member.is_ready]

    def debtors(self) -> list[Member]:
        """Return the workers that still owe an answer."""
        return [member for member in self.members if member.owes is not None]
