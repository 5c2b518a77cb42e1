"""LostRows: what the learner saw last of environments whose worker was lost, until it has been told of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.wire import values
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes

Leaves = list[NDArray[Any] | None]
Objects = list[list[Any]]


class LostRows:
    """One shard's rows: those of the lost episodes, and those of the new ones that take their place.

    The learner hears of a loss with the next step. What it is shown until then are the rows it knows.

    Attributes:
        new_objects: The leaves without a fixed size of the new episodes' first observations.
        new_infos: The infos of the resets that began them.
    """

    def __init__(self, rows: Planes, objects: Objects | None) -> None:
        """Keep what the learner saw last.

        Args:
            rows: The shard's rows of the planes, before anything new is written to them.
            objects: Its leaves without a fixed size; None if it never saw any.
        """
        self.new_objects: Objects = []
        self.new_infos: dict[str, Any] = {}
        self._rows = rows
        self._seen = _copies(rows.observations)
        self._seen_objects = objects
        self._new: Leaves | None = None  # None: they are what the planes hold.

    @property
    def objects(self) -> Objects:
        """The leaves without a fixed size as the learner saw them last."""
        return self.new_objects if self._seen_objects is None else self._seen_objects

    def dump_seen(self) -> bytes:
        """Encode what the learner saw last, for the worker: whatever it does next, it does with the same."""
        return values.dumps(self._seen)

    def show_seen(self) -> None:
        """Put the rows the learner knows into the planes."""
        _write(self._rows.observations, self._seen)

    def show_new(self) -> None:
        """Put the new episodes' rows into the planes."""
        if self._new is not None:
            _write(self._rows.observations, self._new)

    def hide_new(self, mask: NDArray[np.bool_], new_objects: Objects) -> None:
        """After a reset of some rows: show these as they are, and the others as the learner knows them.

        Args:
            mask: Which rows were reset.
            new_objects: The leaves without a fixed size, of all rows.
        """
        planes, was_new = self._rows.observations, self._new
        self._new = _copies(planes)
        for index, (plane, seen, new) in enumerate(zip(planes, self._seen, self._new, strict=True)):
            if plane is None or seen is None or new is None:
                continue
            if was_new is not None and (earlier := was_new[index]) is not None:
                new[~mask] = earlier[~mask]
            seen[mask] = plane[mask]
            plane[~mask] = seen[~mask]
        self._seen_objects = [
            [item if is_reset else old for item, old, is_reset in zip(items, known, mask, strict=True)]
            for items, known in zip(new_objects, self.objects, strict=True)
        ]
        self.new_objects = new_objects

    def finals(self, layout: Layout) -> NDArray[Any]:
        """Return each row the learner saw last as an observation of its own."""
        count = len(self._rows.rewards)
        finals = np.empty(count, dtype=object)
        for row in range(count):
            objects = iter(self.objects)
            finals[row] = layout.nest([next(objects)[row] if leaf is None else leaf[row] for leaf in self._seen])
        return finals


def _copies(leaves: Sequence[NDArray[Any] | None]) -> Leaves:
    return [None if leaf is None else leaf.copy() for leaf in leaves]


def _write(planes: Sequence[NDArray[Any] | None], leaves: Leaves) -> None:
    for plane, leaf in zip(planes, leaves, strict=True):
        if plane is not None:
            plane[...] = leaf
