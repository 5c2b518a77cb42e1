"""Pulls: decides by the sync rule which workers pull the newest version, and counts them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from clusterenv.head.backend import Backend
from clusterenv.head.holdings import Holdings
from clusterenv.head.probing import Probing
from clusterenv.head.stats import Stats
from clusterenv.head.worker import Version, Worker
from clusterenv.policy.sync import Case, Reason, SyncRule, Verdict

log = logging.getLogger(__name__)

_LATE = Verdict(True, Reason.LAG)


class Pulls:
    """Applies a sync rule. Workers that hold the same version are judged together."""

    def __init__(self, rule: SyncRule, backend: Backend, holdings: Holdings, probing: Probing, stats: Stats) -> None:
        self._rule = rule
        self._tracker = rule.start()
        self._backend = backend
        self._workers = backend.workers
        self._holdings = holdings
        self._probing = probing
        self._stats = stats
        self._counted = 0  # The newest version up to which pulls of all workers were counted as needed.
        self._warned: set[Reason] = set()

    @property
    def max_lag(self) -> float:
        """How many versions a worker may be behind, by the rule."""
        return self._rule.max_lag

    def begin(self) -> None:
        """Note that all ready workers were given a policy of another structure."""
        self._tracker = self._rule.start()
        self.count_version()
        for worker in self._workers:
            if worker.is_ready:
                self.note(worker, Reason.FIRST)

    def judge(self, can_take: Callable[[Worker], bool] = lambda worker: True) -> dict[Worker, Reason]:
        """Judge every held version that has not been judged against the newest yet.

        A version without any reports was pulled only recently: it is judged once there is a report, unless its holders
        have fallen behind as far as the rule allows. If the rule sets no limit, versions whose holders report nothing
        are judged after all others.

        Args:
            can_take: Whether a ready worker can be sent weights.

        Returns:
            The workers that should pull the newest version, and why. Pass them to `note_all` once they do.
        """
        newest = self._holdings.newest
        behind = [held for held in self._holdings.versions.values() if held.number < newest > held.judged]
        pulls: dict[Worker, Reason] = {}
        for held, takers, verdict in self._judge_in_order(behind, can_take):
            held.judged = newest
            if verdict.pulls:
                takers = takers[: verdict.at_most]
                pulls |= dict.fromkeys(takers, verdict.reason)
                if takers and held.compared == newest:  # The smallest divergence comes last.
                    self._stats.threshold = held.divergence
        self._stats.age = self._holdings.age
        return pulls

    def judge_again(self, worker: Worker) -> None:
        """Judge a worker's version once more, since the worker could not be sent weights last time."""
        if worker.policy.given:
            worker.policy.given[-1].judged = 0

    def can_judge(self, held: Version) -> bool:
        """Whether a version that could not be judged before, for lack of rows, can be judged now."""
        return held.number < self._holdings.newest > held.judged and bool(held.num_rows) and bool(held.holders)

    def find_exempt(self) -> dict[Worker, Reason]:
        """Return the workers that pull every version because that is faster than judging them."""
        behind = self._holdings.farther_behind(0)
        return {worker: Reason.SHARED for worker in behind if worker.is_ready and self._probing.is_exempt(worker)}

    def find_late(self, lag: float) -> dict[Worker, Reason]:
        """Return the workers that are too far behind for their rollouts to be used."""
        return {worker: Reason.LAG for worker in self._holdings.farther_behind(lag) if worker.is_ready}

    def note_all(self, wanted: Mapping[Worker, Reason]) -> set[Worker]:
        """Note and count that workers are given the newest version; returns the workers."""
        for worker, reason in wanted.items():
            self.note(worker, reason)
        self._stats.age = self._holdings.age
        return set(wanted)

    def note(self, worker: Worker, reason: Reason, version: int | None = None) -> None:
        """Note and count that a worker is given a version, by default the newest."""
        self._holdings.give(worker, self._holdings.newest if version is None else version)
        self._stats.pulls += 1
        self._stats.reasons[reason] += 1
        worker.policy.ahead -= 1
        if worker.policy.ahead < 0:  # Whoever pulls every version makes this pull too.
            self._note_needed(1)

    def count_version(self) -> None:
        """Count the pulls that the newest version would cost if all workers pulled every version."""
        if self._counted < self._holdings.newest:
            self._counted = self._holdings.newest
            self._note_needed(sum(self._count_needed(worker, 1) for worker in self._workers))

    def count_newcomer(self, worker: Worker) -> None:
        """Count the pull that a replacement needs under any rule."""
        worker.policy.counted = self._holdings.newest
        self._note_needed(self._count_needed(worker, 1))

    def count_rollout(self, worker: Worker, at_most: int) -> None:
        """Count the pulls a worker would have made since its last rollout if it pulled every version it could."""
        since = self._holdings.newest - max(worker.policy.counted, self._counted)
        worker.policy.counted = self._holdings.newest
        self._note_needed(self._count_needed(worker, min(max(since, 0), at_most)))

    def _count_needed(self, worker: Worker, num_pulls: int) -> int:
        """Return how many of a worker's needed pulls were not counted when it made them."""
        ahead = worker.policy.ahead
        further = max(0, num_pulls + min(ahead, 0))
        worker.policy.ahead = max(ahead, 0) + further
        return further

    def _note_needed(self, num_pulls: int) -> None:
        self._stats.note_needed(num_pulls, round(num_pulls * self._pull_bytes()))

    def _pull_bytes(self) -> float:
        """Return the mean bytes sent per pulling worker: less than the weights if some share a copy."""
        size_bytes = self._holdings.spec.size_bytes
        return self._backend.count_copies(size_bytes) / len(self._workers) * size_bytes

    def _judge_in_order(
        self, behind: Sequence[Version], can_take: Callable[[Worker], bool]
    ) -> Iterator[tuple[Version, list[Worker], Verdict]]:
        """Apply the rule to versions, most diverged first; leave out those that cannot be judged yet.

        Yields:
            A version, the holders of it that can be sent weights, and the verdict.
        """
        newest = self._holdings.newest
        found: list[tuple[float | None, Version]] = []
        late: list[Version] = []
        silent: list[Version] = []
        if not self._probing.can_compare:
            found = [(None, held) for held in behind]
        else:
            found = [(self._probing.divergence_of(held), held) for held in behind if held.num_rows]
            late = [held for held in behind if not held.num_rows and newest - held.number >= self.max_lag]
            if math.isinf(self.max_lag):
                silent = [held for held in behind if not held.num_rows and held.is_silent]
            if found:  # The mean over workers.
                weights = [max(1, len(held.holders)) for _, held in found]
                self._stats.divergence = float(np.average([divergence for divergence, _ in found], weights=weights))
        found.sort(key=lambda each: (-(each[0] or 0.0), each[1].number))
        found += [(None, held) for held in sorted(silent, key=lambda held: held.number)]
        now_s, num_all, pull_bytes = time.monotonic(), len(self._workers), round(self._pull_bytes())
        for divergence, held in found:
            takers = [worker for worker in held.holders if worker.is_ready and can_take(worker)]
            known = held.number, newest, divergence, len(takers)
            verdict = self._tracker.judge(Case(*known, num_all=num_all, pull_bytes=pull_bytes, now_s=now_s))
            if verdict.advice is not None and verdict.reason not in self._warned and held not in silent:
                self._warned.add(verdict.reason)
                log.warning("%s", verdict.advice)
            yield held, takers, verdict
        for held in late:
            yield held, [worker for worker in held.holders if worker.is_ready and can_take(worker)], _LATE
