"""Crew: keeps the workers complete: gives each its shard, and puts a new one in the place of one that is lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterenv.errors import CallTimeout, LaunchError, WireError, WorkerLost
from clusterenv.head.hub import Hub
from clusterenv.head.outcome import Lost
from clusterenv.head.roster import Member
from clusterenv.wire.messages import Assign, Collected, Ready, Reply, Request
from clusterenv.wire.shared import Bell, HeadDesk, SharedMemory

log = logging.getLogger(__name__)

_MAX_IN_A_ROW = 3
_NEARBY_CALLS = 8  # A replacement that is lost within so many calls, none a rollout, has achieved nothing.
_BACK_OFF_S = 1.0

Make = Callable[[int, Member], Request]
Arrays = Callable[[Member], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that was lost, and what became of its environments.

    Attributes:
        worker_index: Which worker.
        env_indices: The environments it hosted: they were made again, and began new episodes.
        reason: How it ended, with the end of its log.
        seeds: What each of these environments was reset with on the new worker.
        recovery_s: How long it took until the new worker was ready.
    """

    worker_index: int
    env_indices: tuple[int, ...]
    reason: str
    seeds: tuple[int, ...]
    recovery_s: float


@dataclass(eq=False, repr=False)
class _Record:
    """What is known of one worker's losses."""

    in_a_row: int = 0
    last_call: int = -(10**9)
    has_collected: bool = False  # Whether it has made a rollout since it came.
    seeds: list[int] = field(default_factory=list)


class Crew:
    """The workers of one run, with their shards.

    Attributes:
        losses: All there were, in order.
        on_new: What else a new worker needs before it can take over: called with those that have joined.
    """

    def __init__(self, hub: Hub, code: Callable[[int], bytes], memory: SharedMemory | None, *, replaces: bool) -> None:
        """Take charge of workers that have joined.

        Args:
            hub: Talks to them.
            code: A worker's assignment, by the index of its first environment.
            memory: What to offer those who can reach it.
            replaces: Whether lost workers are replaced, rather than raising WorkerLost.
        """
        self.losses: list[Loss] = []
        self.on_new: Callable[[Sequence[Member]], None] = lambda members: None
        self._hub = hub
        self._code = code
        self._memory = memory
        self._replaces = replaces
        self._records = [_Record() for _ in hub.members]
        self._entropy: int | None = None
        self._redo: tuple[Make, Arrays] | None = None
        self._given: dict[int, tuple[Member, Reply]] = {}
        self._waits_for_late = True
        if memory is not None:
            hub.desks.bell = Bell(memory.memory, initialise=True)

    def seed(self, seed: int | None) -> None:
        """Let the seeds of environments that are made again follow from the run's own."""
        self._entropy = seed

    def seeds_of(self, member: Member) -> list[int]:
        """Return what the environments of a worker that has replaced another are to be reset with."""
        return self._records[member.index].seeds

    def assign(self, members: Sequence[Member]) -> None:
        """Give workers their shards, and wait until the environments are made.

        Raises:
            WorkerFailed: A factory raised.
            WorkerLost: A worker died of it.
        """
        desks = {member.index: self.make_desk(member) for member in members}
        self._hub.start(lambda call, member: self.assignment(call, member), members)
        for member, reply in self._hub.collect(self._hub.timeouts.join_s):
            if isinstance(reply, Lost):
                raise lost_error(member, reply)
            self.note_ready(member, reply, desks[member.index])

    def make_desk(self, member: Member) -> HeadDesk | None:
        """Clear the worker's desk, before it is told of it; None if no memory is shared."""
        return None if self._memory is None else HeadDesk(self._memory.memory, member.index)

    def assignment(self, call: int, member: Member, *, streams: bool = False) -> Assign:
        """Return what tells a worker its shard."""
        offer = None if self._memory is None else self._memory.offer
        return Assign(call, member.start, member.stop, self._code(member.start), offer, streams)

    def note_ready(self, member: Member, reply: Reply, desk: HeadDesk | None) -> None:
        """Take a worker's word that it has made its environments, and talk to it over its desk if it can."""
        if not isinstance(reply, Ready):
            raise WireError(f"A worker answered with {type(reply).__name__} where Ready was expected.")
        member.is_ready = True
        if reply.shares_memory and desk is not None:
            self._hub.desks.use(member, desk)

    def start(self, make: Make, arrays: Arrays = lambda member: ()) -> None:
        """Start a call that a new worker can be asked to do again in place of one that was lost."""
        self._redo = make, arrays
        self._given = {}
        self._hub.start(make, arrays=arrays)

    def expect_once(self) -> None:
        """Be told that the call which is started next cannot be repeated."""
        self._redo = None
        self._given = {}

    def answers(self, timeout_s: float | None = None) -> tuple[list[tuple[Member, Reply]], list[Member]]:
        """Wait for the answers to the call under way; replace the workers that were lost over it.

        Returns:
            The answers in order of environments; and the replaced workers from which there is none.

        Raises:
            CallTimeout: One has not answered in time; `answers` may be called again.
            WorkerLost: A worker is lost, and is not to be replaced, or was too often.
        """
        while pending := self._hub.collect(timeout_s):
            lost = [(m, reply) for m, reply in pending if isinstance(reply, Lost) and self._is_wanted(m)]
            self._given |= {m.index: (m, reply) for m, reply in pending if not isinstance(reply, Lost)}
            for member, reply in pending:
                if isinstance(reply, Collected):
                    self.note_collected(member)
            if not lost:
                break
            self.replace(lost)
            members = [member for member, _ in lost]
            if self._redo is None:
                return self._in_order(), members
            make, arrays = self._redo
            self._hub.start(make, members, arrays)
        return self._in_order() if self._given else [], []

    @contextlib.contextmanager
    def without_late(self) -> Iterator[None]:
        """Do not wait for workers that have not come yet: what is asked within is asked of the others."""
        self._waits_for_late = False
        try:
            yield
        finally:
            self._waits_for_late = True

    def _is_wanted(self, member: Member) -> bool:
        return self._waits_for_late or not member.is_late

    def _in_order(self) -> list[tuple[Member, Reply]]:
        return [self._given[index] for index in sorted(self._given)]

    def replace(self, lost: Sequence[tuple[Member, Lost]]) -> None:
        """Put new workers in the place of lost ones; returns when they have what the others have.

        Raises:
            WorkerLost: One is not to be replaced, or was too often.
        """
        started = time.monotonic()
        waiting = list(lost)
        members = [member for member, _ in lost]
        while waiting:
            pause_s = max([self.allow(member, loss) for member, loss in waiting])
            try:
                self._hub.rest(pause_s)
                self._hub.restart(members)
                self.assign(members)
                self.on_new(members)
            except BaseException as error:
                # Some may be ready and others not. None is left half made: all begin once more, or with the next call.
                failure = Lost(f"its replacement did not last: {error}")
                for member in members:
                    self._hub.give_up(member, failure)
                is_first_try = any(member.is_late for member in members)  # Nothing was lost: say what keeps it away.
                if is_first_try or not isinstance(error, LaunchError | WorkerLost | CallTimeout):
                    raise
                waiting = [(member, failure) for member in members]
            else:
                waiting = []
        for member, loss in lost:
            self.note_replaced(member, loss, time.monotonic() - started)

    def note_replaced(self, member: Member, loss: Lost, recovery_s: float) -> None:
        """Write down that a new worker has taken over."""
        self._records[member.index].last_call = self._hub.call
        if member.is_late:
            member.is_late = False
            log.info("%s, takes part from now on", member)
            return
        self.losses.append(
            Loss(
                worker_index=member.index,
                env_indices=member.env_indices,
                reason=loss.reason,
                seeds=tuple(self.seeds_of(member)),
                recovery_s=recovery_s,
            )
        )
        log.warning("%s, takes over after %.1f s", member, recovery_s)

    def note_collected(self, member: Member) -> None:
        """Write down that a worker has made a rollout, and so was of use."""
        self._records[member.index].has_collected = True

    def allow(self, member: Member, loss: Lost, *, by_calls: bool = True) -> float:
        """Decide whether to replace a lost worker, and with which seeds; returns how many seconds to wait before.

        Args:
            member: Who is lost.
            loss: How.
            by_calls: Whether it was of use not only if it has made a rollout since it came, but also if there were many
                calls.

        Raises:
            WorkerLost: This was once too often, or losses are to be raised.
        """
        record, call = self._records[member.index], self._hub.call
        if member.is_late:
            record.seeds = self._fresh_seeds(member, 0)
            return 0.0
        if not self._replaces:
            raise lost_error(member, loss)
        has_achieved = record.has_collected or (by_calls and call - record.last_call > _NEARBY_CALLS)
        record.in_a_row = 1 if has_achieved else record.in_a_row + 1
        record.has_collected = False
        record.last_call = call
        if record.in_a_row > _MAX_IN_A_ROW:
            raise lost_error(member, Lost(f"{_MAX_IN_A_ROW} replacements in a row were lost, too. {loss.reason}"))
        log.warning("%s, is lost and will be replaced: %s", member, loss.reason)
        record.seeds = self._fresh_seeds(member, record.in_a_row)
        return _BACK_OFF_S * (record.in_a_row - 1)

    def _fresh_seeds(self, member: Member, attempt: int) -> list[int]:
        words = [self._entropy or 0, member.index, len(self.losses), attempt]
        sequence = np.random.SeedSequence(words if self._entropy is not None else None)
        # Consecutive, as Gymnasium spreads a seed: native vector environments take no list.
        first = int(sequence.generate_state(1)[0]) % 2**31
        return list(range(first, first + member.stop - member.start))


def lost_error(member: Member, loss: Lost) -> WorkerLost:
    """Return what tells the user of a worker that is lost."""
    return WorkerLost(
        f"{str(member).capitalize()}, is lost: {loss.reason}",
        worker_index=member.index,
        env_indices=member.env_indices,
    )
