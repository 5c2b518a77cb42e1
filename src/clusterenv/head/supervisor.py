"""Supervisor: decides when to restart, prepare or give up workers. Events and the time in, decisions out; no I/O.

    STARTING --joined--> PREPARING --every stage done--> READY
        ^                    |                             |
        '---- restart ---- LOST <---------- lost ----------'

A worker that the run began without is LATE until it joins. Calls and streams share the same rules.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from clusterenv.config import Faults, Timeouts
from clusterenv.errors import BudgetSpent, ClusterEnvError, LaunchError, WorkerLost
from clusterenv.head.attendance import Attendance
from clusterenv.head.worker import Stage, Worker, WorkerState

log = logging.getLogger(__name__)

_MAX_IN_A_ROW = 3
_USEFUL_ANSWERS = 8  # A worker lost before giving more answers than this, or a rollout, has achieved nothing.
_BACK_OFF_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that was lost, and what became of its environments.

    Attributes:
        worker_index: Which worker.
        env_indices: The environments it hosted; they were recreated and began new episodes.
        reason: How it ended, with the end of its log.
        seeds: What each of these environments was reset with on the new worker.
        recovery_s: How long it took until the new worker was ready.
    """

    worker_index: int
    env_indices: tuple[int, ...]
    reason: str
    seeds: tuple[int, ...]
    recovery_s: float


class Restart(NamedTuple):
    """Tell the launcher to start a worker again."""

    worker: Worker


class Prepare(NamedTuple):
    """Send a worker what it is given in this stage, and call `prepared` when that is done."""

    worker: Worker
    stage: Stage


class GiveUp(NamedTuple):
    """Strike a worker off, and call `lost`."""

    worker: Worker
    reason: str


Action: TypeAlias = Restart | Prepare | GiveUp


class Supervisor:
    """Decides what to do for every worker.

    Attributes:
        losses: All losses so far, in order.
        is_open: Whether the run's spaces are known; until then, workers are only assigned their environments.
        attendance: How many workers were present over time.
    """

    def __init__(self, workers: Sequence[Worker], faults: Faults, timeouts: Timeouts, now: float = 0.0) -> None:
        self.losses: list[Loss] = []
        self.is_open = False
        self.attendance = Attendance(now)
        self._faults = faults
        self._timeouts = timeouts
        self._entropy: int | None = None
        self._num_restarts = 0
        self._num_workers = len(workers)
        self._enough_at = now  # When the run last had as many workers as it needs.
        self._incomplete = dict.fromkeys(workers)  # Those not ready; scanning all workers would be slow.

    @property
    def missing(self) -> list[Worker]:
        """The workers that were lost and whose replacements have not joined yet."""
        return [
            worker for worker in self._incomplete if worker.state is WorkerState.STARTING and worker.lost_at is not None
        ]

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues without some of its workers, and waits for them as long as it takes."""
        return self._faults.min_workers is not None

    def find_overspending(self, now: float) -> BudgetSpent | None:
        """Return the error to raise if the workers have used up `Faults.max_worker_hours`, else None."""
        limit = self._faults.max_worker_hours
        if limit is None or (used := self.attendance.worker_s(now) / 3600) < limit:
            return None
        return BudgetSpent(
            f"The workers of this run have used {used:.3g} worker hours in total, and "
            f"Faults(max_worker_hours={limit:g}) allows no more. They have been ended; {self._num_restarts} had been "
            "started again. Raise max_worker_hours to let it run longer."
        )

    def seed(self, seed: int | None) -> None:
        """Derive the seeds of recreated environments from the run's seed."""
        if seed is not None and seed >= 0:  # Environments themselves reject other seeds, with an error.
            self._entropy = seed

    def begin_without(self, worker: Worker) -> None:
        """Do not wait for a worker that has not joined yet; a lost one is still restarted."""
        if worker.state is WorkerState.STARTING and worker.lost_at is None:
            worker.state = WorkerState.LATE

    def joined(self, worker: Worker, now: float) -> None:
        """Note that a worker has joined."""
        if not worker.has_served:
            worker.seeds = self._fresh_seeds(worker)
        self.attendance.change(1, now)
        worker.state, worker.stage, worker.stage_at, worker.is_asked = WorkerState.PREPARING, Stage.ASSIGN, now, False

    def prepared(self, worker: Worker, now: float) -> None:
        """Note that a worker has completed its stage."""
        worker.is_asked, worker.stage_at = False, now
        if worker.stage < Stage.ADOPT:
            worker.stage = Stage(worker.stage + 1)
            return
        worker.state = WorkerState.READY
        del self._incomplete[worker]
        worker.num_answers = 0
        if worker.lost_at is not None:
            recovery_s = now - worker.lost_at
            self.losses.append(
                Loss(
                    worker_index=worker.index,
                    env_indices=worker.env_indices,
                    reason=worker.loss,
                    seeds=tuple(worker.seeds),
                    recovery_s=recovery_s,
                )
            )
            log.warning("%s, has taken over after %.1f s", worker, recovery_s)
        elif worker.has_served or self.is_open:
            log.info("%s, takes part from now on", worker)
        worker.lost_at, worker.has_served = None, True

    def lost(self, worker: Worker, reason: str, now: float) -> None:
        """Note that a worker is lost, and decide whether to replace it."""
        was_prepared = worker.state is WorkerState.READY
        if worker.state in (WorkerState.PREPARING, WorkerState.READY):
            self.attendance.change(-1, now)
        is_first = not worker.has_served and worker.state is not WorkerState.LATE and worker.lost_at is None
        worker.state = WorkerState.LOST
        self._incomplete[worker] = None
        worker.num_losses += 1
        if worker.lost_at is None:
            worker.lost_at, worker.loss = now, reason
        worker.in_a_row = 1 if was_prepared and worker.num_answers > _USEFUL_ANSWERS else worker.in_a_row + 1
        if is_first and not self.is_open:
            ended = LaunchError(f"Worker {worker.index} {reason.removeprefix('it ')}")
            worker.fatal = lost_error(worker, reason) if worker.incarnation else ended
        elif self._faults.on_loss == "raise":
            worker.fatal = lost_error(worker, reason)
        elif worker.in_a_row > _MAX_IN_A_ROW:
            worker.fatal = lost_error(
                worker, f"{_MAX_IN_A_ROW} replacements in a row were lost, too, the last like this: {reason}"
            )
        elif self._faults.max_restarts is not None and self._num_restarts >= self._faults.max_restarts:
            worker.fatal = lost_error(
                worker,
                f"The restarts that Faults(max_restarts={self._faults.max_restarts}) allows are used up: {reason}",
            )
        else:
            log.warning("%s, was lost and will be replaced: %s", worker, reason)
            self._num_restarts += 1
            worker.seeds = self._fresh_seeds(worker)
            worker.restart_at = now + _BACK_OFF_S * (worker.in_a_row - 1)

    def failed(self, worker: Worker, failure: ClusterEnvError, now: float) -> None:
        """Note that a worker's first preparation failed: a replacement would fail in the same way."""
        self.attendance.change(-1, now)
        worker.state, worker.fatal = WorkerState.LOST, failure

    def advance(self, now: float) -> list[Action]:
        """Return what to do now."""
        actions: list[Action] = []
        if self._num_workers - len(self._incomplete) >= (self._faults.min_workers or self._num_workers):
            self._enough_at = now
        for worker in self._incomplete:
            if worker.state is WorkerState.LOST:
                if worker.fatal is None and now >= worker.restart_at:
                    worker.state, worker.stage_at = WorkerState.STARTING, now
                    actions.append(Restart(worker))
            elif worker.state is WorkerState.STARTING:
                waits_since = max(worker.stage_at, self._enough_at)
                if worker.lost_at is not None and now - waits_since > self._timeouts.join_s:
                    reason = f"its replacement did not join within {self._timeouts.join_s:g} s"
                    actions.append(GiveUp(worker, reason))
            elif worker.state is WorkerState.PREPARING:
                if not worker.is_asked and (self.is_open or worker.stage is Stage.ASSIGN):
                    worker.is_asked, worker.stage_at = True, now
                    actions.append(Prepare(worker, worker.stage))
                elif worker.is_asked and now - max(worker.stage_at, worker.progress_at) > self._limit_of(worker.stage):
                    actions.append(GiveUp(worker, _slow(worker.stage, self._limit_of(worker.stage))))
        return actions

    def _limit_of(self, stage: Stage) -> float:
        return self._timeouts.join_s if stage is Stage.ASSIGN else self._timeouts.call_s

    def _fresh_seeds(self, worker: Worker) -> list[int]:
        words = [self._entropy or 0, worker.index, worker.num_losses]
        sequence = np.random.SeedSequence(words if self._entropy is not None else None)
        # Consecutive, as Gymnasium spreads one seed: native vector environments do not take a list.
        first = int(sequence.generate_state(1)[0]) % (2**31 - worker.num_envs)
        return list(range(first, first + worker.num_envs))


def lost_error(worker: Worker, reason: str) -> WorkerLost:
    """Return the error that tells the user a worker is lost."""
    name = str(worker)
    return WorkerLost(
        f"{name[0].upper()}{name[1:]}, is lost: {reason}",
        worker_index=worker.index,
        env_indices=worker.env_indices,
    )


def _slow(stage: Stage, limit_s: float) -> str:
    if stage is Stage.ASSIGN:
        return f"it did not make its environments within {limit_s:g} s: Timeouts(join_s=...) gives it longer"
    return f"it was not ready within {limit_s:g} s: Timeouts(call_s=...) gives it longer"
