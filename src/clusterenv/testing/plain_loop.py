"""PlainLoop: environments in a list, reset and stepped one after another; the reference for vector environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from clusterenv.testing.subject import Mask


class PlainLoop:
    """Environments in a list.

    Args:
        factories: One per environment.
        space: The observation space of one environment.
        mode: What to do when an episode ends.
    """

    def __init__(
        self, factories: Sequence[Callable[[], gym.Env[Any, Any]]], space: gym.Space[Any], mode: AutoresetMode
    ) -> None:
        self._envs = [factory() for factory in factories]
        self._space = space
        self._mode = mode
        self._observations: list[Any] = [None] * len(self._envs)
        self._is_over = [False] * len(self._envs)

    def reset(self, seed: int | None, mask: Mask | None) -> tuple[Any, ...]:
        """Reset all or some; return the batched observations and a list of infos."""
        infos: list[dict[str, Any]] = [{} for _ in self._envs]
        for index in range(len(self._envs)):
            if mask is None or mask[index]:
                infos[index] = self._reset(index, None if seed is None else seed + index)
        return self._batch(), infos

    def step(self, action_space: gym.Space[Any], actions: Any) -> tuple[Any, ...]:
        """Step all; return the batched observations, rewards and flags, and a list of infos.

        Args:
            action_space: The batched action space.
            actions: One per environment.
        """
        rewards = np.zeros(len(self._envs), np.float64)
        flags = np.zeros((2, len(self._envs)), np.bool_)
        infos: list[dict[str, Any]] = []
        for index, (env, action) in enumerate(zip(self._envs, iterate(action_space, actions), strict=True)):
            if self._is_over[index]:
                infos.append(self._reset(index, None))
                continue
            observation, reward, terminated, truncated, info = env.step(action)
            self._observations[index] = deepcopy(observation)
            rewards[index], flags[:, index] = float(reward), (terminated, truncated)
            self._is_over[index] = bool(terminated or truncated)
            info = deepcopy(info)
            if self._is_over[index] and self._mode == AutoresetMode.SAME_STEP:
                final = {"final_obs": self._observations[index], "final_info": info}
                info = final | self._reset(index, None)
            infos.append(info)
        return self._batch(), rewards, flags[0], flags[1], infos

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def _reset(self, index: int, seed: int | None) -> dict[str, Any]:
        observation, info = self._envs[index].reset(seed=seed)
        self._observations[index], self._is_over[index] = deepcopy(observation), False
        return deepcopy(info)

    def _batch(self) -> Any:
        batch: Any = create_empty_array(self._space, len(self._envs))
        return deepcopy(concatenate(self._space, self._observations, batch))
