"""RayLauncher: workers are actors of a Ray cluster. Ray places and isolates them, the head supervises them.

Ray itself is used only in a separate process, `ray_driver`: Ray may block, and ends its process if the cluster is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterenv.config import thread_variables, usable_cores
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import run_labels
from clusterenv.launchers.follower import Follower
from clusterenv.launchers.processes import WorkerLog, describe_exit, make_run_dir, uninterrupted, wait_for
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket

_END_S = 12.0  # How long the driver needs to kill hanging workers and to disconnect.
_PLACEMENTS = ("SPREAD", "DEFAULT")
_ADDRESS = re.compile(r"^(?!\w+://).+:\d+$")  # Not `ray://`: that is for clients outside, where no worker reaches them.
# Ray's own resources, and what to do instead.
_TAKEN = {
    "CPU": "use RayLauncher(cpus=...)",
    "GPU": "use RayLauncher(gpus=...)",
    "memory": "Ray counts it itself; let nodes with much of it declare a custom resource",
    "object_store_memory": "Ray counts it itself, and workers use none",
}

RuntimeEnv = Mapping[str, str | Sequence[str] | Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RayLauncher:
    """Starts workers as actors of a Ray cluster, or of a new one on this machine if there is none.

    Attributes:
        cpus: CPUs per worker, as Ray counts them, and as many BLAS, OpenMP and torch threads.
        gpus: GPUs per worker; with a fraction, several workers share one.
        resources: Custom resources per worker, as the cluster's nodes declare them, e.g. `{"simulator": 1}`.
        runtime_env: What Ray sets up where workers run, as in `ray.init`, e.g. `{"working_dir": ".", "pip": [...]}`.
        placement: "SPREAD" spreads workers over the nodes, "DEFAULT" fills one node after another.
        address: The cluster, as in `ray.init`: HOST:PORT of its head node. "auto" is $RAY_ADDRESS, as in a Ray job, or
            the cluster this machine belongs to, or else a new one on this machine; "local" is always a new one.
        log_dir: Where to keep the workers' output: one directory per run, `run-<time>`, with one file per worker. Ray's
            own logs hold it, too. By default output is kept here only for error messages.
        show_output: Whether to also show the workers' output on this process's standard error, each line prefixed with
            `[worker <index>]`; very large output is shown only in part.
    """

    cpus: float = 1
    gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: RuntimeEnv = field(default_factory=dict)
    placement: str = "SPREAD"
    address: str = "auto"
    log_dir: str | Path | None = None
    show_output: bool = False

    def __post_init__(self) -> None:
        amounts = {"cpus": self.cpus, "gpus": self.gpus}
        amounts |= {f"resources[{name!r}]": amount for name, amount in self._mapping("resources").items()}
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
                raise ConfigError(f"RayLauncher.{name} must be a number of at least 0, got {amount!r}.")
            if amount > 1 and amount != int(amount):
                raise ConfigError(f"RayLauncher.{name} must be whole if it is more than 1, got {amount!r}.")
        for name in _TAKEN.keys() & set(self.resources):
            raise ConfigError(f"RayLauncher.resources may not have {name!r}: {_TAKEN[name]}.")
        if self.placement not in _PLACEMENTS:
            raise ConfigError(f"RayLauncher.placement must be one of {_PLACEMENTS}, got {self.placement!r}.")
        _check_address("RayLauncher.address", str(self.address))
        runtime_env = self._mapping("runtime_env")
        try:
            json.dumps(runtime_env)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"RayLauncher.runtime_env must be plain data, as for `ray.init`: {error}.") from error

    @property
    def suggested_workers(self) -> None:
        """One per core of this machine."""
        return None

    @property
    def queues(self) -> bool:
        """Yes: an autoscaler may take minutes to add a node."""
        return True

    @property
    def route_to(self) -> str:
        """The cluster's head node, if it is known without connecting to it, otherwise this machine."""
        return self._find_address()[0].rpartition(":")[0].strip("[]") or "127.0.0.1"

    def launch(self, ticket: Ticket, num_workers: int) -> RayFleet:
        """Start connecting to the cluster and return immediately.

        Raises:
            LaunchError: Ray is not installed for this Python, or a log cannot be written.
        """
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                f"RayLauncher needs Ray, which {sys.executable} does not have: pip install 'clusterenv-rl[ray]', in "
                "the version that the cluster has."
            )
        settings = self._settings(ticket, num_workers)
        return RayFleet(settings, num_workers, self.log_dir, shows_output=self.show_output)

    def render(self, num_workers: int) -> str:
        """Show what is requested from Ray, and what each actor runs; the ticket is in its environment."""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options().items())
        lines = [f"ray.init({self.address!r}, runtime_env={dict(self.runtime_env)!r})"]
        for worker_index in range(num_workers):
            variables = {**thread_variables(self._threads), WORKER_VARIABLE: str(worker_index)}
            command = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            lines.append(f"actor of {options}: {command} python -m clusterenv.worker")
        return "\n".join(lines)

    @property
    def _threads(self) -> int:
        return max(1, int(self.cpus))

    def _find_address(self) -> tuple[str, bool]:
        """Return the cluster's address, and whether a new cluster on this machine will do instead."""
        if self.address != "auto":
            return self.address, False
        if address := _connected_to():
            _check_address("The address that this script has given to `ray.init`", address)
            return address, False
        if address := os.environ.get("RAY_ADDRESS", ""):
            _check_address("$RAY_ADDRESS", address)
            return address, False
        # Ray notes here which cluster this machine is in. A cluster that was not stopped cleanly leaves the file there.
        temporary = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
        with contextlib.suppress(OSError):
            return (temporary / "ray" / "ray_current_cluster").read_text().strip() or "auto", True
        return "auto", True

    def _mapping(self, name: str) -> dict[str, Any]:
        value = getattr(self, name)
        if not isinstance(value, Mapping):
            raise ConfigError(f"RayLauncher.{name} must be a mapping, got {value!r}.")
        return dict(value)

    def _options(self) -> dict[str, Any]:
        return {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": self.placement,
        }

    def _settings(self, ticket: Ticket, num_workers: int) -> dict[str, Any]:
        labels = run_labels()
        address, may_be_local = self._find_address()
        needs = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        local = {name: math.ceil(amount * num_workers) for name, amount in self.resources.items()}
        return {
            "address": address,
            "may_be_local": may_be_local,
            "runtime_env": dict(self.runtime_env),
            "namespace": f"clusterenv-{labels['user']}-{labels['run']}-{os.getpid()}-{time.time_ns()}",
            "labels": {f"clusterenv_{name}": value for name, value in labels.items()},
            "options": self._options(),
            "needs": {name: amount for name, amount in needs.items() if amount},
            # As many as the workers need: they have this cluster to themselves, so waiting for CPUs would be futile.
            "local": {"num_cpus": max(usable_cores(), math.ceil(self.cpus * num_workers)), "resources": local},
            "variables": {TICKET_VARIABLE: ticket.encode(), "PYTHONUNBUFFERED": "1"},
            "index_variable": WORKER_VARIABLE,
            "defaults": thread_variables(self._threads),
            "path": _own_path(),
            "head_pid": os.getpid(),
        }


class RayFleet:
    """The Ray driver process that this process has started, and what it has reported about the workers."""

    ends_predecessors = False  # A node that is cut off cannot be told to.

    def __init__(
        self, settings: dict[str, Any], num_workers: int, log_dir: str | Path | None, *, shows_output: bool = False
    ) -> None:
        """Start the driver.

        Args:
            settings: The driver's settings.
            num_workers: How many workers the driver starts.
            log_dir: Where to keep the workers' output. None: only for error messages.
            shows_output: Whether to show the output on this process's standard error.

        Raises:
            LaunchError: The driver cannot be started, or a log cannot be written.
        """
        self._settings = settings
        self._num_workers = num_workers
        self._logs: list[WorkerLog] = []
        self._follower: Follower | None = None
        self._driver: subprocess.Popen[bytes] | None = None
        self._lines = b""
        self._hosts: dict[int, str] = {}
        self._ends: dict[int, str] = {}
        self._runs = [0] * num_workers  # How often each was started: reports about earlier starts are stale.
        self._fatal = ""
        self._is_connected = False
        self._waits = ""
        try:
            run_dir = make_run_dir(log_dir)
            for worker_index in range(num_workers):
                with uninterrupted():
                    self._logs.append(WorkerLog(run_dir, f"worker-{worker_index}"))
            if shows_output:
                self._follower = Follower(self._logs)
            with uninterrupted():
                self._driver_log = WorkerLog(None, "driver")
                self._start_driver(range(num_workers))
        except OSError as error:
            self.stop(0.0)
            raise LaunchError(f"The process that talks to Ray cannot be started: {error}.") from error
        except BaseException:
            self.stop(0.0)
            raise

    def exits(self) -> dict[int, str]:
        """Return how each worker that is no longer running ended."""
        self._look()
        return dict(self._ends)

    def status(self) -> str:
        """Say what Ray has not placed yet, and why."""
        self._look()
        if self._driver is not None and not self._is_connected and not self._ends:
            return f"connecting to Ray at {self._settings['address']}"
        return self._waits

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote."""
        return self._logs[worker_index].tail()

    def restart(self, worker_index: int) -> None:
        """Have Ray place a worker again; its previous actor is killed."""
        self._look()
        self._ends.pop(worker_index, None)
        self._logs[worker_index].start_over()
        if self._driver is not None:
            self._start(worker_index)
            return
        try:
            with uninterrupted():
                self._start_driver([worker_index])
        except OSError as error:
            self._ends[worker_index] = f"could not be started: {error}"

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to exit on their own, then kill them and disconnect from Ray."""
        if self._driver is not None:
            self._tell(stop=timeout_s)
            deadline = time.monotonic() + timeout_s + _END_S
            while not wait_for(self._driver, min(deadline, time.monotonic() + 0.05)) and time.monotonic() < deadline:
                self._read()  # Otherwise the driver may block on a full pipe.
            with uninterrupted():
                self._end_driver()
        if self._follower is not None:
            self._follower.close()
        for log in [*self._logs, *([self._driver_log] if hasattr(self, "_driver_log") else [])]:
            log.close()

    def _start_driver(self, worker_indices: Sequence[int]) -> None:
        """Start the process that talks to Ray, and have it start these workers."""
        self._lines, self._fatal, self._waits, self._is_connected = b"", "", "", False
        descriptors = [log.file.fileno() for log in self._logs]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "clusterenv.launchers.ray_driver"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._driver_log.file,
            pass_fds=descriptors,
            process_group=0,  # Ctrl-C in the terminal is for the head.
        )
        assert self._driver.stdout is not None
        os.set_blocking(self._driver.stdout.fileno(), False)
        self._tell(**self._settings, log_fds=descriptors)
        for worker_index in worker_indices:
            self._start(worker_index)

    def _end_driver(self) -> None:
        """Kill the process that talks to Ray and close its pipes."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.kill()
            driver.wait()
            for pipe in (driver.stdin, driver.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _start(self, worker_index: int) -> None:
        self._runs[worker_index] += 1
        self._tell(start=worker_index, run=self._runs[worker_index])

    def _tell(self, **wish: Any) -> None:
        assert self._driver is not None, "it runs"
        assert self._driver.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # The driver has ended; the next `_look` finds out.
            os.write(self._driver.stdin.fileno(), json.dumps(wish).encode() + b"\n")

    def _look(self) -> None:
        """Read what the driver has reported. If the driver has ended, so have all workers."""
        if self._driver is None:
            return
        status = self._driver.poll()
        self._read()
        if status is None:
            return
        with uninterrupted():
            self._end_driver()
        how = f"the process that talks to Ray has ended ({describe_exit(status)}): {self._driver_log.tail()[-1000:]}"
        for worker_index in range(self._num_workers):
            start = "" if worker_index in self._hosts else "could not be started: "
            self._ends.setdefault(worker_index, f"{start}{self._fatal or how}")
        self._hosts.clear()

    def _read(self) -> None:
        assert self._driver is not None, "it runs"
        assert self._driver.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._driver.stdout.fileno(), 1 << 16):
                *whole, self._lines = (self._lines + chunk).split(b"\n")
                for line in whole:
                    self._note(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"worker": worker_index, "run": run} if run != self._runs[worker_index]:
                pass
            case {"connected": _}:
                self._is_connected = True
            case {"fatal": reason}:
                self._fatal = reason
            case {"waits": text}:
                self._waits = text
            case {"worker": worker_index, "status": status, "host": host}:
                self._ends[worker_index] = f"{describe_exit(status)} on {host}{self._hint(worker_index)}"
            case {"worker": worker_index, "ended": how}:
                self._ends[worker_index] = how
            case {"worker": worker_index, "host": host}:
                self._hosts[worker_index] = host

    def _hint(self, worker_index: int) -> str:
        if "No module named 'clusterenv" not in self.log_tail(worker_index).replace(" clusterenv", " 'clusterenv"):
            return ""
        return (
            ": the cluster's Python has no clusterenv, or another one; install the head's version in its image, or "
            "have Ray do so: RayLauncher(runtime_env={'pip': ['clusterenv-rl']})"
        )


def _check_address(what: str, address: str) -> None:
    if address not in ("auto", "local") and not _ADDRESS.match(address):
        raise ConfigError(
            f"{what} must be 'auto', 'local' or HOST:PORT of the cluster's head node, got {address!r}. From outside a "
            "cluster, submit the script as a Ray job: workers must reach it."
        )


def _connected_to() -> str:
    """Return the address of the cluster that this process is already connected to, or an empty string."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    if ray.util.client.ray.is_connected():  # Through Ray Client, which does not know the cluster's own address.
        return "ray://..."
    return str(ray.get_runtime_context().gcs_address)


def _own_path() -> list[str]:
    """Return the directories from which this process imports uninstalled modules: nodes may share the file system."""
    installed = (sys.prefix, sys.base_prefix)
    paths = [os.path.abspath(path or os.getcwd()) for path in sys.path]
    return [path for path in paths if not path.startswith(installed) and "site-packages" not in path]
