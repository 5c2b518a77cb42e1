"""A real Kubernetes: the test bed beside the project, or the cluster that KUBECONFIG names.

The bed (`../shared/infra/kube`) is a real control plane whose nodes are hosts of their own (network namespaces) and
whose Pods are processes of this kernel, so that a test can find and kill them. Heads run on a host that is no part of
the cluster, as on somebody's laptop in the same network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from clusterenv import ClusterEnv
from tests.hosts import Host, require
from tests.remains import descendants, wait_until_gone

ROOT = Path(__file__).parent.parent
INFRA = ROOT.parent / "shared" / "infra"
BED = INFRA / "kube" / "up.sh"
PROGRAMS = ("etcd", "kubectl", "openssl", "xz", "ip", "unshare", "setsid", "flock")
NUM_NODES = 2
CAPACITY = "cpu=4,memory=8Gi,pods=110"
POLL_S = 0.05


@dataclass
class KubeCluster:
    """A cluster that is up.

    Attributes:
        kubeconfig: Its administrator's.
        image: With clusterenv in it; on the bed any name will do.
        laptop: The host that heads run on; None for this machine.
        base: Where the bed keeps its files; None for a cluster that is not the bed.
        prefix: Of the names of the bed's network namespaces.
    """

    kubeconfig: str
    image: str
    laptop: Host | None = None
    base: Path | None = None
    prefix: str = ""

    @contextlib.contextmanager
    def on_laptop(self) -> Iterator[None]:
        """Make this test, and what it starts, run where heads run, as the cluster's administrator."""
        before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = self.kubeconfig
        try:
            with contextlib.nullcontext() if self.laptop is None else self.laptop.entered():
                yield
        finally:
            del os.environ["KUBECONFIG"]
            if before is not None:
                os.environ["KUBECONFIG"] = before

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return what it prints."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        with self.on_laptop():
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout.strip()

    def apply(self, *objects: dict[str, Any]) -> None:
        """Create or change objects."""
        self.kubectl("apply", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def objects(self, kind: str, namespace: str = "default") -> list[dict[str, Any]]:
        """Return all objects of a kind that a run has made."""
        selector = "--selector=app.kubernetes.io/name=clusterenv"
        out = self.kubectl("get", kind, f"--namespace={namespace}", selector, "--output=json")
        items: list[dict[str, Any]] = json.loads(out)["items"]
        return items

    def workers(self, namespace: str = "default") -> list[dict[str, Any]]:
        """Return the Pods of workers."""
        return [pod for pod in self.objects("pods", namespace) if "clusterenv/worker" in pod["metadata"]["labels"]]

    def remains(self, namespace: str = "default") -> list[str]:
        """Return the names of what runs have left."""
        found = self.kubectl(
            "get", "pods,secrets,jobs", f"--namespace={namespace}", "--selector=app.kubernetes.io/name=clusterenv",
            "--output=name",
        )  # fmt: skip
        return found.split()

    def wait_until(self, is_true: Callable[[], bool], deadline_s: float = 60.0) -> None:
        """Wait for something that only Kubernetes can be asked about."""
        ends_at = time.monotonic() + deadline_s
        while not is_true():
            assert time.monotonic() < ends_at, self.kubectl("get", "pods,jobs,events", "--all-namespaces")
            time.sleep(POLL_S)

    def pid_of(self, pod: str) -> int:
        """Return the process id, here, of the worker in a Pod: in its container it has another."""
        for pid in descendants():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_worker = command[1:3] == [b"-m", b"clusterenv.worker"]  # And not the shell around it.
                is_guardian = Path(f"/proc/{pid}/comm").read_text().strip() == "ce-guardian"
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if is_worker and not is_guardian and f"HOSTNAME={pod}".encode() in variables:
                    return pid
        raise LookupError(f"there is no worker in Pod {pod}")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process of the bed: "n2" is a node, "apiserver" a part of the control plane.

        One that is killed is gone when this returns, and its ports are free.
        """
        assert self.base is not None, "only the bed's processes are ours"
        pid = int((self.base / "pid" / f"{name}.pid").read_text())
        os.kill(pid, number)
        if number == signal.SIGKILL:
            assert wait_until_gone([pid]) == []

    def set_link(self, node: str, state: str) -> None:
        """Cut a node off ("down"), or connect it again ("up")."""
        subprocess.run(["ip", "-n", f"{self.prefix}-sw", "link", "set", node.replace("n", "p"), state], check=True)

    def repair(self) -> None:
        """Start what has been killed, and wait until all nodes are ready."""
        assert self.base is not None, "only the bed is ours"
        bed_up(self.base, self.prefix)


class KubeEnv(ClusterEnv):
    """Knows workers by their process ids here: in its container every worker has the same."""

    cluster: ClassVar[KubeCluster]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._pids: dict[str, int] = {}
        super().__init__(*arguments, **options)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Their ids; those of workers that are lost are what they were."""
        return tuple(self._find_pid(worker.host or "") for worker in self.workers)

    def _find_pid(self, pod: str) -> int:
        if pod not in self._pids:
            self._pids[pod] = self.cluster.pid_of(pod)
        return self._pids[pod]


def bed_up(base: Path, prefix: str) -> None:
    """Start the bed, or what is not running of it; containers find this Python first."""
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NODE_CAPACITY": CAPACITY,
        "NODE_GRACE": "5",
        "KUBECONFIG": "",
    }
    environment.pop("CLUSTERENV_TEST_MARK", None)
    done = subprocess.run(
        [str(BED), str(base), str(NUM_NODES), prefix],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def require_bed() -> None:
    """Skip the test where Pods are not processes of this machine."""
    if not BED.exists():
        pytest.skip("needs the Kubernetes test bed, whose Pods are processes of this machine")


@contextlib.contextmanager
def kube_cluster(directory: Path) -> Iterator[KubeCluster]:
    """Start the bed with two nodes, and end it; without a bed, take the cluster that there is."""
    if not BED.exists():
        kubeconfig, image = os.environ.get("KUBECONFIG"), os.environ.get("CLUSTERENV_TEST_IMAGE")
        if kubeconfig is None or image is None:
            pytest.skip(
                "needs a Kubernetes: the test bed beside the project (../shared/infra/kube), or KUBECONFIG and, in "
                "CLUSTERENV_TEST_IMAGE, an image with this clusterenv"
            )
        require("kubectl")
        yield KubeCluster(kubeconfig, image)
        return
    require(*PROGRAMS)
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    prefix = f"ck{os.getpid()}"
    base = directory / "bed"
    num_hosts = NUM_NODES + 2
    laptop = Host("laptop", f"10.88.0.{num_hosts}", f"{prefix}-h{num_hosts}", base / "hosts", None)
    try:
        subprocess.run([str(INFRA / "netns_up.sh"), str(num_hosts), prefix], check=True)
        bed_up(base, prefix)
        yield KubeCluster(str(base / "kubeconfig"), "any", laptop, base, prefix)
    finally:
        subprocess.run([str(INFRA / "kube" / "down.sh"), str(base)], check=False)
        for namespace in (f"{prefix}-sw", *(f"{prefix}-h{number}" for number in range(1, num_hosts + 1))):
            subprocess.run(["ip", "netns", "delete", namespace], check=False)
