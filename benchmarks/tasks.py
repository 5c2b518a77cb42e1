"""The environments the benchmark steps, and the actions it steps them with.

Two are Gymnasium's own. The other two are synthetic and small, because they are there for the shape of their
observations (a Dict, and a stack of images) and not for their dynamics. All come out of `gym.make`, so that every
contender steps the same stack of wrappers.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray

TASKS: Mapping[str, str] = {
    "cartpole": "CartPole-v1",
    "lunarlander": "LunarLander-v3",
    "dict": "BenchDict-v0",
    "image": "BenchImage-v0",
}

# Enough distinct rows that no contender profits from a repeated one, few enough to stay in the cache.
ACTION_ROWS = 128


def make_env(task: str) -> gym.Env[Any, Any]:
    """Make one environment of a task, a key of `TASKS`; safe to call in any process."""
    env_id = TASKS[task]
    if env_id not in gym.registry:
        gym.register("BenchDict-v0", entry_point="benchmarks.tasks:DictTask", max_episode_steps=100)
        gym.register("BenchImage-v0", entry_point="benchmarks.tasks:ImageTask", max_episode_steps=100)
    return gym.make(env_id)


def precompute_actions(task: str, num_envs: int) -> NDArray[np.int64]:
    """Draw random actions, shape `(ACTION_ROWS, num_envs)`, so that sampling them is never part of a measurement."""
    env = make_env(task)
    space = env.action_space
    env.close()
    assert isinstance(space, Discrete)
    return np.random.default_rng(0).integers(0, int(space.n), (ACTION_ROWS, num_envs))


class DictTask(gym.Env[dict[str, Any], np.int64]):
    """A Dict observation of an image, a vector and a category, at about 20 us a step."""

    observation_space = Dict(
        camera=Box(0, 255, (16, 16, 3), np.uint8),
        joints=Box(-np.inf, np.inf, (8,), np.float32),
        mode=Discrete(5),
    )
    action_space = Discrete(4)

    def __init__(self) -> None:
        self._joints: NDArray[np.float32] = np.zeros(8, np.float32)
        self._mode = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start from rest."""
        super().reset(seed=seed)
        self._joints = np.zeros(8, np.float32)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Walk the joints at random; the episode ends with the time limit only."""
        self._mode = (self._mode + int(action)) % 5
        self._joints = self._joints + self.np_random.standard_normal(8, dtype=np.float32)
        return self._observe(), float(np.abs(self._joints).mean()), False, False, {}

    def _observe(self) -> dict[str, Any]:
        camera = self.np_random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        return {"camera": camera, "joints": self._joints, "mode": np.int64(self._mode)}


class ImageTask(gym.Env[NDArray[np.uint8], np.int64]):
    """Frames of 84 x 84 x 4 bytes out of a small bank: next to free, so that moving the 28 kB is what is measured."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)
    action_space = Discrete(6)

    def __init__(self) -> None:
        self._bank = np.random.default_rng(0).integers(0, 256, (8, 84, 84, 4), dtype=np.uint8)
        self._frame = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start at the first frame."""
        super().reset(seed=seed)
        self._frame = 0
        return self._bank[0], {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Show the next frame; the episode ends with the time limit only."""
        self._frame = (self._frame + 1 + int(action)) % len(self._bank)
        return self._bank[self._frame], 1.0, False, False, {}
