"""EpisodeGenerator: random numbers that depend only on the episode, not on which others are in its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_AT_ONCE = 64  # How many numbers to make ahead per row: making one takes nearly as long.
_STREAM = 2  # Distinct from the streams of the environment's own generator and of a training policy.


class EpisodeGenerator(np.random.Generator):
    """Draws row i of a batch from a sequence that depends only on row i's episode.

    That holds for `random`, `uniform`, `standard_normal`, `normal` and `integers` with one row per environment, which
    is what policies draw. Everything else is drawn from an ordinary generator shared by all rows.

    The sequences are SplitMix64's, starting where the episode's seed says: number k of a row is a function of k and
    that start, so a whole batch is drawn at once.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(np.random.PCG64(0))
        self._starts = np.zeros(num_rows, np.uint64)  # Where each row's block begins in SplitMix64's sequence.
        self._block = np.zeros((num_rows, 0), np.uint64)
        self._num_used = 0  # How many of each row's numbers in the block are used: the same for all rows.

    def restart(self, row: int, seed: int) -> None:
        """Begin the sequence of a new episode with this seed in a row."""
        begin = np.random.SeedSequence((seed, _STREAM)).generate_state(1, np.uint64)
        self._starts[row] = (begin - np.array(self._num_used, np.uint64) * _STEP)[0]
        self._block[row] = _mix(self._starts[row : row + 1], self._block.shape[1])[0]

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        shape = self._rows_of(size)
        if shape is None or out is not None:
            return super().random(size, dtype, out)
        if np.dtype(dtype) == np.float32:
            return (self._bits(shape) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return self._uniform(shape)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        shape = self._rows_of(size, low, high)
        if shape is None:
            return super().uniform(low, high, size)
        return low + np.subtract(high, low) * self._uniform(shape)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        shape = self._rows_of(size)
        if shape is None or out is not None:
            return super().standard_normal(size, dtype, out)
        angles = self._uniform((*shape, 2))  # The Box-Muller transform.
        drawn = np.sqrt(-2.0 * np.log1p(-angles[..., 0])) * np.cos(2.0 * np.pi * angles[..., 1])
        return drawn.astype(dtype, copy=False)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        shape = self._rows_of(size, loc, scale)
        if shape is None:
            return super().normal(loc, scale, size)
        return loc + np.multiply(scale, self.standard_normal(shape))

    def integers(
        self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False
    ) -> Any:
        shape = self._rows_of(size, low, 0 if high is None else high)
        if shape is None:
            return super().integers(low, high, size, dtype, endpoint)
        least, end = (0, low) if high is None else (low, high)
        width = np.subtract(end, least) + endpoint
        return (least + np.floor(self._uniform(shape) * width)).astype(dtype)

    def _rows_of(self, size: Any, *parameters: Any) -> tuple[int, ...] | None:
        """Return the shape given by `size`, or by the broadcast parameters, if its first axis is rows; else None."""
        if size is None:
            shape = np.broadcast_shapes(*map(np.shape, parameters))
        else:
            shape = (size,) if isinstance(size, int | np.integer) else tuple(size)
        return shape if shape and shape[0] == len(self._starts) else None

    def _uniform(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        return (self._bits(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _bits(self, shape: tuple[int, ...]) -> NDArray[np.uint64]:
        count = int(np.prod(shape[1:], dtype=np.int64)) if len(shape) > 1 else 1
        if self._num_used + count > self._block.shape[1]:
            self._starts += np.array(self._num_used, np.uint64) * _STEP
            self._block = _mix(self._starts, max(_AT_ONCE, count))
            self._num_used = 0
        drawn = self._block[:, self._num_used : self._num_used + count]
        self._num_used += count
        return drawn.reshape(shape)


def _mix(starts: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """Return the next `count` numbers of SplitMix64 after each start."""
    mixed: NDArray[np.uint64] = starts[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed
