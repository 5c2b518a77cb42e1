"""Failure: what a worker did wrong, told on the head without running anything the worker says."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from clusterenv.errors import WireError, WorkerFailed
from clusterenv.head.roster import Member
from clusterenv.wire.messages import Failed

_MAX_DEPTH = 10
_HEAP_TYPE = 1 << 9  # CPython's flag of classes that were made by a class statement.


@contextlib.contextmanager
def blame(member: Member) -> Iterator[None]:
    """Say whose answer it is in which something makes no sense."""
    try:
        yield
    except WireError as error:
        raise WireError(f"The answer of {member}, makes no sense: {error}") from error


def failure_of(member: Member, failed: Failed) -> WorkerFailed:
    """Return what tells the user of an exception on a worker, with the original as its cause where that is known."""
    is_known = failed.env_index is not None and member.start <= failed.env_index < member.stop
    env_indices = (failed.env_index,) if is_known and failed.env_index is not None else member.env_indices
    name = f"Environment {failed.env_index}" if is_known else "An environment or the policy"
    error = WorkerFailed(
        f"{name} raised {failed.type_name}: {failed.text} (on {member}). "
        f"The traceback there was:\n\n{failed.traceback}",
        worker_index=member.index,
        env_indices=env_indices,
        remote_traceback=failed.traceback,
    )
    error.__cause__ = rebuild(failed.type_module, failed.type_name, failed.text)
    return error


def rebuild(module: str, name: str, text: str) -> Exception | None:
    """Return an exception of the named type that carries the text, or None if no such type is known here.

    Only types of modules that the head has imported itself are looked up, and no constructor runs: a worker cannot make
    the head import or execute anything.
    """
    found: Any = sys.modules.get(module)
    for part in name.split(".", _MAX_DEPTH):
        found = _namespace(found).get(part)
    if not issubclass(type(found), type) or not issubclass(found, Exception):
        return None
    # Not the type's own __new__, which may be anybody's, but that of the built-in exception it descends from.
    builtin = next(base for base in found.__mro__ if not base.__flags__ & _HEAP_TYPE)
    try:
        error: Exception = builtin.__new__(found, text)
    except TypeError:  # An ExceptionGroup cannot be made from a text.
        return None
    return error


def _namespace(found: Any) -> Any:
    """Return what a module or class holds, without a word to it: a lazy module would load itself when asked."""
    if issubclass(type(found), type):
        return type.__getattribute__(found, "__dict__")
    return object.__getattribute__(found, "__dict__") if issubclass(type(found), ModuleType) else {}
