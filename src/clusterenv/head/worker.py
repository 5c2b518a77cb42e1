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
    """A worker's state in its life cycle; the values are shown to users."""

    LATE = "late"  # The run began without this worker, which has never joined yet.
    STARTING = "starting"  # Its launcher was told to start it.
    PREPARING = "preparing"  # It has joined, and is being given what the others have.
    READY = "ready"
    LOST = "lost"  # It was given up, and a replacement will be started unless `fatal` is set.


class Stage(enum.IntEnum):
    """What a worker is given after it has joined, in this order."""

    ASSIGN = 0  # The environments to make.
    SERVE = 1  # The spaces of the run, and its buffers.
    RESTORE = 2  # Its predecessor's state: attributes, a recording, a reset, what the learner saw last.
    ADOPT = 3  # The policy, if there is one.


@dataclass(eq=False, repr=False)
class Owed:
    """An answer that a worker owes.

    Attributes:
        accept: Takes the answer; may raise WireError.
        destination: Returns the arrays to fill from the answer's frames, given the answer and `num_parts`.
        by_mailbox: Whether the answer comes through the mailbox.
        since: When the request was sent.
        cancels: Whether this answer settles everything that was requested before it.
        num_parts: How many steps of a rollout have arrived in partial answers.
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
    """A version of the policy that workers hold, or that made rollouts which are not delivered yet.

    Attributes:
        number: Counted from 1.
        holders: The workers that hold it, longest-standing first.
        pool: How it acted, as reported by workers; None before the first report.
        judged: The newest version at the time the sync rule last judged this one.
        compared: The newest version this one was compared with, on `num_compared` rows of the pool.
        divergence: The result of that comparison; NaN if there was none.
        is_silent: Whether a worker acted with it, was asked how its actions were distributed, and did not say.
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
        """How many rows are in its pool."""
        return 0 if self.pool is None else len(self.pool)


@dataclass(eq=False, repr=False)
class HeldPolicy:
    """The versions of the policy that a worker was given.

    Attributes:
        given: The versions that may have made its next answer. The last is the one it holds; earlier ones were on
            their way when it last answered, or were given to its predecessor.
        counted: The newest version included so far in the count of pulls under "pull every version".
        ahead: How many pulls that count includes which the worker has not made; if negative, pulls that it made
            and that were included at once, to be left out when its next rollout is counted.
    """

    given: deque[Version] = field(default_factory=deque)
    counted: int = 0
    ahead: int = 0

    @property
    def version(self) -> int:
        """The version of its weights; 0 if it holds none."""
        return self.given[-1].number if self.given else 0


class Slot(NamedTuple):
    """Where a rollout is stored: in memory shared with workers, or in the head's own arrays."""

    memory: SharedMemory | None
    buffers: RolloutBuffers


@dataclass(eq=False, repr=False)
class AskedRollout:
    """A stream's request to a worker for a rollout, with action distributions reported at `num_probes` rows."""

    slot: Slot
    num_probes: int


@dataclass(eq=False, repr=False)
class StreamWork:
    """A worker's part of a stream.

    Attributes:
        asked: The rollouts it was asked for, in order.
        free: Slots that no rollout is being written to.
        num_ready: Rollouts that have arrived and are not delivered yet.
        num_loads: How often it was sent weights since its last answer.
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
        registered_at: When the key was registered.
        has_joined: Whether the owner of the key has joined.
        next_key: The key that gets the place when the current worker is given up.
        waiting: The addresses of the processes that wait for the place; the last one owns the next key.
    """

    key: str | None = None
    registered_at: float = 0.0
    has_joined: bool = False
    next_key: str | None = None
    waiting: list[bytes] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Worker:
    """One worker through all its incarnations: a replacement process uses the same record.

    Attributes:
        start: First environment of its shard, which is `[start, stop)`.
        rows: Its rows of the two step buffers.
        shown: Which of the two step buffers holds what the learner saw last.
        objects: The observation leaves without a fixed size, as the learner saw them last.

        incarnation: How many processes have joined as this worker.
        peer: The transport's address; None before it joins and after it is lost. `descriptor` is its connection's.
        mailbox: None if it shares no memory with the head; `mailbox_memory` is the memory it lies in.
        process: A handle on its process, if it shares memory.
        machine: Equal for workers that may be on the same machine; `board` is where it keeps weights for those
            workers, and `has_neighbour` whether one of them could read the other's board.
        may_miss: Whether it was told to find weights on another worker's board, and may still report them missing.
        num_missed: How often it did not find them, or others did not find them on its board.
        may_linger: Whether it shares memory but its process cannot be watched: then its successor must not share.
        owed: The answers it owes, in the order of the requests.
        progress: The mailbox's progress counter when last read; `progress_at` is when it last changed.
        place: Its place in the run, and the key that owns the place.
        has_rival: Whether another process asked for its place and was refused: an exit may be either one's.
        misfit: Why a process that asked for its place was refused, if its installed versions were the reason.
        cut_at: When its connection ended.

        stage: What it is being given while PREPARING; `stage_at` is since when, `is_asked` whether it was sent.
        description: What its environments are like, while the run is starting up.
        has_served: Whether any incarnation was ever ready.
        restart_at: When to start it again, while it is lost.
        lost_at: When its predecessor was lost, and `loss` why, until the replacement has taken over.
        num_losses: How many incarnations were lost; `in_a_row` is the same, counted anew after each useful one.
        num_answers: Answers since it became ready; a rollout counts for many, a plain step not at all.
        num_plain_steps: How many plain steps the run had made when it became ready.
        seeds: What a replacement's environments are reset with.
        fatal: Why this worker will not be restarted.
        packages: The packages that its environments and its policy have imported, with versions.
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
