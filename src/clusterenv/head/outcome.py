"""Outcome: the result of a finished call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from clusterenv.wire.buffers import RolloutBuffers


class Outcome(msgspec.Struct, frozen=True):  # Made with every step, and in C, unlike a NamedTuple.
    """The part of an answer that has no fixed size; the rest is in the step buffers.

    Attributes:
        infos: The infos of all environments, in Gymnasium's vector layout.
        columns: Observation leaves without a fixed size: one list per leaf, one object per environment.
        results: What `invoke` returned, one value per environment.
        errors: Forgiven exceptions of environments: the index, and the text.
        probes: Reports on how actions were distributed, with the worker's index and incarnation; not checked yet.
    """

    infos: dict[str, Any]
    columns: list[list[Any]]
    results: list[Any]
    errors: list[tuple[int, str]]
    probes: list[tuple[int, int, bytes]] = []


@dataclass(frozen=True, eq=False, repr=False)
class Collection:
    """A rollout as the workers made it.

    Attributes:
        buffers: The arrays; the next rollout overwrites them.
        summaries: Each shard's finished episodes and final observations (`worker.collector`), in shard order.
        busy_s: How long each worker worked on it.
        versions: The version of the weights that each worker says it used.
        probes: Each worker's report on how its actions were distributed, if it was asked; not checked yet.
    """

    buffers: RolloutBuffers
    summaries: list[Mapping[str, Any]]
    busy_s: list[float]
    versions: list[int]
    probes: list[bytes | None]
