"""Arrays of fixed size: how they are allocated, and filled from raw frames."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire.layout import Leaf

ArrayMaker: TypeAlias = Callable[[tuple[int, ...], Leaf], NDArray[Any]]

CHUNK_BYTES = 1 << 18  # The largest frame, which bounds what head and worker read from a connection at once.
_ALIGNMENT = 64  # A cache line: aligned arrays load fastest.


def allocate(lead: tuple[int, ...], leaf: Leaf) -> NDArray[Any]:
    """Make an array `[*lead, *leaf.shape]` in this process's own memory."""
    return np.zeros((*lead, *leaf.shape), leaf.dtype)


def shared_allocator(memory: memoryview) -> ArrayMaker:
    """Return a maker that lays one array after another over shared memory."""
    offset = 0

    def carve(lead: tuple[int, ...], leaf: Leaf) -> NDArray[Any]:
        nonlocal offset
        array: NDArray[Any] = np.ndarray((*lead, *leaf.shape), leaf.dtype, memory, offset)
        offset += _aligned(array.nbytes)
        return array

    return carve


def size_of(make_all: Callable[[ArrayMaker], object]) -> int:
    """Return how many bytes `shared_allocator` would need for the arrays that `make_all` makes."""
    total = 0

    def count(lead: tuple[int, ...], leaf: Leaf) -> NDArray[Any]:
        nonlocal total
        total += _aligned(math.prod(lead) * leaf.row_bytes)
        return np.empty(0)

    make_all(count)
    return total


def fill(arrays: Sequence[NDArray[Any]], frames: Sequence[memoryview]) -> None:
    """Copy raw frames into arrays after checking all of them, so that bad frames change nothing.

    Args:
        arrays: Contiguous except for their first axis: rows of a batch, or some environments' columns of a rollout.
        frames: Each array's bytes, cut at every `CHUNK_BYTES`; at least one frame per array.

    Raises:
        WireError: The number of frames, or the size of one, is wrong.
    """
    sizes = [array.nbytes for array in arrays]
    if sizes != [frame.nbytes for frame in frames] or max(sizes, default=0) > CHUNK_BYTES:
        _check_pieces(arrays, frames)
    rest = iter(frames)
    for array, size in zip(arrays, sizes, strict=True):
        if size > CHUNK_BYTES:
            _fill_large(array, itertools.islice(rest, -(-size // CHUNK_BYTES)))
        elif array.dtype == np.bool_:
            # A byte other than 0 or 1 is not a bool; numpy's behaviour with one is undefined.
            np.not_equal(np.frombuffer(next(rest), np.uint8).reshape(array.shape), 0, out=array)
        else:
            frame = next(rest)
            if size:
                array[...] = np.frombuffer(frame, array.dtype).reshape(array.shape)


def _check_pieces(arrays: Sequence[NDArray[Any]], frames: Sequence[memoryview]) -> None:
    sizes = [(array, left) for array in arrays for left in range(array.nbytes, 0, -CHUNK_BYTES) or (0,)]
    if len(frames) != len(sizes):
        raise WireError(f"Expected {len(sizes)} frames for {len(arrays)} arrays, got {len(frames)}.")
    for frame, (array, left) in zip(frames, sizes, strict=True):
        if frame.nbytes != left and not frame.nbytes == CHUNK_BYTES < left:
            wanted = min(left, CHUNK_BYTES)
            raise WireError(f"Expected {wanted} bytes for {array.dtype}{array.shape}, got {frame.nbytes}.")


def _fill_large(array: NDArray[Any], frames: Iterable[memoryview]) -> None:
    """Copy frames one by one; joining them first would take another pass through memory."""
    lines = 1 if array.flags.c_contiguous else len(array)
    rows = array.reshape(lines, -1).view(np.uint8)
    assert np.may_share_memory(rows, array), "only its first axis has gaps"
    width = rows.shape[1]
    offset = 0
    for frame in frames:
        data = np.frombuffer(frame, np.uint8)
        if array.dtype == np.bool_:
            data = (data != 0).view(np.uint8)
        row, column = divmod(offset, width)
        offset += len(data)
        if column:  # The rest of a row that the last frame began.
            begun, data = data[: width - column], data[width - column :]
            rows[row, column : column + len(begun)] = begun
            row += 1
        whole = len(data) // width
        rows[row : row + whole] = data[: whole * width].reshape(whole, width)
        if rest := len(data) - whole * width:
            rows[row + whole, :rest] = data[whole * width :]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
