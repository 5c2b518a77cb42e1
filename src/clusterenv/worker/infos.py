"""Infos: gathers the infos of single environments in Gymnasium's vector layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.wire.info_planes import FullInfos, fits

Infos = dict[str, Any]

# A value of exactly its array's type can be stored without further checks.
_DTYPES: dict[type, np.dtype[Any]] = {
    cls: np.dtype(cls) for cls in (float, bool, int, np.float64, np.float32, np.int64, np.int32, np.uint8)
}
_IMMUTABLE = frozenset((*_DTYPES, np.bool_, str, type(None)))  # Values that cannot be changed afterwards.
_INT_LIMIT = 2**63


class Gathering:
    """Gathers the infos of a step, row by row, and finally lays them out exactly as `VectorEnv._add_info` does.

    If all infos are numbers under the same keys in every environment, they become columns in one go: MuJoCo's
    environments, for example, have four or more in every step.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._infos: Infos = {}
        self._kept: list[tuple[int, Infos]] = []

    def begin(self) -> Callable[[int, Infos], None]:
        """Begin a step; returns the function that adds an environment's info, to be called in Gymnasium's order."""
        self._infos = {}
        self._kept.clear()
        return self._add

    def end(self) -> Infos:
        """Return the infos of all rows; as `FullInfos` if every row has numbers under the same keys."""
        if self._kept:
            if (
                len(self._kept) == self._num_rows
                and not self._infos
                and (columns := self._gather_columns()) is not None
            ):
                return columns
            self._add_kept()
        return self._infos

    def _add(self, row: int, info: Infos) -> None:
        if _IMMUTABLE.issuperset(map(type, info.values())):
            self._kept.append((row, info.copy()))
        else:  # Right away, because another environment may write to the same object.
            self._add_kept()
            add_info(self._infos, info, row, self._num_rows)

    def _gather_columns(self) -> FullInfos | None:
        keys = list(self._kept[0][1])
        rows = []
        for row, (index, info) in enumerate(self._kept):
            if index != row or list(info) != keys:
                return None
            rows.append(info.values())
        columns = FullInfos()
        for key, values in zip(keys, zip(*rows, strict=True), strict=True):
            kinds = set(map(type, values))
            dtype = _DTYPES.get(kinds.pop())
            if dtype is None or kinds:
                return None
            try:
                columns[key] = np.array(values, dtype)
            except OverflowError:  # An int beyond 64 bits.
                return None
        return columns if fits(columns, self._num_rows) else None

    def _add_kept(self) -> None:
        for row, info in self._kept:
            add_info(self._infos, info, row, self._num_rows)
        self._kept.clear()


def complete(infos: Infos, num_rows: int) -> Infos:
    """Return infos with their masks, which `FullInfos` do not have."""
    if type(infos) is not FullInfos:
        return infos
    whole: Infos = {}
    for key, column in infos.items():
        whole[key], whole[f"_{key}"] = column, np.ones(num_rows, np.bool_)
    return whole


def add_info(infos: Infos, info: Infos, row: int, num_rows: int) -> None:
    """Add one environment's info, exactly as `VectorEnv._add_info` lays it out.

    Unlike in Gymnasium, nothing is lost: a float after an int promotes the array instead of being truncated, and a
    value that does not fit the array (another shape, a string after a number) turns it into an array of objects.
    """
    for key, value in info.items():
        known = infos.get(key)
        if (
            type(known) is np.ndarray
            and known.dtype is _DTYPES.get(type(value))
            and known.ndim == 1
            and (type(value) is not int or -_INT_LIMIT <= value < _INT_LIMIT)
        ):
            known[row] = value
            infos[f"_{key}"][row] = True
            continue
        array: Any
        if key == "final_obs":
            array = _objects(num_rows) if known is None else known
            array[row] = value
        elif isinstance(value, dict):
            if known is not None and not isinstance(known, dict):
                raise TypeError(f"The info {key!r} is a dict in some environments and a {known.dtype} in others.")
            array = {} if known is None else known
            add_info(array, value, row, num_rows)
        else:
            if isinstance(known, dict):
                raise TypeError(f"The info {key!r} is a dict in some environments and a {type(value)} in others.")
            array = _new_array(value, num_rows) if known is None else known
            array = _put(array, value, row)
        mask = infos.get(f"_{key}")
        if mask is None:
            mask = np.zeros(num_rows, dtype=np.bool_)
        mask[row] = True
        infos[key], infos[f"_{key}"] = array, mask


def info_row(infos: Infos, row: int) -> Infos:
    """Return one environment's info out of the vector layout."""
    info: Infos = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if isinstance(mask, np.ndarray) and mask[row]:
            info[key] = info_row(value, row) if isinstance(value, dict) else value[row]
    return info


def _objects(num_rows: int) -> NDArray[Any]:
    return np.full(num_rows, fill_value=None, dtype=object)


def _new_array(value: object, num_rows: int) -> NDArray[Any]:
    cls = type(value)
    if cls in (int, float, bool) or issubclass(cls, np.number):
        return np.zeros(num_rows, dtype=cls)
    if isinstance(value, np.ndarray):
        return np.zeros((num_rows, *value.shape), dtype=value.dtype)
    return _objects(num_rows)


def _put(array: NDArray[Any], value: Any, row: int) -> NDArray[Any]:
    """Assign a row, widening the array if the value needs it; returns the array that now holds it."""
    if array.dtype != object:
        item = np.asarray(value)
        if item.shape != array.shape[1:] or item.dtype.kind not in "biufc" or array.dtype.kind not in "biufc":
            if item.shape != array.shape[1:] or item.dtype != array.dtype:
                array = _as_objects(array)
        elif item.dtype != array.dtype and not np.can_cast(item.dtype, array.dtype, "safe"):
            array = array.astype(_wider(array.dtype, value, item.dtype))
    array[row] = value
    return array


def _wider(dtype: np.dtype[Any], value: object, item_dtype: np.dtype[Any]) -> np.dtype[Any]:
    # A Python number adopts the width of the array, as in numpy's own promotion rules.
    return np.result_type(dtype, type(value)) if type(value) in (int, float) else np.result_type(dtype, item_dtype)


def _as_objects(array: NDArray[Any]) -> NDArray[Any]:
    objects = _objects(len(array))
    for row, item in enumerate(array):
        objects[row] = item
    return objects
