"""A real Ray cluster of three nodes: what befalls its actors, its nodes and the process that talks to it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.hosts import Host, connected_hosts
from tests.ray_cluster import RayCluster, ray_cluster
from tests.remains import command_of, descendants

from chaos.faults import Effect, Fault, Target, everybody
from chaos.places.place import Place, host_of
from clusterenv import Network

NUM_CPUS = 4  # Of each node that workers may be on: one holds them all while the other is dead.


@contextlib.contextmanager
def open_ray(transport: str, num_workers: int) -> Iterator[Place]:
    """Start a cluster whose first node holds nobody but the head, and be there."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        connected_hosts(["first", "second", "third"], Path(directory)) as (first, *others),
        ray_cluster() as cluster,
    ):
        cluster.start_head("--num-cpus=0", host=first)
        site = _Site(cluster, others)
        for host in others:
            site.add_node(host)
        faults = [
            Fault("killed actor", "", Effect.LOSS, site.kill_actor),
            Fault("ended actor", "", Effect.LOSS, site.end_actor),
            Fault("killed driver", "", Effect.LOSS, site.kill_driver, everybody, is_rare=True),
            Fault("lost node", "", Effect.LOSS, site.lose_node, site.share_node, is_rare=True),
        ]
        os.environ.update(cluster.variables)
        try:
            with first.entered():
                options = {"launcher": cluster.launcher(), "network": Network(transport=transport)}
                yield Place(options, faults, call_s=20.0, deadline_s=120.0)
        finally:
            for name in cluster.variables:
                del os.environ[name]


class _Site:
    """What befalls a cluster. A node that is taken away is brought back before a fault is over."""

    def __init__(self, cluster: RayCluster, hosts: list[Host]) -> None:
        self._cluster = cluster
        self._hosts = hosts

    def add_node(self, host: Host) -> None:
        """Start a node, and wait until it is up."""
        self._cluster.add_node(f"--num-cpus={NUM_CPUS}", host=host)

    def kill_actor(self, target: Target) -> None:
        """Kill the process of an actor, as the kernel does when memory runs out: the worker is its child."""
        self._signal_actor(target, signal.SIGKILL)

    def end_actor(self, target: Target) -> None:
        """Ask the process of an actor to end, as Ray does when a node is stopped."""
        self._signal_actor(target, signal.SIGTERM)

    def kill_driver(self, target: Target) -> None:
        """Kill the process that talks to Ray for the head; Ray then ends all that it had started."""
        for pid in descendants():
            if "clusterenv.launchers.ray_driver" in command_of(pid):
                os.kill(pid, signal.SIGKILL)

    def lose_node(self, target: Target) -> None:
        """Let a node lose its power, and have it back: it joins as another one."""
        host = host_of(target.pid, self._hosts)
        if host is not None:
            self._cluster.kill_node(host)
            self.add_node(host)

    def share_node(self, target: Target) -> Collection[int]:
        """Return who is on the same node."""
        host = host_of(target.pid, self._hosts)
        return [index for index, pid in enumerate(target.pids) if host is not None and host_of(pid, [host]) is host]

    def _signal_actor(self, target: Target, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # It has just ended.
            os.kill(parent_of(parent_of(target.pid)), number)


def parent_of(pid: int) -> int:
    """Return the parent of a process: of a worker its guardian, of that the actor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
