"""Distributions over continuous actions: Gaussian, squashed Gaussian and deterministic policies."""

from __future__ import annotations

import math
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

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


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

    def __len__(self) -> int:
        return len(self.mean)

    def check(self) -> None:
        """Want finite means, and as many standard deviations or one row of them."""
        check_floats(f"{type(self).__name__}.mean", self.mean, (None, None))
        shape = self.mean.shape if self.log_std.ndim == 2 else self.mean.shape[1:]
        check_floats(f"{type(self).__name__}.log_std", self.log_std, shape)

    def kl(self, newest: DiagonalGaussian) -> NDArray[np.float64]:
        """Add up the closed forms of the independent normals."""
        new_log_std = newest.log_std.astype(np.float64)
        wider = 2.0 * (self.log_std - new_log_std)
        apart = (self.mean.astype(np.float64) - newest.mean) * np.exp(-new_log_std)
        # expm1 keeps the digits when the two are nearly equal, which is the usual case.
        gap: NDArray[np.float64] = 0.5 * (np.maximum(np.expm1(wider) - wider, 0.0) + apart**2).sum(axis=-1)
        return gap

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Add scaled normal noise to the mean."""
        noise, logprob = self._draw(rng, call)
        refuse_nan(logprob)
        return self.mean + noise, logprob

    def log_prob(self, action: Array) -> Floats:
        """Add up the log-densities of the independent normals."""
        scaled = (action.astype(self.mean.dtype) - self.mean) * np.exp(-self.log_std)
        return _normal_log_prob(scaled, self.log_std)

    def _draw(self, rng: np.random.Generator, call: Call) -> tuple[Floats, Floats]:
        """Return the noise on the mean and its log-density."""
        log_std = self.log_std
        if "temperature" in call:
            log_std = log_std + np.log(read_number(call, "temperature", 1.0))[..., None]
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

    tanh and the scaling after it are the same bijection in every version of the policy, so the divergence is the
    Gaussians'.

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
        """Squash a Gaussian sample; its log-density is corrected for the slope of tanh."""
        noise, logprob = self._draw(rng, call)
        before = self.mean + noise
        logprob = logprob - self._log_slope(before)
        refuse_nan(logprob)
        return np.tanh(before) * self.scale + self.shift, logprob

    def log_prob(self, action: Array) -> Floats:
        """Return the log-density; prefer what `sample` returned, since where tanh rounds to 1 the digits are lost."""
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
    """A policy that maps a state to one action, as in DDPG and TD3; exploration noise comes with the call (`noise`).

    Its divergence is that of two Gaussians around the actions whose standard deviation is a tenth of `scale`, the usual
    exploration noise: half the squared distance in that unit.

    Attributes:
        action: Shape `[n, D]`.
        scale: Half the range of each action; shape `[D]` or a single number.
        low: Where actions with noise are clipped, if anywhere; shape `[D]` or a single number.
        high: Likewise.
    """

    action: Floats
    scale: Floats | float = 1.0
    low: Floats | None = None
    high: Floats | None = None

    family: ClassVar[str] = "deterministic"
    sent: ClassVar[tuple[str, ...]] = ("action",)
    reads: ClassVar[frozenset[str]] = frozenset({"deterministic", "noise"})
    noise_in_scale: ClassVar[float] = 0.1

    def __len__(self) -> int:
        return len(self.action)

    def check(self) -> None:
        """Want finite actions `[n, D]`."""
        if not (np.asarray(self.scale) > 0).all():
            raise PolicyError(f"Deterministic.scale must be positive, got {self.scale}.")
        check_floats("Deterministic.action", self.action, (None, None))

    def kl(self, newest: Deterministic) -> NDArray[np.float64]:
        """Return half the squared distance in units of the reference noise."""
        apart = (self.action.astype(np.float64) - newest.action) / (self.noise_in_scale * self.scale)
        gap: NDArray[np.float64] = 0.5 * (apart**2).sum(axis=-1)
        return gap

    def sample(self, rng: np.random.Generator, call: Call = NO_VALUES) -> tuple[Array, Floats | None]:
        """Return the action, with Gaussian noise of `noise * scale` if the call asks for it."""
        refuse_nan(self.action)
        noise = read_number(call, "noise", 0.0)
        if is_deterministic(call) or not noise.any():
            return self.action, None
        drawn = rng.standard_normal(self.action.shape, dtype=np.float32)
        action = self.action + drawn * noise[..., None] * self.scale
        if self.low is not None or self.high is not None:
            action = np.clip(action, self.low, self.high)
        return action.astype(self.action.dtype), None

    def log_prob(self, action: Array) -> Floats:
        """Refuse."""
        raise PolicyError(
            "A deterministic policy has no log-probabilities: its noise belongs to the call, not to the policy."
        )


def _normal_log_prob(scaled: Floats, log_std: Floats) -> Floats:
    logprob: Floats = -(0.5 * scaled**2 + log_std + scaled.dtype.type(_LOG_SQRT_2PI)).sum(axis=-1)
    return logprob
