"""Footprint: how much memory and how many descriptors processes hold, and whether that stays so."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ENOUGH = 9  # Moments: with fewer, one of them decides, in which a question to Slurm may be under way.
_LINGERING = 2  # Descriptors: a connection that has just ended, the log of a worker that has.


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    descriptors: int
    resident_bytes: int

    @staticmethod
    def of(pid: int) -> Footprint:
        """Look at a process; one that has just ended holds nothing."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            return Footprint(len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE"))
        except OSError:
            return Footprint(0, 0)


def measure_head() -> Footprint:
    """Look at this process, without what only waits to be collected."""
    gc.collect()
    return Footprint.of(os.getpid())


@dataclass(frozen=True)
class Moment:
    """What was held at one moment.

    Attributes:
        at_s: Since the beginning.
        workers: In the order of their indices.
    """

    at_s: float
    head: Footprint
    workers: Sequence[Footprint]


class Course:
    """How footprints change in the course of a run.

    Args:
        every_s: How often to look.
    """

    def __init__(self, every_s: float) -> None:
        self.moments: list[Moment] = []
        self._every_s = every_s
        self._began = time.monotonic()

    def look(self, worker_pids: Sequence[int]) -> None:
        """Look, if it is time to."""
        if not self.moments or time.monotonic() - self._began >= self.moments[-1].at_s + self._every_s:
            self.note(worker_pids)

    def note(self, worker_pids: Sequence[int]) -> None:
        """Look now."""
        at_s = time.monotonic() - self._began
        self.moments.append(Moment(at_s, measure_head(), [Footprint.of(pid) for pid in worker_pids]))

    def find_growth(self, max_bytes: float, *, of_workers: bool) -> list[str]:
        """Return who holds more in the end than in the beginning, after a run long enough to say; each by itself.

        What is held goes up and down, for a strike or a question to Slurm needs descriptors of this process too. So the
        least of the last third counts, against the most of the first.

        Args:
            max_bytes: As much more is nothing: interpreters and allocators keep some.
            of_workers: Whether to look at workers too, which makes sense if they are still the same.
        """
        if len(self.moments) < _ENOUGH:
            return []
        third = len(self.moments) // 3
        first, last = self.moments[:third], self.moments[-third:]
        problems = _compare("the head", [m.head for m in first], [m.head for m in last], max_bytes)
        for index in range(len(first[0].workers) if of_workers else 0):
            then, now = ([moment.workers[index] for moment in moments] for moments in (first, last))
            problems += _compare(f"worker {index}", then, now, max_bytes)
        return problems


def _compare(name: str, first: Sequence[Footprint], last: Sequence[Footprint], max_bytes: float) -> list[str]:
    problems = []
    most, least = max(then.descriptors for then in first), min(now.descriptors for now in last)
    if least > most + _LINGERING:
        problems.append(f"{most} descriptors of {name} became {least}")
    growth = min(now.resident_bytes for now in last) - max(then.resident_bytes for then in first)
    if growth > max_bytes:
        problems.append(f"memory of {name} grew by {growth / 1e6:.1f} MB")
    return problems
