"""The sync rules that are compared, as they are named on the command line and in files."""

from __future__ import annotations

from dataclasses import dataclass

from clusterenv import AdaptiveSync, EveryUpdate, PeriodicSync
from clusterenv.policy import SyncRule
from experiments.settings import Settings

UNBOUNDED = 10**6  # Versions: more than any run makes.


@dataclass(frozen=True)
class Rule:
    """When workers pull, and what the learner clips against.

    Args:
        threshold: Pull when diverged by more than this; None for every version.
        period: Pull every `period`-th version; None for every one.
        is_plain: Whether the learner is plain PPO, which clips against the policy that made the data.
        is_protected: Whether AdaptiveSync also pulls when the divergence stops growing, or at a lag.
    """

    threshold: float | None = None
    period: int | None = None
    is_plain: bool = False
    is_protected: bool = True

    @property
    def kind(self) -> str:
        """The rules that look alike in figures."""
        if self.threshold is not None and self.is_plain:
            return "plain" if self.is_protected else "unprotected"
        return "adaptive" if self.threshold is not None else "every" if self.period is None else "periodic"

    @property
    def name(self) -> str:
        """A name for files."""
        if self.threshold is not None:
            return f"{self.kind}-{self.threshold:g}"
        return "every" if self.period is None else f"periodic-{self.period}"

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        if self.threshold is not None:
            suffix = {"plain": ", plain PPO", "unprotected": " without protections, plain PPO"}.get(self.kind, "")
            return f"adaptive, threshold {self.threshold:g}{suffix}"
        return "every update" if self.period is None else f"periodic, every {ordinal(self.period)}"

    def make(self, settings: Settings) -> SyncRule:
        """Return what ClusterEnv takes."""
        if self.threshold is not None:
            if not self.is_protected:
                return AdaptiveSync(threshold=self.threshold, max_lag=UNBOUNDED, plateau=None)
            return AdaptiveSync(threshold=self.threshold, max_lag=settings.max_lag, plateau=settings.plateau)
        return EveryUpdate() if self.period is None else PeriodicSync(self.period)


EVERY = Rule()


def read_rule(name: str) -> Rule:
    """Return the rule of a name."""
    kind, _, number = name.partition("-")
    if kind in ("adaptive", "plain", "unprotected"):
        return Rule(float(number), is_plain=kind != "adaptive", is_protected=kind != "unprotected")
    return Rule(period=int(number)) if kind == "periodic" else EVERY


def ordinal(number: int) -> str:
    """Write 1st, 2nd, 3rd, ..."""
    is_teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
