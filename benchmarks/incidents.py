"""Incidents: a seeded schedule of what befalls workers, a thread that makes it happen, and what came of it.

A new kind is a `Strike`. Those that need only a process are here, in `EVERYWHERE`; those that need a network or a
cluster are in `benchmarks/places.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv import ClusterEnv

PAUSE = 0.4  # of the silence: long enough to be felt, too short to be taken for dead
POLL_S = 0.05


@dataclass(frozen=True)
class Target:
    """A worker to be harmed.

    Attributes:
        pids: The processes of all workers, this one's among them.
    """

    worker_index: int
    silence_s: float
    pids: Sequence[int]

    @property
    def pid(self) -> int:
        """Its process."""
        return self.pids[self.worker_index]

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal; one that is gone already needs none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def only_itself(target: Target) -> Collection[int]:
    """Say that nobody else is harmed."""
    return [target.worker_index]


def everybody(target: Target) -> Collection[int]:
    """Say that all workers are."""
    return range(len(target.pids))


@dataclass(frozen=True)
class Strike:
    """A kind of fault.

    Attributes:
        harm: Does it; returns when it is over, which for a cut link is when it is mended.
        is_fatal: Whether workers are lost by it. By any other nobody may be.
        reach: Which workers it harms.
        weight: How often it happens, relative to others.
        is_alone: Whether nothing else may go on meanwhile.
    """

    harm: Callable[[Target], None]
    is_fatal: bool = True
    reach: Callable[[Target], Collection[int]] = only_itself
    weight: float = 1.0
    is_alone: bool = False


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
    """Freeze it for a while that is shorter than the silence."""
    target.signal(signal.SIGSTOP)
    time.sleep(PAUSE * target.silence_s)
    target.signal(signal.SIGCONT)


EVERYWHERE: Mapping[str, Strike] = {
    "kill": Strike(kill),
    "terminate": Strike(terminate),
    "stop": Strike(stop),
    "pause": Strike(pause, is_fatal=False),
}


@dataclass(frozen=True)
class Incident:
    """One line of the schedule."""

    at_s: float
    kind: str
    worker_index: int


@dataclass(frozen=True)
class Life:
    """A process, which is another one if its number is given to another."""

    pid: int
    born: str

    @staticmethod
    def of(pid: int) -> Life:
        """Look at a process; one that has ended is born at no time."""
        try:
            state, *_, born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
        except OSError:
            return Life(pid, "")
        return Life(pid, "" if state in "ZX" else born)

    @property
    def goes_on(self) -> bool:
        """Whether it still lives."""
        return self.born != "" and Life.of(self.pid) == self


@dataclass(eq=False)
class Struck:
    """What an incident did to one of the workers it reached, at moments of the monotonic clock.

    Attributes:
        is_over: Whether nothing is done to it any more.
        replaced_in: The learner's round.
    """

    incident: Incident
    worker_index: int
    is_fatal: bool
    life: Life
    at: float
    is_over: bool = False
    noticed_at: float | None = None
    replaced_at: float | None = None
    replaced_in: int = 0


def make_schedule(
    seed: int, num_faults: int, seconds: float, num_workers: int, strikes: Mapping[str, Strike]
) -> list[Incident]:
    """Spread incidents over a time at random; each round of workers is hit in another order.

    So no worker is hit again before the others were: four hits in a row on one would rightly be taken for a crash loop.
    """
    rng = np.random.default_rng(seed)
    moments = np.sort(rng.uniform(0.0, seconds, num_faults))
    victims = [worker for _ in range(num_faults // num_workers + 1) for worker in rng.permutation(num_workers)]
    weights = np.array([strike.weight for strike in strikes.values()])
    chosen = rng.choice(list(strikes), num_faults, p=weights / weights.sum())
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
    strikes: Mapping[str, Strike]
    silence_s: float
    rounds_apart: int
    struck: list[Struck] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agitator")
        self._hands = ThreadPoolExecutor(len(self.envs.worker_pids), "strike")  # One for each worker to be harmed.
        self._deeds: list[Future[None]] = []
        self._watcher = _Watcher(self)

    def __enter__(self) -> Agitator:
        self._watcher.attach()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._hands.shutdown()
        self._watcher.detach()

    @property
    def is_done(self) -> bool:
        """Whether everything on the schedule has happened, and is over."""
        return not self._thread.is_alive() and all(deed.done() for deed in self._deeds)

    def find_mishaps(self) -> list[str]:
        """Return which strikes could not be carried out, and why."""
        errors = [deed.exception() for deed in self._deeds if deed.done()]
        return [f"a strike failed: {error!r}" for error in errors if error is not None]

    def _run(self) -> None:
        began = time.monotonic()
        for incident in self.schedule:
            if self._is_over.wait(max(0.0, began + incident.at_s - time.monotonic())):
                return
            strike = self.strikes[incident.kind]
            while not (reached := self._aim(strike, incident.worker_index)):
                if self._is_over.wait(POLL_S) or self.find_mishaps():
                    return  # After a strike that failed, somebody may be waited for who was never harmed.
            now = time.monotonic()
            target = self._look_at(incident.worker_index)
            hits = [Struck(incident, index, strike.is_fatal, Life.of(target.pids[index]), now) for index in reached]
            self.struck += hits
            self._deeds.append(self._hands.submit(_carry_out, strike, target, hits))
            if strike.is_alone:
                self._deeds[-1].exception()

    def _aim(self, strike: Strike, worker_index: int) -> Collection[int]:
        """Return whom a strike would reach now; nobody if it has to wait."""
        everyone = everybody(target := self._look_at(worker_index))
        # Only of workers that are fit can it be told whom a strike at them reaches.
        concerned = everyone if strike.is_alone else [worker_index]
        if not all(map(self._is_fit, concerned)) or not all(map(self._is_fit, reached := strike.reach(target))):
            return ()
        return reached

    def _look_at(self, worker_index: int) -> Target:
        return Target(worker_index, self.silence_s, self.envs.worker_pids)

    def _is_fit(self, worker_index: int) -> bool:
        return all(
            s.is_over
            and (not s.is_fatal or (s.replaced_at is not None and self.rounds > s.replaced_in + self.rounds_apart))
            for s in self.struck
            if s.worker_index == worker_index
        )


def _carry_out(strike: Strike, target: Target, hits: Sequence[Struck]) -> None:
    try:
        strike.harm(target)
    finally:
        for struck in hits:
            struck.is_over = True


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
            s for s in self._agitator.struck if s.worker_index == member.index and s.is_fatal and s.replaced_at is None
        ]
        for struck in open_cases:
            if "takes over" in record.msg:
                struck.replaced_at, struck.replaced_in = time.monotonic(), self._agitator.rounds
            elif struck.noticed_at is None:
                struck.noticed_at = time.monotonic()
