"""Buffers: the arrays of fixed size that steps and rollouts fill.

If head and worker share a machine, the arrays lie in shared memory, and each worker writes its own environments' part
in place. Otherwise each side has its own arrays, and the parts are sent as raw frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ConfigError, WireError
from clusterenv.wire.arrays import ArrayMaker
from clusterenv.wire.info_planes import MAX_COLUMNS
from clusterenv.wire.layout import Layout, Leaf
from clusterenv.wire.messages import ArraySpec
from clusterenv.wire.spaces import checked_dtype, checked_shape

Change = Callable[[NDArray[Any]], NDArray[Any]]

_MAX_ROW_BYTES = 1 << 26  # For one environment and one step, in one array that a policy returns.
_REWARD, _FLAG, _SLOT = (Leaf((), np.dtype(kind)) for kind in (np.float64, np.bool_, np.uint64))


@dataclass(eq=False, repr=False)
class StepBuffers:
    """What a step fills: arrays `[num_envs, ...]`, row *i* for environment *i*, one per leaf of fixed size.

    A run has two, filled in turn: while a step fills one, the other holds what the learner saw last. So if a step is
    lost with its worker, the replacement can answer it. Both share the same actions and infos.

    Attributes:
        actions: One array per leaf of the action space; empty if a leaf has no fixed size.
        observations: One array per leaf of the observation space; None for a leaf of objects.
        info_slots: `[MAX_COLUMNS, num_envs]`, used if memory is shared; see `wire.info_planes`.
    """

    actions: list[NDArray[Any]]
    observations: list[NDArray[Any] | None]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    info_slots: NDArray[np.uint64]

    @staticmethod
    def make_pair(
        actions: Layout, observations: Layout, num_envs: int, make: ArrayMaker
    ) -> tuple[StepBuffers, StepBuffers]:
        """Make both buffers, allocating each array with `make`."""
        lead = (num_envs,)
        shared = [make(lead, leaf) for leaf in actions.leaves] if actions.is_fixed else []
        slots = make((MAX_COLUMNS, num_envs), _SLOT)

        def make_one() -> StepBuffers:
            return StepBuffers(
                shared,
                [None if leaf.dtype is None else make(lead, leaf) for leaf in observations.leaves],
                make(lead, _REWARD),
                make(lead, _FLAG),
                make(lead, _FLAG),
                slots,
            )

        return make_one(), make_one()

    def rows(self, start: int, stop: int) -> StepBuffers:
        """Return views of some environments' rows."""
        return StepBuffers(
            [array[start:stop] for array in self.actions],
            [None if array is None else array[start:stop] for array in self.observations],
            self.rewards[start:stop],
            self.terminations[start:stop],
            self.truncations[start:stop],
            self.info_slots[:, start:stop],
        )

    @cached_property
    def results(self) -> list[NDArray[Any]]:
        """The arrays a worker fills, in wire order."""
        fixed = [array for array in self.observations if array is not None]
        return [*fixed, self.rewards, self.terminations, self.truncations]

    def beside(self) -> StepBuffers:
        """Return buffers with their own rewards and flags, sharing everything else."""
        own = {name: np.zeros_like(getattr(self, name)) for name in ("rewards", "terminations", "truncations")}
        return replace(self, **own)

    def copy_from(self, other: StepBuffers) -> None:
        """Copy everything a step fills."""
        for own, array in zip(self.results, other.results, strict=True):
            own[...] = array


@dataclass(eq=False, repr=False)
class RolloutBuffers:
    """What a rollout fills: arrays `[num_steps, num_envs, ...]`, time first, one column per environment.

    Attributes:
        observations: One array per leaf, with one step more than the others: the last is seen by the next action.
        valid: False where no action was taken: in NEXT_STEP mode, at the step that resets.
        extras: What the policy returned besides actions, by name.
        states: The policy's recurrent state before each step, by name.
    """

    observations: list[NDArray[Any]]
    actions: list[NDArray[Any]]
    rewards: NDArray[np.float64]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    extras: dict[str, NDArray[Any]]
    states: dict[str, NDArray[Any]]

    def columns(self, start: int, stop: int) -> RolloutBuffers:
        """Return views of some environments' columns."""
        return self._map(lambda array: array[:, start:stop])

    def steps(self, first: int, stop: int) -> RolloutBuffers:
        """Return views of some steps; the rollout's last step includes the observation after it."""
        last = stop + (stop == len(self.rewards))
        return self._map(lambda array: array[first:stop], lambda array: array[first:last])

    def copy(self) -> RolloutBuffers:
        """Return a copy."""
        return self._map(np.ndarray.copy)

    def arrays(self) -> Iterator[NDArray[Any]]:
        """Yield all arrays in wire order."""
        yield from self.observations
        yield from self.actions
        yield from (self.rewards, self.terminations, self.truncations, self.valid)
        yield from self.extras.values()
        yield from self.states.values()

    @staticmethod
    def beside(parts: Sequence[RolloutBuffers]) -> RolloutBuffers:
        """Join the columns of rollouts of the same length."""
        if len(parts) == 1:
            return parts[0]
        names = [[*part.extras, *part.states] for part in parts]
        assert all(each == names[0] for each in names), "rollouts of one layout"
        arrays = zip(*(part.arrays() for part in parts), strict=True)
        return parts[0]._map(lambda _: np.concatenate(next(arrays), axis=1))

    def _map(self, change: Change, change_observations: Change | None = None) -> RolloutBuffers:
        """Apply a function to every array, in wire order."""
        return RolloutBuffers(
            [(change_observations or change)(array) for array in self.observations],
            [change(array) for array in self.actions],
            change(self.rewards),
            change(self.terminations),
            change(self.truncations),
            change(self.valid),
            {name: change(array) for name, array in self.extras.items()},
            {name: change(array) for name, array in self.states.items()},
        )


@dataclass(frozen=True, eq=False, repr=False)
class RolloutLayout:
    """The layout of a run's rollouts of any length."""

    actions: Layout
    observations: Layout
    extras: tuple[ArraySpec, ...]
    states: tuple[ArraySpec, ...]

    def make(self, num_steps: int, num_envs: int, make: ArrayMaker) -> RolloutBuffers:
        """Make buffers, allocating each array with `make`."""
        lead = (num_steps, num_envs)
        return RolloutBuffers(
            [make((num_steps + 1, num_envs), leaf) for leaf in self.observations.leaves],
            [make(lead, leaf) for leaf in self.actions.leaves],
            make(lead, _REWARD),
            make(lead, _FLAG),
            make(lead, _FLAG),
            make(lead, _FLAG),
            _make_named(self.extras, lead, make),
            _make_named(self.states, lead, make),
        )


def check_collectable(actions: Layout, observations: Layout) -> None:
    """Raise ConfigError if rollouts of these spaces cannot be stored in arrays."""
    for what, layout in (("action", actions), ("observation", observations)):
        for leaf in layout.leaves:
            if leaf.dtype is None:
                raise ConfigError(
                    f"The {what}{leaf} has no fixed size (Text, Graph, Sequence, OneOf or a space of your own), so a "
                    "policy on the workers cannot handle it: choose actions on the head, envs.step(actions)."
                )


def describe(arrays: dict[str, NDArray[Any]]) -> list[ArraySpec]:
    """Describe a policy's extras or states, each `[num_envs, ...]`."""
    return [ArraySpec(name, array.dtype.str, array.shape[1:]) for name, array in arrays.items()]


def check_specs(specs: Sequence[ArraySpec]) -> None:
    """Check a worker's description of what its policy returns.

    Raises:
        WireError: The arrays are malformed, or too large for a rollout.
    """
    for spec in specs:
        if math.prod(checked_shape(spec.shape)) * checked_dtype(spec.dtype).itemsize > _MAX_ROW_BYTES:
            raise WireError(f"An extra or state {spec.name[:100]!r} of {spec.dtype}{spec.shape} is too large.")


def _make_named(specs: Sequence[ArraySpec], lead: tuple[int, ...], make: ArrayMaker) -> dict[str, NDArray[Any]]:
    return {
        spec.name: make(lead, Leaf((spec.name,), checked_dtype(spec.dtype), checked_shape(spec.shape)))
        for spec in specs
    }
