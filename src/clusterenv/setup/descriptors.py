"""Descriptors: makes sure that this process may open as many files and connections as its workers need."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from clusterenv.errors import LaunchError

log = logging.getLogger(__name__)

_OWN = 64  # For what a learner opens itself: logs, checkpoints, data.
_LEAST = 2  # Per worker: its connection and its log.
_MOST = 8  # Per worker on this machine: shared memory for steps, rollouts and streams, and a handle on its process.


def allow_descriptors(num_workers: int) -> None:
    """Raise this process's limit on open files if this many workers may need it.

    Raises:
        LaunchError: The workers need more than the machine allows: some would fail to join, or be lost mid-run.
    """
    if sys.platform == "win32":
        return
    import resource  # Not on every platform.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    used = _count_open()
    if most < used + _OWN + _LEAST * num_workers:
        raise LaunchError(
            f"{num_workers} workers take at least {_LEAST * num_workers} open files and connections here, besides the "
            f"{used} already open, and this process may have {most} (`ulimit -Hn`). Ask for fewer workers with more "
            "environments each, or have the limit raised: LimitNOFILE= of a service, /etc/security/limits.conf, or "
            "`ulimit -n` of root."
        )
    wanted = min(most, used + _OWN + _MOST * num_workers)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("raised the limit on open files from %d to %d, for %d workers", soft, wanted, num_workers)


def _count_open() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return _OWN
