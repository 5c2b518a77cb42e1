"""Batch: the shards' infos put together as if one process had made them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import WireError

_NUMBERS = "biufc"


class ShardInfos(NamedTuple):
    """One shard's infos in Gymnasium's vector layout, for environments `[start, stop)`."""

    start: int
    stop: int
    infos: Any


def merge_infos(shards: Sequence[ShardInfos], num_envs: int) -> dict[str, Any]:
    """Merge the shards' infos into the whole run's.

    Keys come in the order in which a single process would have met them. Shards must be ordered by `start`.

    Raises:
        WireError: A shard's infos are not in Gymnasium's vector layout.
    """
    keys = dict.fromkeys(key for shard in shards for key in shard.infos)
    return {
        key: _merge(key, [ShardInfos(s.start, s.stop, s.infos[key]) for s in shards if key in s.infos], num_envs)
        for key in keys
    }


def _merge(key: str, shards: Sequence[ShardInfos], num_envs: int) -> Any:
    if all(isinstance(shard.infos, dict) for shard in shards):
        return merge_infos(shards, num_envs)
    if all(isinstance(shard.infos, tuple) for shard in shards):  # Actions of a Tuple space.
        parts = zip(*(shard.infos for shard in shards), strict=True)
        return tuple(
            _merge(key, [ShardInfos(s.start, s.stop, item) for s, item in zip(shards, part, strict=True)], num_envs)
            for part in parts
        )
    arrays: list[NDArray[Any]] = []
    for shard in shards:
        array: Any = shard.infos
        if not isinstance(array, np.ndarray) or array.shape[:1] != (shard.stop - shard.start,):
            raise WireError(
                f"The info {key!r} of environments {shard.start} to {shard.stop - 1} is no array with a row "
                "for each of them."
            )
        arrays.append(array)
    if sum(map(len, arrays)) == num_envs and _are_alike(arrays):
        return np.concatenate(arrays)  # The common case: every shard has it.
    merged = _empty(arrays, num_envs)
    for shard, array in zip(shards, arrays, strict=True):
        if merged.dtype == object and (array.dtype != object or array.ndim > 1):
            for offset, item in enumerate(array):
                merged[shard.start + offset] = item
        else:
            merged[shard.start : shard.stop] = array
    return merged


def _are_alike(arrays: Sequence[NDArray[Any]]) -> bool:
    first = arrays[0]
    return first.dtype.kind in _NUMBERS and all(
        array.dtype == first.dtype and array.shape[1:] == first.shape[1:] for array in arrays
    )


def _empty(arrays: Sequence[NDArray[Any]], num_envs: int) -> NDArray[Any]:
    first = arrays[0]
    if all(array.shape[1:] == first.shape[1:] and array.dtype != object for array in arrays):
        if all(array.dtype == first.dtype for array in arrays):
            return np.zeros((num_envs, *first.shape[1:]), first.dtype)
        if all(array.dtype.kind in _NUMBERS for array in arrays):
            return np.zeros((num_envs, *first.shape[1:]), np.result_type(*arrays))
    return np.full(num_envs, fill_value=None, dtype=object)
