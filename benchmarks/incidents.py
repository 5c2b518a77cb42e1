"""Incidents: a seeded schedule of what befalls workers, a thread that makes it happen, and what came of it.

A new kind (a network partition, say) is a function in `STRIKES`: it harms a worker, and returns when the harm is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterenv import ClusterEnv

PAUSE = 0.4  # of the silence: long enough to be felt, too short to be taken for dead


@dataclass(frozen=True)
class Target:
    """A worker to be harmed."""

    pid: int
    silence_s: float

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal; one that is gone already needs none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def kill(target: Target) -> None:
    """End it at once, as the kernel does when memory runs out."""
    target.signal(signal.SIGKILL)


def terminate(target: Target) -> None:
    """Ask it to end, as a cluster does before a preemption."""
    target.signal(signal.SIGTERM)


def stop(target: Target) -> None:
    """Freeze it for good."""
    target.signal(signal.SIGSTOP)


def pause(target: Target) -> None:
    """Freeze it for a while that is shorter than the silence: nobody may be lost by this."""
    target.signal(signal.SIGSTOP)
    time.sleep(PAUSE * target.silence_s)
    target.signal(signal.SIGCONT)


STRIKES: Mapping[str, Callable[[Target], None]] = {
    "kill": kill,
    "terminate": terminate,
    "stop": stop,
    "pause": pause,
}


@dataclass(frozen=True)
class Incident:
    """One line of the schedule."""

    at_s: float
    kind: str
    worker_index: int


@dataclass(eq=False)
class Struck:
    """An incident that happened, at moments of the monotonic clock."""

    incident: Incident
    pid: int
    at: float
    noticed_at: float | None = None
    replaced_at: float | None = None
    replaced_in: int = 0  # the learner's round


def make_schedule(seed: int, num_faults: int, seconds: float, num_workers: int, kinds: Sequence[str]) -> list[Incident]:
    """Spread incidents over a time at random; each round of workers is hit in another order.

    So no worker is hit again before the others were: four hits in a row on one would rightly be taken for a crash loop.
    """
    rng = np.random.default_rng(seed)
    moments = np.sort(rng.uniform(0.0, seconds, num_faults))
    victims = [worker for _ in range(num_faults // num_workers + 1) for worker in rng.permutation(num_workers)]
    chosen = rng.choice(list(kinds), num_faults)
    return [Incident(float(at), str(kind), int(who)) for at, kind, who in zip(moments, chosen, victims, strict=False)]


@dataclass(eq=False)
class Agitator:
    """Carries out a schedule from a thread of its own, while the learner goes about its work.

    A worker is hit again only when its replacement has lived through some rounds of the learner's: on a slow machine
    the schedule slips, rather than being one long crash loop.

    Attributes:
        rounds_apart: Through how many.
        rounds: How many the learner has completed; it counts.
    """

    envs: ClusterEnv
    schedule: Sequence[Incident]
    silence_s: float
    rounds_apart: int
    struck: list[Struck] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agitator")
        self._watcher = _Watcher(self)

    def __enter__(self) -> Agitator:
        self._watcher.attach()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._watcher.detach()

    @property
    def is_done(self) -> bool:
        """Whether everything on the schedule has happened."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.monotonic()
        for incident in self.schedule:
            if self._is_over.wait(max(0.0, began + incident.at_s - time.monotonic())):
                return
            while not self._is_fit(incident.worker_index):
                if self._is_over.wait(0.05):
                    return
            pid = self.envs.worker_pids[incident.worker_index]
            self.struck.append(Struck(incident, pid, time.monotonic()))
            STRIKES[incident.kind](Target(pid, self.silence_s))

    def _is_fit(self, worker_index: int) -> bool:
        cases = [s for s in self.struck if s.incident.worker_index == worker_index and s.incident.kind != "pause"]
        return all(s.replaced_at is not None and self.rounds > s.replaced_in + self.rounds_apart for s in cases)


class _Watcher(logging.Handler):
    """Reads off the head's own log when it noticed a loss, and when it had made up for it."""

    def __init__(self, agitator: Agitator) -> None:
        super().__init__(logging.WARNING)
        self._agitator = agitator
        self._logger = logging.getLogger("clusterenv.head.crew")

    def attach(self) -> None:
        self._logger.addHandler(self)
        self._was = self._logger.propagate
        self._logger.propagate = False

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._was

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple):
            return
        member: Any = record.args[0]
        open_cases = [
            s
            for s in self._agitator.struck
            if s.incident.worker_index == member.index and s.incident.kind != "pause" and s.replaced_at is None
        ]
        for struck in open_cases:
            if "takes over" in record.msg:
                struck.replaced_at, struck.replaced_in = time.monotonic(), self._agitator.rounds
            elif struck.noticed_at is None:
                struck.noticed_at = time.monotonic()
