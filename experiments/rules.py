"""The sync rules that are compared, as they are named in files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from clusterenv import AdaptiveSync, EveryUpdate, NeverSync, PeriodicSync, SyncBudget
from clusterenv.policy import SyncRule
from clusterenv.policy.sync import Case, Reason, Verdict
from experiments.tasks import AnySettings, PpoSettings


@dataclass(frozen=True)
class Rule:
    """When workers pull, and what PPO clips against.

    Args:
        kind: every, adaptive (as shipped for the learner), unprotected (adaptive without its protections, for PPO),
            periodic, staggered (periodic, the workers one after another), budget, or never.
        value: The threshold, the period, or the pulls per update of all workers; every and never have none.
        is_plain: Whether the learner is plain PPO, which clips against the policy that made the data.
    """

    kind: str
    value: float | None = None
    is_plain: bool = False

    @property
    def name(self) -> str:
        """A name for files."""
        return ("plain-" if self.is_plain else "") + self.kind + ("" if self.value is None else f"-{self.value:g}")

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        match self.kind:
            case "every":
                label = "every update"
            case "periodic":
                label = f"every {ordinal(self.number)}"
            case "staggered":
                label = f"every {ordinal(self.number)}, staggered"
            case "budget":
                label = f"budget, {self.value:g} pulls per update"
            case "adaptive" | "unprotected":
                label = f"{self.kind}, threshold {self.value:g}"
            case _:
                label = self.kind
        return f"{label}, plain PPO" if self.is_plain else label

    @property
    def number(self) -> int:
        """The period."""
        assert self.value is not None
        return int(self.value)

    def make(self, settings: AnySettings) -> SyncRule:
        """Return what ClusterEnv takes."""
        match self.kind:
            case "every":
                return EveryUpdate()
            case "never":
                return NeverSync()
            case "periodic":
                return PeriodicSync(self.number)
            case "staggered":
                return Staggered(self.number, settings.num_workers)
        assert self.value is not None
        if self.kind == "budget":
            return SyncBudget(pulls_per_update=self.value)
        # Everywhere: what the rule does on one machine here is to be what it does on many.
        if self.kind == "adaptive" and isinstance(settings, PpoSettings):
            return AdaptiveSync(self.value, everywhere=True)
        return AdaptiveSync.off_policy(self.value, everywhere=True)


EVERY = Rule("every")
ADAPTIVE = Rule("adaptive", 0.05)


def read_rule(name: str) -> Rule:
    """Return the rule of a name."""
    is_plain = name.startswith("plain-")
    kind, _, value = name.removeprefix("plain-").partition("-")
    return Rule(kind, float(value) if value else None, is_plain)


@dataclass(frozen=True)
class Staggered:
    """Pull every k-th version, the workers one after another and not all at once.

    Args:
        k: The period.
        num_workers: Of the run.
    """

    k: int
    num_workers: int

    compares: ClassVar[bool] = False

    @property
    def max_lag(self) -> float:
        """No worker falls farther behind."""
        return self.k

    def start(self) -> Self:
        """Return itself: there is nothing to remember."""
        return self

    def judge(self, case: Case) -> Verdict:
        """Let the holders of the first version leave it evenly over the first period; then each keeps its turn."""
        if case.own >= case.newest:
            return Verdict(False, Reason.CURRENT)
        if case.own == 0:
            return Verdict(True, Reason.FIRST)
        if case.lag >= self.k:
            return Verdict(True, Reason.PERIOD)
        num_due = math.floor((case.newest - 1) * self.num_workers / self.k) if case.own == 1 else 0
        num_leaving = case.num_workers - (self.num_workers - num_due)
        return Verdict(True, Reason.PERIOD, num_leaving) if num_leaving > 0 else Verdict(False, Reason.WAITING)


def ordinal(number: int) -> str:
    """Write 1st, 2nd, 3rd, ..."""
    is_teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
