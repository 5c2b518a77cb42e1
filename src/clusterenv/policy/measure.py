"""Measure: how far the policy that made some data is from the newest one, as one number.

All measures are of the whole action, however many parts it has, because so are importance weights. And all are given in
one unit, nats: as the KL divergence of two Gaussians with equal variances that are as far apart by that measure.
Between such Gaussians all four measures agree, so a threshold can be kept when the measure is changed.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal, TypeAlias, get_args

import numpy as np

from clusterenv.policy.distribution import Distribution

Measure: TypeAlias = Literal["kl", "reverse_kl", "tv", "ess"]

MEASURES: tuple[Measure, ...] = get_args(Measure)
NEEDS_PROBABILITIES: frozenset[Measure] = frozenset({"tv", "ess"})


def measure_divergence(own: Distribution, newest: Distribution, measure: Measure = "kl") -> float:
    """Return how far apart two versions of a policy are on some states, in nats; infinite if that is not finite.

    Args:
        own: The distributions that made the data, on n states.
        newest: Those of the newest version, on the same states; both have passed `check`.
        measure: `kl` is the mean over the states of KL(own || newest), `reverse_kl` of KL(newest || own). `tv` is the
            total variation: the share of actions that the two would not have in common. `ess` is the effective share of
            a sample of own's actions when weighted by newest/own.

    Raises:
        PolicyError: The policy has no probabilities from which to compute the measure.
    """
    with np.errstate(all="ignore"):  # A worker may send any numbers, and they may overflow.
        match measure:
            case "kl":
                found = float(own.kl(newest).mean())
            case "reverse_kl":
                found = float(newest.kl(own).mean())
            case "tv":
                found = nats_of_tv(float(own.total_variation(newest).mean()))
            case "ess":
                found = nats_of_ess(1.0 / float(own.second_moment(newest).mean()))
    return found if math.isfinite(found) else math.inf


def nats_of_tv(total_variation: float) -> float:
    """Return the KL of two Gaussians with equal variances that have this total variation."""
    if not total_variation < 1.0:
        return math.inf
    return 2.0 * NormalDist().inv_cdf((1.0 + max(0.0, total_variation)) / 2.0) ** 2


def nats_of_ess(share: float) -> float:
    """Return the KL of two Gaussians with equal variances that leave this effective share of a sample."""
    return math.inf if not share > 0.0 else max(0.0, -0.5 * math.log(share))
