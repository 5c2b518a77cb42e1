"""A policy's weights: named arrays, sent as one raw block of memory.

Names, dtypes and shapes are agreed on once, with the agent's structure; after that a version is just bytes, encoded
once however many workers pull it, and read without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array

Weights: TypeAlias = Mapping[str, Array]
Block: TypeAlias = NDArray[np.uint8]

_ALIGNMENT = 64  # A cache line; arrays that start on one load fastest.
_KINDS = "fiubc"  # Numbers only: an object array would be a pickle in disguise.


@dataclass(frozen=True)
class WeightSpec:
    """One array of a policy's weights."""

    name: str
    dtype: str  # In numpy's short form, including the byte order: "<f4".
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise PolicyError(f"Weights {self.name!r} have an unknown dtype: {self.dtype!r}.") from error
        if dtype.kind not in _KINDS or any(size < 0 for size in self.shape):
            raise PolicyError(f"Weights {self.name!r} must be an array of numbers, got {self}.")

    @property
    def size_bytes(self) -> int:
        """The size of the array, without padding."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

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
    def of(weights: Weights) -> WeightsSpec:
        """Describe these weights.

        Raises:
            PolicyError: An array holds something other than numbers.
        """
        return WeightsSpec(tuple(WeightSpec(name, array.dtype.str, array.shape) for name, array in weights.items()))

    @cached_property
    def size_bytes(self) -> int:
        """The size of one encoded version."""
        return self._offsets[-1]

    def check(self, weights: Weights) -> None:
        """Raise PolicyError, naming every difference, unless `weights` match this spec exactly (in any order)."""
        got = {spec.name: spec for spec in WeightsSpec.of(weights).arrays}
        expected = {spec.name: spec for spec in self.arrays}
        problems = [f"{name}: missing" for name in expected.keys() - got.keys()]
        problems += [f"{name}: unknown" for name in got.keys() - expected.keys()]
        problems += [
            f"{name}: expected {expected[name]}, got {got[name]}"
            for name in expected.keys() & got.keys()
            if expected[name] != got[name]
        ]
        if problems:
            raise PolicyError(
                f"These weights do not fit the policy. {'; '.join(sorted(problems))}. If the agent's architecture has "
                "changed, give ClusterEnv the new agent: its structure is sent only once."
            )

    def encode(self, weights: Weights, out: Block | None = None) -> Block:
        """Copy weights into `out`, or a new block of memory; the learner may change its own right afterwards.

        Raises:
            PolicyError: The weights do not match this spec, or `out` is not `size_bytes` long.
        """
        self.check(weights)
        block = np.zeros(self.size_bytes, np.uint8) if out is None else out
        for name, view in self._views(block).items():
            np.copyto(view, weights[name], casting="no")
        return block

    def decode(self, block: bytes | bytearray | memoryview | Block) -> dict[str, Array]:
        """Return the weights in a block, as read-only views into it.

        Raises:
            PolicyError: The block is not `size_bytes` long.
        """
        views = self._views(np.frombuffer(block, np.uint8))
        for view in views.values():
            view.flags.writeable = False
        return views

    def _views(self, block: Block) -> dict[str, Array]:
        if block.dtype != np.uint8 or block.shape != (self.size_bytes,):
            raise PolicyError(
                f"The weights take {self.size_bytes} bytes, got {block.nbytes}: head and worker run different agents."
            )
        return {
            spec.name: block[offset : offset + spec.size_bytes].view(spec.dtype).reshape(spec.shape)
            for spec, offset in zip(self.arrays, self._offsets, strict=False)
        }

    @cached_property
    def _offsets(self) -> list[int]:
        """Where each array starts, and finally where the block ends."""
        offsets = [0]
        for spec in self.arrays:
            offsets.append(offsets[-1] + -(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT)
        return offsets
