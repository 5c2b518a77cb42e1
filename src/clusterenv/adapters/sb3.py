"""Stable-Baselines3: a ClusterEnv as the `VecEnv` that its algorithms train on.

envs = ClusterEnv("CartPole-v1", num_envs=64, autoreset_mode="SameStep")
model = PPO("MlpPolicy", ClusterVecEnv(envs)).learn(1_000_000)

envs = make_vec_env("CartPole-v1", n_envs=64, vec_env_cls=ClusterVecEnv, vec_env_kwargs={"num_workers": 8})
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Wrapper
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn

import clusterenv
from clusterenv.adapters.infos import check_same_step, split_endings, split_infos
from clusterenv.errors import ConfigError

EnvFactory = Callable[[], Env[Any, Any]]


class ClusterVecEnv(VecEnv):
    """Returns what SB3's own `DummyVecEnv` returns for the same environments, seeds and actions.

    Functions that run on workers are lambdas or nested: those are pickled by value, so that a worker need not import
    this module, and with it SB3.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any] | Sequence[EnvFactory], **options: Any) -> None:
        """Wrap a ClusterEnv, or make one from factories, as SB3's own classes do; `close` also closes the ClusterEnv.

        Args:
            envs: A ClusterEnv made with `autoreset_mode="SameStep"`, because SB3 expects the next episode's first
                observation in the step that ends the last one. Or factories, one per environment.
            options: Further arguments for ClusterEnv, if `envs` are factories.

        Raises:
            ConfigError: The ClusterEnv has another autoreset mode, or was made with `copy=False`.
        """
        if not isinstance(envs, VectorEnv):
            envs = clusterenv.ClusterEnv(envs, **options, autoreset_mode="SameStep", copy=True)
        elif options:
            raise ConfigError(
                f"ClusterVecEnv takes {', '.join(options)} with factories, not with a ClusterEnv: {envs}."
            )
        check_same_step(envs, "ClusterVecEnv")
        if not hasattr(envs, "apply"):
            raise ConfigError(f"ClusterVecEnv takes a ClusterEnv itself, without wrappers, got {envs}.")
        self.envs: Any = envs  # A ClusterEnv.
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> VecEnvObs:
        """Reset all environments, with the seeds and options set since the last reset."""
        # `set_options` repeats a single dict, so environments are grouped by its identity, usually into one group.
        groups: dict[int | None, list[int]] = {}
        for index, options in enumerate(self._options):
            groups.setdefault(id(options) if options else None, []).append(index)
        obs: Any = None
        for group in groups.values():
            options = dict(self._options[group[0]])
            if len(groups) > 1:
                options["reset_mask"] = np.isin(np.arange(self.num_envs), group)
            obs, infos = self.envs.reset(seed=list(self._seeds), options=options or None)
            rows = split_infos(infos, self.num_envs)
            for index in group:
                self.reset_infos[index] = rows[index]
        self._reset_seeds()
        self._reset_options()
        return obs  # type: ignore[no-any-return]  # nested as the space is

    def step_async(self, actions: NDArray[Any]) -> None:
        self.envs.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step; the infos of finished episodes hold "terminal_observation"."""
        obs, rewards, terminations, truncations, infos = self.envs.step_wait()
        rows, endings = split_endings(infos, self.num_envs)
        for index, (final_obs, final_info) in endings.items():
            self.reset_infos[index] = rows[index]
            rows[index] = {**final_info, "terminal_observation": final_obs}
        for row, is_truncated in zip(rows, (truncations & ~terminations).tolist(), strict=True):
            row["TimeLimit.truncated"] = is_truncated
        return obs, rewards.astype(np.float32), terminations | truncations, rows

    def close(self) -> None:
        self.envs.close()

    def has_attr(self, attr_name: str) -> bool:
        return all(self.envs.apply(lambda env: env.has_wrapper_attr(attr_name), range(self.num_envs)))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Read an attribute through wrappers; its value must be sendable without pickle."""
        found = self.envs.get_attr(attr_name)
        return [found[index] for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute on the outermost wrapper that has it, or else on the environment itself."""
        if indices is None:
            self.envs.set_attr(attr_name, [value] * self.num_envs)  # So that a replaced worker gets it too.
        else:
            self.envs.apply(lambda env: env.set_wrapper_attr(attr_name, value), list(self._get_indices(indices)))

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method, through wrappers, of the given environments."""

        def call_method(env: Any) -> Any:
            return env.get_wrapper_attr(method_name)(*method_args, **method_kwargs)

        return list(self.envs.apply(call_method, list(self._get_indices(indices))))

    def env_is_wrapped(
        self, wrapper_class: type[Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return whether each environment has a wrapper of this class."""
        wanted = (wrapper_class.__module__, wrapper_class.__qualname__)  # Workers may be unable to import the class.

        def is_wrapped(env: Any) -> bool:
            while isinstance(env, Wrapper):
                if wanted in [(base.__module__, base.__qualname__) for base in type(env).__mro__]:
                    return True
                env = env.env
            return False

        return list(self.envs.apply(is_wrapped, list(self._get_indices(indices))))

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Return what every environment renders in mode "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The environments' render_mode is {self.render_mode}; images need "
                'ClusterEnv(..., render_mode="rgb_array").',
                stacklevel=2,
            )
            return [None] * self.num_envs
        return list(self.envs.render())
