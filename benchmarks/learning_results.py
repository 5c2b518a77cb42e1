"""The results of the learning benchmark: kept in CSV files run by run, summarized by rule, held against the targets."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.training import RULES

# Two standard errors of a difference: about one chance in twenty to call noise a difference.
NOISE = 2.0
FEWER_PULLS = 5.0
RUN_NUMBERS = ("updates", "pulls", "late_return", "late_episodes", "bytes_weights", "bytes_sketches", "seconds")
CURVE_NUMBERS = ("update", "env_steps", "episodes", "return", "age", "divergence", "pulls")
KEY_FIELDS = ("rule", "seed", "steps", "period", "settings")


class Key(NamedTuple):
    """What makes a run the same run."""

    rule: str
    seed: int
    steps: int
    period: int | None = None

    @property
    def name(self) -> str:
        """A name for files and messages."""
        return f"{self.rule}{'' if self.period is None else f'-{self.period}'}-seed{self.seed}-{self.steps}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One rule over its seeds.

    Args:
        returns: Mean return over the last tenth, one per seed.
        areas: Mean over all updates of the return of the episodes that finished then, one per seed: the area under
            the learning curve.
        pulls: Per worker after the first copy, mean over the seeds.
        updates: How many versions were offered to the workers after the first.
    """

    rule: str
    keys: Sequence[Key]
    returns: NDArray[np.float64]
    areas: NDArray[np.float64]
    pulls: float
    updates: float
    bytes_sent: float

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        period = self.keys[0].period
        return RULES[self.rule].label.replace("PeriodicSync", f"PeriodicSync({period})")


class Results:
    """Finished runs, on disk and here.

    Args:
        directory: Where the files are.
        stem: How their names begin.
        settings: Of the runs of today; runs with other settings stay in the files but count for nothing.
    """

    def __init__(self, directory: Path, stem: str, settings: str) -> None:
        self._directory = directory
        self._stem = stem
        self._settings = settings
        self._runs: dict[tuple[Key, str], dict[str, Any]] = {}

    def __contains__(self, key: Key) -> bool:
        return (key, self._settings) in self._runs

    def path(self, ending: str) -> Path:
        """Return the path of one of the files."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / f"{self._stem}{ending}"

    def read(self) -> None:
        """Read what an earlier benchmark left."""
        if not (self.path(".csv").exists() and self.path("-curves.csv").exists()):
            return
        for key, row in read_rows(self.path(".csv")):
            self._runs[key] = {**{name: float(row[name]) for name in RUN_NUMBERS}, "curve": []}
        for key, row in read_rows(self.path("-curves.csv")):
            if key in self._runs:
                point = {name: float(row[name]) if row[name] else None for name in CURVE_NUMBERS}
                self._runs[key]["curve"].append(point)

    def add(self, key: Key, run: Mapping[str, Any]) -> None:
        """Add a finished run, on disk too."""
        self._runs[key, self._settings] = dict(run)
        # The curves first: a run without a curve would be taken for finished.
        write_rows(
            self.path("-curves.csv"),
            CURVE_NUMBERS,
            ((each, point) for each, run in self._runs.items() for point in run["curve"]),
        )
        write_rows(self.path(".csv"), RUN_NUMBERS, ((each, run) for each, run in self._runs.items()))

    def summarize(self, rules: Sequence[str], seeds: Sequence[int], steps: int) -> list[Summary]:
        """Summarize the runs of these rules and seeds; of several periods the one that was run last."""
        return [summary for rule in rules if (summary := self._summarize(rule, seeds, steps)) is not None]

    def curves(self, keys: Sequence[Key], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the environment steps `[updates]` and one number of every update `[seeds, updates]`."""
        runs = [self._runs[key, self._settings]["curve"] for key in keys]
        values = [[math.nan if point[name] is None else point[name] for point in curve] for curve in runs]
        return np.array([point["env_steps"] for point in runs[0]], np.float64), np.array(values, np.float64)

    def write_report(self, markdown: str) -> list[Path]:
        """Write the tables; returns all files but the figure."""
        self.path(".md").write_text(markdown)
        return [self.path(".md"), self.path(".csv"), self.path("-curves.csv")]

    def _summarize(self, rule: str, seeds: Sequence[int], steps: int) -> Summary | None:
        found = [
            key
            for key, settings in self._runs
            if settings == self._settings and key.rule == rule and key.steps == steps and key.seed in seeds
        ]
        keys = sorted(key for key in found if key.period == found[-1].period)
        if not keys:
            return None
        runs = [self._runs[key, self._settings] for key in keys]
        return Summary(
            rule=rule,
            keys=keys,
            returns=np.array([run["late_return"] for run in runs], np.float64),
            areas=np.array([measure_area(run["curve"]) for run in runs], np.float64),
            pulls=float(np.mean([run["pulls"] for run in runs])),
            updates=float(runs[0]["updates"]),
            bytes_sent=float(np.mean([run["bytes_weights"] + run["bytes_sketches"] for run in runs])),
        )


def measure_area(curve: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean over the updates; where no episode finished, the last return before that still counts."""
    returns: list[float] = []
    for point in curve:
        if point["return"] is not None:
            returns.append(point["return"])
        elif returns:
            returns.append(returns[-1])
    return float(np.mean(returns)) if returns else math.nan


def to_markdown(summaries: Sequence[Summary], task: str, steps: int, notes: Sequence[str]) -> str:
    """Lay out the table and the verdicts."""
    lines = [
        "# Learning with fewer pulls",
        "",
        f"{task}, {steps} environment steps. Return: of finished episodes, as the workers' own (possibly old) policies "
        "got it, mean over the seeds with its standard error; *late*: in the last tenth of the run, *whole run*: mean "
        "over all updates, the area under the learning curve. Pulls: per worker after the first copy that every rule "
        "makes. Made by `python -m benchmarks.learning`.",
        "",
        "| rule | late return | each seed | return, whole run | each seed | pulls | kB for weights and sketches |",
        "|---|---:|---|---:|---|---:|---:|",
    ]
    lines += [
        f"| {each.label} | {describe(each.returns)} | {describe(each.areas)} "
        f"| {each.pulls:.1f} of {each.updates:.0f} | {each.bytes_sent / 1000:.0f} |"
        for each in summaries
    ]
    verdicts = list(judge({each.rule: each for each in summaries}))
    if verdicts:
        lines += ["", "| target | measured | |", "|---|---|---|"]
        lines += [f"| {claim} | {measured} | {'met' if holds else 'MISSED'} |" for claim, measured, holds in verdicts]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def describe(values: NDArray[np.float64]) -> str:
    """Fill two cells: the mean with its standard error, and the values."""
    return f"{values.mean():.0f} ± {standard_error(values):.0f} | {', '.join(f'{value:.0f}' for value in values)}"


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean; not-a-number with a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def judge(by_rule: Mapping[str, Summary]) -> Iterator[tuple[str, str, bool]]:
    """Hold the results against the targets: the claim, what was measured, and whether it holds.

    Differences are held against `NOISE` standard errors of the difference; without an error (one seed) nothing that
    depends on it holds.
    """
    every, adaptive = by_rule.get("every"), by_rule.get("adaptive")
    if every and adaptive:
        for when, one, other in pair(adaptive, every):
            gap, error = compare(one, other)
            claim = f"AdaptiveSync's return is within noise of EveryUpdate's, {when}"
            yield claim, f"{gap:+.0f} ± {error:.0f}", gap >= -NOISE * error
        ratio = every.pulls / adaptive.pulls if adaptive.pulls else math.inf
        yield f"at least {FEWER_PULLS:g} times fewer pulls", f"{ratio:.1f} times", ratio >= FEWER_PULLS
    for rule in ("periodic", "periodic-fewer"):
        if adaptive and (periodic := by_rule.get(rule)):
            for when, one, other in pair(adaptive, periodic):
                gap, error = compare(one, other)
                claim = f"AdaptiveSync's return is clearly above PeriodicSync({periodic.keys[0].period})'s, {when}"
                yield claim, f"{gap:+.0f} ± {error:.0f}", gap > NOISE * error
    plain, trap = by_rule.get("adaptive-plain"), by_rule.get("trap")
    if plain and trap:
        gap, error = compare(plain.returns, trap.returns)
        yield (
            "plain PPO with AdaptiveSync does not fall into the trap",
            f"{gap:+.0f} ± {error:.0f}",
            gap > NOISE * error,
        )


def pair(one: Summary, other: Summary) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.float64]]]:
    """List what two rules are compared by."""
    yield "late", one.returns, other.returns
    yield "whole run", one.areas, other.areas


def compare(one: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Return the difference of the means, and its standard error."""
    return float(one.mean() - other.mean()), math.hypot(standard_error(one), standard_error(other))


def read_rows(path: Path) -> Iterator[tuple[tuple[Key, str], dict[str, str]]]:
    """Read a CSV file whose rows begin with a key."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            period = int(row["period"]) if row["period"] else None
            yield (Key(row["rule"], int(row["seed"]), int(row["steps"]), period), row["settings"]), row


def write_rows(path: Path, names: Sequence[str], rows: Iterator[tuple[tuple[Key, str], Mapping[str, Any]]]) -> None:
    """Replace a CSV file in one go, so that an interruption leaves the old one or the new one."""
    partial = path.with_suffix(".tmp")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*KEY_FIELDS, *names))
        for (key, settings), numbers in rows:
            values = ("" if numbers[name] is None else f"{numbers[name]:.6g}" for name in names)
            writer.writerow((*key, settings, *values))
    partial.replace(path)
