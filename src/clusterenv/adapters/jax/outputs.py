"""Turns what a network returns into a decision: its distribution, its value, its next state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array, Call, Distribution
from clusterenv.policy.policy import Decision, State, Tree, draw, map_tree
from clusterenv.policy.program import make_distribution

Output: TypeAlias = Literal["logits", "q", "action", "gaussian", "squashed"]

OUTPUTS: tuple[Output, ...] = get_args(Output)
_FAMILIES = {
    "logits": ("categorical", ("logits",)),
    "q": ("q_values", ("q",)),
    "action": ("deterministic", ("action",)),
    "gaussian": ("diagonal_gaussian", ("mean", "log_std")),
    "squashed": ("squashed_gaussian", ("mean", "log_std")),
}


class Reader:
    """Reads what a network returns.

    Args:
        output: What the network returns; None: a dict with "action", and whatever else the learner wants.
        has_state: Whether the network's last result is the next recurrent state.
        scale: By what a squashed or deterministic action is multiplied, and
        shift: what is then added to it.
    """

    def __init__(self, output: Output | None, has_state: bool, scale: Array | None, shift: Array | None) -> None:
        self._output = output
        self._has_state = has_state
        self._constants: dict[str, Array] = {}
        if scale is not None and shift is not None:
            if output == "squashed":
                self._constants = {"scale": scale, "shift": shift}
            elif output == "action":
                self._constants = {"scale": scale, "low": shift - scale, "high": shift + scale}

    def decide(self, answer: Any, num_rows: int, rng: np.random.Generator, call: Call) -> Decision:
        """Sample an action, or take the one that the network has chosen."""
        read = self._read(answer, num_rows)
        if read.distribution is not None:
            return draw(read.distribution, rng, call, read.extras)._replace(state=read.state)
        if call:
            raise PolicyError(f"The network chooses its own actions and takes no {', '.join(sorted(call))}.")
        assert read.action is not None, "either is there"
        return Decision(read.action, read.extras, read.state)

    def distribution(self, answer: Any, num_rows: int) -> Distribution | None:
        """Return the distribution; None if the network chooses its own actions."""
        return self._read(answer, num_rows).distribution

    def _read(self, answer: Any, num_rows: int) -> _Read:
        state: State | None = None
        if self._has_state:
            answer, state = self._take_state(answer)
        if self._output is None:
            if not isinstance(answer, Mapping) or "action" not in answer:
                raise PolicyError(
                    f'Without output=... a network should return a dict with "action" in it, got {_name(answer)}. Say '
                    f"what it returns: JaxPolicy(..., output=...), one of {', '.join(OUTPUTS)}."
                )
            extras = {name: _column(value, name, num_rows) for name, value in answer.items() if name != "action"}
            return _Read(None, map_tree(np.asarray, answer["action"]), extras, state)
        family, names = _FAMILIES[self._output]
        results = list(answer) if isinstance(answer, tuple) else [answer]
        if not len(names) <= len(results) <= len(names) + 1:
            expected = ", ".join(names)
            raise PolicyError(
                f"A network with output={self._output!r} should return {expected}, and may return a value after that"
                f"{' and before the next state' if self._has_state else ''}; got {_name(answer)}."
            )
        parameters = dict(zip(names, results[: len(names)], strict=True))
        extras = {"value": _column(results[-1], "value", num_rows)} if len(results) > len(names) else {}
        nvec: tuple[int, ...] = ()
        if isinstance(first := results[0], list):  # One array for each part of a MultiDiscrete action.
            family, nvec = "multi_categorical", tuple(part.shape[-1] for part in first)
            parameters = {f"logits.{index}": part for index, part in enumerate(first)}
        floats = {name: _floats(value) for name, value in parameters.items()}
        return _Read(make_distribution(family, floats, self._constants, nvec), None, extras, state)

    def _take_state(self, answer: Any) -> tuple[Any, State]:
        if not isinstance(answer, tuple) or len(answer) < 2 or not isinstance(answer[-1], Mapping):
            raise PolicyError(
                "A recurrent network should return a tuple whose last item is the next state, a dict of arrays as "
                f"initial_state returns it; got {_name(answer)}."
            )
        state = {name: np.array(part) for name, part in answer[-1].items()}
        return answer[0] if len(answer) == 2 else answer[:-1], state


class _Read(NamedTuple):
    """The result of one call: a distribution or an action."""

    distribution: Distribution | None
    action: Tree | None
    extras: dict[str, Array]
    state: State | None


def _floats(value: Any) -> Array:
    array = np.asarray(value)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _column(value: Any, name: str, num_rows: int) -> Array:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":  # numpy has no bfloat16.
        array = array.astype(np.float32)
    if array.shape == (num_rows, 1):
        return array[:, 0]
    if array.shape[:1] != (num_rows,):
        raise PolicyError(f"The network's {name} for {num_rows} environments has shape {array.shape}.")
    return array


def _name(answer: object) -> str:
    if isinstance(answer, Sequence):
        return f"a {type(answer).__name__} of {len(answer)}"
    return f"a {type(answer).__name__}"
