"""When a worker pulls the learner's newest weights.

A rule is a frozen config; `start` makes the tracker that holds one worker's state. A tracker is given what is known and
returns a verdict, without I/O or a clock. Versions are numbered from 1; a worker without weights has version 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol

from clusterenv.errors import ConfigError

# As a fraction of the threshold. A divergence below this is negligible, and how it changes is noise.
_NEGLIGIBLE = 0.05


class Reason(Enum):
    """Why a worker pulls, or does not. The values are the names used in statistics."""

    CURRENT = "current"
    BELOW = "below_threshold"
    WAITING = "waiting"
    FIRST = "first"
    UPDATE = "every_update"
    PERIOD = "period"
    DIVERGED = "diverged"
    PLATEAU = "plateau"
    LAG = "max_lag"
    UNMEASURED = "unmeasured"


class Verdict(NamedTuple):
    """Whether to pull, and why."""

    pulls: bool
    reason: Reason

    @property
    def advice(self) -> str | None:
        """What to tell the user, once, when a worker pulls for this reason; None if nothing is amiss."""
        return _ADVICE.get(self.reason)


class Tracker(Protocol):
    """A rule applied to one worker."""

    def judge(self, own: int, newest: int, divergence: float | None = None) -> Verdict:
        """Decide whether to pull `newest`.

        Args:
            own: The version the worker holds; 0 if none.
            newest: The newest version.
            divergence: Mean KL(own || newest) over the probes, if it was measured between exactly these two versions.
        """


class SyncRule(Protocol):
    """When workers pull new weights."""

    @property
    def needs_sketch(self) -> bool:
        """Whether the head must send sketches for this rule."""

    @property
    def max_lag(self) -> float:
        """How many versions behind a worker may fall before it must pull; infinite if it need not."""

    def start(self) -> Tracker:
        """Return the tracker for one worker."""


@dataclass(frozen=True)
class AdaptiveSync:
    """Pull when the worker's policy has diverged from the newest one.

    Two protections pull even below the threshold. A learner that clips its updates against the policy that made the
    data (plain PPO) is held near that policy: with stale workers the divergence rises, then stays where the clipping
    holds it, below the threshold, and learning stops. `plateau` detects the end of the rise; `max_lag` bounds what it
    misses. If a worker has pulled above the threshold several times in a row, its learner is clearly not held back, so
    a pause is not the trap, and the plateau must last that many versions.

    Attributes:
        threshold: Pull above this mean KL per state, in nats.
        max_lag: Pull when this many versions behind, whatever the divergence.
        plateau: The divergence counts as no longer growing if, from the version measured last to the newest, it grew
            by less than `plateau` times its average growth per version since the last pull. Pull when that happens;
            after n pulls above the threshold in a row, when it happens at n versions in a row. With 0 it must shrink;
            None switches this off.
    """

    threshold: float = 0.05
    max_lag: int = field(default=20, kw_only=True)
    plateau: float | None = field(default=0.5, kw_only=True)

    needs_sketch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ConfigError(f"AdaptiveSync.threshold must be a positive number of nats, got {self.threshold}.")
        if self.max_lag < 1:
            raise ConfigError(f"AdaptiveSync.max_lag must be at least 1 version, got {self.max_lag}.")
        if self.plateau is not None and not 0 <= self.plateau < 1:
            raise ConfigError(
                f"AdaptiveSync.plateau must be at least 0 and less than 1, got {self.plateau}: steady growth is "
                "1 times its own average. None switches it off."
            )

    def start(self) -> Tracker:
        return _AdaptiveTracker(self)


class _AdaptiveTracker:
    def __init__(self, rule: AdaptiveSync) -> None:
        self._rule = rule
        self._own = 0
        self._version = 0  # The version measured last, and the divergence then.
        self._divergence = 0.0
        self._stalls = 0  # Consecutive versions, up to the last, at which the divergence had stopped growing.
        self._crossings = 0  # Pulls above the threshold since the last one below it.
        self._has_crossed = False  # Whether the weights of such a pull have yet to arrive.

    def judge(self, own: int, newest: int, divergence: float | None = None) -> Verdict:
        if basic := _judge_versions(own, newest):
            return basic
        if own != self._own:  # A pull has arrived; a version does not diverge from itself.
            self._crossings += self._has_crossed
            self._own, self._version, self._divergence, self._stalls, self._has_crossed = own, own, 0.0, 0, False
        if divergence is None:
            return Verdict(True, Reason.UNMEASURED)
        if not divergence <= self._rule.threshold:  # NaN pulls too.
            self._has_crossed = True
            return Verdict(True, Reason.DIVERGED)
        if newest > self._version:  # Measuring the same version again, on other probes, says nothing about growth.
            self._stalls = self._stalls + 1 if self._has_stopped_growing(newest, divergence) else 0
            self._version, self._divergence = newest, divergence
        if self._stalls >= max(1, self._crossings):
            return self._pull_below(Reason.PLATEAU)
        if newest - own >= self._rule.max_lag:
            return self._pull_below(Reason.LAG)
        return Verdict(False, Reason.BELOW)

    def _pull_below(self, reason: Reason) -> Verdict:
        self._crossings = 0
        return Verdict(True, reason)

    def _has_stopped_growing(self, newest: int, divergence: float) -> bool:
        if self._rule.plateau is None or divergence < _NEGLIGIBLE * self._rule.threshold:
            return False
        if self._version <= self._own:
            return False  # The first version after a pull has nothing to compare with.
        growth = (divergence - self._divergence) / (newest - self._version)
        average = self._divergence / (self._version - self._own)
        return growth < self._rule.plateau * average


@dataclass(frozen=True, kw_only=True)
class EveryUpdate:
    """Pull every new version."""

    needs_sketch: ClassVar[bool] = False
    max_lag: ClassVar[float] = 1

    def start(self) -> Tracker:
        return _LagTracker(self.max_lag, Reason.UPDATE)


@dataclass(frozen=True)
class PeriodicSync:
    """Pull every k-th version.

    Attributes:
        k: Pull when this many versions behind.
    """

    k: int

    needs_sketch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"PeriodicSync.k must be at least 1 version, got {self.k}.")

    @property
    def max_lag(self) -> float:
        return self.k

    def start(self) -> Tracker:
        return _LagTracker(self.max_lag, Reason.PERIOD)


@dataclass(frozen=True, kw_only=True)
class NeverSync:
    """Pull once, at the start, and then keep those weights."""

    needs_sketch: ClassVar[bool] = False
    max_lag: ClassVar[float] = math.inf

    def start(self) -> Tracker:
        return _LagTracker(self.max_lag, Reason.PERIOD)


class _LagTracker:
    def __init__(self, lag: float, reason: Reason) -> None:
        self._lag = lag
        self._reason = reason

    def judge(self, own: int, newest: int, divergence: float | None = None) -> Verdict:
        if basic := _judge_versions(own, newest):
            return basic
        if newest - own >= self._lag:
            return Verdict(True, self._reason)
        return Verdict(False, Reason.WAITING)


def _judge_versions(own: int, newest: int) -> Verdict | None:
    """Settle what every rule agrees on: a worker without weights pulls, one with the newest does not."""
    if own >= newest:
        return Verdict(False, Reason.CURRENT)
    if own == 0:
        return Verdict(True, Reason.FIRST)
    return None


_REMEDY = (
    "The usual cause is a learner that clips its updates against the policy that made the data, as plain PPO does: "
    "stale workers then hold it back, and it never moves far enough for them to pull. The remedy is the decoupled "
    "objective: clip against the learner's own recent policy and weight by recent/behaviour probability (the rollout's "
    "extras hold the behaviour log-probabilities); see docs/sync.md. A lower AdaptiveSync(threshold=...) or "
    "EveryUpdate() also works. This is harmless if training has converged or the objective is already decoupled: "
    "AdaptiveSync(plateau=None) then saves such pulls."
)
_ADVICE = {
    Reason.PLATEAU: (
        "A worker pulled new weights although its divergence is below the threshold, because the divergence has "
        "stopped growing. " + _REMEDY
    ),
    Reason.LAG: (
        "A worker pulled new weights although its divergence is below the threshold, because it was "
        "AdaptiveSync(max_lag=...) versions behind. " + _REMEDY
    ),
    Reason.UNMEASURED: (
        "This policy has no readable action distribution, so its divergence cannot be measured and workers pull every "
        "version. Give it a distribution() (TorchPolicy takes distribution=...), or choose EveryUpdate() or "
        "PeriodicSync(k) to say that this is intended."
    ),
}
