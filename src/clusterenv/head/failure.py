"""Failure: an exception of a worker, made again on the head without running anything the worker says."""

from __future__ import annotations

import sys


def rebuild(module: str, name: str, text: str) -> Exception | None:
    """Return an exception of the named type that carries the text, or None if no such type is known here.

    Only types of modules that the head has imported itself are looked up, and no constructor runs: a worker cannot make
    the head import or execute anything.
    """
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr: that could run a module's own __getattr__.
        found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        return None
    try:
        # Straight to BaseException: it stores the arguments and calls nothing of the subclass's.
        error: Exception = BaseException.__new__(found, text)
    except TypeError:  # A type with a layout of its own, such as OSError's relatives, insists on its own __new__.
        error = found.__new__(found, text)
    return error
