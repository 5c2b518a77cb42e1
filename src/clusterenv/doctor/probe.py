"""Probe: the environment that the doctor runs on every worker, and that describes the machine it runs on."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from clusterenv.config import thread_variables, usable_cores
from clusterenv.wire.compatibility import installed_versions

_NUM_STEPS = 100


class Probe(gym.Env[NDArray[np.uint8], np.int64]):
    """An environment whose steps cost nothing, so that a step measures only communication."""

    observation_space = spaces.Box(0, 255, (8,), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode that never ends."""
        return np.zeros(8, np.uint8), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Do nothing."""
        return np.zeros(8, np.uint8), 0.0, False, False, {}

    def describe_place(self) -> dict[str, Any]:
        """Return this machine's name and Python, and how many cores and threads it may use."""
        return {
            "hostname": socket.gethostname(),
            "python": sys.executable,
            "versions": installed_versions(),
            "cores": usable_cores(),
            # BLAS uses the smallest that is set, or the number of cores if none is.
            "threads": min((int(os.environ[name]) for name in thread_variables(1) if _is_number(name)), default=None),
        }

    def try_environment(self, env_id: str) -> dict[str, Any]:
        """Make, reset and step an environment, and report how it went."""
        return try_environment(env_id)

    def send_back(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return an array of this size."""
        return np.zeros(size_bytes, np.uint8)

    def take(self, array: NDArray[np.uint8]) -> int:
        """Return the size of an array that was sent here."""
        return array.nbytes


def try_environment(env_id: str) -> dict[str, Any]:
    """Make, reset and step an environment here.

    Returns:
        `make_s` and `step_s`, the seconds taken by making it and by one step; or `error`, what went wrong.
    """
    try:
        began = time.perf_counter()
        env = gym.make(env_id)
        made = time.perf_counter()
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(_NUM_STEPS)]
        stepping = time.perf_counter()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        done = time.perf_counter()
        env.close()
    except Exception as error:  # noqa: BLE001 - an environment may raise anything, and that is what we report
        return {"error": f"{type(error).__name__}: {error}"}
    return {"make_s": made - began, "step_s": (done - stepping) / _NUM_STEPS}


def _is_number(name: str) -> bool:
    return os.environ.get(name, "").isdecimal()
