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
from typing import Any

import pytest

from tests.hosts import Host, require
from tests.remains import descendants

ROOT = Path(__file__).parent.parent
INFRA = ROOT.parent / "shared" / "infra"
PROGRAMS = ("etcd", "kubectl", "openssl", "xz", "ip", "unshare", "setsid", "flock")
NUM_NODES = 2
CAPACITY = "cpu=4,memory=8Gi,pods=110"
POLL_S = 0.05


@dataclass
class KubeCluster:
    """A cluster that is up.

    Attributes:
        base: Where the bed keeps its files.
        laptop: Where heads run.
        prefix: Of the names of the bed's network namespaces.
    """

    base: Path
    laptop: Host
    prefix: str

    @property
    def kubeconfig(self) -> Path:
        return self.base / "kubeconfig"

    @contextlib.contextmanager
    def on_laptop(self) -> Iterator[None]:
        """Make this test, and what it starts, run on the laptop, as the cluster's administrator."""
        before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = str(self.kubeconfig)
        try:
            with self.laptop.entered():
                yield
        finally:
            del os.environ["KUBECONFIG"]
            if before is not None:
                os.environ["KUBECONFIG"] = before

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return what it prints."""
        with self.laptop.entered():
            done = subprocess.run(
                ["kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
                input=stdin,
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout.strip()

    def objects(self, kind: str, namespace: str = "default") -> list[dict[str, Any]]:
        """Return all objects of a kind that a run has made."""
        selector = "--selector=app.kubernetes.io/name=clusterenv"
        out = self.kubectl("get", kind, f"--namespace={namespace}", selector, "--output=json")
        items: list[dict[str, Any]] = json.loads(out)["items"]
        return items

    def remains(self, namespace: str = "default") -> list[str]:
        """Return the names of what runs have left."""
        found = self.kubectl(
            "get", "pods,secrets,jobs", f"--namespace={namespace}", "--selector=app.kubernetes.io/name=clusterenv",
            "--output=name",
        )  # fmt: skip
        return found.split()

    def wait_until(self, is_true: Callable[[], bool], deadline_s: float = 20.0) -> None:
        """Wait for something that only Kubernetes can be asked about."""
        ends_at = time.monotonic() + deadline_s
        while not is_true():
            assert time.monotonic() < ends_at, self.kubectl("get", "pods,jobs,events", "--all-namespaces")
            time.sleep(POLL_S)

    def pid_of(self, worker_index: int) -> int:
        """Return the process id, here, of the newest process of a worker: in its container it has another."""
        found = []
        for pid in descendants():
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                is_worker = b"clusterenv.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            except OSError:
                continue
            if is_worker and name != "ce-guardian" and f"CLUSTERENV_WORKER={worker_index}".encode() in entries:
                found.append((began, pid))
        return max(found)[1]

    def kill_node(self, name: str) -> None:
        """Let a node lose its power."""
        os.kill(int((self.base / "pid" / f"{name}.pid").read_text()), signal.SIGKILL)

    def repair(self) -> None:
        """Start what has been killed, and wait until all nodes are ready."""
        bed_up(self.base, self.prefix)


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
        [str(INFRA / "kube" / "up.sh"), str(base), str(NUM_NODES), prefix],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def kube_cluster(directory: Path) -> Iterator[KubeCluster]:
    """Start the bed with two nodes, and end it."""
    if not (INFRA / "kube" / "up.sh").exists():
        pytest.skip(f"needs the Kubernetes test bed in {INFRA.relative_to(ROOT.parent)} beside the project")
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
        yield KubeCluster(base, laptop, prefix)
    finally:
        subprocess.run([str(INFRA / "kube" / "down.sh"), str(base)], check=False)
        for namespace in (f"{prefix}-sw", *(f"{prefix}-h{number}" for number in range(1, num_hosts + 1))):
            subprocess.run(["ip", "netns", "delete", namespace], check=False)
