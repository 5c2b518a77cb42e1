"""tianshou: a ClusterEnv as the vector environment that its collectors step.

envs = ClusterVectorEnv([lambda: gym.make("CartPole-v1")] * 64, num_workers=8)
collector = Collector(algorithm, envs, VectorReplayBuffer(20_000, 64))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

import clusterenv
from clusterenv.adapters.infos import split_infos
from clusterenv.errors import ConfigError

_INDEX = "_clusterenv_index"  # The attribute by which an environment on a worker knows its index.

Indices = int | Sequence[int] | NDArray[np.integer[Any]] | None
Stepped = tuple[NDArray[Any], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], NDArray[Any]]


class ClusterVectorEnv:
    """Returns what tianshou's own `DummyVectorEnv` returns for the same environments, seeds and actions.

    Environments are reset when tianshou says so. Stepping all environments is one call; stepping only some, as tianshou
    does for the last of a number of episodes, is slower.

    Attributes:
        envs: The ClusterEnv.
        env_num: The number of environments.
        action_space: The action space of each environment.
        observation_space: The observation space of each environment.
        is_async: Always False: a step returns when all environments are done.
    """

    is_async = False

    def __init__(self, envs: VectorEnv[Any, Any, Any] | Sequence[Callable[[], Env[Any, Any]]], **options: Any) -> None:
        """Wrap a ClusterEnv, or make one from factories; `close` also closes the ClusterEnv.

        Args:
            envs: A ClusterEnv made with `autoreset_mode="Disabled"`. Or factories, one per environment.
            options: Further arguments for ClusterEnv, if `envs` are factories.

        Raises:
            ConfigError: The ClusterEnv has another autoreset mode.
        """
        if not isinstance(envs, VectorEnv):
            envs = clusterenv.ClusterEnv(envs, **options, autoreset_mode="Disabled", copy=True)
        elif options:
            raise ConfigError(f"ClusterVectorEnv takes {', '.join(options)} with factories only, not with {envs}.")
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.DISABLED or not hasattr(envs, "apply"):
            raise ConfigError(
                'ClusterVectorEnv takes ClusterEnv(..., autoreset_mode="Disabled") itself, without wrappers: tianshou '
                f"resets environments when it wants to. Got {envs} with the mode {mode}."
            )
        self.envs = cast("Any", envs)
        self.env_num = envs.num_envs
        self.action_space: list[Space[Any]] = [envs.single_action_space] * self.env_num
        self.observation_space: list[Space[Any]] = [envs.single_observation_space] * self.env_num
        self.envs.set_attr(_INDEX, list(range(self.env_num)))

    def __len__(self) -> int:
        """Return the number of environments."""
        return self.env_num

    @property
    def is_closed(self) -> bool:
        """Whether the ClusterEnv was closed."""
        return bool(self.envs.closed)

    def reset(
        self, env_id: Indices = None, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Reset the given environments, or all; each with the same seed, as tianshou does.

        Returns:
            Their observations and infos, in the order of `env_id`.
        """
        indices = self._indices(env_id)
        options = dict(options or {})
        if len(indices) < self.env_num:
            options["reset_mask"] = np.isin(np.arange(self.env_num), indices)
        obs, infos = self.envs.reset(seed=None if seed is None else [seed] * self.env_num, options=options or None)
        rows = split_infos(infos, self.env_num)
        return self._pick(obs, indices), _objects([rows[index] for index in indices])

    def step(self, action: Any, id: Indices = None) -> Stepped:  # noqa: A002 - as tianshou calls it
        """Step the given environments, or all.

        Args:
            action: One action per environment, in the order of `id`.
            id: The indices of the environments; None: all.

        Returns:
            Observations, rewards, terminations, truncations and infos of these environments. Each info has "env_id".
        """
        indices = self._indices(id)
        if len(action) != len(indices):
            raise ValueError(f"action has {len(action)} rows for {len(indices)} environments.")
        if indices != list(range(self.env_num)):
            return self._step_some(action, indices)
        obs, rewards, terminations, truncations, infos = self.envs.step(np.asarray(action))
        rows = [{**row, "env_id": index} for index, row in enumerate(split_infos(infos, self.env_num))]
        return self._pick(obs, indices), rewards, terminations, truncations, _objects(rows)

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int | None]]:
        """Reset all environments, with seeds: an int s gives environment i the seed s + i."""
        seeds: list[int | None] = [None] * self.env_num
        if isinstance(seed, int | np.integer):
            seeds = [int(seed) + index for index in range(self.env_num)]
        elif seed is not None:
            seeds = list(seed)
        self.envs.reset(seed=seeds)
        return [[each] for each in seeds]

    def get_env_attr(self, key: str, id: Indices = None) -> list[Any]:  # noqa: A002 - as tianshou calls it
        """Read an attribute of the environments themselves, inside their wrappers."""
        return list(self.envs.apply(lambda env: getattr(env.unwrapped, key), self._indices(id)))

    def set_env_attr(self, key: str, value: Any, id: Indices = None) -> None:  # noqa: A002 - as tianshou calls it
        """Set an attribute of the environments themselves, inside their wrappers."""
        self.envs.apply(lambda env: setattr(env.unwrapped, key, value), self._indices(id))

    def render(self) -> list[Any]:
        """Return what every environment renders."""
        return list(self.envs.render())

    def close(self) -> None:
        """Close the environments and stop the workers."""
        self.envs.close()

    def _step_some(self, action: Any, indices: list[int]) -> Stepped:
        name, actions = _INDEX, dict(zip(indices, np.asarray(action), strict=True))
        # A lambda is pickled by value: workers need not import this module.
        results = self.envs.apply(lambda env: env.step(actions[env.get_wrapper_attr(name)]), indices)
        obs, rewards, terminations, truncations, infos = zip(*results, strict=True)
        rows = [{**info, "env_id": index} for index, info in zip(indices, infos, strict=True)]
        return (
            _stack(obs),
            np.asarray(rewards, np.float64),
            np.asarray(terminations, np.bool_),
            np.asarray(truncations, np.bool_),
            _objects(rows),
        )

    def _indices(self, ids: Indices) -> list[int]:
        if ids is None:
            return list(range(self.env_num))
        return [int(index) for index in np.atleast_1d(np.asarray(ids))]

    def _pick(self, obs: Any, indices: list[int]) -> NDArray[Any]:
        if isinstance(obs, np.ndarray):
            return obs[indices]
        rows = list(iterate(self.envs.observation_space, obs))
        return _stack([rows[index] for index in indices])


def _stack(obs: Sequence[Any]) -> NDArray[Any]:
    """Stack observations as tianshou does: those that are not arrays are objects."""
    return np.stack(obs) if isinstance(obs[0], np.ndarray | np.generic | int | float) else _objects(obs)


def _objects(items: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(items), object)
    array[:] = items
    return array
