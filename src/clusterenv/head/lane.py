"""Lane: one worker in a stream: what it was asked for, where that goes, and what it still needs if it is new."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from clusterenv.errors import WireError
from clusterenv.head.outcome import Lost
from clusterenv.head.roster import Member
from clusterenv.wire import values
from clusterenv.wire.arrays import fill
from clusterenv.wire.block import Block
from clusterenv.wire.messages import Collected, Part, Reply, Request
from clusterenv.wire.shared import SharedMemory


@dataclass(eq=False, repr=False)
class Slot:
    """Where a rollout goes: memory that its worker shares, or arrays of the head's own that frames are copied into."""

    memory: SharedMemory | None
    block: Block


@dataclass(eq=False, repr=False)
class Asked:
    """A rollout that a worker was asked for."""

    call: int
    number: int
    slot: Slot
    num_steps: int = 0  # how many of them have come as parts


@dataclass(frozen=True, eq=False, repr=False)
class Made:
    """A rollout of one shard, as its worker made it. The block is the head's own."""

    lane: Lane
    block: Block
    summary: Mapping[str, Any]
    busy_s: float
    version: int

    @property
    def num_envs(self) -> int:
        """Of how many environments it is."""
        return len(self.block.rewards[0])


@dataclass(eq=False, repr=False)
class Task:
    """Something a new worker needs before it can take part."""

    make: Callable[[int], Request]
    arrays: Callable[[], Sequence[Any]] = list
    then: Callable[[Reply], None] = lambda reply: None
    call: int | None = None  # once it was sent


@dataclass(eq=False, repr=False)
class Lane:
    """One worker in a stream.

    Attributes:
        asked: Rollouts it was asked for, in order.
        free: Slots that nothing is on the way to.
        num_ready: Rollouts that came and were not delivered yet.
        measuring: The number of the request and the version, while the worker compares its policy.
        num_loads: How often it was sent weights since something came from it.
        tasks: What a new worker still needs, in order.
        loss: How the worker before it was lost, until it has taken over; `lost_at` is when.
        restart_at: When to start it; None if it was started.
        version: Of the weights a new worker was given.
    """

    member: Member
    asked: deque[Asked] = field(default_factory=deque)
    free: list[Slot] = field(default_factory=list)
    num_ready: int = 0
    measuring: tuple[int, int] | None = None
    num_loads: int = 0
    tasks: deque[Task] = field(default_factory=deque)
    loss: Lost | None = None
    lost_at: float = 0.0
    restart_at: float | None = None
    version: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it takes part."""
        return self.loss is None

    def accept(self, reply: Part | Collected, frames: Sequence[zmq.Frame]) -> Made | None:
        """Take a rollout, or a part of one.

        Returns:
            The rollout, if it is complete.

        Raises:
            WireError: It is not the one that is due, or does not fit.
        """
        if not self.asked or self.asked[0].call != reply.call:
            raise WireError(f"it sends rollout {reply.call}, which is not due")
        asked = self.asked[0]
        block = asked.slot.block
        num_steps = len(block.rewards)
        stop = num_steps if isinstance(reply, Collected) else reply.first + reply.count
        if reply.first != asked.num_steps or not reply.first < stop <= num_steps:
            raise WireError(f"steps {reply.first} to {stop} of {num_steps} come after {asked.num_steps}")
        if asked.slot.memory is None:
            fill(list(block.steps(reply.first, stop).arrays()), [frame.buffer for frame in frames])
        elif frames:
            raise WireError(f"{len(frames)} arrays came where memory is shared")
        asked.num_steps = stop
        if isinstance(reply, Part):
            return None
        summary = values.loads(reply.summary)
        if not isinstance(summary, dict):
            raise WireError(f"its summary is a {type(summary).__name__}")
        self.asked.popleft()
        self.num_ready += 1
        own = block
        if asked.slot.memory is not None:
            own = block.copy()
            self.free.append(asked.slot)
        return Made(self, own, summary, reply.busy_s, reply.version)

    def lose(self, loss: Lost, now: float) -> None:
        """Forget what a lost worker was asked for."""
        self.free += [asked.slot for asked in self.asked if asked.slot.memory is not None]
        self.asked.clear()
        self.tasks.clear()
        self.measuring = None
        self.num_loads = 0
        self.loss = self.loss or loss
        self.lost_at = self.lost_at if self.lost_at else now
