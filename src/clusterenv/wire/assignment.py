"""Assignment: the work a head gives a worker. It holds code, so it is only ever sent from head to worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode, VectorEnv

EnvFactory = Callable[[], Env[Any, Any]]
VectorFactory = Callable[[int], "VectorEnv[Any, Any, Any]"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunSpaces:
    """The spaces of a run, which every environment's spaces must match.

    Attributes:
        must_equal: Whether the observation spaces must be equal, or only agree in shape and dtype.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    must_equal: bool


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Assignment:
    """What to host, and how.

    Attributes:
        factories: One factory per environment of the shard; or, for a native vector environment, a single factory that
            takes the number of environments.
        registry: Pickled `EnvSpec`s that the worker's own Gymnasium may not know.
        start: The index of the shard's first environment.
        num_rows: How many environments the shard has.
        num_envs: The number of environments in the whole run, which determines the size of shared buffers.
        on_env_error: "raise", or "reset" to continue with a new episode after an environment's exception.
    """

    factories: list[EnvFactory] | VectorFactory
    registry: list[bytes] = field(default_factory=list)
    autoreset_mode: AutoresetMode
    start: int
    num_rows: int
    num_envs: int
    on_env_error: str = "raise"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EvaluationPlan:
    """What an evaluation runs: its own environments and its own policy.

    Attributes:
        factory: Makes one environment.
        policy: The policy to evaluate, without its weights.
        weights_spec: Describes the weights (`policy.weights`).
        weights: The weights, encoded.
        values: Per-call values for the policy, pickled.
        max_steps: The number of steps after which an episode is cut.
        seed: Seeds random choices that do not belong to a single episode.
    """

    factory: EnvFactory
    policy: Any
    weights_spec: Any
    weights: bytes
    values: bytes | None
    max_steps: int
    seed: int
