"""Entry points: get a ClusterEnv from scripts and libraries that call `gymnasium.make_vec`.

Gymnasium's vectorization modes are a closed list. Our `make_vec` has the same signature and one more mode, "cluster".
With `vector_entry_point`, a registered environment's vector environment is a ClusterEnv even where a library calls
`gymnasium.make_vec` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium import Env, VectorizeMode
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from clusterenv.env import ClusterEnv
from clusterenv.errors import ConfigError
from clusterenv.setup.factories import NativeVector

CLUSTER = "cluster"


def make_vec(
    id: str | EnvSpec,  # noqa: A002 - as Gymnasium calls it
    num_envs: int = 1,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[Env[Any, Any]], Any]] | None = None,
    **kwargs: Any,
) -> VectorEnv[Any, Any, Any]:
    """Make vector environments as `gymnasium.make_vec` does, by default on workers.

    Args:
        id: The environment's id or spec.
        num_envs: The number of environments.
        vectorization_mode: "cluster", the default, makes a ClusterEnv; "vector_entry_point" makes a ClusterEnv that
            runs the environment's own vector implementation on each worker. "sync" and "async" are left to Gymnasium.
        vector_kwargs: Arguments for ClusterEnv: `num_workers`, `launcher`, `autoreset_mode`, ...
        wrappers: Applied to each environment on its worker; the first is innermost.
        kwargs: Arguments for `gymnasium.make`.

    Raises:
        ConfigError: An argument is wrong.
    """
    if vectorization_mode in (None, CLUSTER):
        return ClusterEnv(id, num_envs, env_kwargs=kwargs, wrappers=wrappers, **(vector_kwargs or {}))
    try:
        mode = VectorizeMode(vectorization_mode)
    except ValueError:
        known = ", ".join(repr(each.value) for each in VectorizeMode)
        raise ConfigError(
            f"vectorization_mode must be {CLUSTER!r}, or one of Gymnasium's: {known}; got {vectorization_mode!r}."
        ) from None
    if mode is VectorizeMode.VECTOR_ENTRY_POINT:
        return ClusterEnv(NativeVector(id, **kwargs), num_envs, wrappers=wrappers, **(vector_kwargs or {}))
    return gym.make_vec(id, num_envs, vectorization_mode=mode, vector_kwargs=vector_kwargs, wrappers=wrappers, **kwargs)


def vector_entry_point(env: str | EnvSpec | Callable[..., Env[Any, Any]], **options: Any) -> Callable[..., ClusterEnv]:
    """Return a `vector_entry_point` for `gymnasium.register`, so that `gymnasium.make_vec(id, n)` makes a ClusterEnv.

    gymnasium.register("Walker-v0", Walker, vector_entry_point=vector_entry_point(Walker, num_workers=8))

    Args:
        env: A class or a function that makes one environment from the keyword arguments of the registration and of
            `make_vec`; or the id of another registration.
        options: Arguments for ClusterEnv.
    """

    def make_cluster(num_envs: int = 1, max_episode_steps: int | None = None, **kwargs: Any) -> ClusterEnv:
        spec = env
        if not isinstance(spec, str | EnvSpec):
            # Gymnasium applies no time limit to what a vector entry point returns.
            spec = EnvSpec("clusterenv/VectorEntryPoint-v0", entry_point=spec)
        if max_episode_steps is not None:
            kwargs["max_episode_steps"] = max_episode_steps
        return ClusterEnv(spec, num_envs, env_kwargs=kwargs, **options)

    return make_cluster
