"""Settings shared by head, workers and launchers."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, fields

from clusterenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the head waits, in seconds, before it gives up."""

    join_s: float = 300.0  # Cluster queues are slow; an interactive user presses Ctrl-C.
    call_s: float = 300.0  # One reset() of a whole shard may load many simulators one after another.
    close_s: float = 5.0  # Workers close their environments first; after this they are killed.
    silence_s: float = 10.0  # Not of an environment at work: of the worker's network, machine or process as a whole.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"Timeouts.{field.name} must be positive, got {value}.")


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables by which BLAS, OpenMP and torch are told how many threads to use."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def usable_cores() -> int:
    """Count the cores this process may really use: its affinity mask, and its cgroup's quota if it has one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # Not on every platform.
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def split_shards(num_envs: int, num_workers: int) -> list[tuple[int, int]]:
    """Divide the environment indices into contiguous `[start, stop)` ranges whose sizes differ by at most one."""
    size, extra = divmod(num_envs, num_workers)
    bounds = [0]
    for worker_index in range(num_workers):
        bounds.append(bounds[-1] + size + (worker_index < extra))
    return list(itertools.pairwise(bounds))


def _cgroup_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """Read this process's CPU quota in cores (cgroup v2, then v1), or None if there is none."""
    try:
        quota, period = _read(root, "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int(_read(root, "cpu/cpu.cfs_quota_us"))
        period_us = int(_read(root, "cpu/cpu.cfs_period_us"))
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _read(root: str, name: str) -> str:
    with open(os.path.join(root, name)) as file:
        return file.read()
