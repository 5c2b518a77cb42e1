"""Evaluation: the table of an agent's episodes, and statistics of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ConfigError

_RESAMPLES = 10_000
_DRAWS_AT_ONCE = 1_000_000


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Evaluation:
    """The requested episodes, each once, in the order requested.

    Attributes:
        returns: The sum of each episode's rewards, `[n]`.
        lengths: The number of steps of each episode.
        seeds: The seed with which each episode's environment was reset.
        terminated: Whether each episode reached a terminal state.
        truncated: Whether each episode was cut short, by its environment or at `max_steps`.
        final_infos: The info of each episode's last step.
        is_repeatable: Whether the agent's random numbers depend only on the episode. If not, another evaluation may
            give a different table, depending on which episodes were played side by side.
        manifest: How the table was made: versions, commit, host, launcher, settings, duration.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    seeds: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_infos: list[dict[str, Any]]
    is_repeatable: bool = True
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.returns)

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """The standard deviation of the returns."""
        return float(self.returns.std())

    @property
    def iqm(self) -> float:
        """The interquartile mean of the returns, as in rliable: the mean over the middle half of the episodes.

        A quarter of them, rounded down, is left out at either end.
        """
        cut = len(self) // 4
        return float(np.sort(self.returns)[cut : len(self) - cut].mean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean return: a percentile bootstrap with a fixed seed."""
        rng = np.random.default_rng(0)
        rows = max(1, _DRAWS_AT_ONCE // len(self))
        means: list[NDArray[np.float64]] = []
        for done in range(0, _RESAMPLES, rows):
            drawn = rng.integers(len(self), size=(min(rows, _RESAMPLES - done), len(self)))
            means.append(self.returns[drawn].mean(axis=1))
        low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
        return float(low), float(high)

    def to_dataframe(self) -> Any:
        """Return the table as a pandas DataFrame, one row per episode.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ConfigError("to_dataframe() needs pandas: pip install pandas.") from error
        return pandas.DataFrame({**self._columns(), "final_info": self.final_infos})

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics, the table without its infos, and the manifest, in a form that JSON can hold."""
        low, high = self.interval
        figures = {"episodes": len(self), "mean": self.mean, "low": low, "high": high, "iqm": self.iqm, "std": self.std}
        table = {name: column.tolist() for name, column in self._columns().items()}
        return {**figures, "is_repeatable": self.is_repeatable, "table": table, "manifest": dict(self.manifest)}

    def __str__(self) -> str:
        low, high = self.interval
        count = len(self)
        ends = [(self.terminated & ~self.truncated, "terminated"), (self.truncated, "truncated")]
        ended = ", ".join(f"{int(flags.sum())} {name}" for flags, name in ends if flags.any())
        lines = [
            f"{count} episode{'' if count == 1 else 's'} of {self.manifest.get('env', 'an environment')}",
            f"  return  {self.mean:.6g}  (95 % interval {low:.6g} to {high:.6g})",
            f"          iqm {self.iqm:.6g}, std {self.std:.6g}, from {self.returns.min():.6g} to "
            f"{self.returns.max():.6g}",
            f"  length  {self.lengths.mean():.6g}, from {self.lengths.min()} to {self.lengths.max()}: {ended}",
        ]
        if count == 1:
            lines[1:3] = [f"  return  {self.mean:.6g}"]
        if not self.is_repeatable:
            lines.append("  another evaluation may differ: episodes share the agent's random numbers")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Evaluation of {len(self)} episodes: mean return {self.mean:.6g}>"

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {
            "seed": self.seeds,
            "return": self.returns,
            "length": self.lengths,
            "terminated": self.terminated,
            "truncated": self.truncated,
        }
