"""A policy's weights: named arrays, sent as one raw block of memory.

Names, dtypes and shapes are agreed on once, with the agent's structure; after that a version is just bytes, encoded
once however many workers pull it, and read without a copy. Arrays of floats may be sent as bfloat16, the upper half of
a float32: they are rounded when encoded, and widened again when read.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array

Weights: TypeAlias = Mapping[str, Array]
Block: TypeAlias = NDArray[np.uint8]

_ALIGNMENT = 64  # A cache line; arrays that start on one load fastest.
_KINDS = "fiubc"  # Numbers only: an object array would be a pickle in disguise.
_ROUNDED = np.dtype(np.uint16)  # What carries bfloat16, which numpy lacks.
_HALF_BITS = 16


@dataclass(frozen=True)
class WeightSpec:
    """One array of a policy's weights."""

    name: str
    dtype: str  # In numpy's short form, including the byte order: "<f4".
    shape: tuple[int, ...]
    is_rounded: bool = False  # Whether the array is sent as bfloat16.

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise PolicyError(f"Weights {self.name!r} have an unknown dtype: {self.dtype!r}.") from error
        if dtype.kind not in _KINDS or any(size < 0 for size in self.shape):
            raise PolicyError(f"Weights {self.name!r} must be an array of numbers, got {self}.")
        if self.is_rounded and not can_round(dtype):
            raise PolicyError(f"Weights {self.name!r} cannot be sent as bfloat16: they are {self}.")

    @property
    def sent_dtype(self) -> np.dtype[Any]:
        """The dtype in which the array is sent."""
        return _ROUNDED if self.is_rounded else np.dtype(self.dtype)

    @property
    def size_bytes(self) -> int:
        """The size of the array as it is sent, without padding."""
        return self.sent_dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class WeightsSpec:
    """The names, dtypes and shapes of a policy's weights, in the order in which they are sent."""

    arrays: tuple[WeightSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.arrays]
        if len(set(names)) != len(names):
            raise PolicyError(f"Some names of weights occur twice: {sorted(names)}.")

    @staticmethod
    def of(weights: Weights, rounded: Container[str] = ()) -> WeightsSpec:
        """Describe these weights.

        Args:
            weights: The arrays.
            rounded: Which of them are sent as bfloat16.

        Raises:
            PolicyError: An array holds something other than numbers, or is to be rounded and cannot be.
        """
        return WeightsSpec(
            tuple(WeightSpec(name, array.dtype.str, array.shape, name in rounded) for name, array in weights.items())
        )

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.arrays)

    @cached_property
    def is_exact(self) -> bool:
        """Whether workers get exactly what the learner has."""
        return not any(spec.is_rounded for spec in self.arrays)

    @cached_property
    def size_bytes(self) -> int:
        """The size of one encoded version."""
        return self._offsets[-1]

    def check(self, weights: Weights) -> None:
        """Raise PolicyError, naming every difference, unless `weights` match this spec exactly (in any order)."""
        if len(weights) == len(self.arrays) and all(map(_fits, self.arrays, map(weights.get, self._names))):
            return
        got = {spec.name: spec for spec in WeightsSpec.of(weights).arrays}
        expected = {spec.name: spec for spec in self.arrays}
        problems = [f"{name}: missing" for name in expected.keys() - got.keys()]
        problems += [f"{name}: unknown" for name in got.keys() - expected.keys()]
        problems += [
            f"{name}: expected {expected[name]}, got {got[name]}"
            for name in expected.keys() & got.keys()
            if (expected[name].dtype, expected[name].shape) != (got[name].dtype, got[name].shape)
        ]
        if problems:
            raise PolicyError(
                f"These weights do not fit the policy. {'; '.join(sorted(problems))}. If the agent's architecture has "
                "changed, give ClusterEnv the new agent: its structure is sent only once."
            )

    def encode(self, weights: Weights, out: Block | None = None) -> Block:
        """Copy weights into `out`, or a new block of memory; the learner may change the originals right afterwards.

        Raises:
            PolicyError: The weights do not match this spec, or `out` is not `size_bytes` long.
        """
        self.check(weights)
        block = np.zeros(self.size_bytes, np.uint8) if out is None else out
        for spec, view in zip(self.arrays, self._views(block), strict=True):
            array = weights[spec.name]
            np.copyto(view, _round(array) if spec.is_rounded else array, casting="no")
        return block

    def decode(self, block: bytes | bytearray | memoryview | Block) -> dict[str, Array]:
        """Return the weights in a block, as read-only views into it; those that were rounded, as new arrays.

        Raises:
            PolicyError: The block is not `size_bytes` long.
        """
        decoded: dict[str, Array] = {}
        for spec, view in zip(self.arrays, self._views(np.frombuffer(block, np.uint8)), strict=True):
            array = _widen(view, np.dtype(spec.dtype)) if spec.is_rounded else view
            array.flags.writeable = False
            decoded[spec.name] = array
        return decoded

    def _views(self, block: Block) -> list[Array]:
        if block.dtype != np.uint8 or block.shape != (self.size_bytes,):
            raise PolicyError(
                f"The weights take {self.size_bytes} bytes, got {block.nbytes}: head and worker run different agents."
            )
        return [
            block[offset : offset + spec.size_bytes].view(spec.sent_dtype).reshape(spec.shape)
            for spec, offset in zip(self.arrays, self._offsets, strict=False)
        ]

    @cached_property
    def _offsets(self) -> list[int]:
        """Where each array starts, and finally where the block ends."""
        offsets = [0]
        for spec in self.arrays:
            offsets.append(offsets[-1] + -(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT)
        return offsets


def _fits(spec: WeightSpec, array: Array | None) -> bool:
    return array is not None and array.shape == spec.shape and array.dtype.str == spec.dtype


def can_round(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this dtype, float32 or float64, can be rounded to bfloat16."""
    return dtype.kind == "f" and dtype.itemsize in (4, 8) and dtype.isnative


def _round(array: Array) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):  # Float64 values beyond the range of float32 become infinite.
        floats = np.ascontiguousarray(array, np.float32)
    bits = floats.view(np.uint32)
    up = np.uint32((1 << (_HALF_BITS - 1)) - 1) + ((bits >> _HALF_BITS) & np.uint32(1))
    rounded = ((bits + up) >> _HALF_BITS).astype(np.uint16)
    if np.isnan(floats).any():
        rounded = np.where(np.isnan(floats), np.uint16(0x7FC0), rounded)
    return rounded.reshape(array.shape)


def _widen(rounded: NDArray[np.uint16], dtype: np.dtype[Any]) -> Array:
    wide = np.asarray(rounded.astype(np.uint32) << _HALF_BITS)  # For 0-d arrays numpy returns a scalar.
    array: Array = wide.view(np.float32).astype(dtype, copy=False)
    return array
