"""Masks: which actions environments allow, as given in `info["action_mask"]`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.worker.infos import Infos

NAME = "action_mask"


class ActionMasks:
    """The masks for the next actions, one row per environment; without a mask, all actions are allowed.

    Attributes:
        current: Shape `[n, ...]`; None if no environment gave a mask when all were reset.
    """

    def __init__(self, num_rows: int) -> None:
        self.current: NDArray[Any] | None = None
        self._num_rows = num_rows

    def reset(self, infos: Infos, rows: NDArray[np.bool_] | None) -> None:
        """Note the infos of a reset of all environments, or of these rows."""
        if rows is None:
            found = infos.get(NAME)
            is_mask = isinstance(found, np.ndarray) and found.ndim > 1 and found.dtype.kind in "biu"
            self.current = np.ones_like(found) if is_mask else None
        self._note(infos, rows)

    def step(self, infos: Infos) -> None:
        """Note the infos of a step of all environments."""
        self._note(infos, None)

    def _note(self, infos: Infos, rows: NDArray[np.bool_] | None) -> None:
        if self.current is None:
            return
        masks = self.current.copy()  # A rollout or a policy may still hold the previous one.
        masks[... if rows is None else rows] = 1
        found, given = infos.get(NAME), infos.get(f"_{NAME}")
        if isinstance(found, np.ndarray) and found.shape == masks.shape and isinstance(given, np.ndarray):
            masks[given] = found[given]
        self.current = masks
