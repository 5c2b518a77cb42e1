"""Arrays of fixed size: where they come from, and how raw frames get into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire.layout import Leaf

ArrayMaker: TypeAlias = Callable[[tuple[int, ...], Leaf], NDArray[Any]]

_ALIGNMENT = 64  # A cache line: arrays that start on one load fastest.


def allocate(lead: tuple[int, ...], leaf: Leaf) -> NDArray[Any]:
    """Make an array of this process's own, `[*lead, *leaf.shape]`."""
    return np.zeros((*lead, *leaf.shape), leaf.dtype)


def carver(memory: memoryview) -> ArrayMaker:
    """Return a maker that lays one array after another over shared memory."""
    offset = 0

    def carve(lead: tuple[int, ...], leaf: Leaf) -> NDArray[Any]:
        nonlocal offset
        array: NDArray[Any] = np.ndarray((*lead, *leaf.shape), leaf.dtype, memory, offset)
        offset += _aligned(array.nbytes)
        return array

    return carve


def size_of(make_all: Callable[[ArrayMaker], object]) -> int:
    """Return how many bytes `carver` would need for the arrays that `make_all` makes."""
    total = 0

    def count(lead: tuple[int, ...], leaf: Leaf) -> NDArray[Any]:
        nonlocal total
        total += _aligned(math.prod(lead) * leaf.row_bytes)
        return np.empty(0)

    make_all(count)
    return total


def fill(arrays: Sequence[NDArray[Any]], frames: Sequence[memoryview]) -> None:
    """Copy raw frames into arrays after checking all of them, so that bad frames change nothing.

    Raises:
        WireError: The number of frames, or the size of one, is wrong.
    """
    if len(frames) != len(arrays):
        raise WireError(f"Expected {len(arrays)} arrays, got {len(frames)}.")
    for array, frame in zip(arrays, frames, strict=True):
        if frame.nbytes != array.nbytes:
            raise WireError(f"Expected {array.nbytes} bytes for {array.dtype}{array.shape}, got {frame.nbytes}.")
    for array, frame in zip(arrays, frames, strict=True):
        if array.dtype == np.bool_:
            # A byte other than 0 or 1 is no bool; numpy's behaviour with one is undefined.
            np.not_equal(np.frombuffer(frame, np.uint8).reshape(array.shape), 0, out=array)
        elif frame.nbytes:
            array[...] = np.frombuffer(frame, array.dtype).reshape(array.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
