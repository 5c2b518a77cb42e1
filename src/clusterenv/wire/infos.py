"""Infos in Gymnasium's vector layout: checks them, and merges them as if one process had made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import WireError

_NUMBERS = "biufc"
_MAX_DEPTH = 32


class ShardInfos(NamedTuple):
    """One shard's infos in Gymnasium's vector layout, for environments `[start, stop)`."""

    start: int
    stop: int
    infos: Any


def merge_infos(shards: Sequence[ShardInfos], num_envs: int) -> dict[str, Any]:
    """Merge the shards' infos into those of the whole run.

    Keys are in the order in which a single process would have met them. Shards must be ordered by `start`, and their
    infos already checked.

    Raises:
        WireError: One shard has a dict where another has an array.
    """
    are_all_here = sum([shard.stop - shard.start for shard in shards]) == num_envs
    merged = {}
    for key in dict.fromkeys([key for shard in shards for key in shard.infos]):
        parts = [shard.infos.get(key) for shard in shards]
        if are_all_here and _are_alike(parts):
            merged[key] = np.concatenate(parts)  # The common case: every shard has it.
        else:
            own = [ShardInfos(s.start, s.stop, s.infos[key]) for s in shards if key in s.infos]
            merged[key] = _merge(key, own, num_envs)
    return merged


def check_infos(infos: Any, num_rows: int) -> None:
    """Check a shard's infos: dicts of dicts, tuples and arrays with one row per environment.

    Raises:
        WireError: The infos are not in Gymnasium's vector layout.
    """
    if not isinstance(infos, dict):
        raise WireError(f"Infos must be a dict, got {type(infos).__name__}.")
    for key, value in infos.items():
        _check_info(key, value, num_rows, 0)


def _check_info(key: Any, value: Any, num_rows: int, depth: int) -> None:
    if isinstance(value, np.ndarray):
        if value.shape[:1] == (num_rows,):
            return
    elif isinstance(value, dict | tuple) and depth < _MAX_DEPTH:
        for part in value.values() if isinstance(value, dict) else value:
            _check_info(key, part, num_rows, depth + 1)
        return
    raise WireError(f"The info {_name_of(key)!r} is not an array with a row for each of {num_rows} environments.")


def _name_of(key: object) -> str:
    """Return a key as text for error messages; a worker may have sent one that cannot be printed."""
    try:
        return str(key)[:100]
    except ValueError:
        return f"(of {type(key).__name__})"


def _merge(key: str, shards: Sequence[ShardInfos], num_envs: int) -> Any:
    kinds = {type(shard.infos) for shard in shards}
    if kinds == {dict}:
        return merge_infos(shards, num_envs)
    if len(kinds) > 1 or (kinds == {tuple} and len({len(shard.infos) for shard in shards}) > 1):
        names = ", ".join(f"{type(s.infos).__name__} for environments {s.start} to {s.stop - 1}" for s in shards)
        raise WireError(f"Workers do not agree on what the info {_name_of(key)!r} is: {names}.")
    if kinds == {tuple}:  # Actions of a Tuple space.
        parts = zip(*(shard.infos for shard in shards), strict=True)
        return tuple(
            _merge(key, [ShardInfos(s.start, s.stop, item) for s, item in zip(shards, part, strict=True)], num_envs)
            for part in parts
        )
    arrays: list[NDArray[Any]] = [shard.infos for shard in shards]
    if sum(map(len, arrays)) == num_envs and _are_alike(arrays):
        return np.concatenate(arrays)
    merged = _empty(arrays, num_envs)
    for shard, array in zip(shards, arrays, strict=True):
        if merged.dtype == object and merged.ndim == 1 and (array.dtype != object or array.ndim > 1):
            for offset, item in enumerate(array):
                merged[shard.start + offset] = item
        else:
            merged[shard.start : shard.stop] = array
    return merged


def _are_alike(parts: Sequence[Any]) -> bool:
    """Whether all parts are arrays of numbers that can be concatenated as they are."""
    first = parts[0]
    if type(first) is not np.ndarray or first.dtype.kind not in _NUMBERS:
        return False
    for part in parts:
        if type(part) is not np.ndarray or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            return False
    return True


def _empty(arrays: Sequence[NDArray[Any]], num_envs: int) -> NDArray[Any]:
    first = arrays[0]
    if all(array.shape[1:] == first.shape[1:] and (array.dtype != object or array.ndim > 1) for array in arrays):
        if all(array.dtype == first.dtype for array in arrays):
            return np.zeros((num_envs, *first.shape[1:]), first.dtype)
        if all(array.dtype.kind in _NUMBERS for array in arrays):
            return np.zeros((num_envs, *first.shape[1:]), np.result_type(*arrays))
    return np.full(num_envs, fill_value=None, dtype=object)
