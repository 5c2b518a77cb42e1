"""One script, moved from a laptop to every place where workers can be: only the launcher changes, and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest
from examples import ppo

from clusterenv import KubernetesLauncher, LocalLauncher, SlurmLauncher
from clusterenv.launchers.base import Launcher
from tests.conftest import MARK
from tests.kube_cluster import ROOT, KubeCluster, kube_cluster
from tests.ray_cluster import RayCluster, ray_cluster
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.sshd import Sshd, sshd

__all__ = ["sshd"]

pytestmark = [pytest.mark.xdist_group("kubernetes"), pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    with kube_cluster(tmp_path_factory.mktemp("kube")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        cluster.start_head("--num-cpus=2")
        yield cluster


def train(launcher: Launcher) -> Sequence[float]:
    """Run the example; returns the returns of all episodes: each depends on all that was learned before."""
    return ppo.train(
        ppo.Args(
            env_id="CartPole-v1",
            total_timesteps=1024,
            num_envs=4,
            num_workers=2,
            num_steps=32,
            track=False,
            launcher=launcher,  # type: ignore[arg-type]  # any will do
        )
    )


@contextlib.contextmanager
def with_variables(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def test_an_example_learns_the_same_on_a_laptop_slurm_ssh_kubernetes_and_ray(
    sshd: Sshd, slurm: SlurmCluster, kubernetes: KubeCluster, ray: RayCluster
) -> None:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    pods = KubernetesLauncher(
        image=kubernetes.image,
        memory="512Mi",
        env={} if kubernetes.base is None else {"PYTHONPATH": path, MARK: os.environ[MARK]},
    )
    places: dict[str, tuple[Callable[[], AbstractContextManager[None]], Launcher]] = {
        "ssh": (contextlib.nullcontext, sshd.launcher(["host1", "host2"])),
        "slurm": (slurm.logged_in, SlurmLauncher(nodes=2, partition="cpu")),
        "kubernetes": (kubernetes.on_laptop, pods),
        "ray": (lambda: with_variables(ray.variables), ray.launcher()),
    }
    here = train(LocalLauncher())
    assert len(here) > 10
    for name, (entered, launcher) in places.items():
        with entered():
            assert train(launcher) == here, name
    slurm.wait_until_idle()
    assert kubernetes.remains() == []
