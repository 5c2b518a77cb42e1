"""When a worker pulls the learner's newest weights.

A rule is a frozen config; `start` makes the tracker that holds a run's state. A tracker is given what is known about a
version that workers hold and returns a verdict for all its holders, without I/O or a clock. Versions are numbered from
1; a worker without weights has version 0.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from numbers import Integral, Real
from typing import ClassVar, NamedTuple, Protocol, Self

from clusterenv.errors import ConfigError
from clusterenv.policy.measure import MEASURES, Measure

# As a fraction of the threshold. A divergence below this is negligible, and its changes are noise.
_NEGLIGIBLE = 0.05
# Larger weights are read from shared memory in less time than it takes to evaluate the newest policy on the pooled
# states; see docs/explanation/sync.md.
_CHEAP_CHECK_BYTES = 128 << 10
_MAX_COURSES = 64  # The tracker is not told when a version is no longer held, so the oldest are dropped.


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
    STAGGERED = "staggered"
    BUDGET = "budget"
    LAG = "max_lag"
    SHARED = "shared_memory"
    UNMEASURED = "unmeasured"


class Verdict(NamedTuple):
    """Whether to pull, and why.

    Attributes:
        at_most: How many of the version's holders pull, those that have held it longest first; None: all.
    """

    pulls: bool
    reason: Reason
    at_most: int | None = None

    @property
    def advice(self) -> str | None:
        """What to tell the user, once, when a worker pulls for this reason; None if nothing is amiss."""
        return _ADVICE.get(self.reason)


@dataclass(frozen=True)
class Case:
    """What is known about a version that workers hold.

    Attributes:
        own: The version's number; 0 if the workers hold no weights.
        newest: The newest version.
        divergence: The divergence of this version from the newest over states the workers met, in nats; None if the
            policy has no distribution, or the workers do not report theirs.
        num_workers: How many workers hold this version and could pull now.
        num_all: How many workers there are.
        pull_bytes: The size of one pull.
        now_s: The time, by any monotonic clock.
    """

    own: int
    newest: int
    divergence: float | None = None
    num_workers: int = 1
    _: KW_ONLY
    num_all: int = 1
    pull_bytes: int = 0
    now_s: float = 0.0

    @property
    def lag(self) -> int:
        """How many versions behind the newest this version is."""
        return self.newest - self.own


class Tracker(Protocol):
    """A rule applied in one run."""

    def judge(self, case: Case) -> Verdict:
        """Decide whether the workers that hold a version pull the newest.

        Each held version is judged once per newer version; those that have diverged most are judged first.
        """


class SyncRule(Protocol):
    """When workers pull new weights.

    A rule that compares may have a `measure`, one of `policy.measure.MEASURES`; by default it is KL(own || newest). It
    may also have `max_shared_bytes`: workers that share the head's memory always pull weights larger than that.
    """

    @property
    def compares(self) -> bool:
        """Whether the rule judges by divergence: workers then report their action distributions."""

    @property
    def max_lag(self) -> float:
        """How many versions behind a worker may fall before it must pull; infinite if there is no limit."""

    def start(self) -> Tracker:
        """Return the tracker for a run."""


@dataclass(frozen=True)
class AdaptiveSync:
    """Pull when the worker's policy has diverged from the newest one.

    Two safeguards, `plateau` and `max_lag`, pull even below the threshold. A learner that clips its updates against the
    policy that made the data (plain PPO) is held near that policy: with stale workers, the divergence rises until the
    clipping stops it below the threshold, and learning stalls. `plateau` detects the end of the rise; `max_lag` catches
    what it misses. If a worker has pulled above the threshold several times in a row, its learner is clearly not held
    back, so the plateau must then last that many versions.

    Pulls are staggered: if more than half of the workers hold one version, the surplus pulls at half the threshold.
    From then on workers reach the threshold at different times, so that a learner never has only old data.

    Attributes:
        threshold: Pull above this divergence, a mean over states, in nats.
        measure: How divergence is measured: "kl" is KL(own || newest), which PPO prints as `approx_kl`; "reverse_kl" is
            KL(newest || own), which also sees actions that only the newest policy takes; "tv" is the total variation;
            "ess" is the effective share of the data when weighted by newest/own. All are of the whole action and
            expressed in nats: 0.05 corresponds to a total variation of 0.126 and an effective share of 0.905.
        max_lag: Pull when this many versions behind, whatever the divergence.
        plateau: The divergence counts as no longer growing if, since the version measured last, it grew by less than
            `plateau` times its average growth per version since the last pull. Pull when that happens; after n pulls
            above the threshold in a row, only when it happens at n versions in a row. With 0 the divergence must
            shrink; None switches this off.
        everywhere: Whether to judge even workers for which a pull takes less time than a check: those that share the
            head's memory, if the weights are larger than 128 KiB. By default such workers pull every version, except in
            streams, where weights are sent to them too.
    """

    threshold: float = 0.05
    _: KW_ONLY
    measure: Measure = "kl"
    max_lag: float = 20
    plateau: float | None = 0.5
    everywhere: bool = False

    compares: ClassVar[bool] = True

    @property
    def max_shared_bytes(self) -> float:
        """The size of weights above which workers that share the head's memory need not be judged."""
        return math.inf if self.everywhere else _CHEAP_CHECK_BYTES

    def __post_init__(self) -> None:
        if not _is_number(self.threshold) or not 0 < self.threshold < math.inf:
            raise ConfigError(f"AdaptiveSync.threshold must be a positive number of nats, got {self.threshold!r}.")
        if self.measure not in MEASURES:
            raise ConfigError(f"AdaptiveSync.measure must be one of {', '.join(MEASURES)}, got {self.measure!r}.")
        if self.max_lag != math.inf and not _is_count(self.max_lag):
            raise ConfigError(
                f"AdaptiveSync.max_lag must be at least 1 version, a whole number, got {self.max_lag!r}. math.inf "
                "switches it off."
            )
        if not isinstance(self.everywhere, bool):
            raise ConfigError(f"AdaptiveSync.everywhere must be True or False, got {self.everywhere!r}.")
        if self.plateau is not None and not (_is_number(self.plateau) and 0 <= self.plateau < 1):
            raise ConfigError(
                f"AdaptiveSync.plateau must be at least 0 and less than 1, got {self.plateau!r}: steady growth is "
                "1 times its own average. None switches it off."
            )

    @classmethod
    def off_policy(cls, threshold: float = 0.5, *, measure: Measure = "kl", everywhere: bool = False) -> Self:
        """Return the rule for learners that tolerate or correct for off-policy data: DQN, SAC, V-trace.

        Stale workers do not hold such learners back, so `plateau` and `max_lag` are off: workers pull only when they
        have diverged. The default threshold was tested with replay-based learners (DQN, SAC); for one that weights its
        data by importance ratios, as V-trace does, start with 0.05.
        """
        return cls(threshold, measure=measure, max_lag=math.inf, plateau=None, everywhere=everywhere)

    def start(self) -> Tracker:
        return _AdaptiveTracker(self)


@dataclass
class _Course:
    """How a version's divergence has developed."""

    own: int
    version: int  # The newest version it was compared with, and the divergence then.
    divergence: float = 0.0
    stalls: int = 0  # Consecutive versions, up to the last, at which the divergence had stopped growing.
    has_crossed: bool = False


class _AdaptiveTracker:
    def __init__(self, rule: AdaptiveSync) -> None:
        self._rule = rule
        self._courses: dict[int, _Course] = {}
        self._crossings = 0  # Pulls above the threshold since the last pull below it.
        self._crossed_at = 0  # The newest version at the last such pull.

    def judge(self, case: Case) -> Verdict:
        if basic := _judge_versions(case):
            return basic
        newest, divergence = case.newest, case.divergence
        if divergence is None:
            return Verdict(True, Reason.UNMEASURED)
        course = self._course_of(case.own)
        if not divergence <= self._rule.threshold:  # NaN pulls too.
            self._note_crossing(course, newest)
            return Verdict(True, Reason.DIVERGED)
        if newest > course.version:  # Measuring the same version again, on other probes, says nothing about growth.
            course.stalls = course.stalls + 1 if self._has_stopped_growing(course, newest, divergence) else 0
            course.version, course.divergence = newest, divergence
        if course.stalls >= max(1, self._crossings):
            return self._pull_below(Reason.PLATEAU)
        if case.lag >= self._rule.max_lag:
            return self._pull_below(Reason.LAG)
        excess = case.num_workers - (case.num_all + 1) // 2
        if excess > 0 and divergence > self._rule.threshold / 2:
            return Verdict(True, Reason.STAGGERED, excess)
        return Verdict(False, Reason.BELOW)

    def _course_of(self, own: int) -> _Course:
        if own not in self._courses:
            while len(self._courses) >= _MAX_COURSES:
                del self._courses[min(self._courses)]
            self._courses[own] = _Course(own, own)  # A version does not diverge from itself.
        return self._courses[own]

    def _note_crossing(self, course: _Course, newest: int) -> None:
        """Count a crossing only once, even if the pull takes a while and workers pull at different times."""
        if not course.has_crossed and newest > self._crossed_at <= course.own:
            self._crossings += 1
            self._crossed_at = newest
        course.has_crossed = True

    def _pull_below(self, reason: Reason) -> Verdict:
        self._crossings = 0
        return Verdict(True, reason)

    def _has_stopped_growing(self, course: _Course, newest: int, divergence: float) -> bool:
        if self._rule.plateau is None or divergence < _NEGLIGIBLE * self._rule.threshold:
            return False
        if course.version <= course.own:
            return False  # The first version after a pull has nothing to compare with.
        growth = (divergence - course.divergence) / (newest - course.version)
        average = course.divergence / (course.version - course.own)
        return growth < self._rule.plateau * average


@dataclass(frozen=True, kw_only=True)
class SyncBudget:
    """Pull at a fixed average rate, the workers that have diverged most first.

    Give one of the two attributes. Among workers that have diverged equally, those with the oldest version come first.
    Budget that is not spent because nobody has diverged is not saved up: over any 20 versions, workers exceed their
    budget by at most one pull. Each worker's first pull is not counted. `envs.stats["threshold"]` is the resulting
    threshold: the lowest divergence at which workers last pulled.

    Attributes:
        pulls_per_update: Pulls per version, of all workers together; 0.5 is one pull for every second version.
        bytes_per_second: Bytes of weights sent to all workers together, as `envs.stats["bytes_weights"]` counts them.
    """

    pulls_per_update: float | None = None
    bytes_per_second: float | None = None

    compares: ClassVar[bool] = True
    max_lag: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        if (self.pulls_per_update is None) == (self.bytes_per_second is None):
            raise ConfigError(
                "SyncBudget takes one of pulls_per_update=... and bytes_per_second=..., got "
                f"{'neither' if self.pulls_per_update is None else 'both'}."
            )
        for name, unit in (("pulls_per_update", "pulls"), ("bytes_per_second", "bytes")):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"SyncBudget.{name} must be a positive number of {unit}, got {value!r}.")

    def start(self) -> Tracker:
        return _BudgetTracker(self)


class _BudgetTracker:
    def __init__(self, rule: SyncBudget) -> None:
        self._rule = rule
        self._left = 0.0  # In pulls, like all amounts here.
        self._earned_at: tuple[int, float] | None = None  # The newest version at the last income, and the time.

    def judge(self, case: Case) -> Verdict:
        if basic := _judge_versions(case):
            return basic
        if self._earned_at is None or case.newest > self._earned_at[0]:
            income = self._income(case)
            self._earned_at = case.newest, case.now_s
            # Fractions are carried over; unspent pulls are not, except for the one that may be due.
            self._left = income + (self._left if self._left < 1.0 else max(0.0, 1.0 - income))
        # A thousandth: ten times a tenth is not quite one.
        count = 0 if case.divergence == 0.0 else int(min(case.num_workers, self._left + 1e-3))
        self._left -= count
        return Verdict(True, Reason.BUDGET, count) if count else Verdict(False, Reason.WAITING)

    def _income(self, case: Case) -> float:
        """Return the budget earned since the last time, in pulls."""
        version, then_s = self._earned_at or (case.newest - 1, case.now_s)
        if self._rule.bytes_per_second is not None:
            return self._rule.bytes_per_second * max(0.0, case.now_s - then_s) / max(1, case.pull_bytes)
        assert self._rule.pulls_per_update is not None, "one of the two was given"
        return self._rule.pulls_per_update * (case.newest - version)


@dataclass(frozen=True, kw_only=True)
class EveryUpdate:
    """Pull every new version."""

    compares: ClassVar[bool] = False
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

    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not _is_count(self.k):
            raise ConfigError(f"PeriodicSync.k must be at least 1 version, a whole number, got {self.k!r}.")

    @property
    def max_lag(self) -> float:
        return self.k

    def start(self) -> Tracker:
        return _LagTracker(self.max_lag, Reason.PERIOD)


@dataclass(frozen=True, kw_only=True)
class NeverSync:
    """Pull once, at the start, and then keep those weights."""

    compares: ClassVar[bool] = False
    max_lag: ClassVar[float] = math.inf

    def start(self) -> Tracker:
        return _LagTracker(self.max_lag, Reason.PERIOD)


class _LagTracker:
    def __init__(self, lag: float, reason: Reason) -> None:
        self._lag = lag
        self._reason = reason

    def judge(self, case: Case) -> Verdict:
        if basic := _judge_versions(case):
            return basic
        if case.lag >= self._lag:
            return Verdict(True, self._reason)
        return Verdict(False, Reason.WAITING)


def _judge_versions(case: Case) -> Verdict | None:
    """Decide what every rule agrees on: a worker without weights pulls, one with the newest does not."""
    if case.lag <= 0:
        return Verdict(False, Reason.CURRENT)
    if case.own == 0:
        return Verdict(True, Reason.FIRST)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


_REMEDY = (
    "The usual cause is a learner that clips its updates against the policy that made the data, as plain PPO does: "
    "stale workers then hold it back, and it never moves far enough for them to pull. The remedy is the decoupled "
    "objective: clip against the learner's own recent policy and weight by recent/behaviour probability (the rollout's "
    "extras hold the behaviour log-probabilities); see docs/explanation/sync.md. A lower AdaptiveSync(threshold=...) "
    "or EveryUpdate() also works. A learner that uses a replay buffer (DQN, SAC) is not held back: choose "
    "AdaptiveSync.off_policy() for it. This is also harmless if training has converged or the objective is already "
    "decoupled: "
)
_ADVICE = {
    Reason.PLATEAU: (
        "A worker pulled new weights although its divergence is below the threshold, because the divergence has "
        "stopped growing. " + _REMEDY + "AdaptiveSync(plateau=None) then saves such pulls."
    ),
    Reason.LAG: (
        "A worker pulled new weights although its divergence is below the threshold, because it was "
        "AdaptiveSync(max_lag=...) versions behind. "
        + _REMEDY
        + "a larger max_lag=... then saves such pulls, and max_lag=math.inf saves them all."
    ),
    Reason.UNMEASURED: (
        "This policy has no readable action distribution, so its divergence cannot be measured and workers pull every "
        "version. Give it a distribution() (TorchPolicy takes distribution=...), or choose EveryUpdate() or "
        "PeriodicSync(k) to say that this is intended."
    ),
}
