"""An environment of any spaces, in a module of its own: whoever hosts it imports no learning framework."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym


class AnySpace(gym.Env[Any, Any]):
    """Shows anything, for episodes of seven steps."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._look(), 1.0, self._steps == 7, False, {}

    def _look(self) -> Any:
        seen = self.observation_space.sample()
        if isinstance(seen, dict):
            seen["mask"][0] = 1  # Something is always allowed.
        return seen

    def loaded(self) -> list[str]:
        """Name the frameworks that this process has imported."""
        return sorted({"torch", "jax", "flax", "equinox"} & sys.modules.keys())
