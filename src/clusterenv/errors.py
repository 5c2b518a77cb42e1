"""Every error ClusterEnv raises.

ClusterEnvError
├── ConfigError (ValueError)            an argument or a combination of arguments is wrong
├── LaunchError (RuntimeError)          workers did not start or did not join
├── CallTimeout (TimeoutError, ...)     a worker has not answered in time; the call is still pending
├── WorkerLost (RuntimeError)           a worker died or left
├── BudgetSpent (RuntimeError)          the run has used the worker-hours it was given
├── WorkerFailed (RuntimeError, ...)    an environment, a policy or a factory raised on a worker
├── ConcurrentUse (RuntimeError)        two threads, or a forked process, use one object
├── JournalError (OSError)              an evaluation's file cannot be read or written
├── SpaceMismatch (ValueError)          an environment returned something its own space does not allow
├── RecordingError (OSError)            a recording cannot be written or read
├── PolicyError (ValueError)            an agent cannot be read, or weights do not fit it
└── WireError (ValueError)              bytes that are not a valid message
"""

from __future__ import annotations

import builtins
import functools
import multiprocessing
from typing import Any

# A `for` loop or a generator would take the first two as its end; groups cannot be made without their exceptions.
_NEVER_ALSO = (StopIteration, StopAsyncIteration, BaseExceptionGroup)
_HEAP_TYPE = 1 << 9  # CPython's flag for classes made by a class statement.


class ClusterEnvError(Exception):
    """Base of every error raised by ClusterEnv."""


class ConfigError(ClusterEnvError, ValueError):
    """An argument, or a combination of arguments, is wrong."""


class LaunchError(ClusterEnvError, RuntimeError):
    """Workers did not start, or did not join the head in time."""


class CallTimeout(ClusterEnvError, multiprocessing.TimeoutError, TimeoutError):
    """A worker has not answered in time; the call is still pending."""


class WorkerLost(ClusterEnvError, RuntimeError):
    """A worker died or left while the head needed it.

    Attributes:
        worker_index: Which worker.
        env_indices: The environments it hosted.
    """

    def __init__(self, message: str, *, worker_index: int, env_indices: tuple[int, ...]) -> None:
        super().__init__(message)
        self.worker_index = worker_index
        self.env_indices = env_indices

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_loss, (self.args[0],), self.__dict__


class BudgetSpent(ClusterEnvError, RuntimeError):
    """The run has used all the worker-hours that `Faults(max_worker_hours=...)` allows."""


class WorkerFailed(ClusterEnvError, RuntimeError):
    """An environment, a policy, a factory, or a function given to `apply` raised an exception on a worker.

    If the original exception was of a built-in type, or a subclass of one, this error is an instance of that type as
    well, so that `except ValueError` catches it. StopIteration, StopAsyncIteration and anything that is not an
    Exception (SystemExit, KeyboardInterrupt, ...) arrive as a plain WorkerFailed.

    `__cause__` is an exception of the original type, if that type is known on the head.

    Attributes:
        worker_index: Which worker.
        env_indices: The environment that failed, if it is known which; otherwise the worker's whole shard.
        remote_traceback: The traceback as the worker formatted it, from the user's first frame on.
    """

    _also = ""  # The name of the built-in type.

    def __init__(self, message: str, *, worker_index: int, env_indices: tuple[int, ...], remote_traceback: str) -> None:
        super().__init__(message)
        self.worker_index = worker_index
        self.env_indices = env_indices
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return str(self.args[0])  # A KeyError, for one, would show the message's repr.

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_failure, (self._also, self.args[0]), self.__dict__


def worker_failed_type(name: str) -> type[WorkerFailed]:
    """Return WorkerFailed, or a subclass of it that is also of a built-in type.

    Args:
        name: The name of the built-in type. If it is unknown, or must not be caught as such, it is ignored.
    """
    kind = _KNOWN.get(name)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, _NEVER_ALSO):
        return WorkerFailed
    return WorkerFailed if issubclass(WorkerFailed, kind) else _make_failed_type(name)


@functools.cache
def _make_failed_type(name: str) -> type[WorkerFailed]:
    kind: type[Exception] = _KNOWN[name]

    def make(cls: type[WorkerFailed], message: str, **attributes: object) -> WorkerFailed:
        # Use the __new__ of the built-in type whose memory layout the class has: an OSError has more fields than a
        # RuntimeError. Without arguments, as some types insist on more than one.
        layout: Any = cls
        while layout.__flags__ & _HEAP_TYPE and layout.__base__ is not None:
            layout = layout.__base__
        failed: WorkerFailed = layout.__new__(cls)
        return failed

    names = {"__new__": make, "__doc__": WorkerFailed.__doc__, "__module__": __name__, "_also": name}
    return type(WorkerFailed.__name__, (WorkerFailed, kind), names)


def _restore_failure(name: str, message: str) -> WorkerFailed:
    """Unpickle; the attributes follow as the pickle's state."""
    return worker_failed_type(name)(message, worker_index=-1, env_indices=(), remote_traceback="")


def _restore_loss(message: str) -> WorkerLost:
    """Unpickle; the attributes follow as the pickle's state."""
    return WorkerLost(message, worker_index=-1, env_indices=())


class ConcurrentUse(ClusterEnvError, RuntimeError):
    """Two threads at once, or a forked copy of the process, use the same environments."""


class JournalError(ClusterEnvError, OSError):
    """The file in which an evaluation's episodes are kept cannot be read or written."""


class SpaceMismatch(ClusterEnvError, ValueError):
    """An environment returned something its own space does not allow."""


class RecordingError(ClusterEnvError, OSError):
    """A recorder cannot write its data, or recorded data cannot be read."""


class PolicyError(ClusterEnvError, ValueError):
    """An agent cannot be read as a policy, or weights do not fit it."""


class WireError(ClusterEnvError, ValueError):
    """Bytes that are not a valid message: wrong type, dtype, shape or size."""


# Those of our errors that a worker may raise and a user may want to catch by name.
OWN_TYPES: tuple[type[Exception], ...] = (ConfigError, SpaceMismatch, PolicyError)
_KNOWN: dict[str, Any] = {**vars(builtins), **{kind.__name__: kind for kind in OWN_TYPES}}
