"""Planes: the arrays of fixed size that a step fills.

Row *i* of every plane belongs to environment *i*. On the head's machine the planes lie in shared memory and each
worker writes its own rows in place; elsewhere each side has its own and the rows travel as raw frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire.layout import Layout, Leaf

_ALIGNMENT = 64  # A cache line: workers must not share one.


@dataclass
class Planes:
    """Arrays `[num_envs, ...]`, one per leaf of fixed size.

    Attributes:
        actions: One array a leaf of the action space; empty if a leaf has no fixed size.
        observations: One array a leaf of the observation space; None for a leaf of objects.
    """

    actions: list[NDArray[Any]]
    observations: list[NDArray[Any] | None]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]

    @staticmethod
    def allocate(actions: Layout, observations: Layout, num_envs: int) -> Planes:
        """Make planes of this process's own."""
        return _arrange(actions, observations, _allocator(num_envs))

    @staticmethod
    def over(memory: memoryview, actions: Layout, observations: Layout, num_envs: int) -> Planes:
        """Lay planes over shared memory, in the order that `size_bytes` counts."""
        return _arrange(actions, observations, _carver(memory, num_envs))

    @staticmethod
    def size_bytes(actions: Layout, observations: Layout, num_envs: int) -> int:
        """Return how much memory `over` needs."""
        total = 0

        def count(leaf: Leaf) -> NDArray[Any]:
            nonlocal total
            total += _aligned(leaf.row_bytes * num_envs)
            return np.empty(0)

        _arrange(actions, observations, count)
        return total

    def rows(self, start: int, stop: int) -> Planes:
        """Return views of some environments' rows."""
        return Planes(
            [plane[start:stop] for plane in self.actions],
            [None if plane is None else plane[start:stop] for plane in self.observations],
            self.rewards[start:stop],
            self.terminations[start:stop],
            self.truncations[start:stop],
        )

    def results(self) -> Iterator[NDArray[Any]]:
        """Yield the planes a worker fills, in wire order."""
        yield from (plane for plane in self.observations if plane is not None)
        yield self.rewards
        yield self.terminations
        yield self.truncations


def fill(planes: Sequence[NDArray[Any]], frames: Sequence[memoryview]) -> None:
    """Copy raw frames into planes after checking all of them, so that bad frames change nothing.

    Raises:
        WireError: The number of frames, or the size of one, is wrong.
    """
    if len(frames) != len(planes):
        raise WireError(f"Expected {len(planes)} arrays, got {len(frames)}.")
    for plane, frame in zip(planes, frames, strict=True):
        if frame.nbytes != plane.nbytes:
            raise WireError(f"Expected {plane.nbytes} bytes for {plane.dtype}{plane.shape}, got {frame.nbytes}.")
    for plane, frame in zip(planes, frames, strict=True):
        if plane.dtype == np.bool_:
            # A byte other than 0 or 1 is no bool; numpy's behaviour with one is undefined.
            np.not_equal(np.frombuffer(frame, np.uint8).reshape(plane.shape), 0, out=plane)
        elif frame.nbytes:
            plane[...] = np.frombuffer(frame, plane.dtype).reshape(plane.shape)


_REWARD, _FLAG = Leaf((), np.dtype(np.float64)), Leaf((), np.dtype(np.bool_))


def _arrange(actions: Layout, observations: Layout, make: Any) -> Planes:
    return Planes(
        [make(leaf) for leaf in actions.leaves] if actions.is_fixed else [],
        [None if leaf.dtype is None else make(leaf) for leaf in observations.leaves],
        make(_REWARD),
        make(_FLAG),
        make(_FLAG),
    )


def _allocator(num_envs: int) -> Any:
    return lambda leaf: np.zeros((num_envs, *leaf.shape), leaf.dtype)


def _carver(memory: memoryview, num_envs: int) -> Any:
    offset = 0

    def carve(leaf: Leaf) -> NDArray[Any]:
        nonlocal offset
        size = leaf.row_bytes * num_envs
        plane: NDArray[Any] = np.ndarray((num_envs, *leaf.shape), leaf.dtype, memory, offset)
        offset += _aligned(size)
        return plane

    return carve


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
