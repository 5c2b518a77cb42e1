"""Spaces, dtypes and shapes as plain data: sent without pickle, and checked before numpy or Gymnasium reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceABC
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text, Tuple

from clusterenv.errors import WireError

PLAIN_KINDS = frozenset("biufcSUmM")  # Kinds of numpy dtypes whose bytes are plain data, not pointers.

# As `dtype.str` writes them. numpy itself would also accept records, repetitions, and time units of 0, by which it
# would divide.
_DTYPE = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SU]\d{1,9}|[mM]8(?:\[(?:[1-9]\d{0,8})?[a-zA-Zμ]{1,2}\])?)")
_MAX_DIMENSIONS = 32  # numpy 1's own limit. Multiplying out a longer shape could take minutes.


def describe(space: Space[Any]) -> list[Any] | None:
    """Return `[kind, parts, generator]` for a space of one of Gymnasium's own types.

    The generator is None unless the space was seeded or sampled from. Returns None if the space, or a part of it, is of
    another type.
    """
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
            parts = [list(space.n) if isinstance(space.n, tuple | list) else int(space.n)]  # 3 and (3,) are not equal.
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
    return None if _has_gap(cls, parts) else [cls.__name__, parts, space._np_random]


def build(description: list[Any]) -> Space[Any]:
    """Make the space that `describe` described.

    Raises:
        WireError: The description is not of a space.
    """
    kind, parts, generator = description
    space = _build(kind, parts)
    if isinstance(generator, np.random.Generator):  # Else it is None, or a RemoteObject.
        space._np_random = generator
    return space


def _build(kind: Any, parts: Any) -> Space[Any]:
    match kind, parts:
        case "Box", [low, high, shape, dtype]:
            # Box would broadcast scalar bounds to the shape, however large that is.
            if not np.shape(low) == np.shape(high) == checked_shape(shape):
                raise WireError("The bounds of a Box do not have its shape.")
            return Box(low, high, shape=tuple(shape), dtype=checked_dtype(dtype).type)
        case "Discrete", [n, start, dtype]:
            return Discrete(n, start=start, dtype=checked_dtype(dtype).type)
        case "MultiDiscrete", [nvec, start, dtype]:
            return MultiDiscrete(nvec, start=start, dtype=checked_dtype(dtype).type)
        case "MultiBinary", [n]:
            return MultiBinary(*checked_shape([n])) if isinstance(n, int) else MultiBinary(checked_shape(n))
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
    raise WireError(f"{kind!r} is not a space that can be sent.")


def checked_dtype(text: object) -> np.dtype[Any]:
    """Read a dtype from the wire, refusing those whose bytes would be pointers or records.

    Raises:
        WireError: The text is not a dtype, or not one that may be sent.
    """
    if not isinstance(text, str):
        raise WireError(f"Arrays of dtype {repr(text)[:100]} cannot be sent.")
    return _read_dtype(text)


@lru_cache(maxsize=64)
def _read_dtype(text: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(text):
        raise WireError(f"Arrays of dtype {repr(text)[:100]} cannot be sent.")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise WireError(f"There is no dtype {text}.") from error


def checked_shape(shape: SequenceABC[object]) -> tuple[int, ...]:
    """Read a shape from the wire.

    Raises:
        WireError: The value is not a shape.
    """
    sizes: list[int] = []
    for size in shape if isinstance(shape, list | tuple) and len(shape) <= _MAX_DIMENSIONS else (None,):
        if type(size) is not int or not 0 <= size < 2**63:
            raise WireError(f"{repr(shape)[:100]} is not a shape.")
        sizes.append(size)
    return tuple(sizes)


_KINDS = {
    cls.__name__: cls for cls in (Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Text, Tuple)
}


def _has_gap(cls: type, parts: list[Any]) -> bool:
    """Whether a part of a nested space could not be described."""
    if cls is Dict:
        return None in parts[1]
    if cls in (Tuple, OneOf):
        return None in parts[0]
    if cls is Graph:
        return parts[0] is None or (parts[2] and parts[1] is None)
    return cls is Sequence and parts[0] is None
