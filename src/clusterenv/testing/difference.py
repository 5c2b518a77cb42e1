"""Compares two results: type, dtype, shape, order of keys and every bit, at any depth."""

from __future__ import annotations

from typing import Any

import numpy as np


def find_difference(ours: Any, theirs: Any, where: str = "answer") -> str | None:
    """Say where two results first differ, and how; return None if they are the same."""
    if type(ours) is not type(theirs):
        return f"{where}: {type(ours)} is not {type(theirs)}: {ours!r} / {theirs!r}"
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return f"{where}: keys {list(ours)} are not {list(theirs)}"
        return _first(find_difference(ours[key], theirs[key], f"{where}[{key!r}]") for key in theirs)
    if isinstance(theirs, tuple | list):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} items, not {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return _first(find_difference(our, their, f"{where}[{place}]") for place, (our, their) in pairs)
    if isinstance(theirs, np.ndarray):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{where}: {ours.dtype}{ours.shape} is not {theirs.dtype}{theirs.shape}"
        if theirs.dtype == object:
            return find_difference(ours.ravel().tolist(), theirs.ravel().tolist(), where)
        return None if ours.tobytes() == theirs.tobytes() else f"{where}:\n{ours}\nis not\n{theirs}"
    if isinstance(theirs, np.generic):
        is_same = (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes())
        return None if is_same else f"{where}: {ours!r} is not {theirs!r}"
    if isinstance(theirs, float) and theirs != theirs:
        return None if ours != ours else f"{where}: {ours!r} is not {theirs!r}"
    return None if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"


def is_same_value(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal, whatever their types: 3 equals 3.0 and an array of it."""
    if isinstance(theirs, dict):
        return (
            isinstance(ours, dict)
            and set(ours) == set(theirs)
            and all(is_same_value(ours[key], theirs[key]) for key in theirs)
        )
    if isinstance(ours, np.ndarray | np.generic) or isinstance(theirs, np.ndarray | np.generic):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if ours.dtype == object or theirs.dtype == object:
            return bool(ours.shape == theirs.shape and ours.tolist() == theirs.tolist())
        may_be_nan = all(np.issubdtype(each.dtype, np.inexact) for each in (ours, theirs))
        return bool(np.array_equal(ours, theirs, equal_nan=may_be_nan))
    if isinstance(theirs, float) and theirs != theirs:
        return bool(ours != ours)
    return bool(ours == theirs)


def _first(differences: Any) -> str | None:
    return next((difference for difference in differences if difference is not None), None)
