"""Checks: a worker's answer must be of the kind that was asked for."""

from __future__ import annotations

from typing import Any

from clusterenv.errors import WireError
from clusterenv.wire import values
from clusterenv.wire.messages import Reply, Returned, Stepped


def expect(kind: type[Any], reply: Reply) -> Any:
    """Return the reply if it is of this kind, else raise WireError."""
    if not isinstance(reply, kind):
        raise WireError(f"A worker answered with {type(reply).__name__} where {kind.__name__} was expected.")
    return reply


def checked_list(value: Any, size: int | None = None) -> list[Any]:
    """Return a value that must be a list, and of this size if one is given, else raise WireError."""
    if not isinstance(value, list):
        raise WireError(f"A worker sent a {type(value).__name__} where a list was expected.")
    if size is not None and len(value) != size:
        raise WireError(f"A worker sent a list of {len(value)} where {size} were expected.")
    return value


def checked_dict(value: Any) -> dict[str, Any]:
    """Return a value that must be a dict, else raise WireError."""
    if not isinstance(value, dict):
        raise WireError(f"A worker sent a {type(value).__name__} where a dict was expected.")
    return value


def read_objects(stepped: Stepped, num_leaves: int, num_rows: int) -> list[list[Any]]:
    """Return a list a leaf, of an object an environment. One too few would shift the rows of all others."""
    columns = [] if stepped.columns is None else values.loads(stepped.columns)
    return [checked_list(column, num_rows) for column in checked_list(columns, num_leaves)]


def read_results(reply: Reply, count: int) -> list[Any]:
    """Return what a call returned, as much as was asked for."""
    return checked_list(values.loads(expect(Returned, reply).values), count)
