"""ObservationWriter: where a host writes the observations of its environments, one row each."""

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
        """Write into another array of the same form from now on."""
        self._array = array
        self._joined: NDArray[Any] | None = None

    def put_all(self, values: Sequence[Any]) -> bool:
        """Write every row at once; False if that is not possible, and `put` must find out which row is to blame."""
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
        """Join all rows along their first axis: one call of numpy then fills them, and checks dtype and inner shape."""
        if self._joined is None:
            self._joined = self._array.view()
            self._joined.shape = (-1, *self._shape[1:])  # Unlike reshape, this never makes a copy.
        return self._joined

    def put(self, row: int, value: Any) -> None:
        """Write one row.

        Raises:
            SpaceMismatch: The value does not have the shape, or a dtype, that the space allows.
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
        flat: All rows as one line of memory, if an observation is a vector: `flat[slices[row]] = observation` is the
            fastest way to write one, and refuses another dtype or length. None if there is no such way.
        slices: Where each row lies in `flat`.
        waits: Whether observations are best kept until all are there, for `put_all`. Large ones are written at once,
            while they are in the cache.
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
        # The common case, one array, without a detour.
        self.put: Callable[[int, Any], None] = self._columns[0].put if layout.is_single else self._put_parts

    def put_all(self, observations: Sequence[Any]) -> bool:
        """Write every environment's observation; False if one does not fit, and `put` must find out which."""
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
        """Write into other arrays of the same form from now on."""
        self._arrays = arrays
        for column, array in zip(self._columns, arrays, strict=True):
            if isinstance(column, ArrayColumn):
                assert array is not None
                column.retarget(array)
        self._flatten(arrays)

    def shown(self) -> tuple[Sequence[NDArray[Any] | None], list[list[Any]]]:
        """Return where observations are written: one array per leaf, None for a leaf of objects; and those leaves."""
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
        """Take over the rows from `first` on from where they were written before."""
        before = self.by_leaf(arrays, objects)
        for own, values in zip(self.by_leaf(self._arrays, self._items), before, strict=True):
            own[first:] = values[first:]

    def do_without_flat(self) -> None:
        """Write by `put` from now on: an environment returns another dtype than its space has, which must be cast."""
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
