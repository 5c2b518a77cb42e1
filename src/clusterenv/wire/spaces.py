"""Gymnasium's spaces as plain data, so that `get_attr("action_space")` can cross without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text, Tuple

from clusterenv.errors import WireError
from clusterenv.wire.dtypes import checked_dtype, checked_shape


def describe(space: Space[Any]) -> list[Any] | None:
    """Return `[kind, parts]` for a space of Gymnasium's own types, or None if it (or a part of it) is not."""
    cls = type(space)
    if cls not in _KINDS.values():
        return None
    parts: list[Any]
    match space:
        case Box():
            parts = [space.low, space.high, list(space.shape), space.dtype.str]
        case Discrete():
            parts = [int(space.n), int(space.start), space.dtype.str]
        case MultiDiscrete():
            parts = [space.nvec, space.start, space.dtype.str]
        case MultiBinary():
            parts = [list(space.shape)]
        case Text():
            parts = [space.min_length, space.max_length, "".join(space.character_list)]
        case Dict():
            parts = [list(space.spaces), [describe(part) for part in space.spaces.values()]]
        case Tuple() | OneOf():
            parts = [[describe(part) for part in space.spaces]]
        case Sequence():
            parts = [describe(space.feature_space), space.stack]
        case Graph():
            edges = space.edge_space
            parts = [describe(space.node_space), None if edges is None else describe(edges), edges is not None]
        case _:
            return None
    return None if _has_gap(cls, parts) else [cls.__name__, parts]


def build(description: list[Any]) -> Space[Any]:
    """Make the space that `describe` described.

    Raises:
        WireError: The description is no space.
    """
    kind, parts = description
    match kind, parts:
        case "Box", [low, high, shape, dtype]:
            # Bounds of one number each would be spread over the shape, however large that is.
            if not np.shape(low) == np.shape(high) == checked_shape(shape):
                raise WireError("The bounds of a Box do not have its shape.")
            return Box(low, high, shape=tuple(shape), dtype=checked_dtype(dtype).type)
        case "Discrete", [n, start, dtype]:
            return Discrete(n, start=start, dtype=checked_dtype(dtype).type)
        case "MultiDiscrete", [nvec, start, dtype]:
            return MultiDiscrete(nvec, start=start, dtype=checked_dtype(dtype).type)
        case "MultiBinary", [shape]:
            return MultiBinary(checked_shape(shape))
        case "Text", [min_length, max_length, charset]:
            return Text(max_length, min_length=min_length, charset=charset)
        case "Dict", [keys, inner]:
            # A list of pairs keeps the order that a plain dict argument would lose.
            return Dict([(key, build(part)) for key, part in zip(keys, inner, strict=True)])
        case "Tuple", [inner]:
            return Tuple([build(part) for part in inner])
        case "OneOf", [inner]:
            return OneOf([build(part) for part in inner])
        case "Sequence", [feature, stack]:
            return Sequence(build(feature), stack=stack)
        case "Graph", [nodes, edges, has_edges]:
            return Graph(build(nodes), build(edges) if has_edges else None)
    raise WireError(f"{kind!r} is no space that can travel.")


_KINDS = {
    cls.__name__: cls for cls in (Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text, Tuple)
}


def _has_gap(cls: type, parts: list[Any]) -> bool:
    """Tell whether a part of a nested space could not be described."""
    if cls is Dict:
        return None in parts[1]
    if cls in (Tuple, OneOf):
        return None in parts[0]
    if cls is Graph:
        return parts[0] is None or (parts[2] and parts[1] is None)
    return cls is Sequence and parts[0] is None
