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
        call_s: For a worker to finish a step or a reset. One that finishes none for this long is hung, and treated by
            `Faults.on_loss`; a rollout of many steps may take longer.
        close_s: For workers to close their environments before they are killed.
        silence_s: For any sign of life of a worker's process or machine, whatever its environments do.
        trial_s: For making one environment here, before workers are queued that would find out late; 0 skips that.
    """

    join_s: float = 300.0  # Cluster queues are slow; an interactive user presses Ctrl-C.
    call_s: float = 300.0  # One reset() of a whole shard may load many simulators one after another.
    close_s: float = 5.0  # Workers close their environments first; after this they are killed.
    silence_s: float = 10.0  # Not of an environment at work: of the worker's network, machine or process as a whole.
    trial_s: float = 20.0  # For making one environment here before workers are queued that would; 0 skips that.

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
            them anew. "raise" raises WorkerLost.
        on_env_error: What happens when an environment raises. "raise" raises WorkerFailed. "reset" truncates its
            episode, with `info["env_error"]`, and goes on; see docs/explanation/reliability.md.
        min_workers: Begin when this many workers are there. `stream` uses those that are; the others take part as they
            come, and who was lost, when it is back. All other calls wait for all.
        max_restarts: How many workers may be started again in the whole run, so that a job that keeps crashing does not
            spend without end; then WorkerLost is raised. None: as many as it takes, but no worker more than three times
            in a row without having done any work.
        max_worker_hours: How long the workers of the run may be there, all together: 8 workers use 8 hours in one. Then
            they are ended, and BudgetSpent is raised by whatever the learner calls next. None: as long as it takes.
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
    """How head and workers find each other and talk.

    Attributes:
        transport: "auto" uses shared memory for every worker that can reach it and ZeroMQ for the others; "shm" and
            "zmq" insist on one.
        listen: The head's own address for workers to come in by, "HOST" or "HOST:PORT"; by default the one that routes
            to the launcher's hosts, and a random port. For workers on this machine no port is opened unless one of
            these two is given.
        advertise: What workers are told, if it differs: behind a NAT, or with a forwarded port.
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
    """Return the environment variables by which BLAS, OpenMP and torch are told how many threads to use."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def usable_cores(root: str = "/") -> int:
    """Count the cores this process may really use: its affinity mask, and the quotas of its cgroups if it has any.

    Args:
        root: Where `proc` and `sys` are.
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
        ConfigError: It is not a whole number, or too small.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r}.")
    return int(value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _cgroup_quotas(root: str) -> Iterator[float]:
    """Find the CPU quotas, in cores, of this process's cgroups (version 1 and 2) and of all cgroups around them."""
    try:
        lines = _read(root, "proc/self/cgroup").splitlines()
    except OSError:  # Not Linux.
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):  # "0::/user.slice", "3:cpu,cpuacct:/docker/1"
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container may see its own cgroup as the root, while its path is that of the machine.
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
