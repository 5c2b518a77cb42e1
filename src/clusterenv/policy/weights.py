"""A policy's weights: named arrays that travel as one raw block of memory.

The names, dtypes and shapes are agreed on once, with the agent's structure; after that a version is nothing but
bytes. It is encoded once, however many workers pull it, and read without a copy.
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
    """One array of a policy's weights.

    Attributes:
        name: As the policy calls it.
        dtype: In numpy's short form, byte order included: "<f4".
        shape: Of the array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise PolicyError(f"Weights {self.name!r} have the unknown dtype {self.dtype!r}.") from error
        if dtype.kind not in _KINDS or any(size < 0 for size in self.shape):
            raise PolicyError(f"Weights {self.name!r} must be an array of numbers, got {self}.")

    @property
    def size_bytes(self) -> int:
        """The array's bytes."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        """Name the array's type as numpy users write it."""
        return f"{np.dtype(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class WeightsSpec:
    """The names, dtypes and shapes of a policy's weights, in the order in which they travel.

    Two specs are equal if weights of one fit the other.
    """

    arrays: tuple[WeightSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.arrays]
        if len(set(names)) != len(names):
            raise PolicyError(f"Weights have names that occur twice: {sorted(names)}.")

    @staticmethod
    def of(weights: Weights) -> WeightsSpec:
        """Describe these weights.

        Raises:
            PolicyError: An array holds something other than numbers.
        """
        return WeightsSpec(tuple(WeightSpec(name, array.dtype.str, array.shape) for name, array in weights.items()))

    @cached_property
    def size_bytes(self) -> int:
        """The bytes of one encoded version."""
        return self._offsets[-1]

    def check(self, weights: Weights) -> None:
        """Raise PolicyError, naming every difference, unless `weights` are of exactly this spec (in any order)."""
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
                "These weights do not fit the policy. "
                + "; ".join(sorted(problems))
                + ". If the agent's architecture has "
                "changed, give the ClusterEnv the new agent: its structure is sent only once."
            )

    def encode(self, weights: Weights, out: Block | None = None) -> Block:
        """Copy weights into one block of memory; the learner may change its own right afterwards.

        Args:
            weights: Of this spec.
            out: Where to write, `size_bytes` long; None makes a new block.

        Raises:
            PolicyError: The weights are not of this spec, or `out` has another size.
        """
        self.check(weights)
        block = np.zeros(self.size_bytes, np.uint8) if out is None else out
        for name, view in self._views(block).items():
            np.copyto(view, weights[name], casting="no")
        return block

    def decode(self, block: bytes | bytearray | memoryview | Block) -> dict[str, Array]:
        """Read weights out of a block, as read-only views into it.

        Raises:
            PolicyError: The block has another size than `size_bytes`.
        """
        views = self._views(np.frombuffer(block, np.uint8))
        for view in views.values():
            view.flags.writeable = False
        return views

    def _views(self, block: Block) -> dict[str, Array]:
        if block.dtype != np.uint8 or block.shape != (self.size_bytes,):
            raise PolicyError(
                f"These weights take {self.size_bytes} bytes, got {block.nbytes}: head and worker have other agents."
            )
        return {
            spec.name: block[offset : offset + spec.size_bytes].view(spec.dtype).reshape(spec.shape)
            for spec, offset in zip(self.arrays, self._offsets, strict=False)
        }

    @cached_property
    def _offsets(self) -> list[int]:
        """Where each array starts, and at last where the block ends."""
        offsets = [0]
        for spec in self.arrays:
            offsets.append(offsets[-1] + -(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT)
        return offsets
