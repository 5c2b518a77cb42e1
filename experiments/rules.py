"""The sync rules that are compared, as they are named on the command line and in files."""

from __future__ import annotations

from dataclasses import dataclass

from clusterenv import AdaptiveSync, EveryUpdate, PeriodicSync
from clusterenv.policy import SyncRule
from experiments.settings import Settings


@dataclass(frozen=True)
class Rule:
    """When workers pull: every version, every `period`-th, or when diverged by more than `threshold`."""

    threshold: float | None = None
    period: int | None = None

    @property
    def name(self) -> str:
        """A name for files."""
        if self.threshold is not None:
            return f"adaptive-{self.threshold:g}"
        return "every" if self.period is None else f"periodic-{self.period}"

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        if self.threshold is not None:
            return f"adaptive, threshold {self.threshold:g}"
        return "every update" if self.period is None else f"periodic, every {ordinal(self.period)}"

    def make(self, settings: Settings) -> SyncRule:
        """Return what ClusterEnv takes."""
        if self.threshold is not None:
            return AdaptiveSync(threshold=self.threshold, max_lag=settings.max_lag, plateau=settings.plateau)
        return EveryUpdate() if self.period is None else PeriodicSync(self.period)


EVERY = Rule()


def read_rule(name: str) -> Rule:
    """Return the rule of a name."""
    kind, _, number = name.partition("-")
    if kind == "adaptive":
        return Rule(threshold=float(number))
    return Rule(period=int(number)) if kind == "periodic" else EVERY


def ordinal(number: int) -> str:
    """Write 1st, 2nd, 3rd, ..."""
    is_teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
