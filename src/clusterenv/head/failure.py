"""Failure: reports a worker's errors on the head, without running anything that the worker sent."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from clusterenv.errors import WireError, WorkerFailed, worker_failed_type
from clusterenv.head.worker import Worker
from clusterenv.wire.messages import Failed, Where

# What raised: if the environment concerned is unknown, and if it is known.
_CULPRITS: dict[Where, tuple[str, str]] = {
    "environment": ("An environment", "Environment {}"),
    "policy": ("The policy", "The policy"),
    "factory": ("A factory", "The factory of environment {}"),
    "function": ("The function given to apply()", "The function given to apply(), on environment {},"),
}
_MAX_CHARACTERS = 1 << 16
_MAX_LINE = 255
_MAX_DEPTH = 10
_HEAP_TYPE = 1 << 9  # CPython's flag for classes created at runtime, by a class statement.


@contextlib.contextmanager
def naming(worker: Worker) -> Iterator[None]:
    """Add the worker's name to a WireError about its malformed answer."""
    try:
        yield
    except WireError as error:
        raise malformed(worker, error) from error


def malformed(worker: Worker, error: WireError) -> WireError:
    """Return the error that says whose answer is malformed, and how."""
    return WireError(f"Malformed answer from {worker}: {error}")


def failure_of(worker: Worker, failed: Failed) -> WorkerFailed:
    """Return the error to raise for an exception on a worker, caused by the original if its type is known here."""
    is_known = failed.env_index is not None and worker.start <= failed.env_index < worker.stop
    env_indices = (failed.env_index,) if is_known and failed.env_index is not None else worker.env_indices
    culprit = _CULPRITS[failed.where][is_known].format(failed.env_index)
    kind, text = _line(failed.type_name), printable(failed.text)
    traceback = printable(failed.traceback)
    error = worker_failed_type(failed.base)(
        f"{culprit} raised {kind}: {text} (on {worker}). The traceback there was:\n\n{traceback}",
        worker_index=worker.index,
        env_indices=env_indices,
        remote_traceback=traceback,
    )
    error.__cause__ = rebuild(failed.type_module, failed.type_name, text)
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
    # Not the type's own __new__, which may be any code, but that of the built-in exception it descends from.
    builtin = next(base for base in found.__mro__ if not base.__flags__ & _HEAP_TYPE)
    try:
        error: Exception = builtin.__new__(found, text)
    except TypeError:  # An ExceptionGroup cannot be made from a text.
        return None
    return error


def _namespace(found: Any) -> Any:
    """Return the namespace of a module or class without `getattr`, which could make a lazy module load itself."""
    if issubclass(type(found), type):
        return type.__getattribute__(found, "__dict__")
    return object.__getattribute__(found, "__dict__") if issubclass(type(found), ModuleType) else {}


def printable(text: str) -> str:
    """Return a text with control characters escaped, shortened if it is very long."""
    shown = text[:_MAX_CHARACTERS]
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in shown
    )


def _line(text: str) -> str:
    return printable(text[:_MAX_LINE].replace("\n", " "))
