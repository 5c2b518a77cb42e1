"""Worker: everything the head knows about one worker."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from clusterenv.errors import ClusterEnvError
from clusterenv.policy.pool import Pool
from clusterenv.wire.buffers import RolloutBuffers, StepBuffers
from clusterenv.wire.messages import BoardAddress, Reply
from clusterenv.wire.shared import HeadMailbox, SharedMemory, WorkerProcess


class WorkerState(enum.Enum):
    """Where a worker is on its way; the value is what a user sees."""

    LATE = "late"  # The run began without it, and it is still to come for the first time.
    STARTING = "starting"  # Its launcher was told to start it.
    PREPARING = "preparing"  # It has joined, and is given what the others have.
    READY = "ready"
    LOST = "lost"  # It was given up, and another one is to be started in its place.


class Stage(enum.IntEnum):
    """What a worker that has joined is given, in this order."""

    ASSIGN = 0  # The environments to make.
    SERVE = 1  # The spaces of the run, and its buffers.
    RESTORE = 2  # What the worker before it had: attributes, a recording, a reset, what the learner saw last.
    ADOPT = 3  # The policy, if there is one.


@dataclass(eq=False, repr=False)
class Owed:
    """An answer that a worker owes.

    Attributes:
        accept: Takes the answer; may raise WireError.
        destination: Says into which arrays the frames that come with it belong, after this many steps in parts.
        by_mailbox: Whether it comes by the mailbox.
        since: When it was asked for.
        cancels: Whether nothing that was asked for before is owed any more once it has come.
        num_parts: How many steps of a rollout have come in parts.
    """

    call: int
    accept: Callable[[Worker, Reply], None]
    destination: Callable[[Reply, int], Sequence[NDArray[Any]]]
    by_mailbox: bool
    since: float
    cancels: bool = False
    num_parts: int = 0


@dataclass(eq=False, repr=False)
class Version:
    """A version of the policy that workers hold, or have made something with that was not delivered yet.

    Attributes:
        number: Counted from 1.
        holders: Who holds it, those that do so longest first.
        pool: How it acted; None until anybody has said so.
        judged: The newest version for which the sync rule has been asked about this one.
        compared: The newest version that it was compared with, with `num_compared` rows of the pool.
        divergence: What came out; NaN if it was never compared.
        is_silent: Whether somebody has acted with it, was asked how, and did not say.
    """

    number: int
    holders: dict[Worker, None] = field(default_factory=dict)
    pool: Pool | None = None
    judged: int = 0
    compared: int = 0
    num_compared: int = 0
    divergence: float = float("nan")
    is_silent: bool = False

    @property
    def num_rows(self) -> int:
        """How many rows its pool has."""
        return 0 if self.pool is None else len(self.pool)


@dataclass(eq=False, repr=False)
class HeldPolicy:
    """What a worker was given of the policy.

    Attributes:
        given: The versions with which it may have made what it answers next: the last is the one that it holds; those
            before were on their way to it when it answered last, or were its predecessor's.
        counted: The newest version up to which it was counted how often it would have pulled every one.
    """

    given: deque[Version] = field(default_factory=deque)
    counted: int = 0

    @property
    def version(self) -> int:
        """The version of its weights; 0 if it holds none."""
        return self.given[-1].number if self.given else 0


class Slot(NamedTuple):
    """Where a rollout goes: memory that workers share, or arrays of the head's own."""

    memory: SharedMemory | None
    buffers: RolloutBuffers


@dataclass(eq=False, repr=False)
class AskedRollout:
    """A rollout of a stream that a worker was asked for, and at how many rows to say how actions were distributed."""

    slot: Slot
    num_probes: int


@dataclass(eq=False, repr=False)
class StreamWork:
    """A worker's part of a stream.

    Attributes:
        asked: The rollouts it was asked for, in order.
        free: Slots that nothing is on the way to.
        num_ready: Rollouts that came and were not delivered yet.
        num_loads: How often it was sent weights since something came from it.
    """

    asked: deque[AskedRollout] = field(default_factory=deque)
    free: list[Slot] = field(default_factory=list)
    num_ready: int = 0
    num_loads: int = 0


@dataclass(eq=False, repr=False)
class Place:
    """A worker's place in the run, and who may take it.

    Attributes:
        key: The public key that was registered for it; None while it is vacant.
        registered_at: When.
        has_joined: Whether the owner of the key has come in.
        next_key: Of whom the place will be when the worker in it is given up.
        waiting: The addresses of those who wait for that; the last one has the next key.
    """

    key: str | None = None
    registered_at: float = 0.0
    has_joined: bool = False
    next_key: str | None = None
    waiting: list[bytes] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Worker:
    """One worker, through all its incarnations: a process that takes over has the same record.

    Attributes:
        start: Of its shard, environments `[start, stop)`.
        rows: Its rows of the two step buffers.
        shown: Which of these holds what the learner saw last.
        objects: The leaves without a fixed size, as the learner saw them last.

        incarnation: How many processes have joined in this place.
        peer: The transport's address; None until it has joined, and when it is lost. `descriptor` is its connection's.
        mailbox: None if it shares no memory with the head; `mailbox_memory` is where it lies.
        process: A handle of its process, if it shares memory.
        machine: What it has in common with workers that may be on the same one; `board` is where it keeps weights for
            these, `has_neighbour` whether they have found each other.
        may_miss: Whether it was told to find weights there, and may still say that it did not.
        num_missed: How often it did not find them, or others did not find them on its board.
        may_linger: Whether it shares memory, and cannot be seen from here: its successor must not.
        owed: The answers it owes, in the order in which they were asked for.
        progress: What its mailbox counted when it was last looked at; `progress_at` is when that changed.
        place: Whose key opens it.
        has_rival: Whether another one came for its place and was sent away: what ends may be either of them.
        misfit: Why one that came for its place was sent away, if that was for what is installed there.
        cut_at: When its connection ended.

        stage: What it is being given while it is prepared; `stage_at` is since when, `is_asked` whether it was sent.
        description: What its environments are like, while the run is brought up.
        has_served: Whether one in this place was ever ready.
        restart_at: When to start it again, while it is lost.
        lost_at: When the one before it was lost, and `loss` why, until it has taken over.
        num_losses: How many were lost in this place; `in_a_row` of them without having been of use.
        num_answers: Since it became ready; a rollout counts for many, a plain step not at all.
        num_plain_steps: How many of these there had been when it became ready.
        seeds: What the environments of one that takes over are reset with.
        fatal: Why this worker will not be restarted.
        packages: What its environments and its policy have imported, with versions.
    """

    index: int
    start: int
    stop: int
    rows: tuple[StepBuffers, StepBuffers] | None = None
    shown: int = 0
    objects: list[list[Any]] | None = None

    state: WorkerState = WorkerState.STARTING
    incarnation: int = 0
    peer: bytes | None = None
    descriptor: int = -1
    pid: int | None = None
    hostname: str = ""
    mailbox: HeadMailbox | None = None
    mailbox_memory: SharedMemory | None = None
    process: WorkerProcess | None = None
    machine: str = ""
    board: BoardAddress | None = None
    has_neighbour: bool = False
    may_miss: bool = False
    num_missed: int = 0
    may_linger: bool = False
    owed: deque[Owed] = field(default_factory=deque)
    progress: int = 0
    progress_at: float = 0.0
    place: Place = field(default_factory=Place)
    has_rival: bool = False
    misfit: str = ""
    cut_at: float | None = None

    stage: Stage = Stage.ASSIGN
    stage_at: float = 0.0
    is_asked: bool = False
    description: dict[str, Any] | None = None
    has_served: bool = False
    restart_at: float = 0.0
    lost_at: float | None = None
    loss: str = ""
    num_losses: int = 0
    in_a_row: int = 0
    num_answers: int = 0
    num_plain_steps: int = 0
    seeds: list[int] = field(default_factory=list)
    fatal: ClusterEnvError | None = None
    packages: dict[str, str] = field(default_factory=dict)

    policy: HeldPolicy = field(default_factory=HeldPolicy)
    stream: StreamWork = field(default_factory=StreamWork)

    @property
    def num_envs(self) -> int:
        """How many environments it hosts."""
        return self.stop - self.start

    @property
    def env_indices(self) -> tuple[int, ...]:
        """The environments it hosts."""
        return tuple(range(self.start, self.stop))

    @property
    def is_ready(self) -> bool:
        """Whether it takes part."""
        return self.state is WorkerState.READY

    @property
    def buffers(self) -> tuple[StepBuffers, StepBuffers]:
        """Its rows of the two step buffers, once the run has any."""
        assert self.rows is not None, "the run's spaces are known"
        return self.rows

    def __str__(self) -> str:
        """Name it as an error should."""
        where = "" if self.pid is None else f" (pid {self.pid} on {self.hostname})"
        envs = f"environment {self.start}" if self.num_envs == 1 else f"environments {self.start} to {self.stop - 1}"
        return f"worker {self.index}{where}, {envs}"
