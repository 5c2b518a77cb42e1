"""SlurmLauncher: workers are the tasks of one Slurm job, or of one step of the job the head is in."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clusterenv.config import thread_variables
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import ELSEWHERE
from clusterenv.launchers.slurm_fleet import SlurmFleet
from clusterenv.launchers.slurm_job import Job, job_environment
from clusterenv.launchers.slurm_script import ANY_WORKER, STEP, job_script, single_step, worker_script
from clusterenv.launchers.slurm_step import Step
from clusterenv.wire.ticket import TICKET_VARIABLE, Ticket

_OPTION_NAME = re.compile(r"^[a-zA-Z][a-zA-Z0-9-]*$")
_TIME = re.compile(r"^(\d+-)?\d+(:\d+){0,2}$|^(UNLIMITED|INFINITE)$")
_MEMORY = re.compile(r"^(\d+)([KMGT]?)$")
_MEBIBYTES = {"K": 1 / 1024, "M": 1, "": 1, "G": 1024, "T": 1024**2}
# Options that have a field, or that the launcher needs for itself.
_TAKEN = {
    "nodes": "nodes",
    "ntasks-per-node": "workers_per_node",
    "cpus-per-task": "cpus_per_worker",
    "mem": "memory",
    "mem-per-cpu": "memory",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "gres": "gres",
    "time": "time",
    "exclusive": "exclusive",
    "requeue": "requeue",
    "no-requeue": "requeue",
    "signal": "warning_s",
} | dict.fromkeys(("ntasks", "parsable", "array", "wrap", "wait", "test-only", "clusters"))

_SINFO_S = 30.0

OptionValue = str | int | bool


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher:
    """Starts workers by Slurm.

    On a login node the workers are a job of their own, submitted with `sbatch`. Where the head itself runs in a job,
    they are a step of that job, started with `srun`; the fields that choose resources then do not apply.

    Attributes:
        nodes: On how many nodes; None leaves it to Slurm, and inside a job means all of its nodes.
        workers_per_node: By default the workers are spread evenly.
        cpus_per_worker: Also the number of threads that BLAS, OpenMP and torch use in each.
        memory: For each worker, as Slurm writes it: "2G", or a number of megabytes.
        partition: As in `sbatch --partition`; so are the next ones.
        account: As in `sbatch --account`.
        qos: As in `sbatch --qos`.
        constraint: As in `sbatch --constraint`.
        reservation: As in `sbatch --reservation`.
        gres: As in `sbatch --gres`; for each node.
        time: The time limit, such as "02:00:00", or a number of minutes.
        exclusive: Whether the nodes are shared with no other job.
        requeue: Whether Slurm may start the job again after a preemption or the failure of a node; workers then join
            again.
        warning_s: How long before the time limit workers are told to end (Slurm may be a minute early). None leaves
            it to Slurm, which tells them at the limit.
        setup: Lines of shell to run before each worker starts: modules, conda, a virtual environment. One that fails
            ends the worker.
        python: The interpreter on the nodes. By default the head's own, at the same path and with its module path.
        log_dir: Where to keep the log, a file a job. By default it is kept only for error messages, in a directory
            beside the working directory's files that is removed in the end. The nodes should see it: where they do
            not, errors come without the log.
        submit: Whether to submit a job even where the head is in one itself.
        options: Any other option of `sbatch`, such as `{"job-name": "walkers", "nodelist": "n[1-4]"}`; True for one
            without a value.
    """

    nodes: int | None = None
    workers_per_node: int | None = None
    cpus_per_worker: int = 1
    memory: str | int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gres: str | None = None
    time: str | int | None = None
    exclusive: bool = False
    requeue: bool = True
    warning_s: int | None = 30
    setup: tuple[str, ...] | list[str] = ()
    python: str | None = None
    log_dir: str | Path | None = None
    submit: bool = False
    options: Mapping[str, OptionValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "workers_per_node", "cpus_per_worker", "warning_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"SlurmLauncher.{name} must be an int of at least 1, got {value!r}.")
        if isinstance(self.setup, str):
            raise ConfigError("SlurmLauncher.setup must be a sequence of lines, not one string: setup=[...].")
        if self.time is not None and not _TIME.match(str(self.time)):
            raise ConfigError(
                f'SlurmLauncher.time must be minutes, or like "02:00:00" or "1-12:00:00" (days), got {self.time!r}.'
            )
        if self.memory is not None and not _MEMORY.match(str(self.memory)):
            raise ConfigError(f'SlurmLauncher.memory must be like "2G" or 2048 (megabytes), got {self.memory!r}.')
        for name in self.options:
            if name in _TAKEN:
                instead = f": use SlurmLauncher({_TAKEN[name]}=...)" if _TAKEN[name] else ""
                raise ConfigError(f"SlurmLauncher.options may not have {name!r}{instead}.")
            if not _OPTION_NAME.match(name):
                raise ConfigError(f'SlurmLauncher.options takes names like "mail-type", without dashes, got {name!r}.')

    @property
    def num_workers(self) -> int | None:
        """Nodes times workers per node, if both are given."""
        return None if self.nodes is None or self.workers_per_node is None else self.nodes * self.workers_per_node

    @property
    def route_to(self) -> str:
        """The address of a node that workers may run on, as Slurm knows it.

        Raises:
            LaunchError: Slurm does not say.
        """
        nodes = _addresses(f"--nodes={os.environ.get('SLURM_JOB_NODELIST', '')}") if self._job_id else []
        if not nodes and self.partition is not None:
            nodes = _addresses(f"--partition={self.partition}")
        nodes = nodes or _addresses()  # `sbatch` will say what is wrong with the partition.
        # This machine's own name may stand for its loopback address.
        others = [address for name, address in nodes if name != os.environ.get("SLURMD_NODENAME")]
        return next(iter(others), nodes[0][1] if nodes else ELSEWHERE)

    def launch(self, ticket: Ticket, num_workers: int) -> SlurmFleet:
        """Submit the job, or start the step, and return at once.

        Raises:
            LaunchError: Slurm refuses, in its own words, or is not there.
        """
        self._check(num_workers)
        environment = job_environment({TICKET_VARIABLE: ticket.encode()})
        job_id = self._job_id
        if job_id is not None:
            log_dir = None if self.log_dir is None else Path(self.log_dir)
            return SlurmFleet(
                lambda: Step(self._step(num_workers, job_id), environment, log_dir, job_id),
                lambda _, index, node: self._start_one(job_id, index, node, environment, log_dir),
                num_workers,
            )
        log_dir = self._make_log_dir()
        return SlurmFleet(
            lambda: Job.submit(self._sbatch(num_workers), self._script(num_workers, log_dir), environment, log_dir),
            lambda job_id, index, node: self._start_one(job_id, index, node, environment, log_dir),
            num_workers,
            log_dir if self.log_dir is None else None,
        )

    def render(self, num_workers: int) -> str:
        """Show the submission and the batch script; inside a job, the step. The ticket is in its environment."""
        self._check(num_workers)
        if self._job_id is not None:
            return shlex.join(self._step(num_workers, self._job_id))
        script = self._script(num_workers, Path(self.log_dir or ".clusterenv-XXXXXXXX").absolute())
        return f"{shlex.join(self._sbatch(num_workers))} <<'END'\n{script}END"

    @property
    def _job_id(self) -> str | None:
        """The job this process is in, if workers are to be a step of it."""
        return None if self.submit else os.environ.get("SLURM_JOB_ID")

    def _check(self, num_workers: int) -> None:
        if self.num_workers is not None and num_workers > self.num_workers:
            raise ConfigError(
                f"num_workers={num_workers}, but SlurmLauncher(nodes={self.nodes}, "
                f"workers_per_node={self.workers_per_node}) has room for {self.num_workers}."
            )

    def _make_log_dir(self) -> Path:
        try:
            if self.log_dir is None:
                # Here rather than in the temporary directory: this is the more likely to be seen by the nodes.
                return Path(tempfile.mkdtemp(prefix=".clusterenv-", dir=Path.cwd()))
            log_dir = Path(self.log_dir).absolute()
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"Cannot keep logs: {error}. Name a directory with SlurmLauncher(log_dir=...)."
            ) from error
        return log_dir

    def _sbatch(self, num_workers: int) -> list[str]:
        options: dict[str, OptionValue | None] = {
            "parsable": True,
            "job-name": "clusterenv",
            "output": "/dev/null",  # The script writes to the log directory, where there is one.
            "open-mode": "append",
            "no-kill": True,  # A node that fails takes only its own workers with it.
            **self.options,
            "export": _with_ticket(self.options.get("export", "ALL")),
            **self._shape(num_workers),
            "ntasks-per-node": self._workers_per_node(num_workers),
            "mem-per-cpu": self._memory_per_cpu(),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "reservation": self.reservation,
            "gres": self.gres,
            "time": self.time,
            "exclusive": self.exclusive,
            "requeue" if self.requeue else "no-requeue": True,
            "signal": None if self.warning_s is None else f"TERM@{self.warning_s}",
        }
        return ["sbatch", *_render(options)]

    def _script(self, num_workers: int, log_dir: Path) -> str:
        return job_script([*STEP, *_render(self._shape(num_workers)), *self._shell(ANY_WORKER)], log_dir)

    def _step(self, num_workers: int, job_id: str) -> list[str]:
        per_node = {"ntasks-per-node": self._workers_per_node(num_workers)}
        own = {"jobid": job_id, "overlap": True, **self._shape(num_workers), **per_node}
        return [*STEP, *_render(own), *self._shell(ANY_WORKER)]

    def _start_one(
        self, job_id: str, index: int, node: str | None, environment: dict[str, str], logs: Path | None
    ) -> Step:
        """Start one worker more in a job that runs, on the CPUs that its predecessor has left free."""
        command = [*single_step(job_id, node), f"--cpus-per-task={self.cpus_per_worker}", *self._shell(str(index))]
        return Step(command, environment, logs, job_id)

    def _shape(self, num_workers: int) -> dict[str, OptionValue | None]:
        return {
            "nodes": None if self.nodes is None else min(self.nodes, num_workers),
            "ntasks": num_workers,
            "cpus-per-task": self.cpus_per_worker,
        }

    def _workers_per_node(self, num_workers: int) -> int | None:
        if self.workers_per_node is not None or self.nodes is None:
            return self.workers_per_node
        return math.ceil(num_workers / self.nodes)

    def _memory_per_cpu(self) -> str | None:
        match = None if self.memory is None else _MEMORY.match(str(self.memory))
        if match is None:
            return None
        return f"{math.ceil(int(match[1]) * _MEBIBYTES[match[2]] / self.cpus_per_worker)}M"

    def _shell(self, worker: str) -> list[str]:
        variables = thread_variables(self.cpus_per_worker) | {"PYTHONUNBUFFERED": "1"}
        if self.python is None:
            # The head's own path, so that whatever it can import, its workers can.
            variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        python = self.python or sys.executable
        return ["bash", "-c", worker_script(worker, variables, self.setup, python)]


def _addresses(*which: str) -> list[tuple[str, str]]:
    """Return the names and addresses of nodes, as Slurm knows them."""
    command = ["sinfo", "--noheader", "--Node", "--format=%N %o", *which]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=_SINFO_S, check=False).stdout
    except FileNotFoundError as error:
        raise LaunchError("There is no sinfo on this machine: is it part of a Slurm cluster?") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"Slurm has not answered sinfo within {_SINFO_S:g} s.") from error
    return [(words[0], words[1]) for words in map(str.split, out.splitlines()) if len(words) == 2]


def _with_ticket(export: OptionValue) -> str:
    """Return what to export besides what the user wants exported: the ticket."""
    return TICKET_VARIABLE if export in ("NONE", "NIL") else f"{export},{TICKET_VARIABLE}"


def _render(options: Mapping[str, OptionValue | None]) -> list[str]:
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
