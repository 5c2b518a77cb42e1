"""Small environments made for the benchmark: each is there for one property, and not for its dynamics.

`DictTask` and `ImageTask` have observations that are dear to move. `WaitTask`, `WorkTask` and `RandomTask` have steps
of about a millisecond, as simulators have. None ends by itself; the time limit they are registered with ends them.
"""

import hashlib
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray

Observation = NDArray[np.float32]

STEP_S = 0.001
# Takes about 1 ms of CPU on the machine of the published results; elsewhere it is as much work, and so as fair.
WORK_PER_STEP = 3000
# A duration is drawn from so many quantiles of its distribution, each once before any of them again: rounds are short,
# and nobody should win one because the dice favoured them.
QUANTILES = 32


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
        """Walk the joints at random."""
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
        """Show the next frame."""
        self._frame = (self._frame + 1 + int(action)) % len(self._bank)
        return self._bank[self._frame], 1.0, False, False, {}


class _SlowTask(gym.Env[Observation, np.int64]):
    """An environment of which only the time that a step takes matters."""

    observation_space = Box(-np.inf, np.inf, (8,), np.float32)
    action_space = Discrete(4)

    def __init__(self) -> None:
        self._state: Observation = np.zeros(8, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start from rest."""
        super().reset(seed=seed)
        return self._state.copy(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take the time that a step takes."""
        self._spend()
        return self._state.copy(), 1.0, False, False, {}

    def _spend(self) -> None:
        raise NotImplementedError


class WaitTask(_SlowTask):
    """Waits 1 ms a step without using the CPU, as an environment does whose simulator is another program or device.

    Here the number of cores is no limit: whoever steps all environments at the same time is fastest.
    """

    def _spend(self) -> None:
        time.sleep(STEP_S)


class WorkTask(_SlowTask):
    """Works for 1 ms a step.

    A fixed amount of work and not a fixed time: by the clock, a process would be done as soon even if it never got a
    core, and whoever starts most processes would look fastest.
    """

    def _spend(self) -> None:
        work(WORK_PER_STEP)


class RandomTask(_SlowTask):
    """Works for a random time, exponentially distributed with a mean of 1 ms a step."""

    def __init__(self) -> None:
        super().__init__()
        # Not seeded by reset: contenders seed in their own ways, some of them several environments alike, and equal
        # durations would spare them the waiting for one another that is measured here.
        self._dice = np.random.default_rng()
        self._durations: list[int] = []

    def _spend(self) -> None:
        if not self._durations:
            self._durations = self._dice.permutation(exponential_quantiles(WORK_PER_STEP)).tolist()
        work(self._durations.pop())


def exponential_quantiles(mean: float) -> NDArray[np.int64]:
    """List `QUANTILES` quantiles of the exponential distribution, all equally likely, at least 1, with this mean."""
    quantiles = -np.log1p(-(np.arange(QUANTILES) + 0.5) / QUANTILES)
    durations: NDArray[np.int64] = np.maximum(1, np.rint(quantiles / quantiles.mean() * mean)).astype(np.int64)
    return durations


def work(amount: int) -> None:
    """Keep a core busy with so many rounds of hashing: no memory to speak of, no interpreter, always as long."""
    hashlib.pbkdf2_hmac("sha256", b"work", b"", amount)
