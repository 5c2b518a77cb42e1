"""Resets: checks a user's seeds and masks, and spreads them over the environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SEED_LIMIT = 2**63


def spread_seed(seed: int | list[int | None] | None, num_envs: int) -> list[int | None]:
    """Return one seed per environment; an int s gives environment i the seed s + i."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        seeds: list[int | None] = [int(seed) + index for index in range(num_envs)]
    elif not isinstance(seed, Sequence | np.ndarray) or isinstance(seed, str):
        raise TypeError(f"seed must be an int, a list with one per environment, or None, got {seed!r}.")
    elif len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    else:
        seeds = [None if item is None else int(item) for item in seed]
    for item in seeds:
        if item is not None and not -_SEED_LIMIT <= item < _SEED_LIMIT:
            raise ValueError(f"Seeds must fit in 64 bits, so that they can be sent to workers; got {item}.")
    return seeds


def checked_mask(mask: Any, num_envs: int) -> NDArray[np.bool_]:
    """Check a reset mask, with Gymnasium's error messages."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not np.any(mask):
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask
