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
class RunSpaces:
    """The spaces of a run, which every environment's own must match.

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
            takes their number.
        registry: Pickled `EnvSpec`s that the worker's own Gymnasium may not know.
        start: The index of the shard's first environment.
        num_rows: How many environments the shard has.
        num_envs: The environments of the whole run, which is what shared buffers are sized for.
        on_env_error: "raise", or "reset" to go on after an exception of an environment with a new episode.
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
    """What an evaluation is about: it has environments and a policy of its own.

    Attributes:
        factory: Makes one environment.
        policy: To be evaluated; it travels without its weights.
        weights_spec: Describes them (`policy.weights`).
        weights: The weights, encoded.
        values: Per-call values for the policy, pickled.
        max_steps: Where an episode ends that has not by then.
        seed: Of random choices that are no episode's own.
    """

    factory: EnvFactory
    policy: Any
    weights_spec: Any
    weights: bytes
    values: bytes | None
    max_steps: int
    seed: int
