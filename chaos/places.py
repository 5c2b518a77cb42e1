"""Places: where workers run while they are harmed, and what can befall them there and nowhere else.

`local` is the head's own machine. `hosts` are network namespaces, each worker behind a link of its own. `slurm` is a
real Slurm, its nodes network namespaces too. The latter two need root, and programs that
`scripts/install_infrastructure` installs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.host_launcher import HostFleet, HostLauncher
from tests.hosts import Host, connected_hosts
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.switch import Line, Switch, slow_network

from chaos.faults import POLL_S, Effect, Fault, Scratch, Target, everybody, too_long
from clusterenv import Network, SlurmLauncher
from clusterenv.wire.ticket import Ticket

CUT = Line(is_up=False)
SLOW = Line(delay_s=0.25)
LOSSY = Line(loss=0.1)
BRIEF = 0.4  # of the silence: too short a cut for anybody to be lost
NUM_NODES = 3
SCRATCH_BYTES = 32 * 2**20
LOGS = "logs"


@dataclass(frozen=True)
class Place:
    """Somewhere for workers to run.

    Attributes:
        options: What ClusterEnv must be given so that they run there.
        faults: What can befall them there and nowhere else.
        call_s: After how long without a step a worker there is hung.
        deadline_s: How long it may take to go on after a fault.
    """

    options: Mapping[str, Any]
    faults: Sequence[Fault] = ()
    call_s: float = 6.0
    deadline_s: float = 60.0


@contextlib.contextmanager
def open_scratch() -> Iterator[Scratch | None]:
    """Mount a small disk, and have temporary files made there; None where one may not mount."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        path = Path(directory)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SCRATCH_BYTES}", "tmpfs", str(path)]
        is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = tempfile.tempdir = str(path)
        try:
            yield Scratch(path) if is_mounted else None
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before
            if is_mounted:
                subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def open_local(transport: str, num_workers: int) -> Iterator[Place]:
    """Let workers run on this machine."""
    yield Place({"network": Network(transport=transport)})


@contextlib.contextmanager
def open_hosts(transport: str, num_workers: int) -> Iterator[Place]:
    """Make a host for the head, and two for each worker: its lives are spent on them by turns."""
    names = ["head", *(f"w{number}" for number in range(2 * num_workers))]
    with (
        tempfile.TemporaryDirectory() as directory,
        connected_hosts(names, Path(directory)) as (head, *others),
        slow_network([head, *others]) as switch,
        head.entered(),
    ):
        links = _Links(others, switch)
        faults = [
            Fault("partition", "too long", Effect.LOSS, lambda target: links.change(too_long(target), target, CUT)),
            Fault(
                "partition",
                "brief",
                Effect.NONE,
                lambda target: links.change(BRIEF * target.silence_s, target, CUT),
            ),
            Fault("slow link", "delay", Effect.NONE, lambda target: links.change(target.silence_s, target, SLOW)),
            Fault("slow link", "loss", Effect.NONE, lambda target: links.change(target.silence_s, target, LOSSY)),
        ]
        launcher = _ByTurns(others, switch.address(others[0]))
        yield Place({"launcher": launcher, "network": Network(transport=transport)}, faults, call_s=10.0)


class _ByTurns(HostLauncher):
    """Starts the lives of worker i on host i and host n + i by turns, so that no two workers share a link."""

    def launch(self, ticket: Ticket, num_workers: int) -> HostFleet:
        self.fleet = _FleetByTurns(ticket, self._hosts, num_workers)
        return self.fleet


class _FleetByTurns(HostFleet):
    def __init__(self, ticket: Ticket, hosts: Sequence[Host], num_workers: int) -> None:
        super().__init__(ticket, hosts, num_workers)
        self._lives = [0] * num_workers

    def restart(self, worker_index: int) -> None:
        self._lives[worker_index] += 1
        self.next_host = worker_index + len(self._lives) * (self._lives[worker_index] % 2)
        super().restart(worker_index)


class _Links:
    """The links between hosts and the switch."""

    def __init__(self, hosts: Sequence[Host], switch: Switch) -> None:
        self._hosts = hosts
        self._switch = switch
        self._turn = threading.Lock()  # The switch is asked one thing at a time.

    def change(self, seconds: float, target: Target, line: Line) -> None:
        """Make a worker's link worse, or cut it, for a while."""
        host = host_of(target.pid, self._hosts)
        if host is None:
            return  # It has just ended; there is no link to speak of.
        self._set(line, host)
        time.sleep(seconds)
        self._set(Line(), host)

    def _set(self, line: Line, host: Host) -> None:
        with self._turn:
            self._switch.set(line, host)


@contextlib.contextmanager
def open_slurm(transport: str, num_workers: int) -> Iterator[Place]:
    """Start a Slurm, and be on its login node; in the end no job may be left."""
    logs = Path(tempfile.gettempdir()) / LOGS
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        slurm_cluster(Path(directory), NUM_NODES) as cluster,
        cluster.logged_in(),
    ):
        site = _Site(cluster)
        faults = [
            Fault("cancelled step", "", Effect.LOSS, site.cancel_step, site.share_step),
            Fault("requeued job", "", Effect.LOSS, site.requeue, everybody, is_rare=True),
            Fault("preempted job", "", Effect.LOSS, site.preempt, everybody, is_rare=True),
            Fault("lost node", "", Effect.LOSS, site.lose_node, site.share_node, is_rare=True),
        ]
        launcher = SlurmLauncher(nodes=2, partition="cpu", log_dir=logs)
        options = {"launcher": launcher, "network": Network(transport=transport)}
        yield Place(options, faults, call_s=30.0, deadline_s=180.0)
        cluster.wait_until_idle()


class _Site:
    """What operators and bad luck do to a cluster."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster

    def cancel_step(self, target: Target) -> None:
        """Cancel the step a worker is in."""
        self._cluster.run("scancel", ".".join(step_of(target.pid)))

    def share_step(self, target: Target) -> Collection[int]:
        """Return who is in the same step: many of those that came with the job, or one that was started again."""
        return [index for index, pid in enumerate(target.pids) if step_of(pid) == step_of(target.pid)]

    def requeue(self, target: Target) -> None:
        """Put the job back into the queue, from which it comes soon."""
        job_id, _ = step_of(target.pid)
        self._cluster.run("scontrol", "requeue", job_id)
        self._hurry(job_id)

    def preempt(self, target: Target) -> None:
        """Let more urgent work take all nodes for a moment."""
        job_id, _ = step_of(target.pid)
        wanted = ["--partition=urgent", f"--nodes={NUM_NODES}", "--exclusive", "--output=/dev/null"]
        urgent_id = self._cluster.run("sbatch", "--parsable", *wanted, "--wrap=sleep 600")
        self._await(lambda: self._cluster.state_of(urgent_id) == "RUNNING")
        self._cluster.run("scancel", urgent_id)
        self._hurry(job_id)

    def lose_node(self, target: Target) -> None:
        """Let a node lose its power, and have it back when Slurm has noticed.

        It is one that the job does not begin with, for with that one the whole job ends. Where no worker is on another
        any more, the job is requeued, and has all of its nodes again.
        """
        node = self._find_other_node(target)
        if node is None:
            self.requeue(target)
            return
        self._cluster.kill_node(node)
        self._await(lambda: "down" in self._cluster.run("sinfo", f"--nodes={node.name}", "--noheader", "--format=%T"))
        self._cluster.start_node(node)

    def share_node(self, target: Target) -> Collection[int]:
        """Return whom a node takes with it."""
        node = self._find_other_node(target)
        if node is None:
            return everybody(target)
        return [index for index, pid in enumerate(target.pids) if host_of(pid, [node]) is not None]

    def _find_other_node(self, target: Target) -> Host | None:
        job_id, _ = step_of(target.pid)
        first = self._cluster.run("squeue", f"--jobs={job_id}", "--noheader", "--format=%B")
        others = [node for node in self._cluster.nodes if node.name != first]
        found = (host_of(pid, others) for pid in target.pids)
        return next((node for node in found if node is not None), None)

    def _hurry(self, job_id: str) -> None:
        """Let a requeued job start now: Slurm would let it wait for two minutes."""
        self._await(lambda: self._cluster.state_of(job_id) == "PENDING")
        self._cluster.run("scontrol", "update", f"job={job_id}", "StartTime=now")

    def _await(self, has_come: Callable[[], bool], deadline_s: float = 60.0) -> None:
        ends_at = time.monotonic() + deadline_s
        while not has_come():
            assert time.monotonic() < ends_at, self._cluster.run("squeue")
            time.sleep(POLL_S)


def host_of(pid: int, hosts: Sequence[Host]) -> Host | None:
    """Return on which of these hosts a process is; None if on none of them, or gone."""
    try:
        network = os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None
    return next((host for host in hosts if os.stat(f"/run/netns/{host.namespace}").st_ino == network), None)


def step_of(pid: int) -> tuple[str, str]:
    """Return the job and the step of one of Slurm's processes; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "", ""
    variables = dict(line.partition("=")[::2] for line in lines)
    return variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")


PLACES: Mapping[str, Callable[[str, int], contextlib.AbstractContextManager[Place]]] = {
    "local": open_local,
    "hosts": open_hosts,
    "slurm": open_slurm,
}
