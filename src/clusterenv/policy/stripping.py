"""Pickling by value, with arrays that are sent apart left out."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

from clusterenv.policy.array_kinds import NUMPY, ArrayKind

SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, np.bool_}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
    | {np.float16, np.float32, np.float64}
)
"""What is pickled without looking into it."""


class Stripper(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles arrays that are sent apart as their shapes."""

    def __init__(self, file: io.BytesIO, kinds: Sequence[ArrayKind], apart: set[int]) -> None:
        super().__init__(file)
        self._kinds = (*kinds, NUMPY)
        self._apart = apart

    def reducer_override(self, obj: Any) -> Any:
        for kind in self._kinds:
            if kind.is_array(obj):
                return kind.reduce(obj, has_values=id(obj) not in self._apart)
            if (other := kind.replace(obj)) is not obj:
                return _itself, (other,)
            if (reduced := kind.reduce_object(obj)) is not None:
                return reduced
        return super().reducer_override(obj)


def dump(value: Any, kinds: Sequence[ArrayKind]) -> bytes:
    """Pickle something with all the numbers of its arrays."""
    if type(value) in SCALARS:
        return pickle.dumps(value, 5)
    buffer = io.BytesIO()
    Stripper(buffer, kinds, set()).dump(value)
    return buffer.getvalue()


def _itself(obj: Any) -> Any:
    return obj
