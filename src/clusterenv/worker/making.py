"""Making: an environment from its factory, checked to be what the head expects."""

from __future__ import annotations

from typing import Any

from gymnasium import Env, Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import VectorEnv

from clusterenv.errors import ConfigError
from clusterenv.wire.assignment import Assignment, EnvFactory


def make_env(factory: EnvFactory, assignment: Assignment) -> Env[Any, Any]:
    """Make an environment.

    Raises:
        ConfigError: It is none.
        RuntimeError: It does not have the spaces the head expects.
    """
    env = factory()
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"The factory made a vector environment ({env}). To run vector environments on workers, wrap a callable "
            "that takes their size: ClusterEnv(NativeVector(lambda n: make(n)), num_envs=...)."
        )
    if not isinstance(env, Env):
        raise ConfigError(f"The factory must return a gymnasium.Env, got {type(env)}.")
    check_spaces(env.observation_space, env.action_space, assignment)
    return env


def check_spaces(observation_space: Space[Any], action_space: Space[Any], assignment: Assignment) -> None:
    """Check that an environment has the spaces the head expects.

    Raises:
        RuntimeError: It has not; worded as Gymnasium words it.
    """
    wanted = assignment.observation_space
    if assignment.must_equal and observation_space != wanted:
        raise RuntimeError(
            "ClusterEnv(..., observation_mode='same') however the sub-environments observation spaces are not "
            "equivalent. "
            f"single_observation_space={wanted}, sub-environment observation_space={observation_space}. "
            "If this is intentional, use `observation_mode='different'` instead."
        )
    if not assignment.must_equal and not is_space_dtype_shape_equiv(observation_space, wanted):
        raise RuntimeError(
            "ClusterEnv(..., observation_mode='different' or custom space) however the sub-environments observation "
            f"spaces do not share a common shape and dtype, single_observation_space={wanted}, "
            f"sub-environment observation_space={observation_space}"
        )
    if action_space != assignment.action_space:
        raise RuntimeError(
            "Sub-environment action space doesn't make the `single_action_space`, "
            f"action_space={action_space}, single_action_space={assignment.action_space}"
        )
