"""Block: the arrays of a rollout, time-major, one column an environment.

Like planes, a block lies in shared memory where head and worker share a machine: each worker writes its own columns in
place, environments straight into the row that the policy reads next. Elsewhere the columns travel as raw frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ConfigError, WireError
from clusterenv.wire.arrays import ArrayMaker
from clusterenv.wire.dtypes import checked_dtype, checked_shape
from clusterenv.wire.layout import Layout, Leaf
from clusterenv.wire.messages import ArraySpec

_MAX_ROW_BYTES = 1 << 26  # What a policy returns for one environment at one step, in one array.


@dataclass(eq=False, repr=False)
class Block:
    """Arrays `[num_steps, num_envs, ...]`.

    Attributes:
        observations: One array a leaf, with one step more than the others: the last is what the next action will see.
        valid: False where no action was taken: in NEXT_STEP mode the step that resets.
        extras: What the policy returned beside actions, by name.
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

    def columns(self, start: int, stop: int) -> Block:
        """Return views of some environments' columns."""
        return Block(
            [array[:, start:stop] for array in self.observations],
            [array[:, start:stop] for array in self.actions],
            self.rewards[:, start:stop],
            self.terminations[:, start:stop],
            self.truncations[:, start:stop],
            self.valid[:, start:stop],
            {name: array[:, start:stop] for name, array in self.extras.items()},
            {name: array[:, start:stop] for name, array in self.states.items()},
        )

    def steps(self, first: int, stop: int) -> Block:
        """Return views of some steps; with the rollout's very last comes the observation after it."""
        last = stop + (stop == len(self.rewards))
        return Block(
            [array[first:last] for array in self.observations],
            [array[first:stop] for array in self.actions],
            self.rewards[first:stop],
            self.terminations[first:stop],
            self.truncations[first:stop],
            self.valid[first:stop],
            {name: array[first:stop] for name, array in self.extras.items()},
            {name: array[first:stop] for name, array in self.states.items()},
        )

    def arrays(self) -> Iterator[NDArray[Any]]:
        """Yield all arrays in wire order."""
        yield from self.observations
        yield from self.actions
        yield from (self.rewards, self.terminations, self.truncations, self.valid)
        yield from self.extras.values()
        yield from self.states.values()

    @staticmethod
    def beside(blocks: Sequence[Block]) -> Block:
        """Put blocks of the same length beside each other."""
        if len(blocks) == 1:
            return blocks[0]

        def join(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate(parts, axis=1)

        first = blocks[0]
        return Block(
            [join(parts) for parts in zip(*(block.observations for block in blocks), strict=True)],
            [join(parts) for parts in zip(*(block.actions for block in blocks), strict=True)],
            join([block.rewards for block in blocks]),
            join([block.terminations for block in blocks]),
            join([block.truncations for block in blocks]),
            join([block.valid for block in blocks]),
            {name: join([block.extras[name] for block in blocks]) for name in first.extras},
            {name: join([block.states[name] for block in blocks]) for name in first.states},
        )

    def copy(self) -> Block:
        """Return a block of the caller's own."""
        return Block(
            [array.copy() for array in self.observations],
            [array.copy() for array in self.actions],
            self.rewards.copy(),
            self.terminations.copy(),
            self.truncations.copy(),
            self.valid.copy(),
            {name: array.copy() for name, array in self.extras.items()},
            {name: array.copy() for name, array in self.states.items()},
        )


@dataclass(frozen=True, eq=False, repr=False)
class BlockSpec:
    """What a run's rollouts look like, whatever their length."""

    actions: Layout
    observations: Layout
    extras: tuple[ArraySpec, ...]
    states: tuple[ArraySpec, ...]

    def make(self, num_steps: int, num_envs: int, make: ArrayMaker) -> Block:
        """Make a block, each array by `make`."""
        lead = (num_steps, num_envs)
        flag = Leaf((), np.dtype(np.bool_))
        return Block(
            [make((num_steps + 1, num_envs), leaf) for leaf in self.observations.leaves],
            [make(lead, leaf) for leaf in self.actions.leaves],
            make(lead, Leaf((), np.dtype(np.float64))),
            make(lead, flag),
            make(lead, flag),
            make(lead, flag),
            _make_named(self.extras, lead, make),
            _make_named(self.states, lead, make),
        )


def check_collectable(actions: Layout, observations: Layout) -> None:
    """Raise ConfigError if rollouts of these spaces cannot be arrays."""
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
    """Check what a worker says its policy returns.

    Raises:
        WireError: No rollout can hold such arrays.
    """
    for spec in specs:
        if math.prod(checked_shape(spec.shape)) * checked_dtype(spec.dtype).itemsize > _MAX_ROW_BYTES:
            raise WireError(f"An extra or state {spec.name[:100]!r} of {spec.dtype}{spec.shape} is too large.")


def _make_named(specs: Sequence[ArraySpec], lead: tuple[int, ...], make: ArrayMaker) -> dict[str, NDArray[Any]]:
    return {
        spec.name: make(lead, Leaf((spec.name,), checked_dtype(spec.dtype), checked_shape(spec.shape)))
        for spec in specs
    }
