"""What the runs come to: numbers of each run, and of each rule over its seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.record import Curve, write_number
from experiments.rules import EVERY, Rule
from experiments.runner import Run

RUN_NUMBERS = (
    "final_return",
    "final_episodes",
    "mean_return",
    "pulls",
    "updates",
    "bytes_weights",
    "bytes_checks",
    "seconds",
)

# Student's t, 97.5 %, for 1, 2, ... degrees of freedom; beyond the table it is within 8 % of the normal
# distribution's.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL = 1.96

Values = NDArray[np.float64]


def total(curve: Curve, final_share: float) -> dict[str, float]:
    """Return the numbers of a whole run; the final return is that of its last share."""
    returns, episodes = curve["return"], curve["episodes"]
    is_late = (curve["env_steps"] > (1 - final_share) * curve["env_steps"][-1]) & (episodes > 0)
    late = float(np.average(returns[is_late], weights=episodes[is_late])) if is_late.any() else math.nan
    return {
        "final_return": late,
        "final_episodes": float(episodes[is_late].sum()),
        "mean_return": float(fill_gaps(returns).mean()),
        "updates": float(curve["versions"][-1]) - 1,  # The first version is no update.
        **{name: float(curve[name][-1]) for name in ("pulls", "bytes_weights", "bytes_checks", "seconds")},
    }


def fill_gaps(returns: Values) -> Values:
    """Leave out what is before the first finished episode; later, the last return before a gap counts on."""
    filled = returns[np.argmax(~np.isnan(returns)) :].copy()
    for i in range(1, len(filled)):
        if math.isnan(filled[i]):
            filled[i] = filled[i - 1]
    return filled


def spread(values: Values) -> float:
    """Return half the width of the 95 % interval of the mean over seeds; not-a-number for fewer than two seeds."""
    degrees = len(values) - 1
    if degrees < 1:
        return math.nan
    student = STUDENT[degrees - 1] if degrees <= len(STUDENT) else NORMAL
    return float(student * values.std(ddof=1) / math.sqrt(len(values)))


@dataclass(frozen=True)
class Summary:
    """One rule over its seeds; each number is an array with an entry for each seed."""

    rule: Rule
    seeds: tuple[int, ...]
    numbers: Mapping[str, Values]

    def mean(self, name: str) -> float:
        """Return the mean over the seeds."""
        return float(self.numbers[name].mean())

    def describe(self, name: str) -> str:
        """Write mean and spread."""
        return f"{self.mean(name):.1f}{write_spread(spread(self.numbers[name]))}"

    def gap(self, other: Summary, name: str) -> tuple[float, float]:
        """Return by how much it is above another rule, and the spread of that, over the seeds that both have."""
        seeds = sorted(set(self.seeds) & set(other.seeds))
        ours, theirs = ([each.numbers[name][each.seeds.index(seed)] for seed in seeds] for each in (self, other))
        gaps = np.array(ours, np.float64) - np.array(theirs, np.float64)
        return float(gaps.mean()), spread(gaps)


def summarize(curves: Mapping[Run, Curve], final_share: float) -> list[Summary]:
    """Sum up the runs rule by rule, in the order in which rules first occur."""
    totals = {run: total(curve, final_share) for run, curve in curves.items()}
    summaries = []
    for rule in dict.fromkeys(run.rule for run in totals):
        runs = sorted((run for run in totals if run.rule == rule), key=lambda run: run.seed)
        numbers = {name: np.array([totals[run][name] for run in runs], np.float64) for name in RUN_NUMBERS}
        summaries.append(Summary(rule, tuple(run.seed for run in runs), numbers))
    return summaries


def write_runs(path: Path, summaries: Sequence[Summary]) -> None:
    """Write a row for every run."""
    rows = [
        [summary.rule.name, str(seed), *(write_number(summary.numbers[name][i]) for name in RUN_NUMBERS)]
        for summary in summaries
        for i, seed in enumerate(summary.seeds)
    ]
    write_csv(path, ["rule", "seed", *RUN_NUMBERS], rows)


def write_summary(path: Path, summaries: Sequence[Summary]) -> None:
    """Write a row for every rule: means over the seeds, and their 95 % spread in columns of their own."""
    header = ["rule", "seeds", *(f"{name}{part}" for name in RUN_NUMBERS for part in ("", "_spread"))]
    rows = [
        [summary.rule.name, str(len(summary.seeds))]
        + [write_number(value) for name in RUN_NUMBERS for value in (summary.mean(name), spread(summary.numbers[name]))]
        for summary in summaries
    ]
    write_csv(path, header, rows)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def to_table(summaries: Sequence[Summary]) -> str:
    """Lay the summary out as a Markdown table, with what each rule gains or loses against pulling every update."""
    every = next((summary for summary in summaries if summary.rule == EVERY), None)
    lines = [
        "| rule | seeds | final return | against every update | return, whole run | pulls | fewer pulls "
        "| weights, MB | checks, MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in summaries:
        gap, ratio = "", ""
        if every is not None and each is not every:
            difference, half = each.gap(every, "final_return")
            gap = f"{difference:+.1f}{write_spread(half)}"
            ratio = f"{every.mean('pulls') / each.mean('pulls'):.1f} times" if each.mean("pulls") else "none"
        lines.append(
            f"| {each.rule.label} | {len(each.seeds)} | {each.describe('final_return')} | {gap} "
            f"| {each.describe('mean_return')} | {each.mean('pulls'):.1f} of {each.mean('updates'):.0f} | {ratio} "
            f"| {each.mean('bytes_weights') / 1e6:.2f} | {each.mean('bytes_checks') / 1e6:.3f} |"
        )
    return "\n".join(lines)


def write_spread(half: float) -> str:
    """Write half the width of an interval, if it is known."""
    return "" if math.isnan(half) else f" ± {half:.1f}"


def match_period(summary: Summary) -> int:
    """Return the period with which a fixed interval pulls about as often as this rule did."""
    return max(1, round(summary.mean("updates") / max(1.0, summary.mean("pulls"))))
