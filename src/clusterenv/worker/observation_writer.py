"""ObservationWriter: writes the observations of a host's environments, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import SpaceMismatch
from clusterenv.wire.layout import Layout, Leaf

_SMALL_BYTES = 8192


class ArrayColumn:
    """A leaf of fixed size: rows of an array."""

    def __init__(self, leaf: Leaf, array: NDArray[Any]) -> None:
        self._leaf = leaf
        self._shape = leaf.shape
        self._lengths = {leaf.shape[0]} if leaf.shape else set()
        self._known_dtypes = {array.dtype}
        self.retarget(array)

    def retarget(self, array: NDArray[Any]) -> None:
        """From now on write into another array of the same shape and dtype."""
        self._array = array
        self._joined: NDArray[Any] | None = None

    def put_all(self, values: Sequence[Any]) -> bool:
        """Write all rows at once; returns False if one does not fit, which `put` must find."""
        try:
            if not self._array.size or not self._shape:
                array = np.asarray(values)
                if array.shape != self._array.shape or array.dtype not in self._known_dtypes:
                    return False
                self._array[...] = array
            elif set(map(len, values)) == self._lengths:
                np.concatenate(values, out=self._join_rows())
            else:
                return False
        except (TypeError, ValueError):
            return False
        return True

    def _join_rows(self) -> NDArray[Any]:
        """Join all rows along their first axis, so that one numpy call fills them and checks dtype and inner shape."""
        if self._joined is None:
            self._joined = self._array.view()
            self._joined.shape = (-1, *self._shape[1:])  # Unlike reshape, this never makes a copy.
        return self._joined

    def put(self, row: int, value: Any) -> None:
        """Write one row.

        Raises:
            SpaceMismatch: The value's shape or dtype does not fit the space.
        """
        array = value if type(value) is np.ndarray else self._as_array(value)
        if array.shape != self._shape or array.dtype not in self._known_dtypes:
            self._check(array)
        self._array[row] = array

    def _as_array(self, value: Any) -> NDArray[Any]:
        try:
            return np.asarray(value)
        except (ValueError, TypeError) as error:
            raise SpaceMismatch(f"{self._expected()}, got a {type(value).__name__} that is not an array.") from error

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

    def put_all(self, values: Sequence[Any]) -> bool:
        """Keep every row's object."""
        self.items[:] = values
        return True


class ObservationWriter:
    """All columns of the observation space.

    Attributes:
        put: Writes one environment's observation into its row; raises `SpaceMismatch` if it does not fit the space.
        flat: All rows as one flat buffer, if observations are vectors: `flat[slices[row]] = observation` is the fastest
            way to write one, and raises for another dtype or length. None if that is not possible.
        slices: Where each row lies in `flat`.
        waits: Whether observations are best collected for one `put_all`. Large ones are written one by one, while they
            are in the cache.
    """

    flat: memoryview | None

    def __init__(self, layout: Layout, arrays: Sequence[NDArray[Any] | None], num_rows: int) -> None:
        self._layout = layout
        self._arrays = arrays
        self._columns = [
            ObjectColumn(num_rows) if array is None else ArrayColumn(leaf, array)
            for leaf, array in zip(layout.leaves, arrays, strict=True)
        ]
        self._items = [column.items for column in self._columns if isinstance(column, ObjectColumn)]
        self._has_vectors = layout.is_single and len(layout.leaves[0].shape) == 1
        size = layout.leaves[0].shape[0] if self._has_vectors else 0
        self.slices = [slice(row * size, (row + 1) * size) for row in range(num_rows)]
        self.waits = not self._has_vectors and sum(leaf.row_bytes for leaf in layout.leaves) <= _SMALL_BYTES
        self._flatten(arrays)
        # In the common case of a single array, skip `_put_parts`.
        self.put: Callable[[int, Any], None] = self._columns[0].put if layout.is_single else self._put_parts

    def put_all(self, observations: Sequence[Any]) -> bool:
        """Write every environment's observation; returns False if one does not fit, which `put` must find."""
        if self._layout.is_single:
            return self._columns[0].put_all(observations)
        try:
            parts = [self._layout.flatten(observation) for observation in observations]
        except (KeyError, IndexError, TypeError):
            return False
        return all(column.put_all(items) for column, items in zip(self._columns, zip(*parts, strict=True), strict=True))

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
        """From now on write into other arrays of the same shapes and dtypes."""
        self._arrays = arrays
        for column, array in zip(self._columns, arrays, strict=True):
            if isinstance(column, ArrayColumn):
                assert array is not None
                column.retarget(array)
        self._flatten(arrays)

    def shown(self) -> tuple[Sequence[NDArray[Any] | None], list[list[Any]]]:
        """Return the arrays observations are written to, None for each leaf of objects, and the lists of objects."""
        return self._arrays, self._items

    def by_leaf(self, arrays: Sequence[NDArray[Any] | None], objects: list[list[Any]]) -> list[Any]:
        """Return one array or list per leaf."""
        parts = iter(objects)
        return [next(parts) if array is None else array for array in arrays]

    def put_columns(self, columns: Sequence[Any]) -> None:
        """Write every row of every leaf: one array or list each."""
        for own, values in zip(self.by_leaf(self._arrays, self._items), columns, strict=True):
            own[:] = values

    def keep(self, first: int, arrays: Sequence[NDArray[Any] | None], objects: list[list[Any]]) -> None:
        """Copy the rows from `first` on from earlier arrays and objects."""
        before = self.by_leaf(arrays, objects)
        for own, values in zip(self.by_leaf(self._arrays, self._items), before, strict=True):
            own[first:] = values[first:]

    def do_without_flat(self) -> None:
        """Use `put` from now on, because an environment's dtype differs from its space's and must be cast."""
        self._has_vectors, self.flat = False, None

    def _flatten(self, arrays: Sequence[NDArray[Any] | None]) -> None:
        array = arrays[0] if self._has_vectors else None
        if array is None or not array.size:
            self.flat = None
        else:
            self.flat = memoryview(array.reshape(-1))  # type: ignore[arg-type]  # an array is a buffer

    def objects(self) -> list[list[Any]]:
        """Return the columns that have no fixed size."""
        return self._items
