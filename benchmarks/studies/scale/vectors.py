"""An environment that does nothing but return observations of a given size."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

_EPISODE_STEPS = 200


class Vectors(gym.Env[NDArray[np.float32], np.int64]):
    """Random vectors, always the same ones in turn: they cost no time, and do not compress."""

    def __init__(self, num_floats: int) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (num_floats,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self._vectors = np.random.default_rng(0).normal(size=(8, num_floats)).astype(np.float32)
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._count = 0
        return self._vectors[0], {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Return the next one."""
        self._count += 1
        return self._vectors[self._count % 8], 1.0, False, self._count == _EPISODE_STEPS, {}
