"""Normalised observations and rewards for learners whose policies act on workers.

Wrappers such as Gymnasium's `NormalizeObservation` would give each environment, or each worker, statistics of its own.
Here there is one set: the learner updates it from rollouts, and for observations it is part of the agent, so that it
travels with the weights, as versions do, and is saved with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clusterenv.errors import ConfigError


class Normaliser(nn.Module):
    """Brings what it is given to a mean of 0 and a deviation of 1, by all that it was ever updated with.

    Update it after a policy's update, so that its ratios compare policies under one normalisation.

    Args:
        shape: Of one observation.
        clip: No result is farther from 0.
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
        # In double precision: after many steps one more changes them by less than a float can tell.
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - self.shift) * self.scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, rows: torch.Tensor | NDArray[Any]) -> None:
        """Take in more observations `[..., *shape]`.

        Raises:
            ConfigError: They have another shape, or hold what no statistics survive: NaN or infinity.
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
    """Divides rewards by the deviation of the discounted return, as is usual for continuous control.

    Args:
        num_envs: Of all workers together.
        gamma: What a reward is worth one step earlier.
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
            rewards: `[T, N]`, in the order in which they came.
            ends: Whether each ended an episode.

        Raises:
            ConfigError: They are of other environments, or not of the same steps.
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
