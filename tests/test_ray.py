"""Workers in a real Ray cluster, and what can go wrong on the way to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Network, RayLauncher
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import Launcher
from tests.conftest import MARK, descendants, guardian_of, wait_until_gone
from tests.launcher_contract import NUM_WORKERS, Door, LauncherContract
from tests.ray_cluster import RayCluster, ray_cluster
from tests.remains import command_of
from tests.sshd import ROOT
from tests.test_readme import blocks_of
from tests.worlds import assert_same, make_factories

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(300)]


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


HEAD = """
import json, os, signal, sys
from clusterenv import ClusterEnv, RayLauncher
from tests.worlds import World

envs = ClusterEnv([World] * 2, num_workers=2, launcher=RayLauncher(**json.loads(sys.argv[1])))
envs.reset(seed=1)
print(json.dumps(envs.worker_pids), flush=True)
signal.pause()
"""

# Python runs this first in every process: Ray then takes itself for another version.
OTHER_RAY = """
import ray
ray.__version__ = "1.2.3"
"""


class Talker(gym.Wrapper[Any, Any, Any, Any]):
    """Says something."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        sys.stdout.write("so says an environment\n")


def open_envs(launcher: RayLauncher, num_workers: int = 1, **options: Any) -> ClusterEnv:
    return ClusterEnv(make_factories(num_workers), num_workers=num_workers, launcher=launcher, **options)


def test_what_a_worker_prints_is_in_the_logs_of_ray_and_in_ours(cluster: RayCluster, tmp_path: Path) -> None:
    with ClusterEnv([Talker], launcher=cluster.launcher(log_dir=tmp_path)):
        logs = (cluster.directory / "ray" / "session_latest" / "logs").glob("worker-*.out")
        assert any("so says an environment" in log.read_text() for log in logs)
    assert "so says an environment" in next(tmp_path.glob("run-*/worker-0.log")).read_text()


def test_workers_end_when_the_head_is_killed(cluster: RayCluster) -> None:
    launcher = cluster.launcher()
    settings = json.dumps({"address": launcher.address, "runtime_env": launcher.runtime_env})
    head = subprocess.Popen([sys.executable, "-c", HEAD, settings], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert head.stdout is not None
        pids = json.loads(head.stdout.readline())
        head.kill()
        assert wait_until_gone(pids) == []
    finally:
        head.kill()
        head.communicate()
    assert wait_until_gone(descendants()) == []


@pytest.mark.parametrize("moment", ["the driver starts", "an actor starts", "workers end"])
def test_a_head_that_is_killed_while_it_starts_or_ends_leaves_nothing(cluster: RayCluster, moment: str) -> None:
    launcher = cluster.launcher()
    settings = json.dumps({"address": launcher.address, "runtime_env": launcher.runtime_env})
    script = HEAD.replace("signal.pause()", "envs.close()")
    head = subprocess.Popen([sys.executable, "-c", script, settings], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    wanted = {"the driver starts": "ray_driver", "an actor starts": "Holder"}.get(moment)
    try:
        assert head.stdout is not None
        if wanted is None:
            wait_until_gone(json.loads(head.stdout.readline())[:1])
        else:
            await_process(wanted)
        head.kill()
    finally:
        head.kill()
        head.communicate()
    assert wait_until_gone(descendants(), 20.0) == []


def await_process(words: str) -> None:
    """Wait until a process of this test's has a command line with these words."""
    ends_at = time.monotonic() + 60.0
    while not any(words in command_of(pid) for pid in descendants()):
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def test_the_death_of_the_driver_is_the_loss_of_all_and_the_run_goes_on(cluster: RayCluster) -> None:
    with open_envs(cluster.launcher(), 2) as envs:
        envs.reset(seed=1)
        pids = envs.worker_pids
        (driver,) = [pid for pid in descendants() if b"ray_driver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(driver, signal.SIGKILL)
        assert wait_until_gone(pids) == []
        *_, infos = envs.step([0, 0])
        assert infos["worker_lost"].all()
        envs.step([0, 0])
        assert not set(pids) & set(envs.worker_pids)
        assert {loss.worker_index for loss in envs.losses} == {0, 1}


def test_an_actor_that_is_killed_takes_its_worker_with_it_and_is_replaced(cluster: RayCluster) -> None:
    with open_envs(cluster.launcher(), 2) as envs:
        envs.reset(seed=1)
        worker = envs.worker_pids[1]
        actor = parent_of(guardian_of(worker))
        os.kill(actor, signal.SIGKILL)
        assert wait_until_gone([worker]) == []
        *_, infos = envs.step([0, 0])
        assert infos["worker_lost"].tolist() == [False, True]
        assert "Ray has lost it" in envs.losses[0].reason or "connection" in envs.losses[0].reason


def test_a_cluster_on_this_machine_is_started_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ce-ray-", dir="/tmp") as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        # One that was there once, and has left its address behind.
        (Path(directory) / "ray").mkdir()
        (Path(directory) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        # More than this machine has cores: there is nobody to wait for.
        with ClusterEnv(make_factories(3), num_workers=3, launcher=RayLauncher()) as envs:
            assert_same(envs.reset(seed=1), SyncVectorEnv(make_factories(3)).reset(seed=1))
        assert wait_until_gone(descendants()) == []


def test_the_cluster_of_a_ray_job_is_used(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    assert RayLauncher().route_to == cluster.address.rpartition(":")[0]
    launcher = RayLauncher(runtime_env=cluster.launcher().runtime_env)
    with ClusterEnv(make_factories(1), launcher=launcher) as envs:
        (worker,) = envs.worker_pids
        raylet = parent_of(parent_of(guardian_of(worker)))
        assert str(cluster.directory) in command_of(raylet)


def test_the_block_of_the_manual_runs(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    (block,) = blocks_of(ROOT / "docs" / "how-to" / "ray.md")
    script = tmp_path / "train.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match=r"no Ray cluster answers at 127.0.0.1:1 .*RayLauncher\(address=\.\.\.\)"):
        open_envs(RayLauncher(address="127.0.0.1:1"))


def test_another_version_of_ray_is_named(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_RAY)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match=r"differ: .*1\.2\.3.*Install the cluster's version of Ray here"):
        open_envs(cluster.launcher())


def test_a_python_without_ray_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'clusterenv-rl\[ray\]'"):
        open_envs(RayLauncher(address="127.0.0.1:1"))


def test_a_cluster_without_clusterenv_is_told_how_to_get_it(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "clusterenv").mkdir()
    (tmp_path / "clusterenv" / "__init__.py").touch()
    variables = {MARK: os.environ[MARK], "PYTHONPATH": str(tmp_path)}
    launcher = cluster.launcher(runtime_env={"env_vars": variables})
    with pytest.raises(LaunchError, match=r"(?s)has no clusterenv.*runtime_env=.*No module named"):
        open_envs(launcher)


def test_a_runtime_environment_that_cannot_be_set_up_is_told_in_the_words_of_ray(cluster: RayCluster) -> None:
    with pytest.raises(LaunchError, match="/nowhere must be an existing directory"):
        open_envs(cluster.launcher(runtime_env={"working_dir": "/nowhere"}))


def test_a_head_that_workers_cannot_reach_is_named(cluster: RayCluster) -> None:
    network = Network(listen="127.0.0.1", advertise="127.0.0.1:1")
    with pytest.raises(LaunchError, match=r"(?s)exit status \d+ on .*nobody listens at tcp://127.0.0.1:1"):
        open_envs(cluster.launcher(), network=network)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpus": -1}, "at least 0"),
        ({"cpus": "2"}, "must be a number"),
        ({"gpus": 1.5}, "must be whole"),
        ({"resources": {"CPU": 1}}, r"use RayLauncher\(cpus=\.\.\.\)"),
        ({"resources": {"memory": 2**30}}, "resources may not have 'memory': Ray counts it itself"),
        ({"resources": {"object_store_memory": 2**30}}, "may not have 'object_store_memory'"),
        ({"resources": {"room": float("nan")}}, "at least 0"),
        ({"resources": ["room"]}, "must be a mapping"),
        ({"runtime_env": {"pip": {1, 2}}}, "must be plain data"),
        ({"placement": "ANYWHERE"}, "must be one of"),
        ({"address": "ray://10.0.0.1:10001"}, "submit the script as a Ray job"),
        ({"address": "cluster"}, "HOST:PORT"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is_written(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RayLauncher(**settings)


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://127.0.0.1:8265", "10.0.0.1"])
def test_a_ray_address_that_leads_to_no_head_node_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=rf"\$RAY_ADDRESS must be .*HOST:PORT.*got '{address}'.*as a Ray job"):
        open_envs(RayLauncher())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
