"""A real Kubernetes: what operators, schedulers and bad luck do to Pods, nodes and the control plane."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.kube_cluster import ROOT, KubeCluster, KubeEnv, kube_cluster
from tests.remains import MARK, command_of, descendants

from chaos.faults import Effect, Fault, Target, everybody, kill, too_long
from chaos.places.place import BRIEF, Place, wait_until
from clusterenv import KubernetesLauncher, Network

TAINT = "reclaimed"
GRACE_S = 2
# As clusters have them; the bed's are so short that a slow start of its API server costs all Pods.
TOLERATIONS = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for state in ("not-ready", "unreachable")
]


@contextlib.contextmanager
def open_kubernetes(transport: str, num_workers: int) -> Iterator[Place]:
    """Start the test bed, and be on a laptop beside it; in the end nothing of a run may be left in it."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        kube_cluster(Path(directory)) as cluster,
        cluster.on_laptop(),
    ):
        assert cluster.base is not None, "Pods must be processes of this machine to be harmed"
        KubeEnv.cluster = cluster
        site = _Site(cluster)
        faults = [
            Fault("deleted Pod", "with grace", Effect.LOSS, site.delete_pod),
            Fault("deleted Pod", "by force", Effect.LOSS, site.delete_pod_by_force),
            Fault("evicted Pod", "", Effect.LOSS, site.evict_pod),
            Fault("drained node", "", Effect.LOSS, site.drain_node, site.share_node),
            Fault("lost node", "", Effect.LOSS, site.lose_node, site.share_node, is_rare=True),
            Fault("partition", "too long", Effect.LOSS, site.cut_for_long, site.share_node),
            Fault("partition", "brief", Effect.NONE, site.cut_briefly, site.share_node),
            Fault("deleted Job", "", Effect.LOSS, site.delete_job, everybody, is_rare=True),
            Fault("API server", "killed, and a worker too", Effect.LOSS, site.restart_api_server),
            Fault("API server", "hangs", Effect.NONE, site.freeze_api_server),
            Fault("killed client", "", Effect.NONE, site.kill_client),
        ]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        variables = {"PYTHONPATH": path, MARK: os.environ[MARK]}
        launcher = KubernetesLauncher(image=cluster.image, memory="256Mi", env=variables, tolerations=TOLERATIONS)
        options = {"launcher": launcher, "network": Network(transport=transport)}
        yield Place(options, faults, KubeEnv, call_s=20.0, deadline_s=120.0)
        assert cluster.remains() == [], "left in the cluster"


class _Site:
    """What befalls a cluster. A node, link or server that is taken away is brought back before a fault is over."""

    def __init__(self, cluster: KubeCluster) -> None:
        self._cluster = cluster

    def delete_pod(self, target: Target) -> None:
        """Delete a worker's Pod, as anybody may who sees it."""
        self._delete(target, f"--grace-period={GRACE_S}")

    def delete_pod_by_force(self, target: Target) -> None:
        """Delete it without asking its node."""
        self._delete(target, "--force", "--grace-period=0")

    def evict_pod(self, target: Target) -> None:
        """Ask for the Pod's eviction, as `kubectl drain` does."""
        pod = self._pod_of(target)
        eviction = {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": "default"},
            "deleteOptions": {"gracePeriodSeconds": GRACE_S},
        }
        path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
        self._cluster.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))

    def drain_node(self, target: Target) -> None:
        """Have a node's Pods leave, as before a spot node is reclaimed, until all have."""
        node, pods = self._node_of(target), set(self._pods_on(self._node_of(target)))
        self._cluster.kubectl("taint", "node", node, f"{TAINT}=yes:NoExecute")
        try:
            wait_until(lambda: not pods & set(self._pods_on(node)), self._describe)
        finally:
            self._cluster.kubectl("taint", "node", node, f"{TAINT}-")

    def lose_node(self, target: Target) -> None:
        """Let a node lose its power, and have it back when Kubernetes has noticed."""
        node = self._node_of(target)
        self._cluster.signal(node, signal.SIGKILL)
        try:
            wait_until(lambda: not self._is_ready(node), self._describe)
        finally:
            self._mend()

    def cut_for_long(self, target: Target) -> None:
        """Cut a node's link until its workers have been replaced."""
        self._cut(target, too_long(target))

    def cut_briefly(self, target: Target) -> None:
        """Cut a node's link for so short a time that nobody is lost."""
        self._cut(target, BRIEF * target.silence_s)

    def delete_job(self, target: Target) -> None:
        """Delete the Job that owns all of the run's Pods, and its Secret."""
        for job in self._cluster.objects("jobs"):
            self._cluster.kubectl("delete", "job", job["metadata"]["name"], "--wait=false")

    def restart_api_server(self, target: Target) -> None:
        """Kill the API server, and a worker while it is away."""
        self._cluster.signal("apiserver", signal.SIGKILL)
        kill(target)
        self._mend()

    def freeze_api_server(self, target: Target) -> None:
        """Let the API server answer nobody for a while."""
        self._cluster.signal("apiserver", signal.SIGSTOP)
        try:
            time.sleep(target.silence_s)
        finally:
            self._cluster.signal("apiserver", signal.SIGCONT)

    def kill_client(self, target: Target) -> None:
        """Kill the process that talks to the cluster for the head."""
        for pid in descendants():
            if "clusterenv.launchers.kubernetes.client" in command_of(pid):
                os.kill(pid, signal.SIGKILL)

    def share_node(self, target: Target) -> Collection[int]:
        """Return who is on the same node."""
        pods = set(self._pods_on(self._node_of(target)))
        return [index for index, pid in enumerate(target.pids) if hostname_of(pid) in pods]

    def _delete(self, target: Target, *how: str) -> None:
        self._cluster.kubectl("delete", "pod", self._pod_of(target), "--wait=false", *how)

    def _cut(self, target: Target, seconds: float) -> None:
        node = self._node_of(target)
        self._cluster.set_link(node, "down")
        try:
            time.sleep(seconds)
        finally:
            self._cluster.set_link(node, "up")
            wait_until(lambda: self._is_ready(node), self._describe)

    def _mend(self) -> None:
        self._cluster.repair()

    def _pod_of(self, target: Target) -> str:
        return hostname_of(target.pid)

    def _node_of(self, target: Target) -> str:
        pod = self._pod_of(target)
        return self._cluster.kubectl("get", "pod", pod, "--output=jsonpath={.spec.nodeName}")

    def _pods_on(self, node: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self._cluster.workers() if pod["spec"].get("nodeName") == node]

    def _is_ready(self, node: str) -> bool:
        condition = '--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        return self._cluster.kubectl("get", "node", node, condition) == "True"

    def _describe(self) -> str:
        return self._cluster.kubectl("get", "nodes,pods", "--output=wide")


def hostname_of(pid: int) -> str:
    """Return the name of the Pod that a process is in; empty if it is gone."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((line.partition("=")[2] for line in variables if line.startswith("HOSTNAME=")), "")
