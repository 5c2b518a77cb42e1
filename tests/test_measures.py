"""The four measures of how far apart two policies are: their unit, what they see, and where they are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clusterenv.errors import PolicyError
from clusterenv.policy import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical, SquashedGaussian
from clusterenv.policy.distribution import Distribution
from clusterenv.policy.measure import MEASURES, Measure, measure_divergence, nats_of_ess, nats_of_tv
from tests.test_divergence import MAKERS

pytestmark = pytest.mark.quick

every_measure = pytest.mark.parametrize("measure", MEASURES)
N = 512


def shifted(num_dimensions: int, nats: float, rng: np.random.Generator) -> tuple[DiagonalGaussian, DiagonalGaussian]:
    """Return two Gaussians of the same spread, this far apart in each state, in a random direction."""
    log_std = rng.normal(size=num_dimensions).astype(np.float32)
    mean = rng.normal(size=(N, num_dimensions)).astype(np.float32)
    step = rng.normal(size=(N, num_dimensions))
    step *= math.sqrt(2.0 * nats) / np.linalg.norm(step, axis=1, keepdims=True)
    return DiagonalGaussian(mean, log_std), DiagonalGaussian(
        (mean + step * np.exp(log_std)).astype(np.float32), log_std
    )


@pytest.mark.parametrize("num_dimensions", [1, 20])
@pytest.mark.parametrize("nats", [0.01, 0.05, 0.5])
@every_measure
def test_a_threshold_means_the_same_by_every_measure_and_for_any_number_of_action_dimensions(
    measure: Measure, nats: float, num_dimensions: int
) -> None:
    own, newest = shifted(num_dimensions, nats, np.random.default_rng(3))
    # Total variations are estimated, and the unit goes with their square.
    assert measure_divergence(own, newest, measure) == pytest.approx(nats, rel=0.08 if measure == "tv" else 1e-3)


def test_what_the_default_threshold_is_in_the_measures_own_units() -> None:
    assert nats_of_tv(0.1256) == pytest.approx(0.05, rel=1e-3)
    assert nats_of_ess(0.9048) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"custom"}))
@every_measure
def test_a_policy_is_not_apart_from_itself_and_is_from_others(measure: Measure, name: str) -> None:
    own, other = (MAKERS[name](np.random.default_rng(seed)) for seed in (1, 2))
    assert measure_divergence(own, own, measure) == pytest.approx(0.0, abs=1e-5)
    assert measure_divergence(own, other, measure) > 0.01


NEAR: dict[str, tuple[Distribution, Distribution]] = {
    "categorical": (Categorical(np.array([[0.0, 1.0, -1.0]])), Categorical(np.array([[0.3, 0.8, -1.2]]))),
    "multi_categorical": (
        MultiCategorical(np.array([[0.0, 1.0, 0.5, -1.0, 0.0]]), (2, 3)),
        MultiCategorical(np.array([[0.2, 0.9, 0.2, -0.8, 0.3]]), (2, 3)),
    ),
    "bernoulli": (Bernoulli(np.array([[0.4, -1.0, 2.0]])), Bernoulli(np.array([[0.1, -0.7, 1.8]]))),
    "diagonal_gaussian": (
        DiagonalGaussian(np.array([[0.0, 1.0]]), np.array([[0.0, -0.5]])),
        DiagonalGaussian(np.array([[0.2, 1.1]]), np.array([[0.1, -0.6]])),
    ),
    "squashed_gaussian": (
        SquashedGaussian(np.array([[0.0, 1.0]]), np.array([[0.0, -0.5]]), scale=2.0),
        SquashedGaussian(np.array([[0.2, 1.1]]), np.array([[0.1, -0.6]]), scale=2.0),
    ),
}


def repeat(found: Distribution, count: int) -> Distribution:
    return found.with_arrays({name: np.repeat(array, count, axis=0) for name, array in found.to_arrays()[1].items()})


@pytest.mark.parametrize("name", NEAR)
def test_measures_are_those_of_importance_weights_over_the_own_actions(name: str) -> None:
    own, newest = (repeat(each, 200_000) for each in NEAR[name])
    action, logprob = own.sample(np.random.default_rng(5))
    assert logprob is not None
    weights = np.exp(newest.log_prob(action).astype(np.float64) - logprob)
    own, newest = (repeat(each, N) for each in NEAR[name])
    share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert measure_divergence(own, newest, "ess") == pytest.approx(nats_of_ess(share), rel=0.05)
    variation = np.abs(weights - 1).mean() / 2
    assert measure_divergence(own, newest, "tv") == pytest.approx(nats_of_tv(variation), rel=0.08)


def test_an_action_that_only_the_newest_policy_takes_is_seen_by_the_measures_that_are_for_it() -> None:
    own = Categorical(np.log(np.array([[1 - 1e-6, 1e-6]])))
    newest = Categorical(np.log(np.array([[0.98, 0.02]])))  # An importance weight of 20,000.
    found = {measure: measure_divergence(own, newest, measure) for measure in MEASURES}
    assert found["kl"] < 0.05 < found["reverse_kl"] < found["ess"]
    assert found["tv"] < 0.05


@every_measure
def test_a_newest_policy_that_forbids_or_allows_more_is_never_nan(measure: Measure) -> None:
    some, all_of_them = Categorical(np.array([[0.0, -np.inf, 1.0]])), Categorical(np.array([[0.0, 0.0, 1.0]]))
    assert measure_divergence(some, some, measure) == pytest.approx(0.0, abs=1e-9)
    for own, newest in ((some, all_of_them), (all_of_them, some)):
        assert measure_divergence(own, newest, measure) > 0.0  # Infinite, or not: but a number.


def test_a_newest_policy_that_is_much_wider_leaves_no_effective_sample() -> None:
    own = DiagonalGaussian(np.zeros((4, 2)), np.zeros(2))
    assert measure_divergence(own, DiagonalGaussian(np.zeros((4, 2)), np.full(2, 0.5)), "ess") == math.inf
    assert measure_divergence(own, DiagonalGaussian(np.zeros((4, 2)), np.full(2, -0.5)), "ess") < 1.0


@pytest.mark.parametrize("measure", ["tv", "ess"])
def test_policies_that_only_their_user_can_compare_have_no_probabilities(measure: Measure) -> None:
    own, other = (MAKERS["custom"](np.random.default_rng(seed)) for seed in (1, 2))
    with pytest.raises(PolicyError, match=r'Custom distributions have no probabilities.*Choose measure="kl"'):
        measure_divergence(own, other, measure)
    assert measure_divergence(own, other, "reverse_kl") == measure_divergence(own, other, "kl") > 0.0
