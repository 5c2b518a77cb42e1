"""Workers over ssh on hosts with networks, addresses and names of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Faults, Network, SSHLauncher, Timeouts
from clusterenv.doctor.examination import examine
from clusterenv.errors import WorkerLost
from tests.conftest import wait_until_gone
from tests.hosts import Host, connected_hosts
from tests.policies import Linear
from tests.sshd import ROOT, Sshd, require_sshd
from tests.worlds import assert_same, make_factories

START = """
import json, signal, sys
from clusterenv import ClusterEnv, Network, SSHLauncher
from tests.worlds import World

settings = json.loads(sys.argv[1])
envs = ClusterEnv([World] * 2, num_workers=2, network=Network(transport="zmq"), launcher=SSHLauncher(**settings))
envs.reset(seed=1)
print(json.dumps(envs.worker_pids), flush=True)
signal.pause()
"""


class Site:
    """A head's host, where the test is, and two others that can be logged in to."""

    def __init__(self, hosts: list[Host], sshd: Sshd) -> None:
        self.head, self.one, self.two = hosts
        self._sshd = sshd

    def launcher(self) -> SSHLauncher:
        return self._sshd.launcher(["host1", "host2"], cpus=1, connect_timeout_s=2)


@pytest.fixture
def site(nothing_is_left_behind: None) -> Iterator[Site]:
    require_sshd()
    with tempfile.TemporaryDirectory() as scratch:
        keys = Path(scratch) / "keys"
        keys.mkdir()
        with (
            connected_hosts(["head", "one", "two"], Path(scratch)) as hosts,
            Sshd(keys, {host.address: host.command for host in hosts[1:]}) as sshd,
            hosts[0].entered(),
        ):
            yield Site(hosts, sshd)


def test_environments_on_other_hosts_step_as_in_one_process(site: Site) -> None:
    factories = make_factories(5)
    with ClusterEnv(factories, launcher=site.launcher(), network=Network(transport="zmq")) as ours:
        assert ours.num_workers == 2
        theirs = SyncVectorEnv(factories)
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        theirs.action_space.seed(3)
        for _ in range(20):
            actions = theirs.action_space.sample()
            assert_same(ours.step(actions), theirs.step(actions))


def test_policies_act_on_other_hosts(site: Site) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, launcher=site.launcher(), network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            assert envs.rollout(agent, num_steps=16).obs.shape == (16, 4, 4)
            agent.nudge()


def test_the_doctor_finds_all_well_on_other_hosts(site: Site) -> None:
    found = {finding.subject: finding for finding in examine(site.launcher(), 2, env_id="CartPole-v1", join_s=30.0)}
    assert all(finding.is_ok for finding in found.values()), list(map(str, found.values()))
    assert found["start"].text.endswith("1 on one, 1 on two")
    assert f"at tcp://{site.head.address}:" in found["reach"].text


@pytest.mark.slow
def test_a_host_that_vanishes_is_named(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    timeouts = Timeouts(silence_s=3.0, close_s=1.0)
    options: dict[str, Any] = {
        "network": Network(transport="zmq"),
        "timeouts": timeouts,
        "faults": Faults(on_loss="raise"),
    }
    with ClusterEnv(make_factories(2), launcher=site.launcher(), **options) as envs:
        envs.reset(seed=1)
        site.two.cut()
        with pytest.raises(WorkerLost, match="on two") as caught:
            envs.step([0, 0])
    assert caught.value.worker_index == 1
    assert "host2 could not be reached to end the workers there" in caplog.text
    subprocess.run(["ip", "-n", site.two.namespace, "link", "set", "eth0", "up"], check=True)
    assert wait_until_gone([envs.worker_pids[1]], 60.0) == [], "it finds the head gone"


def test_workers_on_other_hosts_end_when_the_head_is_killed(site: Site) -> None:
    launcher = site.launcher()
    settings = {name: getattr(launcher, name) for name in ("hosts", "python", "setup", "ssh_options")}
    head = subprocess.Popen(
        [sys.executable, "-c", START, json.dumps(settings)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert head.stdout is not None
        pids = json.loads(head.stdout.readline())
        os.kill(head.pid, signal.SIGKILL)
        assert wait_until_gone(pids, 40.0) == []
    finally:
        head.kill()
        head.communicate()
