"""Infos of all environments, divided again into those of each."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_mask(key: Any, infos: dict[Any, Any]) -> bool:
    """Tell whether an entry says whose the values of another entry are."""
    return isinstance(key, str) and key.startswith("_") and any(f"_{other}" == key for other in infos if other != key)


def row_of(infos: dict[Any, Any], index: int) -> dict[Any, Any]:
    """Return the infos of one environment: the values that masks say are its own."""
    row = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if is_mask(key, infos) or not isinstance(mask, np.ndarray) or not mask[index]:
            continue
        row[key] = row_of(values, index) if isinstance(values, dict) else values[index]
    return row
