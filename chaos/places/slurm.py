"""A real Slurm: what operators and bad luck do to its steps, jobs and nodes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tests.hosts import Host
from tests.slurm_cluster import SlurmCluster, slurm_cluster

from chaos.faults import Effect, Fault, Target, everybody
from chaos.places.place import LOGS, Place, host_of, wait_until
from clusterenv import Network, SlurmLauncher

NUM_NODES = 3


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

    def _await(self, has_come: Callable[[], bool]) -> None:
        wait_until(has_come, lambda: self._cluster.run("squeue"))


def step_of(pid: int) -> tuple[str, str]:
    """Return the job and the step of one of Slurm's processes; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "", ""
    variables = dict(line.partition("=")[::2] for line in lines)
    return variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "")
