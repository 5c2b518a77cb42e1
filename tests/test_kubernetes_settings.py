"""KubernetesLauncher without a cluster: its settings, its manifests, and how it reads what Kubernetes says.

The last stands in for what the test bed cannot show: memory limits, and conditions of newer versions.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from clusterenv import KubernetesLauncher
from clusterenv.cli import main
from clusterenv.errors import ConfigError
from clusterenv.launchers.base import ELSEWHERE
from clusterenv.launchers.by_hand import find_index, read_ticket
from clusterenv.launchers.kubernetes.manifest import RIGHTS
from clusterenv.launchers.kubernetes.pod import PodState, find_disruption, read_pod
from clusterenv.wire.ticket import Ticket

DOCS = Path(__file__).parent.parent / "docs" / "how-to" / "kubernetes.md"
TICKET = Ticket(endpoint="tcp://10.0.0.5:40123", head_key="h" * 40, public_key="p" * 40, secret_key="s" * 40)
VERSIONS = sorted({v for v in all_versions() if int(v.split(".")[1]) >= 24}, key=lambda v: int(v.split(".")[1]))

FULL: dict[str, Any] = {
    "image": "registry.example.org/rl:1",
    "namespace": "lab",
    "cpus": 2.5,
    "memory": "4Gi",
    "gpus": 1,
    "env": {"MUJOCO_GL": "egl"},
    "labels": {"kueue.x-k8s.io/queue-name": "rl"},
    "node_selector": {"cloud.google.com/gke-spot": "true"},
    "tolerations": ["spot=true:NoSchedule", {"key": "gpu", "operator": "Exists"}],
    "service_account": "workers",
    "image_pull_secrets": ["registry"],
    "priority_class": "low",
    "pod_template": {
        "metadata": {"annotations": {"team": "walkers"}, "name": "ignored"},
        "spec": {
            "restartPolicy": "Always",
            "volumes": [{"name": "data", "emptyDir": {}}],
            "tolerations": [{"key": "mine", "operator": "Exists"}],
            "containers": [
                {
                    "name": "worker",
                    "image": "ignored",
                    "args": ["ignored"],
                    "env": [{"name": "MUJOCO_GL", "value": "ignored"}, {"name": "COLOUR", "value": "green"}],
                    "resources": {"limits": {"cpu": "3", "memory": "ignored"}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "proxy", "image": "proxy:1"},
            ],
        },
    },
}


def objects_of(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def pod_of(**settings: Any) -> dict[str, Any]:
    return objects_of(KubernetesLauncher(**{"image": "rl:1", **settings}).render(1))[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": ""}, r"image must name an image"),
        ({"image": "my image"}, r"image must name an image"),
        ({"image": "https://registry.example.org/rl:1"}, r'image must name an image, .* without "https://"'),
        ({"image": "RL:1"}, r"image must name an image, .* in small letters .*got 'RL:1'"),
        ({"image": "registry.example.org/Team/rl"}, r"image must name an image"),
        ({"cpus": 0}, r"cpus must be a number above 0, like 1 or 0\.5, got 0"),
        ({"cpus": "2"}, r"cpus must be a number"),
        ({"cpus": True}, r"cpus must be a number"),
        ({"memory": "512"}, r"memory must have a unit"),
        ({"memory": 4}, r"memory must have a unit"),
        ({"memory": "0Gi"}, r"memory must have a unit .* and be more than 0, .*got '0Gi'"),
        ({"memory": "0.0Mi"}, r"be more than 0"),
        ({"gpus": -1}, r"gpus must be an int of at least 0"),
        ({"gpus": 0.5}, r"gpus must be an int"),
        ({"lease_s": 1}, r"lease_s must be an int of at least 10"),
        ({"namespace": "My Lab"}, r"namespace must be a name"),
        ({"service_account": "A_B"}, r"service_account must be a name"),
        ({"priority_class": ""}, r"priority_class must be a name"),
        ({"image_pull_secrets": "registry"}, r"image_pull_secrets must be a list"),
        ({"image_pull_secrets": ["A B"]}, r"image_pull_secrets must be a name"),
        ({"context": ""}, r"context must name a context"),
        ({"python": "python -O"}, r"python must be one command, without options"),
        ({"env": ["A=1"]}, r"env must be a mapping"),
        ({"env": {"A": 1}}, r"env\['A'\] must be a text, got 1: quote it"),
        ({"env": {"1A": ""}}, r"env holds '1A', which cannot be a variable"),
        ({"env": {"CLUSTERENV_TICKET": "x"}}, r"env may not have CLUSTERENV_TICKET"),
        ({"labels": {"a b": "c"}}, r"labels holds 'a b': 'c', which cannot be a label"),
        ({"labels": {"a": "c d"}}, r"which cannot be a label"),
        ({"labels": {"clusterenv/run": "x"}}, r"labels may not have clusterenv/run"),
        ({"node_selector": {"zone": True}}, r"node_selector\['zone'\] must be a text"),
        ({"tolerations": "spot"}, r"tolerations must be a list"),
        ({"tolerations": ["spot=true:Never"]}, r"the effect is one of NoSchedule, .*, got 'Never'"),
        ({"tolerations": [{"taint": "spot"}]}, r"tolerations takes texts like"),
        ({"tolerations": ["a b"]}, r"tolerations takes texts like"),
        ({"pod_template": "nowhere.yaml"}, r"nowhere\.yaml cannot be read"),
        ({"pod_template": ["spec"]}, r"pod_template must be a mapping"),
        ({"pod_template": "spec:\n  runtimeClassName: gvisor\n"}, r"looks like YAML itself: write it to a file"),
        ({"pod_template": "{spec: {runtimeClassName: gvisor}}"}, r"looks like YAML itself"),
        ({"pod_template": {"containers": []}}, r"holds 'containers', but a Pod has .* It belongs under `spec`"),
        ({"pod_template": {"kind": "Job"}}, r"must be of kind Pod, got 'Job'"),
        ({"pod_template": {"spec": "x"}}, r"`spec` must be a mapping"),
        ({"pod_template": {"metadata": {"label": {}}}}, r"`labels` and `annotations` are used, and not 'label'"),
        ({"pod_template": {"spec": {"containers": [{"image": "x"}]}}}, r"`containers` must be a list of mappings"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is_written(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KubernetesLauncher(**{"image": "rl:1", **settings})


@pytest.mark.parametrize(
    "image",
    [
        "rl",
        "my_team/rl-train.v2:1.0-RC1",
        "localhost:5000/rl",
        "Registry.Example.org:5000/team/rl:Latest",
        "registry.example.org/rl:1@sha256:" + "0a" * 32,
        "[2001:db8::1]:5000/rl",
    ],
)
def test_every_name_of_an_image_is_taken(image: str) -> None:
    assert KubernetesLauncher(image=image).image == image


def test_a_launcher_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        KubernetesLauncher(image="rl:1").image = "rl:2"  # type: ignore[misc]  # that is what is tried


def test_a_template_lies_under_what_fields_name() -> None:
    pod = pod_of(**FULL)
    worker, proxy = pod["spec"]["containers"]
    assert proxy == {"name": "proxy", "image": "proxy:1"}
    assert (worker["image"], worker["command"]) == (FULL["image"], ["python", "-m", "clusterenv.worker"])
    assert "args" not in worker
    assert worker["resources"] == {
        "requests": {"cpu": "2500m", "memory": "4Gi"},
        "limits": {"cpu": "3", "memory": "4Gi", "nvidia.com/gpu": 1},
    }
    values = {each["name"]: each.get("value") for each in worker["env"]}
    assert (values["MUJOCO_GL"], values["COLOUR"], values["OMP_NUM_THREADS"]) == ("egl", "green", "2")
    assert worker["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert [each["key"] for each in pod["spec"]["tolerations"]] == ["mine", "spot", "gpu"]
    assert pod["metadata"]["annotations"] == {"team": "walkers"}
    assert pod["metadata"]["name"] == "clusterenv-run-0"


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("spec:\n  runtimeClassName: gvisor\n")
    assert pod_of(pod_template=file)["spec"]["runtimeClassName"] == "gvisor"
    file.write_text("spec: [")
    with pytest.raises(ConfigError, match=r"pod\.yaml is not YAML"):
        KubernetesLauncher(image="rl:1", pod_template=str(file))


def test_a_worker_has_no_access_to_the_cluster_unless_it_is_given_an_account() -> None:
    assert pod_of()["spec"]["automountServiceAccountToken"] is False
    assert pod_of(service_account="mine")["spec"]["automountServiceAccountToken"] is True


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_in_every_version(version: str, tmp_path: Path) -> None:
    script = tmp_path / "Train it!.py"
    script.write_text("print('hello')\n")
    for settings in ({"image": "rl:1"}, FULL):
        launcher = KubernetesLauncher(**settings)
        texts = [launcher.render(1), launcher.render_indexed_job(1, TICKET), launcher.render_head(script)]
        for each in objects_of("\n---\n".join(texts)):
            kubernetes_validate.validate(each, version, strict=True)


def test_the_manuals_role_is_the_one_that_is_needed() -> None:
    shown = DOCS.read_text().partition("kind: Role\n")[2].partition("```")[0]
    rules = yaml.safe_load("rules:" + shown.partition("rules:")[2])["rules"]
    found = {(rule["apiGroups"][0], rule["resources"][0]): tuple(rule["verbs"]) for rule in rules}
    assert found == RIGHTS


def test_examples_of_the_manual_are_valid() -> None:
    blocks = [block.partition("```")[0] for block in DOCS.read_text().split("```yaml\n")[1:]]
    for block in blocks:
        for each in objects_of(block):
            if each.get("apiVersion", "").partition("/")[0] in ("v1", "batch", "rbac.authorization.k8s.io"):
                kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    assert blocks


def test_dry_run_prints_what_is_created_without_a_ticket(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "kubernetes", "--image=rl:1", "--num-workers=2", "--tolerations=spot", "--dry-run"]) == 0
    anchor, secret, *pods = objects_of(capsys.readouterr().out)
    assert (anchor["kind"], secret["kind"]) == ("Job", "Secret")
    assert anchor["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 1, "nobody waits for it"
    assert [pod["metadata"]["name"] for pod in pods] == ["clusterenv-run-0", "clusterenv-run-1"]
    assert pods[0]["spec"]["tolerations"] == [{"key": "spot", "operator": "Exists"}]


def test_every_object_says_whose_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ada/My Runs/train_ppo.v2.py"])
    monkeypatch.setenv("LOGNAME", "Ada L.")
    launcher = KubernetesLauncher(**FULL)
    for text in (launcher.render(1), launcher.render_indexed_job(1)):
        for each in objects_of(text):
            for metadata in metadata_of(each):
                labels = metadata["labels"]
                assert (labels["clusterenv/name"], labels["clusterenv/user"]) == ("train-ppo-v2", "ada-l")
    script = tmp_path / "Train it!.py"
    script.touch()
    *rights, config, head = objects_of(launcher.render_head(script))
    assert list(config["data"]) == ["Train-it-.py"], "no other characters may be in a key"
    assert head["spec"]["template"]["spec"]["containers"][0]["command"] == ["python", "/clusterenv/Train-it-.py"]
    for metadata in [each["metadata"] for each in (*rights, config)] + metadata_of(head):
        assert (metadata["labels"]["clusterenv/name"], metadata["labels"]["clusterenv/user"]) == ("train-it", "ada-l")
    assert {"name": "USER", "value": "ada-l"} in head["spec"]["template"]["spec"]["containers"][0]["env"]


def metadata_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return that of an object, and of the Pods it makes."""
    template = manifest.get("spec", {}).get("template")
    return [manifest["metadata"], *([template["metadata"]] if template else [])]


def test_the_file_of_a_head_shares_nothing_with_that_of_another(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    launcher = KubernetesLauncher(**FULL)
    first, second = (objects_of(launcher.render_head(script)) for _ in range(2))
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (first, second)]
    assert names[0].isdisjoint(names[1])
    account, role, binding, config, head = first
    spec = head["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert spec["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]


def test_an_indexed_job_mounts_the_ticket(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    file.write_text(TICKET.encode())
    file.chmod(0o600)
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {runtimeClassName: gvisor}")
    options = ["--image=rl:1", "--cpus=2", "--num-workers=3", f"--pod-template={template}", "--indexed-job"]
    assert main(["launch", "kubernetes", *options, f"--ticket={file}"]) == 0
    secret, job = objects_of(capsys.readouterr().out)
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (3, "Indexed")
    spec = job["spec"]["template"]["spec"]
    assert spec["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
    assert spec["containers"][0]["command"][-4:] == ["--ticket", "/etc/clusterenv/ticket", "--cpus", "2"]
    assert spec["runtimeClassName"] == "gvisor"
    assert main(["launch", "kubernetes", "--image=rl:1", "--indexed-job", "--dry-run"]) == 0
    assert TICKET.encode()[:40] not in capsys.readouterr().out


def test_a_head_that_cannot_be_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "kubernetes", "--image=rl:1", "--head", "nowhere.py"]) == 2
    assert "The script nowhere.py cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o644, 0o440, 0o400, 0o444])
def test_a_ticket_in_a_secret_volume_may_have_kubernetes_modes(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "..2026_11_17_19_26_11.123"
    data.mkdir()
    (data / "ticket").write_text(TICKET.encode())
    (data / "ticket").chmod(mode)
    (tmp_path / "..data").symlink_to(data.name)
    (tmp_path / "ticket").symlink_to("..data/ticket")
    assert read_ticket(tmp_path / "ticket") == TICKET
    (tmp_path / "..data").unlink()
    (tmp_path / "ticket").unlink()
    (tmp_path / "ticket").write_text(TICKET.encode())
    (tmp_path / "ticket").chmod(mode)
    if stat.S_IMODE((tmp_path / "ticket").stat().st_mode) & 0o077:
        with pytest.raises(ConfigError, match="can be used by others"):
            read_ticket(tmp_path / "ticket")


def test_a_job_is_for_a_script_or_for_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "kubernetes", "--image=rl:1", f"--head={script}", "--indexed-job"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "--head prints a Job for a script, and --indexed-job one for workers" in shown.err


def test_an_indexed_job_tells_workers_who_they_are() -> None:
    assert find_index({"JOB_COMPLETION_INDEX": "3"}) == 3


@pytest.mark.parametrize(
    ("server", "route"),
    [("https://10.9.8.7:6443", "10.9.8.7"), ("https://127.0.0.1:34567", ELSEWHERE), ("https://localhost", ELSEWHERE)],
)
def test_the_head_listens_towards_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, route: str
) -> None:
    config = {
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "c", "namespace": "walkers"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'nowhere'}{os.pathsep}{tmp_path / 'config'}")
    launcher = KubernetesLauncher(image="rl:1")
    assert launcher.route_to == route
    (tmp_path / "train.py").write_text("")
    spaces = {each["metadata"]["namespace"] for each in objects_of(launcher.render_head(tmp_path / "train.py"))}
    assert spaces == {"walkers"}


def test_in_a_pod_the_head_listens_towards_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert KubernetesLauncher(image="rl:1").route_to == "10.96.0.1"


def seen(state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    """Return a Pod with a worker in some state."""
    containers = [{"name": "proxy", "state": {"running": {}}}, {"name": "worker", "state": state}] if state else []
    return {
        "metadata": {"name": "w"},
        "spec": {"nodeName": "n1", "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
        "status": {"phase": "Running", "containerStatuses": containers, **status},
    }


def unscheduled(reason: str, message: str) -> list[dict[str, str]]:
    return [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]


def disrupted(reason: str, message: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}]


@pytest.mark.parametrize(
    ("pod", "kind", "text"),
    [
        (seen({"running": {}}), "running", "in Pod w on n1"),
        (seen({"terminated": {"exitCode": 1, "reason": "Error"}}), "ended", "exit status 1 in Pod w on n1"),
        (seen({"terminated": {"exitCode": 137, "reason": "Error"}}), "ended", "killed by SIGKILL in Pod w on n1"),
        (
            seen({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "ended",
            "killed by SIGKILL in Pod w on n1: it used more memory than its limit of 1Gi (OOMKilled). "
            "KubernetesLauncher(memory=...) gives it more",
        ),
        (
            seen({"terminated": {"exitCode": 143}}, conditions=disrupted("PreemptionByScheduler", "for vip")),
            "ended",
            "killed by SIGTERM in Pod w on n1; preempted by the scheduler: for vip",
        ),
        (
            seen({"terminated": {"exitCode": 143}}, conditions=disrupted("EvictionByEvictionAPI", "drained")),
            "ended",
            "killed by SIGTERM in Pod w on n1; evicted, as when a node is drained: drained",
        ),
        (
            seen(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
            "ended",
            "ended in Pod w on n1; evicted by its node: The node was low on resource: memory.",
        ),
        (
            seen({"running": {}}, conditions=disrupted("DeletionByPodGC", "no node"), reason="NodeLost"),
            "ended",
            "ended in Pod w on n1; its node is gone: no node",
        ),
        (
            seen(phase="Failed", reason="OutOfcpu", message="too many"),
            "ended",
            "ended in Pod w on n1; OutOfcpu too many",
        ),
        (
            seen(phase="Pending", conditions=unscheduled("Unschedulable", "0/2 nodes are available: no GPU.")),
            "waiting",
            "0/2 nodes are available: no GPU",
        ),
        (
            seen(phase="Pending", conditions=unscheduled("SchedulingGated", "")),
            "waiting",
            "held back by kueue.x-k8s.io/admission",
        ),
        (
            seen({"waiting": {"reason": "InvalidImageName", "message": "RL"}}, phase="Pending"),
            "ended",
            "could not be started: its image has a name that cannot be (InvalidImageName: RL), in Pod w on n1",
        ),
        (seen({"waiting": {"reason": "ContainerCreating"}}), "waiting", "ContainerCreating in Pod w on n1"),
    ],
)
def test_what_kubernetes_says_is_told_in_words(pod: dict[str, Any], kind: str, text: str) -> None:
    state = read_pod(pod, "1Gi")
    assert (state.kind, state.text) == (kind, text)


@pytest.mark.parametrize(
    ("reason", "message", "is_hopeless"),
    [
        ("ErrImagePull", "manifest unknown", True),
        ("ImagePullBackOff", "pull access denied", True),
        ("ErrImagePull", "503 Service Unavailable", False),
        ("CreateContainerError", "context deadline exceeded", False),
        ("CreateContainerConfigError", 'secret "x" not found', False),
    ],
)
def test_what_may_yet_succeed_is_waited_for(reason: str, message: str, is_hopeless: bool) -> None:
    state = read_pod(seen({"waiting": {"reason": reason, "message": message}}, phase="Pending"))
    assert state.kind == ("ended" if is_hopeless else "waiting")
    assert state.is_failing is not is_hopeless


def test_what_kubernetes_says_cannot_harm_a_terminal() -> None:
    state = read_pod(seen({"waiting": {"reason": "ErrImagePull", "message": "not found \x1b[2J\n" + "x" * 9999}}))
    assert isinstance(state, PodState)
    assert state.text.isprintable()
    assert len(state.text) < 800


def test_the_newest_event_that_tells_of_a_disruption_counts() -> None:
    events = [
        {"reason": reason, "message": reason.lower(), "metadata": {}, "lastTimestamp": f"2026-01-01T00:00:0{number}Z"}
        for number, reason in enumerate(("Started", "NodeNotReady", "Preempted", "Killing"))
    ]
    assert find_disruption(events) == "preempted by the scheduler: preempted"
    assert find_disruption(events[:1]) == ""


def test_without_the_extra_the_error_says_how_to_install_it() -> None:
    code = """
import sys
sys.modules["yaml"] = None
from clusterenv import KubernetesLauncher
from clusterenv.errors import ClusterEnvError
launcher = KubernetesLauncher(image="rl:1")
assert "kubernetes" not in sys.modules
try:
    launcher.render(1)
except ClusterEnvError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'clusterenv-rl[kubernetes]'" in done.stdout
