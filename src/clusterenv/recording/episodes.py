"""Episodes: finds whole episodes in recorded rollouts, across rollout boundaries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterenv.recording.pieces import Record


class Part(NamedTuple):
    """Steps `[first, stop)` of one column of a record."""

    record: Record
    column: int
    first: int
    stop: int

    def steps(self, group: str, name: str) -> NDArray[Any]:
        """Return these steps of an array."""
        return self.record.arrays[group][name][self.first : self.stop, self.column]


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """An episode of one environment, in parts from one or more rollouts.

    Attributes:
        seed: The seed the episode was reset with; None if there was none, or it is unknown.
        cut: Why the episode stops although it has not ended: "worker lost", "interrupted" (its environment was reset,
            or stepped in a way that was not recorded) or "recording ended". None if it has ended.
        error: What the environment raised, if that ended the episode.
    """

    env_index: int
    seed: int | None
    parts: tuple[Part, ...]
    cut: str | None
    error: str | None

    def __len__(self) -> int:
        return sum(part.stop - part.first for part in self.parts)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """A sort key for when it ended: the rollout's number, the environment's columns in it, the step, the index."""
        last = self.parts[-1]
        notes = last.record.notes
        num_before = int(np.count_nonzero(notes["env_indices"][: last.column] == self.env_index))
        return int(notes["number"]), num_before, last.stop, self.env_index

    @property
    def extras(self) -> list[str]:
        """The names of the policy's outputs, besides actions, at every step: the policy may have changed on the way."""
        forms = [
            {name: (array.dtype, array.shape[2:]) for name, array in part.record.arrays.get("extras", {}).items()}
            for part in self.parts
        ]
        return [name for name, form in forms[0].items() if all(other.get(name) == form for other in forms)]

    def steps(self, group: str, name: str) -> NDArray[Any]:
        """Return an array `[T, ...]`, one entry per step."""
        return np.concatenate([part.steps(group, name) for part in self.parts])

    def observations(self, name: str) -> NDArray[Any]:
        """Return a leaf of the observations, `[T + 1, ...]`, including the one that the last action led to."""
        last = self.parts[-1]
        arrays = last.record.arrays
        final_index = last.record.finals.get((last.stop - 1, last.column))
        if final_index is not None:
            final = arrays["final_obs"][name][final_index]
        elif last.stop < len(arrays["obs"][name]):
            final = arrays["obs"][name][last.stop, last.column]
        else:
            final = arrays["next_obs"][name][last.column]
        return np.concatenate([*(part.steps("obs", name) for part in self.parts), final[None]])

    def provenance(self, name: str) -> NDArray[Any]:
        """Return a note that exists once per rollout and environment, repeated for each step."""
        return np.concatenate(
            [np.repeat(part.record.notes[name][part.column], part.stop - part.first) for part in self.parts]
        )


@dataclass(eq=False)
class _Open:
    """The current episode of an environment.

    Attributes:
        life: The number of the process that runs the environment.
        number: The number of the episode in that process.
        length: How many steps were taken; -1 if that is unknown.
        is_whole: Whether all of these steps were recorded.
    """

    life: int
    number: int
    length: int
    seed: int | None = None
    is_whole: bool = True
    parts: list[Part] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, float]:
        """How far the process has come; if steps were missed, the rest of the episode is not counted."""
        return self.number, self.length if self.length >= 0 else math.inf


class EpisodeFinder:
    """Goes through the records of one run, in order.

    Attributes:
        num_left_out: The number of steps of episodes whose beginning is missing, or that were recorded before.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self._open: dict[int, _Open] = {}

    def add(self, record: Record) -> Iterator[Episode]:
        """Take the next record; yield the episodes that ended in it, or were cut before it."""
        for column, env_index in enumerate(record.notes["env_indices"].tolist()):
            yield from self._add_column(record, column, env_index)

    def end(self) -> Iterator[Episode]:
        """Yield the episodes that have not ended."""
        for env_index, current in sorted(self._open.items()):
            yield from _cut(env_index, current, "recording ended")

    def _add_column(self, record: Record, column: int, env_index: int) -> Iterator[Episode]:
        valid = record.column("valid", column)
        start = _position(record, column)
        current = self._open.get(env_index)
        if current is not None and current.life == start.life:
            if start.place < current.place:
                self.num_left_out += int(np.count_nonzero(valid))  # The record was added twice.
                return
            if start.place == current.place:
                start = current
        if current is not None and start is not current:
            yield from _cut(env_index, current, "interrupted" if start.life == current.life else "worker lost")
        self._open[env_index] = current = start
        done = record.column("terminations", column) | record.column("truncations", column)
        first = 0
        for stop in [*(np.flatnonzero(done) + 1).tolist(), len(done)]:
            self._take(record, column, first, stop, valid)
            if stop > first and done[stop - 1]:
                if current.is_whole:
                    error = record.notes["errors"].get(f"{stop - 1} {column}")
                    yield replace(_episode(env_index, current), error=error)
                current = _Open(current.life, current.number + 1, 0)
                self._open[env_index] = current
            first = stop

    def _take(self, record: Record, column: int, first: int, stop: int, valid: NDArray[np.bool_]) -> None:
        """Add the steps in which an action was taken, which are consecutive, to the current episode."""
        taken = np.flatnonzero(valid[first:stop])
        if not len(taken):
            return
        current = self._open[int(record.notes["env_indices"][column])]
        if current.is_whole:
            current.parts.append(Part(record, column, first + int(taken[0]), first + int(taken[-1]) + 1))
        else:
            self.num_left_out += len(taken)
        if current.length >= 0:
            current.length += len(taken)


def _position(record: Record, column: int) -> _Open:
    life, number, length, seed = (int(record.notes[name][column]) for name in ("lives", "episodes", "steps", "seeds"))
    return _Open(life, number, length, None if seed < 0 else seed, is_whole=length == 0)


def _cut(env_index: int, current: _Open, reason: str) -> Iterator[Episode]:
    if current.parts:
        yield replace(_episode(env_index, current), cut=reason)


def _episode(env_index: int, current: _Open) -> Episode:
    return Episode(env_index=env_index, seed=current.seed, parts=tuple(current.parts), cut=None, error=None)
