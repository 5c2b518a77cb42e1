"""Assignment: the work a head gives a worker. It holds code, so it travels from head to worker only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode, VectorEnv

EnvFactory = Callable[[], Env[Any, Any]]
VectorFactory = Callable[[int], "VectorEnv[Any, Any, Any]"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Assignment:
    """What to host, and what the head expects of it.

    Attributes:
        factories: One factory an environment of the shard; or, for a native vector environment, a single
            factory that takes their number.
        registry: Pickled `EnvSpec`s that the worker's own Gymnasium may not know.
        observation_space: What every environment's observation space must match.
        must_equal: Whether the observation spaces must be equal, or only agree in shape and dtype.
        start: The index of the shard's first environment.
        num_envs: The environments of the whole run, which is what shared planes are sized for.
        num_workers: The workers of the whole run.
        on_env_error: "raise", or "reset" to go on after an exception of an environment with a new episode.
    """

    factories: list[EnvFactory] | VectorFactory
    registry: list[bytes] = field(default_factory=list)
    autoreset_mode: AutoresetMode
    observation_space: Space[Any]
    action_space: Space[Any]
    must_equal: bool
    start: int
    num_envs: int
    num_workers: int
    on_env_error: str = "raise"
