"""Every error ClusterEnv raises.

ClusterEnvError
├── ConfigError (ValueError)            an argument or a combination of arguments is wrong
├── LaunchError (RuntimeError)          workers did not start or did not join
├── CallTimeout (TimeoutError, ...)     a worker has not answered in time; the call is still pending
├── WorkerLost (RuntimeError)           a worker died or left
├── WorkerFailed (RuntimeError)         an environment or policy raised on a worker
├── SpaceMismatch (ValueError)          an environment returned what its own space does not allow
├── PolicyError (ValueError)            an agent cannot be read, or weights do not fit it
└── WireError (ValueError)              bytes that are no message of ours
"""

from __future__ import annotations

import multiprocessing


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


class WorkerFailed(ClusterEnvError, RuntimeError):
    """An environment or policy raised an exception on a worker.

    `__cause__` is an exception of the original type where that type is known on the head.

    Attributes:
        worker_index: Which worker.
        env_indices: The environments concerned: one if it is known which, else the worker's whole shard.
        remote_traceback: The traceback as the worker formatted it.
    """

    def __init__(self, message: str, *, worker_index: int, env_indices: tuple[int, ...], remote_traceback: str) -> None:
        super().__init__(message)
        self.worker_index = worker_index
        self.env_indices = env_indices
        self.remote_traceback = remote_traceback


class SpaceMismatch(ClusterEnvError, ValueError):
    """An environment returned something its own space does not allow."""


class PolicyError(ClusterEnvError, ValueError):
    """An agent cannot be read as a policy, or weights do not fit it."""


class WireError(ClusterEnvError, ValueError):
    """Bytes that are no message of ours: wrong type, dtype, shape or size."""
