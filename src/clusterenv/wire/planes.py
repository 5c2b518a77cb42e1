"""Planes: the arrays of fixed size that a step fills.

Row *i* of every plane belongs to environment *i*. On the head's machine the planes lie in shared memory and each
worker writes its own rows in place; elsewhere each side has its own and the rows travel as raw frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.wire.arrays import ArrayMaker
from clusterenv.wire.info_planes import MAX_COLUMNS
from clusterenv.wire.layout import Layout, Leaf


@dataclass(eq=False, repr=False)
class Planes:
    """Arrays `[num_envs, ...]`, one per leaf of fixed size.

    Attributes:
        actions: One array a leaf of the action space; empty if a leaf has no fixed size.
        observations: One array a leaf of the observation space; None for a leaf of objects.
        info_slots: `[MAX_COLUMNS, num_envs]`, where memory is shared: see `wire.info_planes`.
    """

    actions: list[NDArray[Any]]
    observations: list[NDArray[Any] | None]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    info_slots: NDArray[np.uint64]

    @staticmethod
    def make(actions: Layout, observations: Layout, num_envs: int, make: ArrayMaker) -> Planes:
        """Make the planes, each array by `make`."""
        lead = (num_envs,)
        return Planes(
            [make(lead, leaf) for leaf in actions.leaves] if actions.is_fixed else [],
            [None if leaf.dtype is None else make(lead, leaf) for leaf in observations.leaves],
            make(lead, _REWARD),
            make(lead, _FLAG),
            make(lead, _FLAG),
            make((MAX_COLUMNS, num_envs), _SLOT),
        )

    def rows(self, start: int, stop: int) -> Planes:
        """Return views of some environments' rows."""
        return Planes(
            [plane[start:stop] for plane in self.actions],
            [None if plane is None else plane[start:stop] for plane in self.observations],
            self.rewards[start:stop],
            self.terminations[start:stop],
            self.truncations[start:stop],
            self.info_slots[:, start:stop],
        )

    def results(self) -> Iterator[NDArray[Any]]:
        """Yield the planes a worker fills, in wire order."""
        yield from (plane for plane in self.observations if plane is not None)
        yield self.rewards
        yield self.terminations
        yield self.truncations


_REWARD, _FLAG, _SLOT = (Leaf((), np.dtype(kind)) for kind in (np.float64, np.bool_, np.uint64))
