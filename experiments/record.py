"""The record of one run: a CSV file with a row for every stretch of it, complete or not there at all."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from clusterenv import Rollout
from experiments.tasks import Settings

# own_return, in the first and the last row: of the learner's own policy, evaluated. Of the stretch: episodes that
# finished on the workers, their mean return, mean divergence measured, age of the workers' policies. Of the run so far:
# all else. Pulls are per worker, after the first copy that every rule makes; bytes to and from all workers.
COLUMNS = (
    "rollout",
    "env_steps",
    "own_return",
    "episodes",
    "return",
    "divergence",
    "age",
    "versions",
    "pulls",
    "pulls_diverged",
    "pulls_plateau",
    "pulls_max_lag",
    "bytes_weights",
    "bytes_checks",
    "seconds",
)
NUM_ROWS = 50
Values = NDArray[np.float64]
Curve = Mapping[str, Values]


def partial_path(path: Path) -> Path:
    """Return where a run that is under way keeps its record."""
    return path.with_suffix(".partial")


class Record:
    """Writes a run's record; the file gets its name only when the run is complete.

    Args:
        path: Of the finished record.
        settings: Of the run.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self._num_workers = settings.num_workers
        # At most so many rows, at most one a rollout.
        self._rollouts_per_row = -(-settings.num_rollouts // NUM_ROWS)
        self._num_rollouts = 0
        self._began = time.monotonic()
        self._stretch = Stretch()
        self._stats: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        self._file = partial_path(self._path).open("w", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(COLUMNS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        partial = partial_path(self._path)
        if kind is None:
            partial.replace(self._path)
        else:
            partial.unlink()

    def begin(self, own_return: float) -> None:
        """Note what the learner's own policy returned before it has learned anything."""
        first = {"rollout": 0, "env_steps": 0, "own_return": own_return}
        self._writer.writerow(write_number(first[name]) if name in first else "" for name in COLUMNS)

    def add(self, rollout: Rollout, stats: Mapping[str, Any]) -> None:
        """Note a rollout, and what the run has cost up to it."""
        if self._num_rollouts and self._num_rollouts % self._rollouts_per_row == 0:
            self._write(math.nan)
        self._num_rollouts += 1
        self._stats = stats
        self._stretch.add(rollout, stats)

    def finish(self, own_return: float) -> None:
        """Note what the learner's own policy returned when it had learned all it could."""
        self._write(own_return)

    def _write(self, own_return: float) -> None:
        stats, workers = self._stats, self._num_workers
        row = {
            "rollout": self._num_rollouts,
            "env_steps": stats["env_steps"],
            "own_return": own_return,
            **self._stretch.describe(),
            "versions": stats["updates"],
            "pulls": stats["pulls"] / workers - 1,
            **{name: stats.get(name, 0) / workers for name in COLUMNS if name.startswith("pulls_")},
            "bytes_weights": stats["bytes_weights"],
            "bytes_checks": stats["bytes_checks"],
            "seconds": round(time.monotonic() - self._began, 2),
        }
        self._writer.writerow(write_number(row[name]) for name in COLUMNS)
        self._stretch = Stretch()


class Stretch:
    """What happened since the last row."""

    def __init__(self) -> None:
        self._returns: list[float] = []
        self._divergences: list[float] = []
        self._ages: list[float] = []

    def add(self, rollout: Rollout, stats: Mapping[str, Any]) -> None:
        """Note a rollout."""
        self._returns += rollout.episodes.returns.tolist()
        self._ages.append(float(rollout.ages.mean()))
        if not math.isnan(stats["divergence"]):
            self._divergences.append(stats["divergence"])

    def describe(self) -> dict[str, float]:
        """Return its columns."""
        return {
            "episodes": len(self._returns),
            "return": float(np.mean(self._returns)) if self._returns else math.nan,
            "divergence": float(np.mean(self._divergences)) if self._divergences else math.nan,
            "age": float(np.mean(self._ages)),
        }


def write_number(value: float) -> str:
    """Write whole numbers in full, others with six digits, and nothing for not-a-number."""
    if math.isnan(value):
        return ""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def read_record(path: Path) -> Curve:
    """Read the columns of a finished record; empty cells are not-a-number."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name] or "nan") for row in rows], np.float64) for name in COLUMNS}


def read_steps(path: Path) -> int:
    """Return how many environment steps an unfinished record is at; 0 if it is not there."""
    try:
        last = path.read_text().splitlines()[-1].split(",")
        return int(last[COLUMNS.index("env_steps")])
    except (OSError, IndexError, ValueError):
        return 0  # Not begun, or a line half written: the next look will see it.
