"""Actions: converts what a learner passes to `step` into what workers read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from clusterenv.wire.layout import Layout

_BATCHES = (np.ndarray, list, tuple, dict)


def is_batch(actions: object) -> bool:
    """Whether this is a batch of actions, or an attempt at one, rather than an agent that chooses actions."""
    is_agent = callable(actions) or hasattr(actions, "act") or hasattr(actions, "predict")
    return not is_agent or hasattr(actions, "__array__")


class ActionWriter:
    """Writes actions to the step buffers if they have the right shape and dtype, or else passes them on unchanged.

    Environments must get exactly what they would get from `SyncVectorEnv`, so float64 actions for a float32 space, for
    example, are not cast.
    """

    def __init__(self, space: Space[Any], layout: Layout, planes: Sequence[NDArray[Any]], num_envs: int) -> None:
        self._space = space
        self._layout = layout
        self._planes = planes
        self._num_envs = num_envs

    def place(self, actions: Any) -> Any | None:
        """Return None if the actions are now in the step buffers; otherwise the actions, one per environment.

        Raises:
            ValueError: The number of actions is wrong.
            TypeError: The actions are not a batch.
        """
        if self._layout.is_single and isinstance(actions, np.ndarray):  # The common case, on a short path.
            plane = self._planes[0]
            if actions.dtype == plane.dtype and actions.shape == plane.shape:
                plane[...] = actions
                return None
        if not isinstance(actions, _BATCHES) and hasattr(actions, "__array__"):
            actions = np.asarray(actions)  # A torch tensor, a jax array.
        parts = self._parts(actions)
        if len(parts) == len(self._planes) > 0 and all(map(_fits, parts, self._planes)):
            for part, plane in zip(parts, self._planes, strict=True):
                plane[...] = part
            return None
        is_array = isinstance(actions, np.ndarray) and actions.ndim > 0
        if (
            not isinstance(actions, Iterable)
            or isinstance(actions, str)
            or (isinstance(actions, np.ndarray) and actions.ndim == 0)
        ):
            raise TypeError(
                f"actions must be a batch, one per environment ({self._num_envs} here), or an agent that chooses them, "
                f"got {actions!r}. The action space is {self._space}."
            )
        single: Any = actions if is_array else list(iterate(self._space, actions))
        if len(single) != self._num_envs:
            raise ValueError(
                f"Expected {self._num_envs} actions, one per environment, got {len(single)}. "
                f"The action space is {self._space}."
            )
        return single

    def _parts(self, actions: Any) -> list[Any]:
        if self._layout.is_single:
            return [actions]
        try:
            return self._layout.flatten(actions)
        except (KeyError, IndexError, TypeError):
            return []


def _fits(part: Any, plane: NDArray[Any]) -> bool:
    return isinstance(part, np.ndarray) and part.dtype == plane.dtype and part.shape == plane.shape
