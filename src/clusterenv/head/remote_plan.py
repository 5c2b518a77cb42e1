"""RemotePlan: what the workers of a run are to do, as the head needs to know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gymnasium.vector import AutoresetMode

from clusterenv.wire.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RemotePlan:
    """What the workers of a run are to do.

    Attributes:
        code: A worker's assignment, by the index of its first environment.
        actions: The layout of one environment's.
        observations: The layout of one environment's.
        autoreset_mode: How environments are reset.
        shares_memory: Whether to offer shared memory; a worker that cannot reach it uses the socket.
        replaces: Whether lost workers are replaced, rather than raising WorkerLost.
    """

    code: Callable[[int], bytes]
    actions: Layout
    observations: Layout
    autoreset_mode: AutoresetMode
    shares_memory: bool
    replaces: bool
