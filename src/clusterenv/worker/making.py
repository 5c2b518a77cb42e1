"""Making: makes environments from their factories, and checks that they are what the run expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium import Env, Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import VectorEnv

from clusterenv.errors import ConfigError
from clusterenv.wire import spaces as codec
from clusterenv.wire.assignment import Assignment, EnvFactory, RunSpaces

Envs = list[Env[Any, Any]] | VectorEnv[Any, Any, Any]


def make_env(factory: EnvFactory) -> Env[Any, Any]:
    """Make an environment.

    Raises:
        ConfigError: The factory did not return an environment.
    """
    env = factory()
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"The factory made a vector environment ({env}). To run vector environments on workers, wrap a callable "
            "that takes their size: ClusterEnv(NativeVector(lambda n: make(n)), num_envs=...)."
        )
    if not isinstance(env, Env):
        hint = " If it makes factories, as CleanRL's make_env does, call it: [make_env(i) for i in range(n)]."
        raise ConfigError(f"The factory must return a gymnasium.Env, got {env!r}.{hint if callable(env) else ''}")
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), Space):
            raise ConfigError(
                f"{type(env.unwrapped).__name__} must have an {name}, a gymnasium.spaces.Space, got {space!r}. Set "
                f"self.{name} in its __init__."
            )
    return env


def make_vector_env(assignment: Assignment) -> VectorEnv[Any, Any, Any]:
    """Make the native vector environment that is the shard.

    Raises:
        ConfigError: The result is not a vector environment, has another size, or resets in another mode.
    """
    assert not isinstance(assignment.factories, list)
    env = assignment.factories(assignment.num_rows)
    if not isinstance(env, VectorEnv):
        raise ConfigError(f"A NativeVector's callable must return a gymnasium.vector.VectorEnv, got {type(env)}.")
    if env.num_envs != assignment.num_rows:
        raise ConfigError(
            f"The vector environment has {env.num_envs} environments where this worker hosts {assignment.num_rows}. "
            "Its callable is given that number and must use it."
        )
    mode = env.metadata.get("autoreset_mode")
    if mode is not None and mode != assignment.autoreset_mode:
        raise ConfigError(
            f"{env} resets in mode {mode}, not {assignment.autoreset_mode}: pass ClusterEnv(autoreset_mode={mode})."
        )
    return env


def describe_envs(made: Envs) -> dict[str, Any]:
    """Describe environments: their observation spaces (one if all are equal), action space and attributes."""
    if isinstance(made, VectorEnv):
        first: Any = made
        observation_spaces, action_space = [made.single_observation_space], made.single_action_space
    else:
        first = made[0]
        observation_spaces, action_space = [env.observation_space for env in made], first.action_space
        if all(space == observation_spaces[0] for space in observation_spaces[1:]):
            del observation_spaces[1:]
    return {
        "observation_spaces": observation_spaces,
        "action_space": action_space,
        # The run sets the mode; a native vector environment's own mode was checked against it.
        "metadata": {key: value for key, value in first.metadata.items() if key != "autoreset_mode"},
        "render_mode": first.render_mode,
    }


def check_spaces(observation_space: Space[Any], action_space: Space[Any], wanted: RunSpaces) -> None:
    """Check that an environment has the spaces of the run.

    Raises:
        RuntimeError: It does not; worded as in Gymnasium.
    """
    single = wanted.observation_space
    if wanted.must_equal and observation_space != single:
        raise RuntimeError(
            "ClusterEnv(..., observation_mode='same') however the sub-environments observation spaces are not "
            "equivalent. "
            f"single_observation_space={single}, sub-environment observation_space={observation_space}. "
            "If this is intentional, use `observation_mode='different'` instead."
        )
    if not wanted.must_equal and not is_space_dtype_shape_equiv(observation_space, single):
        raise RuntimeError(
            "ClusterEnv(..., observation_mode='different' or custom space) however the sub-environments observation "
            f"spaces do not share a common shape and dtype, single_observation_space={single}, "
            f"sub-environment observation_space={observation_space}"
        )
    if action_space != wanted.action_space:
        raise RuntimeError(
            "Sub-environment action space doesn't make the `single_action_space`, "
            f"action_space={action_space}, single_action_space={wanted.action_space}"
        )


def make_all(factories: list[EnvFactory], note_row: Callable[[int], None]) -> list[Env[Any, Any]]:
    """Make a shard's environments in index order; if one fails, those before it are closed."""
    envs: list[Env[Any, Any]] = []
    try:
        for row, factory in enumerate(factories):
            note_row(row)
            envs.append(make_env(factory))
    except BaseException:
        for env in envs:
            env.close()
        raise
    return envs


def for_travel(description: dict[str, Any]) -> dict[str, Any]:
    """Replace spaces that are not Gymnasium's own, and so cannot be sent, by None."""
    return {
        **description,
        "observation_spaces": [_travelling(space) for space in description["observation_spaces"]],
        "action_space": _travelling(description["action_space"]),
    }


def _travelling(space: Space[Any]) -> Space[Any] | None:
    return None if codec.describe(space) is None else space
