"""The one kind of interval that is used everywhere: Student's t, 95 %, over seeds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.record import Values

# Student's t, 97.5 %, by degrees of freedom; between two of them the fewer count, which errs towards wider intervals.
DEGREES = (*range(1, 31), 40, 60, 120)
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
           2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
           2.021, 2.000, 1.980)  # fmt: skip


class Interval(NamedTuple):
    """A mean and half the width of its 95 % interval; that is not-a-number where it is not known."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """Its lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Its upper end."""
        return self.mean + self.half

    def divided_by(self, scale: float) -> Interval:
        """Return it in another unit, which is above 0."""
        return Interval(self.mean / scale, self.half / scale)


def interval_of(values: Values) -> Interval:
    """Return the mean over seeds and its interval; of paired differences, if that is what is given."""
    return pool([values])


def pool(strata: Sequence[Values]) -> Interval:
    """Return the mean of the strata's means, each weighing the same, and its interval.

    The strata (tasks) are fixed, and the values (seeds) of each are a sample with a variance of its own; the degrees of
    freedom are Welch's and Satterthwaite's.
    """
    if not strata or not all(map(len, strata)):
        return Interval(math.nan, math.nan)
    mean = float(np.mean([values.mean() for values in strata]))
    if any(len(values) < 2 for values in strata):
        return Interval(mean, math.nan)
    errors = np.array([values.var(ddof=1) / len(values) for values in strata]) / len(strata) ** 2
    if not (variance := float(errors.sum())):
        return Interval(mean, 0.0)
    degrees = variance**2 / float(np.sum(errors**2 / np.array([len(values) - 1 for values in strata])))
    # A thousandth: four degrees computed in floating point may be a little less than four.
    student = STUDENT[bisect_right(DEGREES, degrees + 1e-3) - 1]
    return Interval(mean, student * math.sqrt(variance))


def judge_loss(difference: Interval, margin: float) -> str:
    """Say whether something is no worse than the margin allows."""
    if difference.low > -margin:
        return "non-inferior"
    return "worse" if difference.high < -margin else "undecided"


def judge_gap(difference: Interval) -> str:
    """Say whether something is ahead or behind."""
    if difference.low > 0:
        return "ahead"
    return "behind" if difference.high < 0 else "no difference shown"
