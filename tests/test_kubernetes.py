"""KubernetesLauncher on a real control plane, with nodes that have addresses and host names of their own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import msgspec
import pytest

from clusterenv import ClusterEnv, Faults, KubernetesLauncher, Network, Timeouts
from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.wire.messages import Join
from tests.conftest import MARK
from tests.kube_cluster import KubeCluster, kube_cluster
from tests.launcher_contract import NUM_WORKERS, Door, LauncherContract

ROOT = Path(__file__).parent.parent
LAPTOP = "10.88.0.4"
TIMEOUTS = Timeouts(join_s=30, call_s=30, close_s=5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """A Kubernetes with two nodes."""
    with kube_cluster(tmp_path_factory.mktemp("kube")) as cluster:
        KubeEnv.cluster = cluster
        yield cluster


@pytest.fixture(autouse=True)
def laptop(cluster: KubeCluster, nothing_is_left_behind: None) -> Iterator[KubeCluster]:
    """Every test runs on the laptop, and leaves nothing in the cluster."""
    with cluster.on_laptop():
        yield cluster
        left = cluster.remains()
        if left:
            cluster.kubectl("delete", "--force", "--grace-period=0", *left)
    assert not left


def make(**settings: Any) -> KubernetesLauncher:
    """Return a launcher whose workers find the code under test, and are found by the conftest."""
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH") or f"{ROOT / 'src'}{os.pathsep}{ROOT}", MARK: os.environ[MARK]}
    return KubernetesLauncher(**{"image": "any", "memory": "256Mi", **settings, "env": env | settings.get("env", {})})


class KubeDoor(Door):
    """Knows workers by their process ids here: in its container every worker has the same."""

    def __init__(self, cluster: KubeCluster) -> None:
        super().__init__(LAPTOP)
        self._cluster = cluster

    def await_join(self, fleet: Fleet) -> Join:
        join = super().await_join(fleet)
        return msgspec.structs.replace(join, pid=self._cluster.pid_of(join.hostname))


class KubeEnv(ClusterEnv):
    """Knows workers by their process ids here."""

    cluster: ClassVar[KubeCluster]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return tuple(self.cluster.pid_of(worker.host or "") for worker in self.workers)


class Farewell(gym.Wrapper[Any, Any, Any, Any]):
    """Leaves a file when it is closed, in a directory that the nodes share."""

    def __init__(self, directory: Path) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._directory = directory

    def close(self) -> None:
        (self._directory / f"closed in {socket.gethostname()}").touch()


class TestKubernetesLauncher(LauncherContract):
    address = LAPTOP
    options = {"network": Network(transport="zmq")}  # noqa: RUF012 - a constant
    stride = 160

    def make_launcher(self, log_dir: Path) -> Launcher:
        return make(log_dir=log_dir)

    def open(self, launcher: Launcher, env: Any, num_envs: int | None = None, on_loss: str = "replace") -> ClusterEnv:
        return KubeEnv(
            env,
            num_envs,
            num_workers=NUM_WORKERS,
            launcher=launcher,
            timeouts=TIMEOUTS,
            faults=Faults(on_loss=on_loss),
            network=Network(transport="zmq"),
        )

    def test_workers_that_are_told_to_stop_are_not_killed(self, launcher: Launcher, tmp_path: Path) -> None:
        with self.open(launcher, [partial(Farewell, tmp_path)] * 4) as envs:
            pods = [worker.host for worker in envs.workers]
        assert {f"closed in {pod}" for pod in pods} <= {path.name for path in tmp_path.iterdir()}

    @pytest.fixture
    def door(self, laptop: KubeCluster) -> Iterator[Door]:
        door = KubeDoor(laptop)
        yield door
        door.close()
