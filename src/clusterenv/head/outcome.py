"""What a finished call brought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from clusterenv.wire.block import Block


class Lost(NamedTuple):
    """Stands in a list of answers for that of a worker that died or vanished."""

    reason: str


class Outcome(msgspec.Struct, frozen=True):  # Made with every step: C makes it, unlike a NamedTuple.
    """The part of an answer that has no fixed size; the rest is in the planes.

    Attributes:
        infos: The infos of all environments, in Gymnasium's vector layout.
        columns: Observation leaves without a fixed size: one list a leaf, one object an environment.
        results: What `invoke` returned, one value an environment.
    """

    infos: dict[str, Any]
    columns: list[list[Any]]
    results: list[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Collection:
    """A rollout as the workers made it.

    Attributes:
        block: The arrays; the next rollout overwrites them.
        summaries: Each shard's finished episodes and final observations (`worker.collector`), in shard order.
        busy_s: How long each worker worked on it.
    """

    block: Block
    summaries: list[Mapping[str, Any]]
    busy_s: list[float]
