"""Distributions over discrete actions: Discrete, MultiDiscrete and MultiBinary spaces, and greedy Q-value policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    read_number,
    refuse_nan,
)


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

    def __len__(self) -> int:
        return len(self.logits)

    def check(self) -> None:
        """Want `[n, A]` with an allowed action in every row."""
        check_floats("Categorical.logits", self.logits, (None, None), may_forbid=True)

    def kl(self, newest: Categorical) -> NDArray[np.float64]:
        """Sum p log(p/q) over the actions that p allows."""
        own, new = _log_softmax(self.logits), _log_softmax(newest.logits)
        gap: NDArray[np.float64] = _expected_gap(np.exp(own), own, new).sum(axis=-1)
        return np.maximum(gap, 0.0)

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw by inverting the cumulative distribution: one random number per state."""
        # Actions first: with few actions numpy reduces along the first axis several times faster.
        scores = self.logits.T
        if "temperature" in call:
            scores = scores / read_number(call, "temperature", 1.0)
        scores = scores - scores.max(axis=0)
        cumulative = np.exp(scores).cumsum(axis=0)
        total = cumulative[-1]
        refuse_nan(total)
        if is_deterministic(call):
            action = scores.argmax(axis=0)
        else:
            # The draw is below 1, and rounding cannot lift it to `total`: a forbidden action is never counted up to.
            action = (cumulative <= _uniform(rng, total) * total).sum(axis=0)
        return action, scores[action, np.arange(len(action))] - np.log(total)

    def log_prob(self, action: Array) -> Floats:
        """Look up the normalised logit."""
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

    def __len__(self) -> int:
        return len(self.logits)

    def check(self) -> None:
        """Want logits as wide as `nvec` says."""
        if not self.nvec or min(self.nvec) < 1:
            raise PolicyError(f"MultiCategorical.nvec should be positive numbers of actions, got {self.nvec}.")
        check_floats("MultiCategorical.logits", self.logits, (None, sum(self.nvec)), may_forbid=True)
        for part in self._parts():
            part.check()

    def kl(self, newest: MultiCategorical) -> NDArray[np.float64]:
        """Add up the independent choices."""
        gaps = [own.kl(new) for own, new in zip(self._parts(), newest._parts(), strict=True)]
        gap: NDArray[np.float64] = np.sum(gaps, axis=0)
        return gap

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw each choice, shape `[n, len(nvec)]`."""
        actions, logprobs = zip(*(part.sample(rng, call) for part in self._parts()), strict=True)
        return np.stack(actions, axis=1), np.sum(logprobs, axis=0)

    def log_prob(self, action: Array) -> Floats:
        """Add up the independent choices."""
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

    def __len__(self) -> int:
        return len(self.logits)

    def check(self) -> None:
        """Want finite log-odds `[n, m]`."""
        check_floats("Bernoulli.logits", self.logits, (None, None))

    def kl(self, newest: Bernoulli) -> NDArray[np.float64]:
        """Add up the independent choices."""
        yes, new_yes = _log_sigmoid(self.logits), _log_sigmoid(newest.logits)
        no, new_no = _log_sigmoid(-self.logits), _log_sigmoid(-newest.logits)
        each = _expected_gap(np.exp(yes), yes, new_yes) + _expected_gap(np.exp(no), no, new_no)
        gap: NDArray[np.float64] = np.maximum(each, 0.0).sum(axis=-1)
        return gap

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Draw each choice, as int8 like a MultiBinary space."""
        logits = self.logits
        if "temperature" in call:
            logits = logits / read_number(call, "temperature", 1.0)[..., None]
        refuse_nan(logits)
        if is_deterministic(call):
            action = logits > 0
        else:
            action = _uniform(rng, logits) < np.exp(_log_sigmoid(logits))
        return action.astype(np.int8), Bernoulli(logits).log_prob(action)

    def log_prob(self, action: Array) -> Floats:
        """Add up the independent choices."""
        signed = np.where(action.astype(np.bool_), self.logits, -self.logits)
        logprob: Floats = _log_sigmoid(signed).sum(axis=-1).astype(self.logits.dtype)
        return logprob


@dataclass(frozen=True, eq=False)
class QValues(Distribution):
    """A policy that takes the action of highest value, now and then (`epsilon`) a random one.

    A greedy policy has no useful KL of its own: it is 0 until an action flips, then infinite. So what is compared is
    a softmax over values in the policy's own unit: how much better, on average over the given states, the best action
    is than a random one. Like the greedy policy itself it does not change when all values are scaled or a state's
    values are shifted; a flip between nearly equal actions counts little, one between clearly different actions about
    1 / `temperature`.

    Attributes:
        q: Shape `[n, A]`; -inf forbids an action.
        temperature: Of that softmax, in that unit.
    """

    q: Floats
    temperature: float = 0.5

    family: ClassVar[str] = "q_values"
    sent: ClassVar[tuple[str, ...]] = ("q",)
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic", "epsilon"})

    def __len__(self) -> int:
        return len(self.q)

    def check(self) -> None:
        """Want `[n, A]` with an allowed action in every row."""
        if not self.temperature > 0:
            raise PolicyError(f"QValues.temperature must be positive, got {self.temperature}.")
        check_floats("QValues.q", self.q, (None, None), may_forbid=True)

    def kl(self, newest: QValues) -> NDArray[np.float64]:
        """Compare the two softmaxes, each in its own unit."""
        return Categorical(self._soft_logits()).kl(Categorical(newest._soft_logits()))

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Take the best action; with probability `epsilon` any allowed one."""
        refuse_nan(self.q)
        action = self.q.argmax(axis=1)
        epsilon = read_number(call, "epsilon", 0.0)
        if is_deterministic(call) or not epsilon.any():
            return action, None
        lots = rng.random(self.q.shape, dtype=np.float32)
        lots[np.isneginf(self.q)] = -1.0
        explores = rng.random(len(action), dtype=np.float32) < epsilon
        return np.where(explores, lots.argmax(axis=1), action), None

    def log_prob(self, action: Array) -> Floats:
        """Refuse."""
        raise PolicyError(
            "A Q-value policy has no log-probabilities: its epsilon belongs to the call, not to the policy."
        )

    def _soft_logits(self) -> NDArray[np.float64]:
        behind: NDArray[np.float64] = self.q.astype(np.float64) - self.q.max(axis=-1, keepdims=True)
        allowed = np.isfinite(behind)
        unit = -np.mean(behind, axis=-1, where=allowed).mean()
        if unit == 0.0:  # All values equal, as in a network whose last layer starts at zero.
            return behind
        behind /= self.temperature * unit
        return behind


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
    """Return `probability * (own - newest)`, with 0 where the probability is 0 even if a logarithm there is -inf."""
    possible = probability > 0
    gap = np.zeros_like(probability)
    np.subtract(own, newest, out=gap, where=possible)
    return gap * probability
