"""Checks: a worker's answer must be of the kind that was asked for."""

from __future__ import annotations

from typing import Any

from clusterenv.errors import WireError
from clusterenv.wire.messages import Reply


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
