"""Settings shared by head, workers and launchers."""

from __future__ import annotations

import itertools
import math
import numbers
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields

from clusterenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long the head waits, in seconds, before it gives up.

    Attributes:
        join_s: For workers to start, join, and make their environments.
        call_s: For a worker to finish a step or a reset. A worker that finishes none for this long counts as hung, and
            is handled by `Faults.on_loss`; a rollout of many steps may take longer.
        close_s: For workers to close their environments before they are killed.
        silence_s: For any sign of life from a worker's process or machine, whatever its environments do.
        trial_s: For making one environment on the head as a test, before workers are queued; 0 skips the test.
    """

    join_s: float = 300.0  # Cluster queues are slow; an interactive user presses Ctrl-C.
    call_s: float = 300.0  # One reset() of a whole shard may load many simulators one after another.
    close_s: float = 5.0  # Workers close their environments first; after this they are killed.
    silence_s: float = 10.0  # Heartbeats go on while an environment computes: silence means network, machine, process.
    trial_s: float = 20.0  # A factory that fails should fail here, not after an hour in a queue.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not (value > 0 or (field.name == "trial_s" and value == 0)):
                raise ConfigError(f"Timeouts.{field.name} must be a positive number of seconds, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What happens when workers are lost or environments raise.

    Attributes:
        on_loss: What happens when a worker dies, hangs or vanishes. "replace" starts a new one and makes its
            environments again: `step` returns their rows truncated, with `info["worker_lost"]`, and `rollout` collects
            their steps again. "raise" raises WorkerLost.
        on_env_error: What happens when an environment raises. "raise" raises WorkerFailed. "reset" truncates its
            episode, with `info["env_error"]`, and continues; see docs/explanation/reliability.md.
        min_workers: Begin once this many workers have joined. `stream` uses the workers present; late or replaced ones
            take part as soon as they are ready. All other calls wait for every worker.
        max_restarts: How many times workers may be restarted in the whole run, so that a job that keeps crashing does
            not run up costs; after that, WorkerLost is raised. None: no limit, but no worker is restarted more than
            three times in a row without having done any work.
        max_worker_hours: The run's budget in worker-hours: 8 workers use 8 per hour. When it is spent, the workers are
            stopped, and the learner's next call raises BudgetSpent. None: no limit.
    """

    on_loss: str = "replace"
    on_env_error: str = "raise"
    min_workers: int | None = None
    max_restarts: int | None = None
    max_worker_hours: float | None = None

    def __post_init__(self) -> None:
        _check_choice("Faults.on_loss", self.on_loss, ("replace", "raise"))
        _check_choice("Faults.on_env_error", self.on_env_error, ("raise", "reset"))
        for name, least in (("min_workers", 1), ("max_restarts", 0)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(f"Faults.{name}", value, least=least))
        hours = self.max_worker_hours
        if hours is not None and (not isinstance(hours, int | float) or not hours > 0):
            raise ConfigError(f"Faults.max_worker_hours must be a positive number, or None, got {hours!r}.")


@dataclass(frozen=True, kw_only=True)
class Network:
    """How head and workers find each other and communicate.

    Attributes:
        transport: "auto" uses shared memory for every worker that can reach it and ZeroMQ for the others; "shm" and
            "zmq" insist on one.
        listen: The address the head listens on, "HOST" or "HOST:PORT"; by default the one that routes to the
            launcher's hosts, and a random port. If all workers are on this machine, no port is opened unless `listen`
            or `advertise` is given.
        advertise: The address workers connect to, if it differs from `listen`: behind a NAT, or with a forwarded port.
    """

    transport: str = "auto"
    listen: str | None = None
    advertise: str | None = None

    def __post_init__(self) -> None:
        _check_choice("Network.transport", self.transport, ("auto", "shm", "zmq"))
        for name in ("listen", "advertise"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"Network.{name} must be an address such as '10.0.0.5:5555', got {value!r}.")


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that set how many threads BLAS, OpenMP and torch use."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def usable_cores(root: str = "/") -> int:
    """Count the cores this process may really use, given its affinity mask and its cgroups' quotas.

    Args:
        root: The directory that holds `proc` and `sys`.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # Not on every platform.
        cores = os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _cgroup_quotas(root))]))


def split_shards(num_envs: int, num_workers: int) -> list[tuple[int, int]]:
    """Divide the environment indices into contiguous `[start, stop)` ranges whose sizes differ by at most one."""
    size, extra = divmod(num_envs, num_workers)
    bounds = [0]
    for worker_index in range(num_workers):
        bounds.append(bounds[-1] + size + (worker_index < extra))
    return list(itertools.pairwise(bounds))


def whole_number(name: str, value: object, *, least: int) -> int:
    """Return a count as an int; numpy's integers are welcome, bools and floats are not.

    Raises:
        ConfigError: The value is not a whole number, or is too small.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}.")
    return int(value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _cgroup_quotas(root: str) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's cgroups (version 1 and 2) and of all their ancestors."""
    try:
        lines = _read(root, "proc/self/cgroup").splitlines()
    except OSError:  # Not Linux.
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):  # "0::/user.slice", "3:cpu,cpuacct:/docker/1"
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container may see its own cgroup as the root, although the path given is the machine's.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            for depth in range(len(parts) + 1):
                quota = _read_quota(os.path.join(root, "sys/fs/cgroup", mount, *parts[:depth]))
                if quota is not None:
                    yield quota


def _read_quota(directory: str) -> float | None:
    try:
        quota, period = _read(directory, "cpu.max").split()
    except (OSError, ValueError):
        try:
            quota, period = _read(directory, "cpu.cfs_quota_us"), _read(directory, "cpu.cfs_period_us")
        except OSError:
            return None
    # No quota is "max" in version 2 and -1 in version 1.
    return int(quota) / int(period) if quota.strip().isdecimal() else None


def _read(directory: str, name: str) -> str:
    with open(os.path.join(directory, name)) as file:
        return file.read()
