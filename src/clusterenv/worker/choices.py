"""Choices: checks the actions a policy has chosen, and divides them among the environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.policy import Decision, State
from clusterenv.wire.layout import Layout


class Choices:
    """Checks and divides a policy's actions for a number of environments."""

    def __init__(self, action_space: Space[Any], num_rows: int) -> None:
        """Prepare for an action space.

        Args:
            action_space: The action space of one environment.
            num_rows: How many environments a policy decides for at a time.
        """
        self._rows = num_rows
        self._actions = Layout(action_space)
        self._batched_actions = batch_space(action_space, num_rows)
        self._ranges = [_range_of(part) for part in _leaf_spaces(action_space)]

    def check(self, decision: Decision, *, are_real: bool = True) -> list[NDArray[Any]]:
        """Return one array per leaf, in exactly the space's dtype and shape; `are_real` also checks the values."""
        try:
            parts = self._actions.flatten(decision.action)
        except (KeyError, IndexError, TypeError) as error:
            raise PolicyError(f"The policy's actions are not nested as the action space is: {error}.") from error
        checked = []
        for leaf, part, bounds in zip(self._actions.leaves, parts, self._ranges, strict=True):
            array = _as_actions(part, leaf)
            wanted = (self._rows, *leaf.shape)
            assert leaf.dtype is not None, "checked by the head: check_collectable"
            if array.shape != wanted or not (array.dtype == leaf.dtype or _fits(array, leaf.dtype)):
                got = f"a {type(part).__name__}" if array.dtype == object else f"shape {array.shape} of {array.dtype}"
                batch = " It is given a batch of observations, a row per environment." if array.ndim == 0 else ""
                raise PolicyError(
                    f"The policy's action{leaf} must have shape {wanted} and a dtype that fits {leaf.dtype}, "
                    f"got {got}. The action space is {self._batched_actions}.{batch}"
                )
            if not are_real:
                pass  # On made-up observations a policy may do anything.
            elif bounds is None:
                if array.dtype.kind == "f" and np.isnan(array).any():
                    raise PolicyError(f"The policy's action{leaf} holds NaN. Has training diverged?")
            elif _is_outside(array, *bounds):
                raise PolicyError(
                    f"The policy's action{leaf} must be from {bounds[0]} to {bounds[1]}, got {array.min()} to "
                    f"{array.max()}. The action space is {self._batched_actions}."
                )
            checked.append(array if array.dtype == leaf.dtype else array.astype(leaf.dtype))
        return checked

    def split(self, actions: list[NDArray[Any]], *, is_batched: bool = False) -> Any:
        """Return one action per environment or, with `is_batched`, all actions nested like the action space."""
        if is_batched:
            return self._actions.nest(actions)
        if self._actions.is_single:
            return actions[0]
        return iterate(self._batched_actions, self._actions.nest(actions))


def checked_state(state: State | None) -> State | None:
    """Check what a policy's `initial_state` returned.

    Raises:
        PolicyError: The state is not a dict of numpy arrays.
    """
    if state is None:
        return None
    if not isinstance(state, dict):
        raise PolicyError(
            f"initial_state() must return a dict of numpy arrays, such as {{'h': np.zeros((num_envs, 8))}}, or None; "
            f"got a {type(state).__name__}."
        )
    for name, part in state.items():
        if not isinstance(part, np.ndarray):
            raise PolicyError(
                f"initial_state() must return numpy arrays; its {name!r} is a {type(part).__name__}. Convert a tensor "
                "with .numpy()."
            )
    return state


def _is_outside(array: NDArray[Any], least: Any, largest: Any) -> bool:
    """Whether an action is outside the space. Runs every step, so the common case is a single pass."""
    if array.dtype == np.int64 and type(least) is int and least == 0:
        return bool(array.view(np.uint64).max() > largest)  # As unsigned, negative numbers are the largest.
    return bool((array < least).any() or (array > largest).any())


def _leaf_spaces(space: Space[Any]) -> list[Space[Any]]:
    """Return the spaces of a layout's leaves, in the layout's order."""
    if isinstance(space, spaces.Dict):
        return [leaf for part in space.spaces.values() for leaf in _leaf_spaces(part)]
    if isinstance(space, spaces.Tuple):
        return [leaf for part in space.spaces for leaf in _leaf_spaces(part)]
    return [space]


def _range_of(space: Space[Any]) -> tuple[Any, Any] | None:
    """Return the smallest and largest action; None for continuous actions, which environments clip as they like."""
    match space:
        case spaces.Discrete():
            return int(space.start), int(space.start + space.n - 1)
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            return 0, 1
        case _:
            return None


def _fits(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether actions can be cast without loss of meaning; Bernoulli samples of 0.0 and 1.0 are fine for ints."""
    if np.can_cast(array.dtype, dtype, "same_kind"):
        return True
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise PolicyError(f"The policy's actions hold NaN where {dtype} is expected. Has training diverged?")
    return bool((array.astype(dtype) == array).all())


def _as_actions(part: Any, leaf: object) -> NDArray[Any]:
    try:
        return np.asarray(part)
    except ValueError as error:
        raise PolicyError(
            f"The policy's action{leaf} must be one array, got a {type(part).__name__} of {len(part)} parts. If it "
            "returns more than actions, give a function that picks them: lambda obs: act(obs)[0]."
        ) from error
