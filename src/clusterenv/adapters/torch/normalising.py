"""Normalised observations and rewards for learners whose policies act on workers.

Wrappers such as Gymnasium's `NormalizeObservation` would keep separate statistics for each environment or worker. Here
there is one set, which the learner updates from rollouts. The statistics of observations are part of the agent, so that
they are sent, versioned and saved with its weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clusterenv.errors import ConfigError


class Normaliser(nn.Module):
    """Normalises its input to mean 0 and standard deviation 1, using the statistics of all rows it was updated with.

    Update it after the policy's update, so that importance ratios compare policies under one normalisation.

    Args:
        shape: The shape of one observation.
        clip: Results are clipped to [-clip, clip].
    """

    mean: torch.Tensor
    var: torch.Tensor
    count: torch.Tensor
    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shape: int | tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.clip = clip
        # In double precision: after many steps, one more changes them by less than a float32 can represent.
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, rows: torch.Tensor | NDArray[Any]) -> None:
        """Include more observations `[..., *shape]` in the statistics.

        Raises:
            ConfigError: The observations have another shape, or hold NaN or infinity.
        """
        given = torch.as_tensor(rows, dtype=torch.float64, device=self.mean.device)
        shape = tuple(self.mean.shape)
        if tuple(given.shape[given.ndim - len(shape) :]) != shape:
            raise ConfigError(f"Normaliser.update takes rows of shape {shape}, got an array of {tuple(given.shape)}.")
        given = given.reshape(-1, *shape)
        if len(given) == 0:
            return
        if not given.isfinite().all():
            raise ConfigError("Normaliser.update was given NaN or infinity, which its statistics would keep for good.")
        share = len(given) / (self.count + len(given))
        delta = given.mean(0) - self.mean
        self.var += share * (given.var(0, correction=0) - self.var) + share * (1.0 - share) * delta.square()
        self.mean += share * delta
        self.count += len(given)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.var + 1e-8).rsqrt())


class RewardScaler:
    """Divides rewards by the standard deviation of the discounted return, as is usual for continuous control.

    Args:
        num_envs: The number of environments of all workers together.
        gamma: The discount factor.
    """

    def __init__(self, num_envs: int, gamma: float = 0.99) -> None:
        if not 0 <= gamma <= 1:
            raise ConfigError(f"RewardScaler.gamma must be from 0 to 1, got {gamma}.")
        self._gamma = gamma
        self._sums = np.zeros(num_envs)
        self._moments = Normaliser(1)

    def __call__(self, rewards: Any, ends: Any) -> NDArray[np.float32]:
        """Return the rewards of a rollout, scaled by all rewards so far.

        Args:
            rewards: `[T, N]`, in order of time.
            ends: Whether each step ended an episode, `[T, N]`.

        Raises:
            ConfigError: The shapes differ, or do not match the number of environments.
        """
        rewards, ends = np.asarray(rewards), np.asarray(ends, np.bool_)
        if rewards.ndim != 2 or rewards.shape != ends.shape or rewards.shape[1] != len(self._sums):
            raise ConfigError(
                f"RewardScaler takes rewards and ends of [steps, {len(self._sums)} environments], got "
                f"{rewards.shape} and {ends.shape}."
            )
        sums = np.zeros(rewards.shape)
        for t in range(len(rewards)):
            sums[t] = self._gamma * self._sums + rewards[t]
            self._sums = sums[t] * ~ends[t]
        self._moments.update(sums[..., None])
        scaled: NDArray[np.float32] = (rewards * self._moments.scale.item()).astype(np.float32)
        return scaled
