"""Backend: where policies run and environments are stepped, on workers (`Remote`) or in this process (`Inline`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from clusterenv.head.outcome import Collection
from clusterenv.head.worker import Worker
from clusterenv.policy.policy import Policy
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire.buffers import StepBuffers


@dataclass(frozen=True, eq=False, repr=False)
class Instructions:
    """What workers are told when they choose the actions.

    Attributes:
        version: The version of the weights that `load` encoded last.
        pulls: The workers that load these weights.
        num_probes: At how many rows each worker should report how its actions were distributed; 0 if not listed.
        arguments: Per-call values for the policy.
    """

    version: int
    pulls: set[Worker]
    num_probes: Mapping[Worker, int]
    arguments: Mapping[str, Any]


class Backend(Protocol):
    """What `Versions`, `Rollouts` and `Exchange` build on; `Workers`, `Acting` and `Remote` document the methods."""

    @property
    def workers(self) -> Sequence[Worker]: ...
    @property
    def buffers(self) -> tuple[StepBuffers, StepBuffers]: ...
    @property
    def newest(self) -> StepBuffers: ...
    @property
    def deferred(self) -> contextlib.AbstractContextManager[None]: ...
    def settle(self) -> None: ...
    def advance(self, timeout_s: float, /) -> bool: ...
    def raise_fatal(self, workers: Iterable[Worker]) -> None: ...
    def adopt(self, policy: Policy, spec: WeightsSpec, version: int, arguments: Mapping[str, Any]) -> int: ...
    def forget_policy(self) -> None: ...
    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int, pulls: set[Worker]) -> int: ...
    def count_copies(self, size_bytes: int, /) -> int: ...
    def decide(self, instructions: Instructions) -> Any: ...
    def collect(self, num_steps: int, instructions: Instructions, record: int | None = None) -> Collection: ...
    def step_shard(self, worker: Worker, /) -> Any: ...
    def wait_for(self, call: Any, /) -> None: ...
