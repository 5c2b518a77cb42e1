"""Divergences against torch.distributions and closed forms, the laws they obey, and what their reader refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy import (
    Bernoulli,
    Categorical,
    Custom,
    Deterministic,
    DiagonalGaussian,
    MultiCategorical,
    QValues,
    SquashedGaussian,
)
from clusterenv.policy.distribution import Array, Distribution, divergence

Arrays = NDArray[np.float32]
Maker = Callable[[np.random.Generator], Distribution]
N = 16


def normal(rng: np.random.Generator, width: int, scale: float = 1.0) -> Arrays:
    return (scale * rng.standard_normal((N, width))).astype(np.float32)


def squared_distance(own: Mapping[str, Array], newest: Mapping[str, Array]) -> NDArray[np.float64]:
    gap: NDArray[np.float64] = np.square(own["place"].astype(np.float64) - newest["place"].astype(np.float64)).sum(
        axis=1
    )
    return gap


MAKERS: dict[str, Maker] = {
    "categorical": lambda rng: Categorical(normal(rng, 5, 2.0)),
    "multi_categorical": lambda rng: MultiCategorical(normal(rng, 9, 2.0), (2, 3, 4)),
    "bernoulli": lambda rng: Bernoulli(normal(rng, 4, 2.0)),
    "q_values": lambda rng: QValues(normal(rng, 5, 20.0)),
    "diagonal_gaussian": lambda rng: DiagonalGaussian(normal(rng, 3), normal(rng, 3, 0.5)),
    "shared_std": lambda rng: DiagonalGaussian(normal(rng, 3), normal(rng, 3, 0.5)[0]),
    "squashed_gaussian": lambda rng: SquashedGaussian(normal(rng, 3), normal(rng, 3, 0.5), scale=2.0),
    "deterministic": lambda rng: Deterministic(normal(rng, 3), scale=2.0),
    "custom": lambda rng: Custom({"place": normal(rng, 2)}, squared_distance, "mine"),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("name", MAKERS)
def test_divergence_is_positive_between_different_policies_and_zero_with_itself(
    name: str, rng: np.random.Generator
) -> None:
    own, newest = MAKERS[name](rng), MAKERS[name](rng)
    gap = divergence(own, newest)
    assert gap.shape == (N,)
    assert gap.dtype == np.float64
    assert (gap > 0).all()
    np.testing.assert_allclose(divergence(own, own), 0.0, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_reading_a_distribution_back_from_its_arrays_changes_nothing(name: str, rng: np.random.Generator) -> None:
    own, newest = MAKERS[name](rng), MAKERS[name](rng)
    family, arrays = newest.to_arrays()
    copies = {key: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape) for key, array in arrays.items()}
    np.testing.assert_array_equal(own.kl(own.read(family, copies)), divergence(own, newest))


@pytest.mark.parametrize(
    "name", ["categorical", "multi_categorical", "bernoulli", "diagonal_gaussian", "squashed_gaussian"]
)
def test_divergence_equals_that_of_torch(name: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    td = torch.distributions
    squash = [td.TanhTransform(), td.AffineTransform(0.0, 2.0)]

    def as_torch(dist: Distribution) -> list[object]:
        match dist:
            case MultiCategorical():
                parts = torch.from_numpy(dist.logits).double().split(dist.nvec, dim=1)
                return [td.Categorical(logits=part) for part in parts]
            case Categorical():
                return [td.Categorical(logits=torch.from_numpy(dist.logits).double())]
            case Bernoulli():
                return [td.Independent(td.Bernoulli(logits=torch.from_numpy(dist.logits).double()), 1)]
            case DiagonalGaussian():
                mean, log_std = torch.from_numpy(dist.mean).double(), torch.from_numpy(dist.log_std).double()
                gaussian = td.Independent(td.Normal(mean, log_std.exp()), 1)
                return [td.TransformedDistribution(gaussian, squash) if type(dist) is SquashedGaussian else gaussian]
        raise AssertionError(dist)

    own, newest = MAKERS[name](rng), MAKERS[name](rng)
    pairs = zip(as_torch(own), as_torch(newest), strict=True)
    expected = sum(td.kl_divergence(a, b) for a, b in pairs)
    np.testing.assert_allclose(divergence(own, newest), expected.numpy(), rtol=1e-9, atol=1e-12)


def test_squashing_does_not_change_a_divergence_measured_by_sampling(rng: np.random.Generator) -> None:
    own = SquashedGaussian(np.full((1, 1), 0.3), np.full((1, 1), -0.5), scale=3.0, shift=1.0)
    newest = SquashedGaussian(np.full((1, 1), -0.1), np.full((1, 1), -0.2), scale=3.0, shift=1.0)
    many = SquashedGaussian(np.repeat(own.mean, 200_000, 0), np.repeat(own.log_std, 200_000, 0), 3.0, 1.0)
    actions, logprobs = many.sample(rng)
    assert logprobs is not None
    others = SquashedGaussian(np.repeat(newest.mean, 200_000, 0), np.repeat(newest.log_std, 200_000, 0), 3.0, 1.0)
    estimate = np.mean(logprobs - others.log_prob(actions))
    np.testing.assert_allclose(divergence(own, newest)[0], estimate, rtol=0.02)


def test_deterministic_divergence_is_that_of_gaussians_with_the_reference_noise(rng: np.random.Generator) -> None:
    one, other, scale = normal(rng, 2), normal(rng, 2), np.array([0.5, 2.0], np.float32)
    log_std = np.log(0.1 * scale)
    expected = divergence(DiagonalGaussian(one, log_std), DiagonalGaussian(other, log_std))
    np.testing.assert_allclose(divergence(Deterministic(one, scale), Deterministic(other, scale)), expected, rtol=1e-5)


@pytest.mark.parametrize(("factor", "shift"), [(3.0, 0.0), (1.0, 100.0), (0.01, -5.0)])
def test_q_values_that_rank_and_space_actions_alike_do_not_diverge(
    factor: float, shift: float, rng: np.random.Generator
) -> None:
    q = normal(rng, 4).astype(np.float64)
    np.testing.assert_allclose(divergence(QValues(q), QValues(factor * q + shift)), 0.0, atol=1e-10)


def test_a_flip_between_clearly_different_actions_diverges_more_than_one_between_near_ties() -> None:
    clear, near = np.array([[0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 0.01]])
    flipped = divergence(QValues(near), QValues(np.array([[0.0, 1.0], [0.01, 0.0]])))
    assert flipped[1] < 0.01 < 1.0 < divergence(QValues(clear), QValues(clear[:, ::-1]))[0]


def test_equal_q_values_compare_as_a_uniform_policy() -> None:
    zeros = np.zeros((3, 4))
    np.testing.assert_array_equal(divergence(QValues(zeros), QValues(zeros)), 0.0)


def test_forbidden_actions_count_for_nothing() -> None:
    own = np.array([[0.3, -np.inf, 1.0]])
    newest = np.array([[0.1, -np.inf, 0.2]])
    expected = divergence(Categorical(own[:, [0, 2]]), Categorical(newest[:, [0, 2]]))
    np.testing.assert_allclose(divergence(Categorical(own), Categorical(newest)), expected)


def test_divergence_is_infinite_if_the_newest_policy_forbids_what_the_own_may_do() -> None:
    own, newest = Categorical(np.array([[0.0, 0.0]])), Categorical(np.array([[0.0, -np.inf]]))
    assert divergence(own, newest)[0] == np.inf
    assert np.isfinite(divergence(newest, own)[0])


@pytest.mark.parametrize("size", [1e3, 1e5, 1e30])
def test_extreme_parameters_give_no_nan(size: float) -> None:
    logits = np.array([[size, 0.0, -size]], np.float32)
    for one, other in [(Categorical(logits), Categorical(-logits)), (Bernoulli(logits), Bernoulli(-logits))]:
        assert divergence(one, other)[0] > 0.5 * size
        assert divergence(one, one)[0] == 0


def test_nearly_equal_gaussians_keep_their_digits() -> None:
    mean = np.zeros((1, 1))
    own, newest = DiagonalGaussian(mean, np.full((1, 1), 1e-7)), DiagonalGaussian(mean, np.zeros((1, 1)))
    np.testing.assert_allclose(divergence(own, newest), 1e-14, rtol=1e-5)


finite = st.floats(-50, 50, width=32)


@given(hnp.arrays(np.float32, (2, 6, 3), elements=finite))
@settings(max_examples=60, deadline=None)
def test_divergence_is_never_negative_nor_nan(pair: Arrays) -> None:
    for family in (Categorical, Bernoulli, QValues, Deterministic):
        gap = divergence(family(pair[0]), family(pair[1]))
        assert (gap >= 0).all()
        assert (divergence(family(pair[0]), family(pair[0])) <= 1e-9).all()
    logs = np.clip(pair[::-1], -5, 5)
    assert (divergence(DiagonalGaussian(pair[0], logs[0]), DiagonalGaussian(pair[1], logs[1])) >= 0).all()


@given(
    st.sampled_from(sorted(MAKERS)),
    st.sampled_from(["family", "name", "missing", "shape", "integers", "nan", "inf", "objects"]),
)
@settings(max_examples=120, deadline=None)
def test_malformed_parameters_are_refused(name: str, fault: str) -> None:
    own = MAKERS[name](np.random.default_rng(1))
    family, arrays = own.to_arrays()
    first = next(iter(arrays))
    broken: Array = arrays[first].copy()
    match fault:
        case "family":
            family = "no_such_family"
        case "name":
            arrays["other"] = broken
        case "missing":
            del arrays[first]
        case "shape":
            arrays[first] = broken[:-1]
        case "integers":
            arrays[first] = broken.astype(np.int64)
        case "objects":
            arrays[first] = broken.astype(np.object_)
        case "nan" | "inf":
            if name == "custom":  # What its arrays may hold only its user knows.
                return
            broken[(0,) * broken.ndim] = np.float32(fault)
            arrays[first] = broken
    with pytest.raises(PolicyError):
        own.read(family, arrays)


@pytest.mark.parametrize(
    "wrong",
    [
        Categorical(np.zeros((3,), np.float32)),
        Categorical(np.zeros((0, 3), np.float32)),
        Categorical(np.full((1, 2), -np.inf, np.float32)),
        MultiCategorical(np.zeros((2, 5), np.float32), (2, 2)),
        MultiCategorical(np.zeros((2, 5), np.float32), ()),
        MultiCategorical(np.array([[0, 0, -np.inf, -np.inf]], np.float32), (2, 2)),
        Bernoulli(np.array([[-np.inf]], np.float32)),
        DiagonalGaussian(np.zeros((2, 3), np.float32), np.zeros((2,), np.float32)),
        DiagonalGaussian(np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32)),
        Deterministic(np.zeros((2, 3), np.float32), scale=0.0),
        QValues(np.zeros((2, 3), np.float32), temperature=0.0),
        Custom({}, squared_distance),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_a_distribution_that_makes_no_sense_is_refused(wrong: Distribution) -> None:
    with pytest.raises(PolicyError):
        wrong.check()


@pytest.mark.parametrize("answer", [np.zeros(3), np.full(N, -1.0), np.full(N, np.nan)])
def test_a_custom_comparison_that_makes_no_sense_is_refused(answer: NDArray[np.float64]) -> None:
    mine = Custom({"place": np.zeros((N, 2), np.float32)}, lambda _own, _newest: answer)
    with pytest.raises(PolicyError):
        divergence(mine, mine)


@pytest.mark.parametrize(
    "name", ["categorical", "multi_categorical", "bernoulli", "diagonal_gaussian", "squashed_gaussian"]
)
def test_the_log_probability_returned_with_a_sample_is_that_of_the_action(name: str, rng: np.random.Generator) -> None:
    dist = MAKERS[name](rng)
    action, logprob = dist.sample(rng)
    assert logprob is not None
    assert logprob.shape == (N,)
    assert logprob.dtype == np.float32
    np.testing.assert_allclose(logprob, dist.log_prob(action), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_categorical_samples_have_the_stated_probabilities(dtype: type[np.floating], rng: np.random.Generator) -> None:
    count = 200_000
    logits = np.array([0.0, -np.inf, 2.0, -1.0, -4.0], dtype)
    action, _ = Categorical(np.tile(logits, (count, 1))).sample(rng)
    probability = np.exp(logits.astype(np.float64))
    expected = probability / probability.sum() * count
    observed = np.bincount(action.astype(np.int64), minlength=5)
    assert observed[1] == 0
    possible = expected > 0
    chi_square = np.sum((observed[possible] - expected[possible]) ** 2 / expected[possible])
    assert chi_square < 16.3  # The 0.1 % point for 3 degrees of freedom.


@pytest.mark.parametrize("forbidden", [0, 1, 2])
def test_a_forbidden_action_is_never_drawn(forbidden: int, rng: np.random.Generator) -> None:
    logits = np.zeros((100_000, 3), np.float32)
    logits[:, forbidden] = -np.inf
    assert not (Categorical(logits).sample(rng)[0] == forbidden).any()
    assert not (QValues(logits).sample(rng, {"epsilon": 1.0})[0] == forbidden).any()


def test_epsilon_is_the_share_of_random_actions_and_may_differ_between_environments(rng: np.random.Generator) -> None:
    q = np.tile(np.array([0.0, 1.0, 0.0, 0.0], np.float32), (40_000, 1))
    epsilon = np.repeat(np.array([0.0, 0.4], np.float32), 20_000)
    action, logprob = QValues(q).sample(rng, {"epsilon": epsilon})
    assert logprob is None
    assert (action[:20_000] == 1).all()
    np.testing.assert_allclose(np.mean(action[20_000:] != 1), 0.3, atol=0.015)


def test_temperature_and_determinism_travel_with_the_call(rng: np.random.Generator) -> None:
    logits = np.tile(np.array([0.0, 2.0], np.float32), (50_000, 1))
    cold, _ = Categorical(logits).sample(rng, {"temperature": 0.5})
    np.testing.assert_allclose(np.mean(cold == 1), 1 / (1 + np.exp(-4.0)), atol=0.01)
    greedy, logprob = Categorical(logits).sample(rng, {"deterministic": True})
    assert (greedy == 1).all()
    assert logprob is not None
    np.testing.assert_allclose(logprob, -np.log1p(np.exp(-2.0)), rtol=1e-5)
    gaussian = DiagonalGaussian(np.zeros((50_000, 1), np.float32), np.zeros(1, np.float32))
    np.testing.assert_allclose(gaussian.sample(rng, {"temperature": 0.25})[0].std(), 0.25, rtol=0.02)
    assert (gaussian.sample(rng, {"deterministic": True})[0] == 0).all()


def test_exploration_noise_scales_with_the_action_range_and_is_clipped(rng: np.random.Generator) -> None:
    action = np.zeros((50_000, 2), np.float32)
    scale = np.array([1.0, 10.0], np.float32)
    noisy, _ = Deterministic(action, scale, low=-scale, high=scale).sample(rng, {"noise": 0.1})
    np.testing.assert_allclose(noisy.std(axis=0), 0.1 * scale, rtol=0.02)
    clipped, _ = Deterministic(action, scale, low=-scale, high=scale).sample(rng, {"noise": 5.0})
    assert (np.abs(clipped) <= scale).all()
    np.testing.assert_array_equal(Deterministic(action, scale).sample(rng)[0], action)


@pytest.mark.parametrize("family", [Categorical, Bernoulli, QValues, Deterministic])
def test_nan_is_reported_instead_of_sampled(family: Callable[[Arrays], Distribution], rng: np.random.Generator) -> None:
    with pytest.raises(PolicyError, match="NaN"):
        family(np.array([[0.0, np.nan]], np.float32)).sample(rng)
