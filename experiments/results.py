"""What the runs come to: numbers of each run, and comparisons of rules over the seeds that both have."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.plan import Match, Run
from experiments.record import Curve, Values, write_number
from experiments.rules import EVERY, Rule
from experiments.statistics import Interval, interval_of, pool
from experiments.tasks import AnySettings

FINAL_SHARE = 0.2  # The workers' final return is that of the episodes that finished in this last share of a run.
PRIMARY = "own_final"
OUTCOMES = (PRIMARY, "workers_final", "workers_whole")
NUMBERS = (*OUTCOMES, "own_initial", "pulls", "updates", "bytes_weights", "bytes_checks", "bytes", "seconds")


def total(curve: Curve) -> dict[str, float]:
    """Return the numbers of a whole run."""
    returns, episodes = curve["return"], curve["episodes"]
    is_late = (curve["env_steps"] > (1 - FINAL_SHARE) * curve["env_steps"][-1]) & (episodes > 0)
    late = float(np.average(returns[is_late], weights=episodes[is_late])) if is_late.any() else math.nan
    return {
        "own_initial": float(curve["own_return"][0]),
        PRIMARY: float(curve["own_return"][-1]),
        "workers_final": late,
        "workers_whole": float(fill_gaps(returns).mean()),
        "updates": float(curve["versions"][-1]) - 1,  # The first version is no update.
        "bytes": float(curve["bytes_weights"][-1] + curve["bytes_checks"][-1]),
        **{name: float(curve[name][-1]) for name in ("pulls", "bytes_weights", "bytes_checks", "seconds")},
    }


def fill_gaps(returns: Values) -> Values:
    """Leave out what is before the first finished episode; later, the last return before a gap counts on."""
    filled = returns[np.argmax(~np.isnan(returns)) :].copy()
    for i in range(1, len(filled)):
        if math.isnan(filled[i]):
            filled[i] = filled[i - 1]
    return filled


@dataclass(frozen=True)
class Results:
    """All runs that are on record, the pilots aside.

    Args:
        tasks: What was learned.
        matches: What the pilots set.
        totals: The numbers of each run.
    """

    tasks: Mapping[str, AnySettings]
    matches: Mapping[str, Match]
    totals: Mapping[Run, Mapping[str, float]]

    def seeds(self, task: str, rule: Rule) -> list[int]:
        """Return the seeds that a rule has been run with."""
        return sorted(run.seed for run in self.totals if (run.task, run.rule) == (task, rule))

    def rules(self, task: str) -> list[Rule]:
        """Return the rules that have been run, in the order of the plan."""
        return list(dict.fromkeys(run.rule for run in self.totals if run.task == task))

    def values(self, task: str, rule: Rule, name: str) -> Values:
        """Return a number for each seed."""
        return np.array([self.totals[Run(task, rule, seed)][name] for seed in self.seeds(task, rule)], np.float64)

    def differences(self, task: str, rule: Rule, against: Rule, name: str) -> Values:
        """Return by how much a rule is above another, seed by seed."""
        seeds = [seed for seed in self.seeds(task, rule) if seed in self.seeds(task, against)]
        ours, theirs = (
            np.array([self.totals[Run(task, each, seed)][name] for seed in seeds], np.float64)
            for each in (rule, against)
        )
        return ours - theirs

    def gains(self, task: str) -> Values:
        """Return what the learner gained with every update, seed by seed."""
        return self.values(task, EVERY, PRIMARY) - self.values(task, EVERY, "own_initial")

    def range_of(self, task: str) -> float:
        """Return what a task's differences are measured by; not-a-number if every update did not learn it."""
        gains = self.gains(task)
        if not len(gains):
            return math.nan
        gained = interval_of(gains)
        lowest = gained.mean if math.isnan(gained.half) else gained.low
        return gained.mean if lowest > 0 else math.nan

    def bytes_share(self, task: str, rule: Rule) -> float:
        """Return what a rule sends, as a share of what every update sends; the means over their seeds."""
        ours, every = self.values(task, rule, "bytes"), self.values(task, EVERY, "bytes")
        return float(ours.mean() / every.mean()) if len(ours) and len(every) else math.nan

    def pooled(self, pairs: Mapping[str, tuple[Rule, Rule]], name: str) -> tuple[Interval, list[str]]:
        """Pool one rule's differences from another over tasks, in ranges; returns also the tasks that count.

        Args:
            pairs: For each task a rule, and what it is compared with.
            name: The outcome.
        """
        differences = {task: self.differences(task, *pair, name) for task, pair in pairs.items()}
        counted = [task for task in pairs if len(differences[task]) and self.range_of(task) > 0]
        return pool([differences[task] / self.range_of(task) for task in counted]), counted


def write_runs(path: Path, results: Results) -> None:
    """Write a row for every run."""
    rows = [
        [run.task, run.rule.name, str(run.seed), *(write_number(numbers[name]) for name in NUMBERS)]
        for run, numbers in results.totals.items()
    ]
    write_csv(path, ["task", "rule", "seed", *NUMBERS], rows)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
