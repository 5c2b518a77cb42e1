"""The families of action distributions: discrete, continuous, and a custom one for the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import (
    NO_VALUES,
    Array,
    Call,
    Distribution,
    Floats,
    check_floats,
    is_deterministic,
    read_epsilon,
    read_number,
    read_temperature,
    refuse_nan,
)

Parameters: TypeAlias = Mapping[str, Array]

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_NUM_DRAWN = 16  # How many actions per state to draw when comparing two distributions by sampling.


@dataclass(frozen=True, eq=False)
class Categorical(Distribution):
    """One action out of A per state.

    Attributes:
        logits: Shape `[n, A]`, not necessarily normalised; -inf forbids an action.
    """

    logits: Floats

    family: ClassVar[str] = "categorical"
    sent: ClassVar[tuple[str, ...]] = ("logits",)
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic", "temperature"})

    def check(self) -> None:
        check_floats("Categorical.logits", self.logits, (None, None), may_forbid=True)

    def kl(self, newest: Categorical) -> NDArray[np.float64]:
        """Sum p log(p/q) over the actions that p allows."""
        own, new = _log_softmax(self.logits), _log_softmax(newest.logits)
        gap: NDArray[np.float64] = _expected_gap(np.exp(own), own, new).sum(axis=-1)
        return np.maximum(gap, 0.0)

    def total_variation(self, newest: Categorical) -> NDArray[np.float64]:
        gap = np.exp(_log_softmax(self.logits)) - np.exp(_log_softmax(newest.logits))
        share: NDArray[np.float64] = 0.5 * np.abs(gap).sum(axis=-1)
        return share

    def second_moment(self, newest: Categorical) -> NDArray[np.float64]:
        moment: NDArray[np.float64] = _weighted(_log_softmax(self.logits), _log_softmax(newest.logits)).sum(axis=-1)
        return moment

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw by inverting the cumulative distribution: one random number per state."""
        # Actions first: with few actions numpy reduces along the first axis several times faster.
        scores = self.logits.T
        if "temperature" in call:
            scores = scores / read_temperature(call, len(self))
        scores = scores - scores.max(axis=0)
        cumulative = np.exp(scores).cumsum(axis=0)
        total = cumulative[-1]
        refuse_nan(total)
        if is_deterministic(call):
            action = scores.argmax(axis=0)
        else:
            # The draw is below 1, and rounding cannot lift the product to `total`: a forbidden action is never chosen.
            action = (cumulative <= _uniform(rng, total) * total).sum(axis=0)
        return action, scores[action, np.arange(len(action))] - np.log(total)

    def log_prob(self, action: Array) -> Floats:
        logprob: Floats = _log_softmax(self.logits)[np.arange(len(self)), action.astype(np.int64)]
        return logprob


@dataclass(frozen=True, eq=False)
class MultiCategorical(Distribution):
    """Several independent categorical choices per state, as in a MultiDiscrete space.

    Attributes:
        logits: Shape `[n, sum(nvec)]`, the choices' logits side by side.
        nvec: The number of actions of each choice.
    """

    logits: Floats
    nvec: tuple[int, ...]

    family: ClassVar[str] = "multi_categorical"
    sent: ClassVar[tuple[str, ...]] = ("logits",)
    reads: ClassVar[frozenset[str]] = Categorical.reads

    def check(self) -> None:
        if not self.nvec or min(self.nvec) < 1:
            raise PolicyError(f"MultiCategorical.nvec must hold positive numbers of actions, got {self.nvec}.")
        check_floats("MultiCategorical.logits", self.logits, (None, sum(self.nvec)), may_forbid=True)
        for part in self._parts():
            part.check()

    def kl(self, newest: MultiCategorical) -> NDArray[np.float64]:
        gaps = [own.kl(new) for own, new in zip(self._parts(), newest._parts(), strict=True)]
        gap: NDArray[np.float64] = np.sum(gaps, axis=0)
        return gap

    def total_variation(self, newest: MultiCategorical) -> NDArray[np.float64]:
        return _sampled_variation(self, newest)

    def second_moment(self, newest: MultiCategorical) -> NDArray[np.float64]:
        moments = [own.second_moment(new) for own, new in zip(self._parts(), newest._parts(), strict=True)]
        moment: NDArray[np.float64] = np.prod(moments, axis=0)
        return moment

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw each choice, shape `[n, len(nvec)]`."""
        actions, logprobs = zip(*(part.sample(rng, call) for part in self._parts()), strict=True)
        return np.stack(actions, axis=1), np.sum(logprobs, axis=0)

    def log_prob(self, action: Array) -> Floats:
        logprob: Floats = np.sum([part.log_prob(action[:, i]) for i, part in enumerate(self._parts())], axis=0)
        return logprob

    def _parts(self) -> list[Categorical]:
        stops = np.cumsum(self.nvec)
        return [Categorical(self.logits[:, stop - size : stop]) for size, stop in zip(self.nvec, stops, strict=True)]


@dataclass(frozen=True, eq=False)
class Bernoulli(Distribution):
    """Independent yes-or-no choices, as in a MultiBinary space.

    Attributes:
        logits: Shape `[n, m]`: the log-odds of a 1.
    """

    logits: Floats

    family: ClassVar[str] = "bernoulli"
    sent: ClassVar[tuple[str, ...]] = ("logits",)
    reads: ClassVar[frozenset[str]] = Categorical.reads

    def check(self) -> None:
        check_floats("Bernoulli.logits", self.logits, (None, None))

    def kl(self, newest: Bernoulli) -> NDArray[np.float64]:
        yes, new_yes = _log_sigmoid(self.logits), _log_sigmoid(newest.logits)
        no, new_no = _log_sigmoid(-self.logits), _log_sigmoid(-newest.logits)
        each = _expected_gap(np.exp(yes), yes, new_yes) + _expected_gap(np.exp(no), no, new_no)
        gap: NDArray[np.float64] = np.maximum(each, 0.0).sum(axis=-1)
        return gap

    def total_variation(self, newest: Bernoulli) -> NDArray[np.float64]:
        return _sampled_variation(self, newest)

    def second_moment(self, newest: Bernoulli) -> NDArray[np.float64]:
        yes = _weighted(_log_sigmoid(self.logits), _log_sigmoid(newest.logits))
        no = _weighted(_log_sigmoid(-self.logits), _log_sigmoid(-newest.logits))
        moment: NDArray[np.float64] = (yes + no).prod(axis=-1)
        return moment

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw each choice, as int8 like a MultiBinary space."""
        logits = self.logits
        if "temperature" in call:
            logits = logits / read_temperature(call, len(self))[..., None]
        refuse_nan(logits)
        if is_deterministic(call):
            action = logits > 0
        else:
            action = _uniform(rng, logits) < np.exp(_log_sigmoid(logits))
        return action.astype(np.int8), Bernoulli(logits).log_prob(action)

    def log_prob(self, action: Array) -> Floats:
        signed = np.where(action.astype(np.bool_), self.logits, -self.logits)
        logprob: Floats = _log_sigmoid(signed).sum(axis=-1).astype(self.logits.dtype)
        return logprob


@dataclass(frozen=True, eq=False)
class QValues(Distribution):
    """A policy that takes the action with the highest value, or a random one with probability `epsilon`.

    A greedy policy has no useful KL of its own: it is 0 until an action flips, then infinite. Instead we compare
    softmaxes over the values, in units of how much better the best action is than a random one, on average over the
    given states. Like the greedy policy itself, this measure does not change when all values are scaled or a state's
    values are shifted. A flip between nearly equal actions counts for little, one between clearly different actions for
    about 1 / `temperature`.

    Attributes:
        q: Shape `[n, A]`; -inf forbids an action.
        temperature: The temperature of the softmax, in the unit above.
    """

    q: Floats
    temperature: float = 0.5

    family: ClassVar[str] = "q_values"
    sent: ClassVar[tuple[str, ...]] = ("q",)
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic", "epsilon"})

    def check(self) -> None:
        if not self.temperature > 0:
            raise PolicyError(f"QValues.temperature must be positive, got {self.temperature}.")
        check_floats("QValues.q", self.q, (None, None), may_forbid=True)

    def kl(self, newest: QValues) -> NDArray[np.float64]:
        """Compare the two softmaxes, each in its own unit."""
        return self._soft().kl(newest._soft())

    def total_variation(self, newest: QValues) -> NDArray[np.float64]:
        return self._soft().total_variation(newest._soft())

    def second_moment(self, newest: QValues) -> NDArray[np.float64]:
        return self._soft().second_moment(newest._soft())

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Take the best action, or with probability `epsilon` any allowed one."""
        refuse_nan(self.q)
        action = self.q.argmax(axis=1)
        epsilon = read_epsilon(call, len(self))
        if is_deterministic(call) or not epsilon.any():
            return action, None
        draws = rng.random(self.q.shape, dtype=np.float32)
        draws[np.isneginf(self.q)] = -1.0
        explores = rng.random(len(action), dtype=np.float32) < epsilon
        return np.where(explores, draws.argmax(axis=1), action), None

    def _soft(self) -> Categorical:
        advantage: NDArray[np.float64] = self.q.astype(np.float64) - self.q.max(axis=-1, keepdims=True)
        unit = -np.mean(advantage, axis=-1, where=np.isfinite(advantage)).mean()
        if unit != 0.0:  # 0 if all values are equal, as in a network whose last layer starts at zero.
            advantage /= self.temperature * unit
        return Categorical(advantage)


@dataclass(frozen=True, eq=False)
class DiagonalGaussian(Distribution):
    """Independent normal distributions.

    Attributes:
        mean: Shape `[n, D]`.
        log_std: Shape `[n, D]`, or `[D]` if it does not depend on the state.
    """

    mean: Floats
    log_std: Floats

    family: ClassVar[str] = "diagonal_gaussian"
    sent: ClassVar[tuple[str, ...]] = ("mean", "log_std")
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic", "temperature"})

    def to_arrays(self) -> tuple[str, dict[str, Array]]:
        """Return both with one row per state: a few states may not show whether `log_std` depends on the state."""
        log_std = np.ascontiguousarray(np.broadcast_to(self.log_std, self.mean.shape))
        return self.family, {"mean": self.mean, "log_std": log_std}

    def check(self) -> None:
        """Require finite means, and log standard deviations of the same shape or a single row."""
        check_floats(f"{type(self).__name__}.mean", self.mean, (None, None))
        shape = self.mean.shape if self.log_std.ndim == 2 else self.mean.shape[1:]
        check_floats(f"{type(self).__name__}.log_std", self.log_std, shape)

    def kl(self, newest: DiagonalGaussian) -> NDArray[np.float64]:
        new_log_std = newest.log_std.astype(np.float64)
        log_ratio = 2.0 * (self.log_std - new_log_std)
        distance = (self.mean.astype(np.float64) - newest.mean) * np.exp(-new_log_std)
        # expm1 is accurate when the two are nearly equal, which is the usual case.
        gap: NDArray[np.float64] = 0.5 * (np.maximum(np.expm1(log_ratio) - log_ratio, 0.0) + distance**2).sum(axis=-1)
        return gap

    def total_variation(self, newest: DiagonalGaussian) -> NDArray[np.float64]:
        """Compare the Gaussians, even if their samples are squashed: a bijection preserves total variation."""
        return _sampled_variation(
            DiagonalGaussian(self.mean, self.log_std), DiagonalGaussian(newest.mean, newest.log_std)
        )

    def second_moment(self, newest: DiagonalGaussian) -> NDArray[np.float64]:
        """Use the closed form; infinite if the newest is wider than sqrt(2) times our own in any direction."""
        log_std = self.log_std.astype(np.float64)
        ratio = np.exp(2.0 * (newest.log_std - log_std))  # The ratio of the variances.
        distance = (newest.mean.astype(np.float64) - self.mean) * np.exp(-log_std)
        exponents = distance**2 / (2.0 - ratio) - 0.5 * np.log(ratio * (2.0 - ratio))
        moment: NDArray[np.float64] = np.exp(np.where(ratio < 2.0, exponents, np.inf).sum(axis=-1))
        return moment

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        noise, logprob = self._draw(rng, call)
        refuse_nan(logprob)
        return self.mean + noise, logprob

    def log_prob(self, action: Array) -> Floats:
        scaled = (action.astype(self.mean.dtype) - self.mean) * np.exp(-self.log_std)
        return _normal_log_prob(scaled, self.log_std)

    def _draw(self, rng: np.random.Generator, call: Call) -> tuple[Floats, Floats]:
        """Return the noise to add to the mean, and its log-density."""
        log_std = self.log_std
        if "temperature" in call:
            log_std = log_std + np.log(read_temperature(call, len(self)))[..., None]
        if is_deterministic(call):
            scaled: Floats = np.zeros_like(self.mean)
        elif self.mean.dtype == np.float64:
            scaled = rng.standard_normal(self.mean.shape)
        else:
            scaled = rng.standard_normal(self.mean.shape, dtype=np.float32)
        return scaled * np.exp(log_std), _normal_log_prob(scaled, log_std)


@dataclass(frozen=True, eq=False)
class SquashedGaussian(DiagonalGaussian):
    """A diagonal Gaussian pushed through tanh, as in SAC.

    tanh and the scaling after it are the same bijection in every version of the policy, so the divergence is that of
    the Gaussians.

    Attributes:
        mean: Before tanh, shape `[n, D]`.
        log_std: Before tanh, shape `[n, D]` or `[D]`.
        scale: The action is `tanh(...) * scale + shift`; shape `[D]` or a single number.
        shift: Likewise.
    """

    scale: Floats | float = 1.0
    shift: Floats | float = 0.0

    family: ClassVar[str] = "squashed_gaussian"

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Squash a Gaussian sample, and correct its log-density for the slope of tanh."""
        noise, logprob = self._draw(rng, call)
        before = self.mean + noise
        logprob = logprob - self._log_slope(before)
        refuse_nan(logprob)
        return np.tanh(before) * self.scale + self.shift, logprob

    def log_prob(self, action: Array) -> Floats:
        """Return the log-density; the one that `sample` returned is more accurate where tanh rounds to 1."""
        squashed = (action.astype(np.float64) - self.shift) / self.scale
        before = np.arctanh(np.clip(squashed, -1 + 1e-12, 1 - 1e-12))
        return super().log_prob(before) - self._log_slope(before)

    def _log_slope(self, before: Floats) -> Floats:
        # log(1 - tanh(x)^2) without cancellation.
        log_slope = 2.0 * (math.log(2.0) - before - np.logaddexp(np.float32(0.0), -2.0 * before)) + np.log(self.scale)
        total: Floats = log_slope.sum(axis=-1).astype(before.dtype)
        return total


@dataclass(frozen=True, eq=False)
class Deterministic(Distribution):
    """A policy that maps a state to one action, as in DDPG and TD3; exploration noise is a per-call value (`noise`).

    The divergence is that of two Gaussians around the actions with a standard deviation of a tenth of `scale`, the
    usual exploration noise: half the squared distance in that unit.

    Attributes:
        action: Shape `[n, D]`.
        scale: Half the range of each action; shape `[D]` or a single number.
        low: Lower bound at which noisy actions are clipped, if any; shape `[D]` or a single number.
        high: Upper bound, likewise.
    """

    action: Floats
    scale: Floats | float = 1.0
    low: Floats | None = None
    high: Floats | None = None

    family: ClassVar[str] = "deterministic"
    sent: ClassVar[tuple[str, ...]] = ("action",)
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic", "noise"})
    noise_in_scale: ClassVar[float] = 0.1

    def check(self) -> None:
        if not (np.asarray(self.scale) > 0).all():
            raise PolicyError(f"Deterministic.scale must be positive, got {self.scale}.")
        check_floats("Deterministic.action", self.action, (None, None))

    def kl(self, newest: Deterministic) -> NDArray[np.float64]:
        """Return half the squared distance in units of the reference noise."""
        distance = (self.action.astype(np.float64) - newest.action) / (self.noise_in_scale * self.scale)
        gap: NDArray[np.float64] = 0.5 * (distance**2).sum(axis=-1)
        return gap

    def total_variation(self, newest: Deterministic) -> NDArray[np.float64]:
        return np.array([math.erf(0.5 * math.sqrt(gap)) for gap in self.kl(newest)])

    def second_moment(self, newest: Deterministic) -> NDArray[np.float64]:
        moment: NDArray[np.float64] = np.exp(2.0 * self.kl(newest))
        return moment

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Return the action, plus Gaussian noise of `noise * scale` if the call asks for it."""
        refuse_nan(self.action)
        noise = read_number(call, "noise", 0.0, len(self))
        if is_deterministic(call) or not noise.any():
            return self.action, None
        drawn = rng.standard_normal(self.action.shape, dtype=np.float32)
        action = self.action + drawn * noise[..., None] * self.scale
        if self.low is not None or self.high is not None:
            action = np.clip(action, self.low, self.high)
        return action.astype(self.action.dtype), None


@dataclass(frozen=True, eq=False)
class Custom(Distribution):
    """A user's own family: named arrays, and a function that compares two sets of them.

    Only the arrays are sent; the function is the reader's own.

    Attributes:
        arrays: Whatever describes the policy on n states; the first array has n rows.
        compare: `compare(own arrays, newest arrays)` returns one non-negative number per state, shape `[n]`.
        name: Tells different custom families apart.
    """

    arrays: Parameters
    compare: Callable[[Parameters, Parameters], Floats]
    name: str = "custom"

    family: ClassVar[str] = "custom"

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values()), ()))

    def check(self) -> None:
        if len(self) == 0:
            raise PolicyError(f"The custom distribution {self.name!r} holds no arrays, or no states.")

    def kl(self, newest: Custom) -> NDArray[np.float64]:
        """Call the user's function, and check what it returns."""
        gap = np.asarray(self.compare(self.arrays, newest.arrays), np.float64)
        if gap.shape != (len(self),) or (gap < 0).any():
            raise PolicyError(
                f"Custom.compare of {self.name!r} must return one non-negative number for each of {len(self)} "
                f"states, got shape {gap.shape}, smallest {gap.min(initial=np.inf):g}."
            )
        return gap

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Raise: only the policy's own `act` knows how to sample."""
        raise PolicyError(f"The custom distribution {self.name!r} cannot be sampled: give the policy an act().")

    def to_arrays(self) -> tuple[str, dict[str, Array]]:
        return self.name, dict(self.arrays)

    def with_arrays(self, arrays: Parameters) -> Custom:
        return Custom(arrays, self.compare, self.name)


def _uniform(rng: np.random.Generator, like: Floats) -> Floats:
    if like.dtype == np.float64:
        return rng.random(like.shape)
    return rng.random(like.shape, dtype=np.float32)


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def _log_sigmoid(logits: Floats) -> NDArray[np.float64]:
    return -np.logaddexp(0.0, -logits.astype(np.float64))


def _expected_gap(
    probability: NDArray[np.float64], own: NDArray[np.float64], newest: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return `probability * (own - newest)`, or 0 where the probability is 0, even if a logarithm there is -inf."""
    possible = probability > 0
    gap = np.zeros_like(probability)
    np.subtract(own, newest, out=gap, where=possible)
    return gap * probability


def _weighted(own: NDArray[np.float64], newest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return newest^2 / own of probabilities given as logarithms, or 0 where the newest is 0, even if own is 0, too."""
    weighted = np.zeros_like(own)
    np.exp(2.0 * newest - own, out=weighted, where=newest > -np.inf)
    return weighted


def _sampled_variation(own: Distribution, newest: Distribution) -> NDArray[np.float64]:
    """Estimate the total variation from actions of `own`: for independent parts it has no closed form.

    The random numbers are the same each time. The mean over a few hundred states is within 2 % of the truth.
    """
    rng = np.random.default_rng(0)
    total = np.zeros(len(own))
    for _ in range(_NUM_DRAWN):
        action, logprob = own.sample(rng)
        assert logprob is not None, "these have log-probabilities"
        total += np.maximum(0.0, -np.expm1(newest.log_prob(action).astype(np.float64) - logprob))
    return total / _NUM_DRAWN


def _normal_log_prob(scaled: Floats, log_std: Floats) -> Floats:
    logprob: Floats = -(0.5 * scaled**2 + log_std + scaled.dtype.type(_LOG_SQRT_2PI)).sum(axis=-1)
    return logprob
