"""Splits the infos of all environments into those of each."""

from __future__ import annotations

from typing import Any

import numpy as np


def without_clock(value: Any) -> Any:
    """Return infos, or a result that contains them, without the durations of episodes.

    Gymnasium's RecordEpisodeStatistics adds these durations; they are never the same twice.
    """
    if isinstance(value, tuple):
        return tuple(map(without_clock, value))
    if not isinstance(value, dict):
        return value
    episode = value.get("episode")
    if isinstance(episode, dict):
        value = value | {"episode": {key: entry for key, entry in episode.items() if key not in ("t", "_t")}}
    if isinstance(value.get("final_info"), dict):
        value = value | {"final_info": without_clock(value["final_info"])}
    return value


def is_mask(key: Any, infos: dict[Any, Any]) -> bool:
    """Return whether an entry is the mask of another entry."""
    return isinstance(key, str) and key.startswith("_") and any(f"_{other}" == key for other in infos if other != key)


def row_of(infos: dict[Any, Any], index: int) -> dict[Any, Any]:
    """Return the infos of one environment: the values whose masks are set for it."""
    row = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if is_mask(key, infos) or not isinstance(mask, np.ndarray) or not mask[index]:
            continue
        row[key] = row_of(values, index) if isinstance(values, dict) else values[index]
    return row
