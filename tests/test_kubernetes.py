"""KubernetesLauncher on a real control plane, with nodes that have addresses and host names of their own.

What the bed cannot show (memory limits, Indexed Jobs, conditions of newer versions) is in `test_kubernetes_settings`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgspec
import numpy as np
import pytest

from clusterenv import ByHandLauncher, ClusterEnv, Faults, KubernetesLauncher, Network, Timeouts
from clusterenv.cli import main
from clusterenv.errors import LaunchError
from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.launchers.kubernetes.manifest import RIGHTS
from clusterenv.wire.messages import Join
from clusterenv.wire.ticket import Ticket
from tests.conftest import MARK
from tests.kube_cluster import KubeCluster, KubeEnv, kube_cluster
from tests.launcher_contract import AT_ONCE_S, NUM_WORKERS, Door, LauncherContract, tells_secret, time_call
from tests.located import make_located
from tests.remains import command_of, descendants, wait_until_gone
from tests.test_readme import blocks_of

pytestmark = [pytest.mark.xdist_group("kubernetes"), pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent
MANUALS = [ROOT / "docs" / kind / "kubernetes.md" for kind in ("how-to", "tutorials")]
LAPTOP = "10.88.0.4"
TIMEOUTS = Timeouts(join_s=30, call_s=30, close_s=5, trial_s=0)
IMPATIENT = Timeouts(join_s=30, call_s=30, close_s=5, silence_s=3, trial_s=0)
OVER_TCP = Network(transport="zmq")

HEAD = """
import os, sys, time
from clusterenv import ClusterEnv, KubernetesLauncher, Network, Timeouts

if __name__ == "__main__":
    launcher = KubernetesLauncher(
        image={image!r}, memory="256Mi", lease_s={lease_s},
        env={{name: os.environ[name] for name in ("PYTHONPATH", "CLUSTERENV_TEST_MARK") if name in os.environ}},
    )
    network, timeouts = Network(transport="zmq"), Timeouts(trial_s=0)
    with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=launcher, network=network, timeouts=timeouts) as envs:
        envs.reset(seed=1)
        print("ready", flush=True)
        {then}
"""


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


@pytest.fixture
def bed(laptop: KubeCluster) -> KubeCluster:
    """The cluster, if its processes are of this kernel."""
    if laptop.base is None:
        pytest.skip("needs the Kubernetes test bed, whose Pods are processes of this machine")
    return laptop


@pytest.fixture
def door(bed: KubeCluster) -> Iterator[Door]:
    door = KubeDoor(bed)
    yield door
    door.close()


def make(**settings: Any) -> KubernetesLauncher:
    """Return a launcher whose workers find the code under test, and are found by the conftest."""
    env = {"PYTHONPATH": module_path(), MARK: os.environ[MARK]} if KubeEnv.cluster.base is not None else {}
    settings = {"image": KubeEnv.cluster.image, "memory": "256Mi", **settings}
    return KubernetesLauncher(**{**settings, "env": env | settings.get("env", {})})


def module_path() -> str:
    return os.environ.get("PYTHONPATH") or f"{ROOT / 'src'}{os.pathsep}{ROOT}"


def find_client() -> int:
    """Return the process that talks to the cluster for a head."""
    (client,) = [pid for pid in descendants() if "kubernetes.client" in command_of(pid)]
    return client


class KubeDoor(Door):
    """Knows workers by their process ids here: in its container every worker has the same."""

    def __init__(self, cluster: KubeCluster) -> None:
        super().__init__(LAPTOP)
        self._cluster = cluster

    def await_join(self, fleet: Fleet) -> Join:
        join = super().await_join(fleet)
        return msgspec.structs.replace(join, pid=self._cluster.pid_of(join.hostname))


def launch(
    launcher: Launcher,
    env: Any = "CartPole-v1",
    num_workers: int = NUM_WORKERS,
    timeouts: Timeouts = TIMEOUTS,
    network: Network = OVER_TCP,
) -> KubeEnv:
    """Open a ClusterEnv with two environments a worker."""
    return KubeEnv(env, 2 * num_workers, num_workers=num_workers, launcher=launcher, timeouts=timeouts, network=network)


class Farewell(gym.Wrapper[Any, Any, Any, Any]):
    """Leaves a file when it is closed, in a directory that the nodes share."""

    def __init__(self, directory: Path) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._directory = directory

    def close(self) -> None:
        (self._directory / f"closed in {socket.gethostname()}").touch()


@pytest.mark.usefixtures("bed")
class TestKubernetesLauncher(LauncherContract):
    address = LAPTOP
    stride = 97

    def make_launcher(self, log_dir: Path) -> Launcher:
        return make(log_dir=log_dir)

    def open(
        self, launcher: Launcher, env: Any, num_envs: int | None = None, faults: Faults | None = None
    ) -> ClusterEnv:
        return KubeEnv(
            env,
            num_envs,
            num_workers=NUM_WORKERS,
            launcher=launcher,
            timeouts=TIMEOUTS,
            faults=faults or Faults(),
            network=OVER_TCP,
        )

    @pytest.fixture
    def door(self, bed: KubeCluster) -> Iterator[Door]:
        door = KubeDoor(bed)
        yield door
        door.close()

    def test_workers_that_are_told_to_stop_are_not_killed(self, launcher: Launcher, tmp_path: Path) -> None:
        with self.open(launcher, [functools.partial(Farewell, tmp_path)] * 4) as envs:
            pods = [worker.host for worker in envs.workers]
        assert {f"closed in {pod}" for pod in pods} <= {path.name for path in tmp_path.iterdir()}


def test_the_objects_of_a_run_are_those_of_the_manual(laptop: KubeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ada/train_ppo.py"])
    monkeypatch.setenv("LOGNAME", "Ada L.")
    launcher = make(labels={"team": "walkers"}, cpus=0.5, tolerations=["spot=true:NoSchedule"])
    with launch(launcher, make_located) as envs:
        hosts = envs.get_attr("host")
        (job,), (secret,) = (laptop.objects(kind) for kind in ("jobs", "secrets"))
        pods = laptop.workers()
        whose = {f"clusterenv/{name}": value for name, value in (("name", "train-ppo"), ("user", "ada-l"))}
        for each in (job, secret, *laptop.objects("pods")):
            assert whose.items() <= each["metadata"]["labels"].items()
        assert sorted(set(hosts)) == sorted(pod["metadata"]["name"] for pod in pods)
        for owned in (secret, *pods):
            assert [owner["uid"] for owner in owned["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
        for pod in pods:
            assert pod["metadata"]["labels"]["team"] == "walkers"
            assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "500m"
            assert any(each.get("key") == "spot" for each in pod["spec"]["tolerations"])
            assert not pod["spec"]["containers"][0].get("volumeMounts"), "a worker has no access to the cluster"
        assert laptop.remains()
    assert laptop.remains() == [], "close() has removed all of it"


def test_nobody_who_sees_the_pods_sees_the_ticket(bed: KubeCluster, door: Door) -> None:
    fleet = make().launch(door.ticket, 1)
    try:
        door.await_join(fleet)
        shown = bed.kubectl("get", "pods,jobs,events", "--output=yaml")
    finally:
        fleet.stop(0.0)
    assert not tells_secret(shown.encode(), door.ticket)


def test_what_workers_wait_for_is_said(laptop: KubeCluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(LaunchError) as caught:
        launch(make(cpus=3), num_workers=4, timeouts=Timeouts(join_s=12, close_s=5, trial_s=0))
    line = r"2 of 4 workers running; workers \d, \d: 0/2 nodes are available: 2 Insufficient cpu"
    assert re.search(line, caplog.text), caplog.text
    assert re.search(rf"Only 2 of 4 workers joined within 12 s\. .*{line}", str(caught.value))
    assert "FailedScheduling" in str(caught.value)


def test_an_image_that_is_not_there_is_told_in_seconds(laptop: KubeCluster, seconds: Callable[[], float]) -> None:
    with pytest.raises(LaunchError, match=r"its image cannot be pulled.*image_pull_secrets") as caught:
        launch(make(image="missing:1"))
    assert seconds() < 60, "long before the workers are given up"
    assert "The events of Pod" in str(caught.value)


def test_an_image_without_clusterenv_is_told(bed: KubeCluster) -> None:
    with pytest.raises(LaunchError, match=r"No module named|has no clusterenv") as caught:
        launch(make(env={"PYTHONPATH": "/nowhere"}, python="/usr/bin/python3"))
    assert "Its image has no clusterenv: any. Build one that has the same version as here" in str(caught.value)


def test_a_python_that_is_not_there_is_told(bed: KubeCluster) -> None:
    with pytest.raises(LaunchError, match=r"nowhere/python"):
        launch(make(python="/nowhere/python"))


def test_a_quota_is_told_at_once_and_leaves_nothing(laptop: KubeCluster) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    laptop.apply(quota)
    try:
        laptop.wait_until(lambda: '"pods":"1"' in laptop.kubectl("get", "quota", "few", "--output=jsonpath={.status}"))
        with pytest.raises(LaunchError, match=r"The Pod of worker \d is refused: .*exceeded quota: few"):
            launch(make())
    finally:
        laptop.kubectl("delete", "quota", "few")
    assert laptop.remains() == []


def test_a_worker_that_was_refused_by_a_quota_comes_when_there_is_room(bed: KubeCluster, door: Door) -> None:
    fleet = make().launch(door.ticket, 1)
    try:
        door.await_join(fleet)
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}}
        bed.apply(quota | {"spec": {"hard": {"pods": "2"}}})  # It, and the one that holds on to the others.
        try:
            bed.wait_until(lambda: "2" in bed.kubectl("get", "quota", "one", "--output=jsonpath={.status.used.pods}"))
            fleet.restart(0)  # Its predecessor counts until it is gone.
            door.await_join(fleet)
        finally:
            bed.kubectl("delete", "quota", "one")
        assert fleet.exits() == {}
    finally:
        fleet.stop(0.0)


def make_account(
    cluster: KubeCluster, name: str, rights: dict[tuple[str, str], tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Return a service account in the namespace "lab" that has these rights there."""
    api, metadata = "rbac.authorization.k8s.io", {"name": name, "namespace": "lab"}
    rules = [{"apiGroups": [group], "resources": [kind], "verbs": list(v)} for (group, kind), v in rights.items() if v]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        },
    ]


@functools.cache
def read_config_text(kubeconfig: str) -> str:
    command = [
        "kubectl",
        f"--kubeconfig={kubeconfig}",
        "config",
        "view",
        "--raw",
        "--flatten",
        "--minify",
        "-o",
        "json",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_config(cluster: KubeCluster) -> Any:
    """Return the administrator's kubeconfig, to make others of it."""
    return json.loads(read_config_text(cluster.kubeconfig))


def log_in(cluster: KubeCluster, account: str, directory: Path) -> Path:
    """Return a kubeconfig for a service account of the namespace "lab"."""
    request = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
    path = f"/api/v1/namespaces/lab/serviceaccounts/{account}/token"
    token = json.loads(cluster.kubectl("create", f"--raw={path}", "--filename=-", stdin=request))["status"]["token"]
    config = read_config(cluster)
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    config["contexts"][0]["context"]["namespace"] = "lab"
    file = directory / f"{account}.json"
    file.write_text(json.dumps(config))
    return file


def test_with_the_manuals_role_it_works_and_with_any_right_less_it_says_which(
    laptop: KubeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = Ticket(endpoint=f"tcp://{LAPTOP}:9", head_key="h" * 40, public_key="p" * 40, secret_key="s" * 40)
    fewer = [(right, verb) for right, verbs in RIGHTS.items() for verb in verbs]
    objects = make_account(laptop, "head", RIGHTS)
    for number, (right, verb) in enumerate(fewer):
        rest = tuple(each for each in RIGHTS[right] if each != verb)
        objects += make_account(laptop, f"lacks-{number}", RIGHTS | {right: rest})
    laptop.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "lab"}}, *objects)
    try:
        monkeypatch.setenv("KUBECONFIG", str(log_in(laptop, "head", tmp_path)))
        with launch(make()) as envs:
            envs.reset(seed=1)
            assert len(laptop.workers("lab")) == NUM_WORKERS
        assert laptop.remains("lab") == []
        for number, ((_, resource), verb) in enumerate(fewer):
            monkeypatch.setenv("KUBECONFIG", str(log_in(laptop, f"lacks-{number}", tmp_path)))
            with pytest.raises(
                LaunchError, match=f"You lack rights in namespace lab: you may not {verb} {resource}\\."
            ):
                make().launch(ticket, 1)
        assert laptop.remains("lab") == []
    finally:
        laptop.kubectl("delete", "namespace", "lab", "--wait=false")


def start_head(then: str, lease_s: int = 600) -> subprocess.Popen[str]:
    """Start a head as a process of its own; returns when it has reset its environments."""
    script = HEAD.format(image=KubeEnv.cluster.image, lease_s=lease_s, then=then)
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": module_path()}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert head.stdout is not None
    said = []
    for line in head.stdout:
        if line == "ready\n":
            return head
        said.append(line)
    head.wait()
    head.stdout.close()
    raise AssertionError("".join(said))


def end_head(head: subprocess.Popen[str]) -> None:
    assert head.stdout is not None
    head.kill()
    head.wait()
    head.stdout.close()


@pytest.mark.parametrize("end", ["interrupt", "exception", "kill"])
def test_however_a_head_ends_it_leaves_nothing(laptop: KubeCluster, end: str, seconds: Callable[[], float]) -> None:
    # Briefly, again and again: of a signal that comes just before a sleep, Python learns when that is over.
    then = "raise KeyError('mine')" if end == "exception" else "any(time.sleep(0.1) for _ in range(600))"
    head = start_head(then)
    try:
        if end == "interrupt":
            head.send_signal(signal.SIGINT)
        elif end == "kill":
            head.kill()
        ended_at = seconds()
        head.wait(30)
        laptop.wait_until(lambda: laptop.remains() == [])
        assert seconds() - ended_at < 60
    finally:
        end_head(head)


@pytest.mark.parametrize("moment", ["client", "job", "secret", "pod", "close"])
def test_a_head_that_is_killed_while_it_starts_or_closes_leaves_nothing(bed: KubeCluster, moment: str) -> None:
    script = HEAD.format(image=KubeEnv.cluster.image, lease_s=600, then="pass")
    environment = os.environ | {"PYTHONPATH": module_path()}
    head = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.DEVNULL)
    try:
        if moment == "client":
            bed.wait_until(lambda: any("kubernetes.client" in command_of(pid) for pid in descendants()), 60.0)
        else:
            kind = {"job": "jobs", "secret": "secrets"}.get(moment, "pods")
            bed.wait_until(lambda: bool(bed.objects(kind)), 60.0)
        if moment == "close":
            bed.wait_until(lambda: not bed.objects("jobs"), 60.0)  # What it owned goes after it.
    finally:
        head.kill()
        head.wait()
    assert wait_until_gone(descendants(), 30.0) == []
    bed.wait_until(lambda: bed.remains() == [], 10.0)


def test_two_runs_in_a_namespace_leave_each_other_alone(bed: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        ours = set(bed.remains())
        head = start_head("time.sleep(60)")
        try:
            assert set(bed.remains()) > ours
            with launch(make()) as others:
                others.reset(seed=1)
        finally:
            end_head(head)
        bed.wait_until(lambda: set(bed.remains()) == ours)
        envs.step(np.zeros(4, np.int64))
        assert envs.losses == ()


def test_an_image_with_another_version_is_told(bed: KubeCluster, tmp_path: Path) -> None:
    other = shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    messages = other / "clusterenv" / "wire" / "messages.py"
    messages.write_text(re.sub(r"(?m)^PROTOCOL = \d+", "PROTOCOL = 1", messages.read_text()))
    with pytest.raises(LaunchError, match=r"speaks protocol 1, the head \d+: install the head's clusterenv there"):
        launch(make(env={"PYTHONPATH": f"{other}{os.pathsep}{ROOT}"}))


def test_if_the_heads_machine_is_lost_kubernetes_removes_everything_after_the_lease(
    bed: KubeCluster, seconds: Callable[[], float]
) -> None:
    head = start_head("time.sleep(60)", lease_s=10)
    client = find_client()
    try:
        # Kubernetes before 1.25, as the bed, looks at a deadline when it was first to pass, and never again by itself.
        bed.wait_until(lambda: bed.objects("jobs")[0]["spec"]["activeDeadlineSeconds"] > 10)
        os.kill(client, signal.SIGKILL)
        head.kill()
        killed_at = seconds()
        bed.wait_until(lambda: bed.remains() == [])
        assert seconds() - killed_at < 60
    finally:
        end_head(head)


@pytest.mark.parametrize("fate", ["its file is deleted", "its Pod is deleted by force"])
def test_a_head_in_a_pod_needs_one_command_and_goes_with_all_it_has(
    bed: KubeCluster, fate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: Callable[[], float]
) -> None:
    script = tmp_path / "My training (2).py"
    script.write_text(HEAD.format(image="any", lease_s=600, then="time.sleep(60)"))
    options = [f"--env=PYTHONPATH={module_path()}", f"--env={MARK}={os.environ[MARK]}"]
    assert main(["launch", "kubernetes", "--image", "any", *options, "--head", str(script)]) == 0
    manifests = capsys.readouterr().out
    bed.kubectl("apply", "--filename=-", stdin=manifests)
    try:
        job = next(name for name in bed.remains() if name.startswith("job.batch/my-training-2-"))
        bed.wait_until(lambda: "ready" in bed.kubectl("logs", job, "--ignore-errors"))
        (head,) = [pod for pod in bed.objects("pods") if "my-training" in pod["metadata"]["name"]]
        (anchor,) = [each for each in bed.objects("jobs") if each["metadata"]["name"].startswith("clusterenv-")]
        assert anchor["metadata"]["ownerReferences"][0]["uid"] == head["metadata"]["uid"]
        assert len(bed.workers()) == NUM_WORKERS
        deleted_at = seconds()
        if fate == "its file is deleted":
            bed.kubectl("delete", "--filename=-", stdin=manifests)
        else:
            bed.kubectl("delete", job, "--wait=false")
            bed.kubectl("delete", f"pod/{head['metadata']['name']}", "--force", "--grace-period=0")
        bed.wait_until(lambda: bed.remains() == [])
        assert seconds() - deleted_at < 25, "less than the grace period that Pods have by default"
        assert wait_until_gone(descendants()) == []
    finally:
        bed.kubectl("delete", "--filename=-", "--ignore-not-found", "--wait=false", stdin=manifests)


def test_a_pod_that_somebody_deletes_is_replaced_and_the_loss_says_so(laptop: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        victim = envs.workers[1].host
        laptop.kubectl("delete", "pod", str(victim), "--grace-period=1", "--wait=false")
        while not envs.losses:
            envs.step(np.zeros(4, np.int64))
        assert "its Pod was deleted" in envs.losses[0].reason
        assert "The events of Pod" in envs.losses[0].reason
        assert envs.workers[1].host == f"{victim}-again1"


def test_a_preempted_worker_is_told_as_such(bed: KubeCluster, door: Door) -> None:
    bed.apply(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "vip"},
            "value": 1000,
        }
    )
    fleet = make(cpus=3).launch(door.ticket, 2)
    try:
        door.await_join(fleet)
        door.await_join(fleet)
        sleep = {"name": "main", "image": "any", "command": ["sleep", "1000"]}
        sleep["resources"] = {"requests": {"cpu": "3"}}  # type: ignore[assignment]  # a manifest holds anything
        spec = {"priorityClassName": "vip", "containers": [sleep], "restartPolicy": "Never"}
        bed.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "vip"}, "spec": spec})
        door.wait_until(lambda: bool(fleet.exits()), fleet)
        (how,) = fleet.exits().values()
        assert re.search(r"preempted by the scheduler: Preempted by default/vip", how), how
    finally:
        fleet.stop(0.0)
        bed.kubectl("delete", "pod", "vip", "--ignore-not-found", "--force", "--grace-period=0")
        bed.kubectl("delete", "priorityclass", "vip")


def test_a_node_that_is_about_to_go_lets_its_worker_move(bed: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in bed.workers()}
        node = nodes[str(envs.workers[0].host)]
        bed.kubectl("taint", "node", node, "spot=reclaimed:NoExecute")
        try:
            while not envs.losses:
                envs.step(np.zeros(4, np.int64))
            assert "evicted from a node that is lost or tainted" in envs.losses[0].reason
        finally:
            bed.kubectl("taint", "node", node, "spot-")


@pytest.mark.parametrize("fate", ["power", "link"])
def test_workers_of_a_node_that_is_lost_are_started_on_another(bed: KubeCluster, fate: str) -> None:
    with launch(make(), timeouts=IMPATIENT) as envs:
        envs.reset(seed=1)
        nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in bed.workers()}
        hosts = [str(worker.host) for worker in envs.workers]
        node = nodes[hosts[0]]
        victims = [index for index, host in enumerate(hosts) if nodes[host] == node]
        if fate == "power":
            bed.signal(node, signal.SIGKILL)
        else:
            bed.set_link(node, "down")
        try:
            while len(envs.losses) < len(victims):
                envs.step(np.zeros(4, np.int64))
            moved = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in bed.workers()}
            assert all(moved[str(envs.workers[index].host)] != node for index in victims)
            if fate == "link":
                bed.set_link(node, "up")
            envs.close()
            assert bed.remains() == [], "not even of a node that does not answer"
        finally:
            bed.set_link(node, "up")
            bed.repair()
        assert wait_until_gone(descendants(), 15.0) == [], "a node that is back ends what has no Pod any more"


def test_a_cluster_that_does_not_answer_keeps_nobody_waiting(bed: KubeCluster, door: Door) -> None:
    fleet = make().launch(door.ticket, 1)
    try:
        first = door.await_join(fleet)
        bed.signal("apiserver", signal.SIGSTOP)
        try:
            os.kill(first.pid, signal.SIGKILL)
            assert time_call(lambda: fleet.restart(0)) < AT_ONCE_S
            assert time_call(fleet.exits) < AT_ONCE_S
            assert time_call(fleet.status) < AT_ONCE_S
            assert "the Pod is being created" in fleet.status()
        finally:
            bed.signal("apiserver", signal.SIGCONT)
        assert door.await_join(fleet).pid != first.pid
        assert door.longest_s < AT_ONCE_S
    finally:
        fleet.stop(0.0)


def test_a_client_that_dies_is_replaced_and_nobody_else_notices(bed: KubeCluster, door: Door) -> None:
    fleet = make().launch(door.ticket, NUM_WORKERS)
    try:
        joins = {join.worker_index: join for join in (door.await_join(fleet), door.await_join(fleet))}
        os.kill(find_client(), signal.SIGKILL)
        os.kill(joins[1].pid, signal.SIGKILL)
        assert "killed by SIGKILL" in door.await_exit(fleet, 1)
        fleet.restart(1)
        assert door.await_join(fleet).worker_index == 1
        assert fleet.exits() == {}
    finally:
        fleet.stop(0.0)


def test_close_leaves_nothing_even_if_the_client_has_just_died(bed: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        os.kill(find_client(), signal.SIGKILL)
    assert bed.remains() == []


def test_a_cluster_that_nobody_can_log_in_to_any_more_is_told(
    bed: KubeCluster, door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "config"
    config.write_text(json.dumps(read_config(bed)))
    monkeypatch.setenv("KUBECONFIG", str(config))
    fleet = make().launch(door.ticket, 1)
    try:
        door.await_join(fleet)
        config.unlink()
        os.kill(find_client(), signal.SIGKILL)
        fleet.restart(0)
        assert "could not be started: There is no cluster" in door.await_exit(fleet, 0)
        assert door.longest_s < AT_ONCE_S
        fleet.stop(0.0)
        assert re.search(r"could not remove everything from the cluster .*Kubernetes does within 600 s", caplog.text)
    finally:
        fleet.stop(0.0)
        bed.kubectl("delete", *bed.remains(), "--grace-period=1")
    assert wait_until_gone(descendants()) == []


def test_if_somebody_deletes_the_job_that_owns_the_workers_others_are_started(bed: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        (job,) = bed.objects("jobs")
        bed.kubectl("delete", "job", job["metadata"]["name"])
        while len(envs.losses) < NUM_WORKERS:
            envs.step(np.zeros(4, np.int64))
        (again,) = bed.objects("jobs")
        assert again["metadata"]["uid"] != job["metadata"]["uid"]
        assert len(bed.objects("secrets")) == 1


def test_if_somebody_deletes_the_secret_workers_can_still_be_replaced(bed: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        (secret,) = bed.objects("secrets")
        bed.kubectl("delete", "secret", secret["metadata"]["name"])
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        while not envs.losses:
            envs.step(np.zeros(4, np.int64))
        (again,) = bed.objects("secrets")
        assert again["metadata"]["uid"] != secret["metadata"]["uid"]
        (job,) = bed.objects("jobs")
        assert [owner["uid"] for owner in again["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]


def test_who_takes_over_from_a_client_that_made_the_job_again_starts_workers_that_stay(bed: KubeCluster) -> None:
    with launch(make()) as envs:
        envs.reset(seed=1)
        (job,) = bed.objects("jobs")
        bed.kubectl("delete", "job", job["metadata"]["name"])
        while len(envs.losses) < NUM_WORKERS:
            envs.step(np.zeros(4, np.int64))
        os.kill(find_client(), signal.SIGKILL)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        while len(envs.losses) < NUM_WORKERS + 1:
            envs.step(np.zeros(4, np.int64))
        (again,) = bed.objects("jobs")
        for pod in bed.workers():
            assert [owner["uid"] for owner in pod["metadata"]["ownerReferences"]] == [again["metadata"]["uid"]]
        assert len(envs.losses) == NUM_WORKERS + 1


def test_a_sidecar_does_not_hide_that_the_worker_has_ended(bed: KubeCluster, door: Door) -> None:
    sidecar = {"name": "proxy", "image": "any", "command": ["sleep", "1000"]}
    worker = {"name": "worker", "args": ["never", "run"], "env": [{"name": "COLOUR", "value": "green"}]}
    fleet = make(pod_template={"spec": {"containers": [worker, sidecar]}}).launch(door.ticket, 1)
    try:
        os.kill(door.await_join(fleet).pid, signal.SIGKILL)
        assert "killed by SIGKILL" in door.await_exit(fleet, 0)
        assert bed.workers()[0]["status"]["phase"] == "Running"
    finally:
        fleet.stop(0.0)


def test_a_ticket_in_a_secret_volume_opens_the_door(bed: KubeCluster, tmp_path: Path) -> None:
    """The Job itself needs Kubernetes 1.21: its Pods are created here as its controller would."""
    ticket = tmp_path / "run.ticket"

    class Applied(ByHandLauncher):
        def launch(self, *arguments: Any) -> Any:
            fleet = super().launch(*arguments)
            options = ["--image=any", "--memory=256Mi", f"--env=PYTHONPATH={module_path()}"]
            options += [f"--env={MARK}={os.environ[MARK]}", "--num-workers=2", "--indexed-job", f"--ticket={ticket}"]
            command = [sys.executable, "-m", "clusterenv", "launch", "kubernetes", *options]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            secret, job = (json.loads(each) for each in to_json(out))
            assert job["spec"]["completionMode"] == "Indexed"
            pods = []
            for index in range(job["spec"]["completions"]):
                pod = json.loads(json.dumps(job["spec"]["template"]))
                pod["metadata"]["name"] = f"{job['metadata']['name']}-{index}"
                pod["spec"]["containers"][0]["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
                pods.append({"apiVersion": "v1", "kind": "Pod", **pod})
            bed.apply(secret, *pods)
            return fleet

    with launch(Applied(ticket_file=ticket, route_to="10.88.0.1")) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(4, np.int64))
    bed.kubectl("delete", *bed.remains(), "--grace-period=1")


def to_json(stream: str) -> list[str]:
    """Return the documents of a YAML stream."""
    import yaml

    return [json.dumps(each) for each in yaml.safe_load_all(stream)]


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("no cluster", r"There is no cluster: this is not a Pod, and there is no .*nowhere.*Set KUBECONFIG"),
        ("wrong context", r"The kubeconfig has no context 'moon'. It has \w+"),
        ("expired token", r"does not accept your credentials \(401 Unauthorized\).*Log in again"),
        ("nobody there", r"The cluster at https://10\.88\.0\.4:1 cannot be reached: .*refused.*context="),
        ("no namespace", r'namespaces "moon" not found\. Create it, or name another'),
        ("not YAML", r"The kubeconfig cannot be used"),
    ],
)
def test_bad_credentials_are_told_in_a_sentence(
    bed: KubeCluster,
    trouble: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = read_config(bed)
    settings: dict[str, Any] = {}
    file = tmp_path / ("nowhere" if trouble == "no cluster" else "config")
    if trouble == "wrong context":
        settings["context"] = "moon"
    elif trouble == "expired token":
        config["users"][0]["user"]["token"] = "gone"
    elif trouble == "nobody there":
        config["clusters"][0]["cluster"]["server"] = "https://10.88.0.4:1"
    elif trouble == "no namespace":
        settings["namespace"] = "moon"
    if trouble != "no cluster":
        file.write_text("[" if trouble == "not YAML" else json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(LaunchError, match=message):
        launch(make(**settings))
    assert caplog.text == "", "nothing was created, so nothing is to be removed"


def ask_doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Ask the doctor about two workers; returns the exit status and what was said."""
    env = [f"--variable={name}={value}" for name, value in make().env.items()]
    fixed = ["--image", KubeEnv.cluster.image, "--memory", "256Mi", "--num-workers", "2", "--timeout", "30", *env]
    status = main(["doctor", "kubernetes", *fixed, *options])
    return status, " ".join(capsys.readouterr().out.split())


def test_the_doctor_finds_a_cluster_well(laptop: KubeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = ask_doctor(capsys)
    assert status == 0, said
    assert "workers are started: 1 on clusterenv-" in said
    assert "bandwidth" in said


@pytest.mark.parametrize(
    ("options", "step", "advice"),
    [
        (["--image", "missing:2"], "start", "next: Push the image"),
        (["--context", "moon"], "start", "next: Make `kubectl get pods` work first"),
        (
            ["--python", "/usr/bin/python3", "--variable=PYTHONPATH=/x"],
            "python",
            "next: Build the image with clusterenv",
        ),
        (
            ["--listen", LAPTOP, "--advertise", "10.88.0.1:9", "--timeout", "5"],
            "reach",
            "next: Pods cannot reach this machine. Run the head in the cluster",
        ),
    ],
)
def test_the_doctor_says_what_to_do(
    bed: KubeCluster, capsys: pytest.CaptureFixture[str], options: list[str], step: str, advice: str
) -> None:
    status, said = ask_doctor(capsys, *options)
    assert status == 1
    assert f"failed {step}" in said
    assert advice in said


@pytest.mark.parametrize("block", [block for page in MANUALS for block in blocks_of(page)], ids=str)
def test_the_blocks_of_the_manual_run(bed: KubeCluster, block: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": module_path()}
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
