"""Sample: what one environment, made on the head, tells about all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gymnasium import Env, Space
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from clusterenv.errors import ConfigError
from clusterenv.factories import Factories

ObservationMode = str | tuple[Space[Any], Space[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class Sample:
    """Spaces and attributes of the environments."""

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    kept: Env[Any, Any] | None


def take_sample(factories: Factories, observation_mode: ObservationMode, *, keeps: bool) -> Sample:
    """Make an environment and read what is needed.

    With `observation_mode="different"` that is done for each environment, since each may have bounds of its own.

    Args:
        factories: Make the environments.
        observation_mode: As in Gymnasium.
        keeps: Whether to hand on environment 0 for use, if it is a plain one, rather than to close it.

    Raises:
        ValueError: The observation mode is none of those Gymnasium has.
        TypeError: It is a tuple of something other than spaces.
    """
    if isinstance(observation_mode, tuple) and len(observation_mode) == 2:
        if not all(isinstance(space, Space) for space in observation_mode):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, "
                f"got {type(observation_mode[0])} and {type(observation_mode[1])}"
            )
    elif observation_mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {observation_mode}"
        )
    env = factories.sample()
    single_observation, single_action = _single_spaces(env)
    metadata, render_mode = dict(env.metadata), env.render_mode
    kept = env if keeps and isinstance(env, Env) else None
    if kept is None:
        env.close()
    num_envs = factories.num_envs
    if isinstance(observation_mode, tuple):
        observation, single_observation = observation_mode
    elif observation_mode == "same" or factories.plain is None:
        observation = batch_space(single_observation, num_envs)
    else:
        others = [_observation_space(factories, index) for index in range(1, num_envs)]
        observation = batch_differing_spaces([single_observation, *others])
    action = batch_space(single_action, num_envs)
    return Sample(single_observation, observation, single_action, action, metadata, render_mode, kept)


def _single_spaces(env: object) -> tuple[Space[Any], Space[Any]]:
    if isinstance(env, VectorEnv):
        return env.single_observation_space, env.single_action_space
    if isinstance(env, Env):
        return env.observation_space, env.action_space
    raise ConfigError(f"The factory must return a gymnasium.Env, got {type(env)}.")


def _observation_space(factories: Factories, env_index: int) -> Space[Any]:
    env = factories.sample(env_index)
    try:
        return _single_spaces(env)[0]
    finally:
        env.close()
