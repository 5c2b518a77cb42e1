"""Tally: an environment that counts its resets and its steps."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np

from clusterenv import ClusterEnv


class Tally(gym.Env[Any, Any]):
    """Shows how often it was reset, and stepped since; says text in its infos.

    Args:
        gate: A named pipe, as long as it is there: a reset waits until a writer has come and left.
    """

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, gate: str = "") -> None:
        self._gate = gate
        self._resets = self._steps = 0
        self.color = "none"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._wait()
        self._resets, self._steps = self._resets + 1, 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self.show(), 1.0, False, False, {"said": "text"}

    def show(self) -> Any:
        return np.array([self._resets, self._steps], np.float64)

    def _wait(self) -> None:
        if self._gate and os.path.exists(self._gate):
            with open(self._gate, "rb") as gate:
                gate.read()


def truth(envs: ClusterEnv) -> Any:
    """Ask the environments themselves what they show."""
    return np.array(envs.call("show"))
