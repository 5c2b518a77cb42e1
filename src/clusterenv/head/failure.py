"""Failure: an exception of a worker, made again on the head without running anything the worker says."""

from __future__ import annotations

import sys

from clusterenv.errors import WorkerFailed
from clusterenv.head.roster import Member
from clusterenv.wire.messages import Failed


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
