"""EnvPool's C++ environments on the workers: `ClusterEnv(EnvPool("CartPole-v1"), num_envs=256)`."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import envpool
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from clusterenv.errors import ConfigError
from clusterenv.setup.factories import NativeVector

_ROW_NUMBERS = ("env_id", "players")  # Row i is environment i: indices within one worker's pool would mislead.


class EnvPool(NativeVector):
    """Hosts a pool of EnvPool environments on each worker."""

    def __init__(self, env_id: str, **kwargs: Any) -> None:
        """Name the environment.

        Args:
            env_id: One of `envpool.list_all_envs()`.
            kwargs: Arguments for `envpool.make_gymnasium`. `num_threads` defaults to the worker's share of the cores.
        """
        for name in ("num_envs", "batch_size", "seed", "env_seed"):
            if name in kwargs:
                raise ConfigError(f"EnvPool({name}=...) is set by ClusterEnv: use num_envs, and reset(seed=...).")
        super().__init__(functools.partial(_PoolVector, env_id, kwargs))


class _PoolVector(VectorEnv[Any, Any, NDArray[Any]]):
    """An EnvPool with Gymnasium's interface: seeds at reset, partial resets, infos in the usual layout."""

    def __init__(self, env_id: str, kwargs: dict[str, Any], num_envs: int) -> None:
        self._make = functools.partial(
            envpool.make_gymnasium,
            env_id,
            num_envs=num_envs,
            **{"num_threads": int(os.environ.get("OMP_NUM_THREADS", "0")), **kwargs},
        )
        self._pool = self._make()
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations: Any = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        # With a seed, the pool is made again: EnvPool takes seeds only when it is made.
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            return self._reset_some(mask, seed)
        if seed is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
            self._pool = self._make(env_seed=_checked_seeds(seeds))
        self._observations, infos = self._pool.reset()
        return self._observations, _without_row_numbers(infos)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        self._observations, rewards, terminations, truncations, infos = self._pool.step(actions)
        return self._observations, rewards, terminations, truncations, _without_row_numbers(infos)

    def close_extras(self) -> None:
        self._pool.close()

    def _reset_some(self, mask: NDArray[np.bool_], seed: object) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            raise ConfigError("EnvPool cannot seed only some environments: leave out the seed or the reset_mask.")
        if not isinstance(self._observations, np.ndarray):
            raise ConfigError("Some environments of an EnvPool can be reset only if observations are single arrays.")
        rows = np.flatnonzero(mask).astype(np.int32)
        part, infos = self._pool.reset(rows)
        order = np.asarray(infos["env_id"])
        self._observations = self._observations.copy()
        self._observations[order] = part
        whole: dict[str, Any] = {}
        for key, value in _without_row_numbers(infos).items():
            if isinstance(value, np.ndarray):
                whole[key] = np.zeros((self.num_envs, *value.shape[1:]), value.dtype)
                whole[key][order] = value
                whole[f"_{key}"] = np.asarray(mask, dtype=np.bool_)
        return self._observations, whole


def _checked_seeds(seeds: Sequence[int | None]) -> list[int]:
    if any(seed is None for seed in seeds):
        raise ConfigError("EnvPool needs a seed for every environment, or none at all; got a list with a None in it.")
    return [int(seed) % (2**31 - 1) for seed in seeds if seed is not None]


def _without_row_numbers(infos: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in infos.items() if key not in _ROW_NUMBERS}
