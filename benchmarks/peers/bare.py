"""The limits: plain loops over environments in a few processes, free-running and in lockstep.

Two processes, on two cores, unless the environments wait instead of working: then as many as help.

Both loops do the same work as `SyncVectorEnv` in its default NEXT_STEP mode: a finished environment is reset in the
place of its next step, and that counts as a step. They keep nothing of what the environments return.
"""

import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from ctypes import c_long
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import RawValue
from multiprocessing.synchronize import Semaphore
from typing import Any, Protocol

from benchmarks.tasks import make_env, precompute_actions

PROCESSES = 2
FORK = multiprocessing.get_context("fork")


class BareLoops:
    """Processes that step their part of the environments and never speak to each other."""

    def __init__(self, task: str, num_envs: int, num_processes: int = PROCESSES) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for first, size in split(num_envs, num_processes):
            ours, theirs = FORK.Pipe()
            self._pipes.append(ours)
            self._processes.append(start(run_freely, task, first, size, theirs))

    def run(self, seconds: float) -> float:
        """Step for so long; returns environment steps per second, all processes together."""
        for pipe in self._pipes:
            pipe.send(seconds)
        rates: list[float] = [pipe.recv() for pipe in self._pipes]
        return sum(rates)

    def close(self) -> None:
        """End the processes."""
        end(self._processes)


class PairLockstep:
    """Two processes that meet each other after every step: each posts the other's semaphore and waits for its own.

    Args:
        task: A key of `tasks.TASKS`.
        num_envs: Of both processes together.
        make_shard: Makes the environments of one process, from the task and their number. What its `step` does is
            what happens between two meetings.
    """

    def __init__(self, task: str, num_envs: int, make_shard: "Callable[[str, int], Steppable] | None" = None) -> None:
        gates = (FORK.Semaphore(0), FORK.Semaphore(0))
        last_step = RawValue(c_long, 0)
        self._num_envs = num_envs
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for rank, (first, size) in enumerate(split(num_envs, PROCESSES)):
            ours, theirs = FORK.Pipe()
            self._pipes.append(ours)
            make = make_shard or partial(Shard, first=first)
            self._processes.append(
                start(run_as_pair, make, task, size, theirs, gates[rank], gates[1 - rank], last_step, rank)
            )

    def run(self, seconds: float) -> float:
        """Step for so long; returns environment steps per second, both processes together."""
        for pipe in self._pipes:
            pipe.send(seconds)
        # Both took the same number of steps in the same time; the first of them kept the clock.
        rates = [pipe.recv() for pipe in self._pipes]
        return float(rates[0]) * self._num_envs

    def close(self) -> None:
        """End both processes."""
        end(self._processes)


class ParentLockstep:
    """Processes and a parent that, for every step, posts them all and waits for them all."""

    def __init__(self, task: str, num_envs: int, num_processes: int = PROCESSES) -> None:
        self._num_envs = num_envs
        self._go: list[Semaphore] = []
        self._done: list[Semaphore] = []
        self._processes: list[ForkProcess] = []
        for first, size in split(num_envs, num_processes):
            self._go.append(FORK.Semaphore(0))
            self._done.append(FORK.Semaphore(0))
            self._processes.append(start(run_for_parent, task, first, size, self._go[-1], self._done[-1]))

    def run(self, seconds: float) -> float:
        """Step for so long; returns environment steps per second, all processes together."""
        starts = [go.release for go in self._go]
        waits = [done.acquire for done in self._done]
        steps = 0
        began = now = time.perf_counter()
        while now - began < seconds:
            for release in starts:
                release()
            for acquire in waits:
                acquire()
            steps += 1
            now = time.perf_counter()
        return steps * self._num_envs / (now - began)

    def close(self) -> None:
        """End the processes."""
        end(self._processes)


class Steppable(Protocol):
    """The environments of one process."""

    def step(self) -> None:
        """Step them."""


class Shard:
    """The environments of one process, stepped by the tightest loop that still resets the finished ones.

    Seeds and actions go by the environment's index among all: were they the same in all processes, so would be the
    steps' durations, and nobody would ever wait for anybody.
    """

    def __init__(self, task: str, size: int, first: int = 0) -> None:
        self._envs = [make_env(task) for _ in range(size)]
        self._steps = [env.step for env in self._envs]
        self._is_finished = [False] * size
        self._actions = [list(row[first:]) for row in precompute_actions(task, first + size)]
        self._row = 0
        for seed, env in enumerate(self._envs, start=first):
            env.reset(seed=seed)

    def step(self) -> None:
        """Step every environment once."""
        is_finished = self._is_finished
        actions = self._actions[self._row]
        self._row = (self._row + 1) % len(self._actions)
        for index, step in enumerate(self._steps):
            if is_finished[index]:
                self._envs[index].reset()
                is_finished[index] = False
            else:
                _, _, terminated, truncated, _ = step(actions[index])
                is_finished[index] = terminated or truncated


def run_freely(task: str, first: int, size: int, pipe: Connection) -> None:
    """Step for as many seconds as each message says, answering with the rate."""
    shard = Shard(task, size, first)
    while True:
        seconds = pipe.recv()
        steps = 0
        began = now = time.perf_counter()
        while now - began < seconds:
            shard.step()
            steps += 1
            now = time.perf_counter()
        pipe.send(steps * size / (now - began))


def run_as_pair(
    make_shard: "Callable[[str, int], Steppable]",
    task: str,
    size: int,
    pipe: Connection,
    own_gate: Semaphore,
    other_gate: Semaphore,
    last_step: c_long,
    rank: int,
) -> None:
    """Step in lockstep with the other process; the one of rank 0 decides when it is over."""
    shard = make_shard(task, size)
    while True:
        seconds = pipe.recv()
        steps = 0
        if rank == 0:
            last_step.value = sys.maxsize
        # Meet once before the clock starts: the two messages did not arrive at the same moment.
        other_gate.release()
        own_gate.acquire()
        began = time.perf_counter()
        while True:
            shard.step()
            steps += 1
            if rank == 0 and time.perf_counter() - began >= seconds:
                # A number and not a flag: the other process may still be about to look after the step before this one.
                last_step.value = steps
            other_gate.release()
            own_gate.acquire()
            if steps == last_step.value:
                break
        pipe.send(steps / (time.perf_counter() - began))


def run_for_parent(task: str, first: int, size: int, go: Semaphore, done: Semaphore) -> None:
    """Step once whenever the parent says so."""
    shard = Shard(task, size, first)
    while True:
        go.acquire()
        shard.step()
        done.release()


def split(num_envs: int, num_processes: int) -> list[tuple[int, int]]:
    """Share the environments out: for each process the first one's index and how many, at least one."""
    num_processes = min(num_processes, num_envs)
    edges = [num_envs * rank // num_processes for rank in range(num_processes + 1)]
    return [(first, stop - first) for first, stop in itertools.pairwise(edges)]


def start(target: Callable[..., None], *args: Any) -> ForkProcess:
    """Start a daemon process, so that it can never outlive the contender it works for."""
    process = FORK.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def end(processes: Sequence[ForkProcess]) -> None:
    """Terminate processes that hold nothing worth a goodbye."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
