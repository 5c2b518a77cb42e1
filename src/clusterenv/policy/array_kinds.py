"""Arrays of different frameworks: how they are recognised, read, written and watched for changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from clusterenv.policy.distribution import Array

SMALL_BYTES = 1 << 16
"""Arrays and objects below this size are compared in full."""

_NUM_SAMPLES = 1024  # How many numbers of a large array are compared.
_MAX_SUMMED_BYTES = 1 << 24  # Summing these takes half a millisecond.
_ROW_WORDS = 1021  # A prime, so that changes aligned with the rows of a user's table are not aligned with these rows.


class ArrayKind(Protocol):
    """How one framework's arrays are recognised, read and written; pickles name only the class."""

    def is_array(self, obj: object) -> bool:
        """Whether an object is one of this framework's arrays."""

    def view(self, obj: Any) -> Array:
        """Return the array as a numpy array, sharing its memory if possible."""

    def write(self, obj: Any, array: Array) -> None:
        """Overwrite the array's values in place."""

    def watch(self, arrays: Sequence[Any]) -> Callable[[], Hashable]:
        """Return a function whose value differs from an earlier one if any of these arrays was written to since."""

    def reduce(self, obj: Any, *, has_values: bool) -> tuple[Any, ...]:
        """Pickle an array: with its values, or to be filled later."""

    def replace(self, obj: Any) -> object:
        """Return what to send in place of an object: the object itself, or, for instance, None for an optimizer."""

    def reduce_object(self, obj: Any) -> tuple[Any, ...] | None:
        """Pickle an object, other than an array, that cannot be pickled as it is; return None for all others."""

    def hidden(self, obj: Any) -> frozenset[str]:
        """Return the names of an object's attributes that are mere bookkeeping."""

    def is_weight(self, obj: Any) -> bool:
        """Whether an array is a parameter that a learner trains, whatever its size."""


class NumpyArrays:
    """Arrays of numpy."""

    def is_array(self, obj: object) -> bool:
        return isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc"

    def view(self, obj: Any) -> Array:
        array: Array = obj
        return array

    def write(self, obj: Any, array: Array) -> None:
        np.copyto(obj, array)

    def watch(self, arrays: Sequence[Any]) -> Callable[[], Hashable]:
        samples = [_sampler(array) for array in arrays]
        return lambda: b"".join([read() for read in samples])

    def reduce(self, obj: Any, *, has_values: bool) -> tuple[Any, ...]:
        if has_values:
            return tuple(obj.__reduce_ex__(5))
        return np.zeros, (obj.shape, obj.dtype)

    def replace(self, obj: Any) -> object:
        return obj

    def reduce_object(self, obj: Any) -> tuple[Any, ...] | None:
        return None

    def hidden(self, obj: Any) -> frozenset[str]:
        return frozenset()

    def is_weight(self, obj: Any) -> bool:
        return False


NUMPY = NumpyArrays()


def sample(array: Array) -> Array:
    """Return a view of the whole array, or of some of its numbers if it is too large to be compared in full."""
    flat = array.reshape(-1)
    return flat if array.nbytes < SMALL_BYTES else flat[:: max(1, flat.size // _NUM_SAMPLES)]


def is_sampled(array: Array) -> bool:
    """Return whether the array is only sampled, so that a change to a few numbers may go unnoticed."""
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    return array.nbytes >= SMALL_BYTES and (array.nbytes > _MAX_SUMMED_BYTES or not is_whole)


def summed(array: Array) -> Callable[[], bytes]:
    """Return a function that computes checksums of an array's memory, at about 35 microseconds per megabyte.

    The words are summed along both rows and columns, so that changes to up to three words never cancel out.
    """
    octets = (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8)
    end = array.nbytes - array.nbytes % (8 * _ROW_WORDS)
    rows, rest = octets[:end].view(np.uint64).reshape(-1, _ROW_WORDS), octets[end:]
    return lambda: rows.sum(axis=0).tobytes() + rows.sum(axis=1).tobytes() + rest.tobytes()


def _sampler(array: Array) -> Callable[[], bytes]:
    """Return a function that reads the array, or a checksum or sample of it, whatever its memory layout."""
    if array.nbytes < SMALL_BYTES:
        return array.tobytes
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return sample(array if array.flags.c_contiguous else array.T).tobytes if is_sampled(array) else summed(array)
    where = np.unravel_index(np.arange(0, array.size, max(1, array.size // _NUM_SAMPLES)), array.shape)
    return lambda: array[where].tobytes()
