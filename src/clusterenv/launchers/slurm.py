"""SlurmLauncher: workers are the tasks of one Slurm job, or of one step of the job the head is in.

The commands and scripts given to Slurm never hold the ticket: it is passed in the environment of `sbatch` or `srun`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterenv.config import thread_variables
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import ELSEWHERE, run_labels
from clusterenv.launchers.slurm_fleet import SlurmCommands, SlurmFleet
from clusterenv.launchers.slurm_job import SAYS, job_environment
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket

_OPTION_NAME = re.compile(r"^[a-zA-Z][a-zA-Z0-9-]*$")
_TIME = re.compile(r"^(\d+-)?\d+(:\d+){0,2}$|^(UNLIMITED|INFINITE)$")
_MEMORY = re.compile(r"^(\d+)([KMGT])$")
_MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
# Options that have a field, or that the launcher needs for itself.
_TAKEN = {
    "nodes": "nodes",
    "ntasks-per-node": "workers_per_node",
    "cpus-per-task": "cpus",
    "mem": "memory",
    "mem-per-cpu": "memory",
    "gpus": "gpus",
    "gpus-per-task": "gpus",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "time": "time",
    "exclusive": "exclusive",
    "requeue": "requeue",
    "no-requeue": "requeue",
    "signal": "warning_s",
} | dict.fromkeys(("ntasks", "parsable", "array", "wrap", "wait", "test-only", "clusters"))

_SINFO_S = 30.0
_LOOK_S = 5  # How often a job whose first workers have ended checks whether restarted ones are left.

_ANY_WORKER = "$SLURM_PROCID"  # In a step with all workers, the index of each.
_LABEL = "--label"  # Prefixes each line with the index of its worker.
_STEP = (
    "srun",
    "--export=ALL",  # Not sbatch's own --export: the setup may have changed the environment since.
    "--input=none",
    "--mpi=none",
    "--kill-on-bad-exit=0",  # A worker that dies does not take others with it,
    "--wait=0",
    "--no-kill",  # and neither does a node.
)

OptionValue = str | int | bool


@dataclass(frozen=True, kw_only=True)
class SlurmLauncher:
    """Starts workers with Slurm.

    On a login node the workers are a separate job, submitted with `sbatch`. If the head itself runs in a job, they are
    a step of that job, started with `srun`; the fields that choose resources then do not apply.

    Attributes:
        nodes: The number of nodes; None leaves it to Slurm, and inside a job means all of its nodes.
        workers_per_node: The maximum number of workers per node. By default they are spread evenly.
        cpus: CPUs per worker, and as many BLAS, OpenMP and torch threads.
        memory: Memory per worker, with a unit (K, M, G or T): "4G". By default the partition's.
        gpus: GPUs per worker. For GPUs shared by a node's workers, use `options={"gres": "gpu:1"}`.
        partition: As in `sbatch --partition`.
        account: As in `sbatch --account`.
        qos: As in `sbatch --qos`.
        constraint: As in `sbatch --constraint`.
        reservation: As in `sbatch --reservation`.
        time: The time limit, such as "02:00:00", or a number of minutes.
        exclusive: Whether the nodes are not shared with other jobs.
        requeue: Whether Slurm may restart the job after a preemption or a node failure; the workers then join again.
        warning_s: How long before the time limit workers are told to exit (Slurm may be a minute early). None leaves
            this to Slurm, which tells them at the limit.
        setup: Shell lines to run before each worker starts: modules, conda, a virtual environment. If one fails, the
            worker is not started.
        python: The interpreter on the nodes. By default the head's own, at the same path and with its module path.
        log_dir: Where to keep the log, one file per job, `job-<number>.log`. By default it is kept only for error
            messages, in a temporary directory inside the working directory. The nodes should see this directory: if
            they do not, errors come without the log.
        show_output: Whether to also show the workers' output, read from the log, on this process's standard error, each
            line prefixed with `[worker <index>]`; very large output is shown only in part.
        submit: Whether to submit a separate job even if the head itself runs in one.
        options: Any other options of `sbatch`, such as `{"job-name": "walkers", "nodelist": "n[1-4]"}`; True for an
            option without a value.
    """

    nodes: int | None = None
    workers_per_node: int | None = None
    cpus: int = 1
    memory: str | None = None
    gpus: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | int | None = None
    exclusive: bool = False
    requeue: bool = True
    warning_s: int | None = 30
    setup: tuple[str, ...] | list[str] = ()
    python: str | None = None
    log_dir: str | Path | None = None
    show_output: bool = False
    submit: bool = False
    options: Mapping[str, OptionValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "workers_per_node", "cpus", "gpus", "warning_s"):
            value = getattr(self, name)
            if (value is not None or name == "cpus") and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"SlurmLauncher.{name} must be an int of at least 1, got {value!r}.")
        if isinstance(self.setup, str):
            raise ConfigError("SlurmLauncher.setup must be a sequence of lines, not one string: setup=[...].")
        if self.time is not None and not _TIME.match(str(self.time)):
            raise ConfigError(
                f'SlurmLauncher.time must be minutes, or like "02:00:00" or "1-12:00:00" (days), got {self.time!r}.'
            )
        if self.memory is not None and not _MEMORY.match(str(self.memory)):
            raise ConfigError(f'SlurmLauncher.memory must have a unit (K, M, G, T), like "4G", got {self.memory!r}.')
        for name in self.options:
            if name in _TAKEN:
                instead = f": use SlurmLauncher({_TAKEN[name]}=...)" if _TAKEN[name] else ""
                raise ConfigError(f"SlurmLauncher.options may not have {name!r}{instead}.")
            if not _OPTION_NAME.match(name):
                raise ConfigError(f'SlurmLauncher.options takes names like "mail-type", without dashes, got {name!r}.')

    @property
    def suggested_workers(self) -> int | None:
        """Nodes times workers per node, if both are given."""
        return None if self.nodes is None or self.workers_per_node is None else self.nodes * self.workers_per_node

    @property
    def queues(self) -> bool:
        """Yes: jobs may wait for hours."""
        return True

    @property
    def route_to(self) -> str:
        """The address of a node that workers may run on, as Slurm knows it.

        Raises:
            LaunchError: Slurm is not there or does not answer.
        """
        nodes = _addresses(f"--nodes={os.environ.get('SLURM_JOB_NODELIST', '')}") if self._job_id else []
        if not nodes and self.partition is not None:
            nodes = _addresses(f"--partition={self.partition}")
        nodes = nodes or _addresses()  # If the partition is wrong, `sbatch` will say so.
        # This machine's own name may stand for its loopback address.
        others = [address for name, address in nodes if name != os.environ.get("SLURMD_NODENAME")]
        return next(iter(others), nodes[0][1] if nodes else ELSEWHERE)

    def launch(self, ticket: Ticket, num_workers: int) -> SlurmFleet:
        """Submit the job, or start the step.

        Raises:
            ConfigError: There is no room for this many workers.
            LaunchError: Slurm refuses, in its own words, or is not there.
        """
        self._check(num_workers)
        commands = SlurmCommands(
            job=self._sbatch(num_workers),
            script=lambda log_dir: self._script(num_workers, log_dir),
            step=self._step(num_workers, self._job_id or ""),
            one=lambda job_id, where, index: [*_single_step(job_id, where), *self._share(), *self._shell(str(index))],
            alone=_single_step,
            environment=job_environment({TICKET_VARIABLE: ticket.encode()}),
        )
        return SlurmFleet(commands, num_workers, self._job_id, self.log_dir, shows_output=self.show_output)

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
        if self.suggested_workers is not None and num_workers > self.suggested_workers:
            raise ConfigError(
                f"num_workers={num_workers}, but SlurmLauncher(nodes={self.nodes}, "
                f"workers_per_node={self.workers_per_node}) has room for {self.suggested_workers}."
            )

    def _sbatch(self, num_workers: int) -> list[str]:
        options: dict[str, OptionValue | None] = {
            "parsable": True,
            "job-name": f"clusterenv-{run_labels()['run']}",  # Slurm shows the user itself.
            "output": "/dev/null",  # The script writes to the log directory, where there is one.
            "open-mode": "append",
            "no-kill": True,  # A node failure takes down only that node's workers.
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
            "time": self.time,
            "exclusive": self.exclusive,
            "requeue" if self.requeue else "no-requeue": True,
            "signal": None if self.warning_s is None else f"TERM@{self.warning_s}",
        }
        return ["sbatch", *_render(options)]

    def _script(self, num_workers: int, log_dir: Path) -> str:
        """Return the batch script of a job that runs all workers, and stays as long as any restarted worker does.

        Restarted workers are separate steps: if the job ended with the last of its original workers, it would take
        those steps with it. It writes to the log directory if its node sees that, and otherwise to `sbatch --output`.
        """
        directory = shlex.quote(str(log_dir))
        step = [*_STEP, _LABEL, *_render(self._shape(num_workers)), *self._shell(_ANY_WORKER)]
        return (
            "#!/bin/bash\n"
            f'[ -d {directory} ] && exec >>{directory}/"job-$SLURM_JOB_ID.log" 2>&1\n'
            f'echo "{SAYS} job $SLURM_JOB_ID starts on $SLURM_JOB_NODELIST"\n'
            f"{shlex.join(step)}\n"
            "status=$?\n"
            'while squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q "\\.[0-9]"; do\n'
            f"    sleep {_LOOK_S}\n"
            "done\n"
            "exit $status\n"
        )

    def _step(self, num_workers: int, job_id: str) -> list[str]:
        per_node = {"ntasks-per-node": self._workers_per_node(num_workers)}
        own = {"jobid": job_id, "overlap": True, **self._shape(num_workers), **per_node}
        return [*_STEP, _LABEL, *_render(own), *self._shell(_ANY_WORKER)]

    def _shape(self, num_workers: int) -> dict[str, OptionValue | None]:
        return {
            "nodes": None if self.nodes is None else min(self.nodes, num_workers),
            "ntasks": num_workers,
            "cpus-per-task": self.cpus,
            "gpus-per-task": self.gpus,
        }

    def _share(self) -> list[str]:
        return _render({"cpus-per-task": self.cpus, "gpus-per-task": self.gpus})

    def _workers_per_node(self, num_workers: int) -> int | None:
        if self.workers_per_node is not None or self.nodes is None:
            return self.workers_per_node
        return math.ceil(num_workers / self.nodes)

    def _memory_per_cpu(self) -> str | None:
        match = None if self.memory is None else _MEMORY.match(str(self.memory))
        if match is None:
            return None
        return f"{math.ceil(int(match[1]) * _MEBIBYTES[match[2]] / self.cpus)}M"

    def _shell(self, worker: str) -> list[str]:
        """Return the command that runs one worker in a shell that prints where the worker starts and how it ends.

        Args:
            worker: The worker's index, or `_ANY_WORKER`.
        """
        variables = thread_variables(self.cpus) | {"PYTHONUNBUFFERED": "1"}
        if self.python is None:
            # The head's own path, so that its workers can import whatever it can.
            variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        lines = [f"export {WORKER_VARIABLE}={worker}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        lines += [
            f'echo "{SAYS} worker ${WORKER_VARIABLE} starts on $SLURMD_NODENAME in process group $$"',
            f'report() {{ echo "{SAYS} worker ${WORKER_VARIABLE} ended with status $?"; }}',
            "trap report EXIT",
            # The worker gets the signal too. This shell outlives the worker, to report its status.
            f'warn() {{ echo "{SAYS} SIGTERM: the job was cancelled or preempted, or its time limit is near"; }}',
            "trap warn TERM",
        ]
        for number, line in enumerate(self.setup, start=1):
            lines += [line, f'[ $? -eq 0 ] || {{ echo "{SAYS} line {number} of the setup failed"; exit 1; }}']
        lines += [f"{shlex.quote(self.python or sys.executable)} -m clusterenv.worker", ""]
        return ["bash", "-c", "\n".join(lines)]


def _single_step(job_id: str, where: Sequence[str]) -> list[str]:
    """Return the beginning of a command that runs a single task in a running job, alongside its other steps."""
    return [*_STEP, f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", *where]


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
    """Return the user's export option with the ticket added."""
    return TICKET_VARIABLE if export in ("NONE", "NIL") else f"{export},{TICKET_VARIABLE}"


def _render(options: Mapping[str, OptionValue | None]) -> list[str]:
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
