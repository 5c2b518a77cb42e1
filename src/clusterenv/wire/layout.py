"""Layout: how the values of a space are stored in arrays.

A space is a tree, and each leaf is stored in its own column. A leaf of fixed size (Box, Discrete, MultiDiscrete,
MultiBinary) becomes an array `[num_envs, *shape]`. A leaf of varying size (Text, Graph, Sequence, OneOf, a user's own)
becomes a list of objects. This is exactly how Gymnasium batches them, so columns need only be nested again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


@dataclass(frozen=True, eq=False, repr=False)
class Leaf:
    """One column: its place in the tree and, if it has a fixed size, its dtype and the shape of one row."""

    path: tuple[str | int, ...]
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """The size of one row; 0 for objects."""
        return 0 if self.dtype is None else self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        """Name the leaf as a user would index it."""
        return "".join(f"[{part!r}]" for part in self.path)


class Layout:
    """The columns of a space, and the conversion between nested values and columns.

    Attributes:
        space: The space.
        leaves: One per column.
        is_single: Whether the space is one array of fixed size, the common case.
        is_fixed: Whether every leaf has a fixed size.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.space = space
        self.leaves: list[Leaf] = list(_leaves(space, ()))
        self.is_single = len(self.leaves) == 1 and self.leaves[0].path == () and self.leaves[0].dtype is not None
        self.is_fixed = all(leaf.dtype is not None for leaf in self.leaves)
        self._flatten = _flattener(space)
        self._nest = _nester(space)

    def flatten(self, value: Any) -> list[Any]:
        """Return the leaf values of one nested value, in the order of `leaves`."""
        parts: list[Any] = []
        self._flatten(value, parts.append)
        return parts

    def nest(self, columns: Sequence[Any]) -> Any:
        """Nest one item per leaf like the space."""
        return self._nest(iter(columns))


def _leaves(space: Space[Any], path: tuple[str | int, ...]) -> Any:
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(space, Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, index))
    elif isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
        yield Leaf(path, np.dtype(space.dtype), tuple(space.shape or ()))
    else:
        yield Leaf(path, None)


def _flattener(space: Space[Any]) -> Callable[[Any, Callable[[Any], None]], None]:
    branches: list[tuple[str | int, Callable[[Any, Callable[[Any], None]], None]]]
    if isinstance(space, Dict):
        branches = [(key, _flattener(part)) for key, part in space.spaces.items()]
    elif isinstance(space, Tuple):
        branches = [(index, _flattener(part)) for index, part in enumerate(space.spaces)]
    else:
        return lambda value, put: put(value)

    def flatten(value: Any, put: Callable[[Any], None]) -> None:
        for key, branch in branches:
            branch(value[key], put)

    return flatten


def _nester(space: Space[Any]) -> Callable[[Any], Any]:
    if isinstance(space, Dict):
        named = [(key, _nester(part)) for key, part in space.spaces.items()]
        return lambda columns: {key: branch(columns) for key, branch in named}
    if isinstance(space, Tuple):
        branches = [_nester(part) for part in space.spaces]
        return lambda columns: tuple([branch(columns) for branch in branches])
    return next
