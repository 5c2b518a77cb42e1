"""Columns: where a host writes the observations of its environments, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import SpaceMismatch
from clusterenv.wire.layout import Layout, Leaf


class ArrayColumn:
    """A leaf of fixed size: rows of an array."""

    def __init__(self, leaf: Leaf, array: NDArray[Any]) -> None:
        self._leaf = leaf
        self._array = array
        self._shape = leaf.shape
        self._known_dtypes = {array.dtype}

    def retarget(self, array: NDArray[Any]) -> None:
        """Write into another array of the same form from now on."""
        self._array = array

    def put(self, row: int, value: Any) -> None:
        """Write one row.

        Raises:
            SpaceMismatch: The value has not the shape, or a dtype, that the space allows.
        """
        array = value if type(value) is np.ndarray else self._as_array(value)
        if array.shape != self._shape or array.dtype not in self._known_dtypes:
            self._check(array)
        self._array[row] = array

    def _as_array(self, value: Any) -> NDArray[Any]:
        try:
            return np.asarray(value)
        except (ValueError, TypeError) as error:
            raise SpaceMismatch(f"{self._expected()}, got a {type(value).__name__} that is no array.") from error

    def _check(self, array: NDArray[Any]) -> None:
        if array.shape != self._shape or not np.can_cast(array.dtype, self._array.dtype, "same_kind"):
            raise SpaceMismatch(f"{self._expected()}, got shape {array.shape} of {array.dtype}.")
        self._known_dtypes.add(array.dtype)

    def _expected(self) -> str:
        return (
            f"The environment's observation{self._leaf} does not fit its own observation space: "
            f"expected shape {self._shape} of {self._array.dtype}"
        )


class ObjectColumn:
    """A leaf of varying size: a list of objects."""

    def __init__(self, num_rows: int) -> None:
        self.items: list[Any] = [None] * num_rows

    def put(self, row: int, value: Any) -> None:
        """Keep one row's object."""
        self.items[row] = value


class Columns:
    """All columns of the observation space.

    Attributes:
        put: Writes one environment's observation into its row; raises `SpaceMismatch` if it does not fit the space.
    """

    def __init__(self, layout: Layout, planes: list[NDArray[Any] | None], num_rows: int) -> None:
        self._layout = layout
        self._columns = [
            ObjectColumn(num_rows) if plane is None else ArrayColumn(leaf, plane)
            for leaf, plane in zip(layout.leaves, planes, strict=True)
        ]
        # The common case, one array, without a detour.
        self.put: Callable[[int, Any], None] = self._columns[0].put if layout.is_single else self._put_parts

    def _put_parts(self, row: int, observation: Any) -> None:
        try:
            parts = self._layout.flatten(observation)
        except (KeyError, IndexError, TypeError) as error:
            raise SpaceMismatch(
                "The environment's observation does not have the structure of its own observation space: "
                f"{type(error).__name__}: {error}, in a {type(observation).__name__}."
            ) from error
        for column, part in zip(self._columns, parts, strict=True):
            column.put(row, part)

    def retarget(self, arrays: Sequence[NDArray[Any] | None]) -> None:
        """Write into other arrays of the same form from now on."""
        for column, array in zip(self._columns, arrays, strict=True):
            if isinstance(column, ArrayColumn):
                assert array is not None
                column.retarget(array)

    def objects(self) -> list[list[Any]]:
        """Return the columns that have no fixed size."""
        return [column.items for column in self._columns if isinstance(column, ObjectColumn)]
