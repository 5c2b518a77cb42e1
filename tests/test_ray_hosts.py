"""Workers in a Ray cluster whose nodes are hosts with networks, addresses and names of their own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Faults, Network, RayLauncher, Timeouts
from tests.conftest import descendants, wait_until_gone
from tests.hosts import Host, connected_hosts
from tests.policies import Linear
from tests.ray_cluster import RayCluster, ray_cluster
from tests.worlds import assert_same, make_factories

pytestmark = [pytest.mark.xdist_group("ray hosts"), pytest.mark.slow, pytest.mark.timeout(300)]

NETWORK = Network(transport="zmq")


class Site:
    """A Ray cluster of two nodes; the test is on the first one's host. There is a host for a third node."""

    def __init__(self, hosts: list[Host], cluster: RayCluster) -> None:
        self.one, self.two, self.three = hosts
        self.cluster = cluster

    def start(self) -> None:
        """Start the nodes: each holds one worker."""
        self.cluster.start_head("--num-cpus=1", host=self.one)
        self.cluster.add_node("--num-cpus=1", host=self.two)

    def launcher(self, **settings: Any) -> RayLauncher:
        return self.cluster.launcher(**settings)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with tempfile.TemporaryDirectory() as scratch, connected_hosts(["one", "two", "three"], Path(scratch)) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def running(hosts: list[Host]) -> Iterator[Site]:
    with ray_cluster() as cluster:
        site = Site(hosts, cluster)
        site.start()
        yield site


@pytest.fixture
def site(running: Site, nothing_is_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name, value in running.cluster.variables.items():
        monkeypatch.setenv(name, value)
    with running.one.entered():
        yield running
    assert wait_until_gone(descendants()) == []


def test_workers_are_spread_over_the_nodes_and_step_as_in_one_process(site: Site) -> None:
    factories = make_factories(5)
    with ClusterEnv(factories, num_workers=2, launcher=site.launcher(), network=NETWORK) as ours:
        assert {worker.host for worker in ours.workers} == {"one", "two"}
        theirs = SyncVectorEnv(factories)
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        theirs.action_space.seed(3)
        for _ in range(20):
            actions = theirs.action_space.sample()
            assert_same(ours.step(actions), theirs.step(actions))
        assert ours.workers[0].host != ours.workers[1].host


def test_a_worker_that_ray_cannot_place_is_waited_for_until_a_node_comes_and_replaced_when_that_dies(
    site: Site,
) -> None:
    launcher = site.launcher(cpus=0, resources={"late": 1})
    has_come = False

    class Bring(logging.Handler):
        """Is the autoscaler: brings a node when it hears that one is needed."""

        def emit(self, record: logging.LogRecord) -> None:
            nonlocal has_come
            if "each needs 1 late, and free on its nodes are 0 of 0 late" in record.getMessage() and not has_come:
                has_come = True
                site.cluster.add_node("--num-cpus=0", '--resources={"late": 1}', host=site.three, waits=False)

    handler = Bring()
    logging.getLogger("clusterenv").addHandler(handler)
    try:
        timeouts = Timeouts(join_s=90.0, silence_s=3.0)
        with ClusterEnv(make_factories(1), launcher=launcher, network=NETWORK, timeouts=timeouts) as envs:
            assert has_come
            assert envs.workers[0].host == "three"
            envs.reset(seed=1)
            (pid,) = envs.worker_pids
            site.cluster.kill_node(site.three)
            assert wait_until_gone([pid]) == []
            has_come = False  # And once more.
            *_, infos = envs.step([0])
            assert infos["worker_lost"].tolist() == [True]
            assert has_come
            assert envs.worker_pids != (pid,)
    finally:
        logging.getLogger("clusterenv").removeHandler(handler)
        site.cluster.kill_node(site.three)


def test_a_stream_goes_on_while_a_node_is_dead_and_ray_puts_its_worker_elsewhere(site: Site) -> None:
    site.cluster.add_node("--num-cpus=1", host=site.three)
    launcher, faults = site.launcher(), Faults(min_workers=1)
    with ClusterEnv("CartPole-v1", 3, num_workers=3, launcher=launcher, network=NETWORK, faults=faults) as envs:
        with envs.stream(Linear(), 16) as stream:
            while {worker.state for worker in envs.workers} != {"ready"}:
                next(stream)
            lost = next(worker for worker in envs.workers if worker.host == "three")
            site.cluster.kill_node(site.three)
            while envs.workers[lost.index].state == "ready":
                next(stream)
            for _ in range(10):
                assert next(stream).env_indices[0] != lost.index
            site.cluster.add_node("--num-cpus=1", host=site.three)
            while not envs.losses:
                next(stream)
        assert envs.workers[lost.index].pid != lost.pid
    site.cluster.kill_node(site.three)


def test_nothing_is_left_when_the_whole_cluster_is_stopped(site: Site) -> None:
    with ClusterEnv(make_factories(2), num_workers=2, launcher=site.launcher(), network=NETWORK) as envs:
        pids = envs.worker_pids
        site.cluster.stop()
        assert wait_until_gone(pids) == []
