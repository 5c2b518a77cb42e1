"""A real Slurm: a controller that is the login node too, and compute nodes; each a host of its own (tests/hosts.py)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import wait_until_gone
from tests.hosts import Host, connected_hosts, require

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "salloc")
CPUS_PER_NODE = 4
UP_S = 60.0
POLL_S = 0.05  # Slurm can only be asked.

_CONFIG = """
ClusterName=test
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdParameters=config_overrides
SlurmctldTimeout=5
SlurmdTimeout={node_timeout_s}
KillWait=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""


@dataclass
class SlurmCluster:
    """A cluster that is up.

    Attributes:
        login: Where users work, and the controller runs.
        nodes: The compute nodes.
        private: A directory that each host has for itself.
    """

    directory: Path
    login: Host
    nodes: list[Host]
    private: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.directory / "slurm.conf"

    @contextlib.contextmanager
    def logged_in(self) -> Iterator[None]:
        """Make this test, and what it starts, run on the login node."""
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.config)
        try:
            with self.login.entered():
                yield
        finally:
            del os.environ["SLURM_CONF"]
            if before is not None:
                os.environ["SLURM_CONF"] = before

    def run(self, *command: str) -> str:
        """Run one of Slurm's commands on the login node and return what it prints."""
        with self.login.entered():
            environment = os.environ | {"SLURM_CONF": str(self.config)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}{self._logs()}"
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that are not over."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def state_of(self, job_id: str) -> str:
        """Return what Slurm calls the state of a job."""
        return self.run("squeue", f"--jobs={job_id}", "--states=all", "--noheader", "--format=%T")

    def node_states(self) -> set[str]:
        """Return what Slurm calls the states of the nodes; those that still end a job are completing."""
        return set(self.run("sinfo", "--noheader", "--Node", "--format=%T").split())

    def wait_until_idle(self, deadline_s: float = 45.0) -> None:
        """Wait until no job is there, pending, running or ending, with all of its processes."""
        ends_at = time.monotonic() + deadline_s
        while self.jobs():
            assert time.monotonic() < ends_at, self.run("squeue")
            time.sleep(POLL_S)
        assert wait_until_gone(self.processes(), max(1.0, ends_at - time.monotonic())) == []

    def processes(self, node: Host | None = None) -> list[int]:
        """Return the processes that Slurm runs for jobs, slurmstepd included; those of one node, if it is given."""
        found = []
        nodes = self.nodes if node is None else [node]
        networks = {os.stat(f"/run/netns/{node.namespace}").st_ino for node in nodes}
        daemons = {daemon.pid for daemon in self.daemons.values()}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                is_in_job = b"SLURM_JOB_ID=" in Path(f"/proc/{pid}/environ").read_bytes()
                is_manager = Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
                network = os.stat(f"/proc/{pid}/ns/net").st_ino
            except OSError:  # It has ended.
                continue
            if network in networks and pid not in daemons and (is_in_job or is_manager):
                found.append(pid)
        return found

    def kill_node(self, node: Host) -> None:
        """Let a node lose its power."""
        os.kill(self.daemons[node.name].pid, signal.SIGKILL)
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_node(self, node: Host) -> None:
        """Let a node that was killed have power again."""
        self.daemons[node.name].wait()
        self._start_daemon(node)

    def _start_daemon(self, node: Host) -> None:
        self._start(node.name, node, "slurmd", "-D", "-f", str(self.config))

    def _start(self, name: str, host: Host, *command: str) -> None:
        environment = os.environ | {"SLURM_CONF": str(self.config)}
        with (self.directory / f"{name}.out").open("wb") as out:
            self.daemons[name] = subprocess.Popen(
                host.command(*command), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _up(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key": "munge.key", "socket": "munge.socket", "pid": "munge.pid", "log": "munge.log", "seed": "seed"}
        options = [f"--{what}={self.directory / name}" for what, name in files.items() if what == "socket"]
        options += [f"--{what}-file={self.directory / name}" for what, name in files.items() if what != "socket"]
        self._start("munged", self.login, "munged", "--foreground", "--force", "--num-threads=2", *options)
        self._await_up(lambda: (self.directory / "munge.socket").exists())
        self._start("slurmctld", self.login, "slurmctld", "-D", "-c", "-f", str(self.config))
        for node in self.nodes:
            self._start_daemon(node)
        self._await_up(lambda: self._count_idle() == len(self.nodes))

    def _await_up(self, is_up: Callable[[], bool]) -> None:
        ends_at = time.monotonic() + UP_S
        while not is_up():
            assert time.monotonic() < ends_at, self._logs()
            time.sleep(POLL_S)

    def _count_idle(self) -> int:
        with self.login.entered():
            environment = os.environ | {"SLURM_CONF": str(self.config)}
            command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
            out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        return sum(int(line) for line in out.split())

    def _down(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(3.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _logs(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted([*self.directory.glob("*.log"), *self.directory.glob("*.out")])
        )


@contextlib.contextmanager
def slurm_cluster(directory: Path, num_nodes: int, *, node_timeout_s: int = 5) -> Iterator[SlurmCluster]:
    """Start a Slurm on hosts of its own, and end it.

    Args:
        directory: For its files; an empty one.
        num_nodes: That it computes on.
        node_timeout_s: How long it waits for a node before it takes it for dead.
    """
    require(*PROGRAMS)
    (directory / "state").mkdir()
    private = directory / "private"
    private.mkdir()
    names = ["login", *(f"n{number}" for number in range(1, num_nodes + 1))]
    with connected_hosts(names, directory, private=private) as (login, *nodes):
        cluster = SlurmCluster(directory, login, nodes, private)
        lines = [
            f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs={CPUS_PER_NODE} State=UNKNOWN"
            for node in nodes
        ]
        lines += [
            "PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP",  # Preempts the other.
        ]
        text = (
            _CONFIG.format(controller=login, directory=directory, node_timeout_s=node_timeout_s)
            + "\n".join(lines)
            + "\n"
        )
        cluster.config.write_text(text)
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        try:
            cluster._up()
            yield cluster
        finally:
            cluster._down()
