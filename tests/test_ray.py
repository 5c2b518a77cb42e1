"""Workers in a real Ray cluster, and what can go wrong on the way to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterenv import RayLauncher
from clusterenv.launchers.base import Launcher
from tests.conftest import descendants, wait_until_gone
from tests.launcher_contract import NUM_WORKERS, Door, LauncherContract
from tests.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster of one node with room for several runs."""
    with ray_cluster() as cluster:
        cluster.start_head("--num-cpus=8")
        yield cluster


@pytest.fixture(autouse=True)
def with_token(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)


class TestRayLauncher(LauncherContract):
    """What every launcher must do."""

    stride = 25

    @pytest.fixture(autouse=True)
    def with_cluster(self, cluster: RayCluster, nothing_is_left_behind: None) -> Iterator[None]:
        self.cluster = cluster
        yield
        assert wait_until_gone(descendants()) == []

    def test_an_interrupt_while_it_starts_leaves_nothing(self, launcher: Launcher, door: Door) -> None:
        super().test_an_interrupt_while_it_starts_leaves_nothing(launcher, door)
        # Ray may still be about to start processes for actors that nobody wants any more, and then ends them. Once it
        # has started another, it is through with those.
        fleet = launcher.launch(door.ticket, NUM_WORKERS)
        try:
            for _ in range(NUM_WORKERS):
                door.await_join(fleet)
        finally:
            fleet.stop(0.0)

    def make_launcher(self, log_dir: Path) -> RayLauncher:
        return self.cluster.launcher(log_dir=log_dir)
