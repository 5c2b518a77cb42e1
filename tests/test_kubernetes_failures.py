"""What a KubernetesLauncher does when its cluster fails in ways that the test bed does not: see `kube_api`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterenv import KubernetesLauncher
from clusterenv.errors import LaunchError
from clusterenv.launchers.base import Fleet
from clusterenv.wire.ticket import Ticket
from tests.kube_api import KubeApi

pytestmark = pytest.mark.timeout(120)

TICKET = Ticket(endpoint="tcp://127.0.0.1:9", head_key="h" * 40, public_key="p" * 40, secret_key="s" * 40)
RUNNING = {"phase": "Running", "containerStatuses": [{"name": "worker", "state": {"running": {}}}]}
DEADLINE_S = 30.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(file))
    return file


@pytest.fixture
def api(config: Path, nothing_is_left_behind: None) -> Iterator[KubeApi]:
    api = KubeApi()
    api.write_config(config)
    yield api
    api.close()


def launch(api: KubeApi, lease_s: int = 600) -> Fleet:
    """Have the Pod of one worker created and watched."""
    fleet = KubernetesLauncher(image="any", lease_s=lease_s).launch(TICKET, 1)
    api.wait_until(lambda: "WATCH pods" in api.requests)
    return fleet


def wait_until(is_true: Callable[[], Any]) -> None:
    """Wait for what a fleet can only be asked."""
    ends_at = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def restart_until(fleet: Fleet, is_true: Callable[[], Any]) -> None:
    """Do as a head does: replace a worker whenever it has ended."""

    def is_true_now() -> Any:
        if fleet.exits():
            fleet.restart(0)
        return is_true()

    wait_until(lambda: bool(fleet.exits()))
    wait_until(is_true_now)


def worker_of(api: KubeApi) -> str:
    """Return the name of the worker's Pod."""
    (pod,) = api.objects("pods")
    return str(pod["metadata"]["name"])


@pytest.mark.parametrize("lost", ["POST jobs", "POST secrets", "DELETE secrets", "POST pods"])
def test_a_worker_is_started_again_whichever_answer_gets_lost(api: KubeApi, lost: str) -> None:
    fleet = launch(api)
    try:
        (job,) = api.objects("jobs")
        api.delete("jobs", job["metadata"]["name"])
        api.fail(lost, "lost")
        restart_until(fleet, lambda: api.objects("pods"))
        (again,) = api.objects("jobs")
        for kind in ("pods", "secrets"):
            (owned,) = api.objects(kind)
            assert [owner["uid"] for owner in owned["metadata"]["ownerReferences"]] == [again["metadata"]["uid"]]
        api.change("pods", worker_of(api), status=RUNNING)
        wait_until(lambda: fleet.status() == "")
        assert fleet.exits() == {}
    finally:
        fleet.stop(0.0)
    assert [*api.objects("jobs"), *api.objects("secrets"), *api.objects("pods")] == []


@pytest.mark.parametrize("condition", ["Failed", "FailureTarget"])
def test_a_job_that_is_about_to_go_is_followed_by_another(api: KubeApi, condition: str) -> None:
    fleet = launch(api, lease_s=10)
    try:
        (job,) = api.objects("jobs")
        name = job["metadata"]["name"]
        api.change("jobs", name, status={"conditions": [{"type": condition, "status": "True"}]})
        api.wait_until(lambda: api.requests.count("POST jobs") > 1)  # Refused as long as the old one is there.
        api.delete("jobs", name)
        restart_until(fleet, lambda: api.objects("pods"))
        (again,) = api.objects("jobs")
        assert again["metadata"]["uid"] != job["metadata"]["uid"]
        (pod,) = api.objects("pods")
        assert pod["metadata"]["ownerReferences"][0]["uid"] == again["metadata"]["uid"]
    finally:
        fleet.stop(0.0)


def test_a_secret_that_somebody_deletes_is_created_again(api: KubeApi) -> None:
    fleet = launch(api, lease_s=10)
    try:
        (job,), (secret,) = api.objects("jobs"), api.objects("secrets")
        api.delete("secrets", secret["metadata"]["name"])
        api.wait_until(lambda: bool(api.objects("secrets")))
        (again,) = api.objects("secrets")
        assert again["data"] == secret["data"]
        assert [owner["uid"] for owner in again["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    finally:
        fleet.stop(0.0)


def test_a_secret_that_is_there_stays_as_it_is(api: KubeApi) -> None:
    fleet = launch(api, lease_s=10)
    try:
        before = api.objects("secrets")
        api.wait_until(lambda: "TRY secrets" in api.requests)
        api.wait_until(lambda: api.requests.count("PATCH jobs") > 1)
        assert api.objects("secrets") == before
    finally:
        fleet.stop(0.0)


@pytest.mark.parametrize(("minor", "restarts"), [("20+", True), ("24", True), ("25", False), ("34", False)])
def test_an_anchor_restarts_where_kubernetes_would_not_notice_that_its_deadline_has_passed(
    api: KubeApi, minor: str, restarts: bool
) -> None:
    api.minor = minor
    fleet = launch(api, lease_s=600)
    try:
        (job,) = api.objects("jobs")
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["restartPolicy"] == ("OnFailure" if restarts else "Never")
        assert ("sigtimedwait([s.SIGTERM], 600)" in container["command"][-1]) is restarts
        assert not restarts or job["spec"]["backoffLimit"] * 600 > 10 * 365 * 86400, "restarts count as failures"
    finally:
        fleet.stop(0.0)


@pytest.mark.parametrize("how", [503, 403])
def test_the_pod_of_a_replaced_worker_is_deleted_even_if_that_fails_at_first(api: KubeApi, how: int) -> None:
    fleet = launch(api)
    try:
        name = worker_of(api)
        api.change("pods", name, status=RUNNING)
        wait_until(lambda: fleet.status() == "")
        api.fail("DELETE pods", how)
        fleet.restart(0)
        api.wait_until(lambda: [pod["metadata"]["name"] for pod in api.objects("pods")] == [f"{name}-again1"])
        assert fleet.exits() == {}
    finally:
        fleet.stop(0.0)


def test_close_does_not_repeat_what_it_has_no_right_to(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    fleet = launch(api)
    api.fail("DELETE jobs", 403)
    fleet.stop(0.0)
    assert api.requests.count("DELETE jobs") == 1
    assert "could not remove everything from the cluster (DELETE jobs fails with 403)" in caplog.text


def test_what_happened_before_a_watch_expired_is_seen(api: KubeApi) -> None:
    fleet = launch(api)
    try:
        api.change("pods", worker_of(api), status=RUNNING)
        wait_until(lambda: fleet.status() == "")
        name = worker_of(api)
        api.delete("pods", name, unseen=True)
        api.expire_watches()
        wait_until(fleet.exits)
        assert fleet.exits() == {0: f"Pod {name} was deleted"}
    finally:
        fleet.stop(0.0)


def test_a_pod_that_was_gone_before_anybody_looked_is_told(api: KubeApi) -> None:
    api.fail("GET pods", 500)  # It looks again after a while.
    fleet = KubernetesLauncher(image="any").launch(TICKET, 1)
    try:
        name = worker_of(api)
        api.delete("pods", name)
        wait_until(fleet.exits)
        assert fleet.exits()[0].startswith(f"Pod {name} ")
    finally:
        fleet.stop(0.0)


@pytest.mark.parametrize("how", [503, "hang"])
def test_a_cluster_that_is_away_when_a_run_ends_is_waited_for(api: KubeApi, how: str | int) -> None:
    fleet = launch(api)
    api.fail("DELETE jobs", how)
    fleet.stop(0.0)
    assert [*api.objects("jobs"), *api.objects("secrets"), *api.objects("pods")] == []


def test_what_was_never_created_is_not_to_be_removed(api: KubeApi, caplog: pytest.LogCaptureFixture) -> None:
    api.tokens = {"new"}
    with pytest.raises(LaunchError, match="does not accept your credentials"):
        launch(api)
    assert caplog.text == ""


def test_who_logs_in_again_goes_on(api: KubeApi, config: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = launch(api, lease_s=10)
    try:
        api.tokens = {"new"}
        wait_until(lambda: fleet.exits() == {} and "does not accept your credentials" in caplog.text)
        assert "Kubernetes ends all workers in" in caplog.text
        api.write_config(config, {"token": "new"})
        fleet.restart(0)
        api.wait_until(lambda: any("again1" in pod["metadata"]["name"] for pod in api.objects("pods")))
    finally:
        fleet.stop(0.0)
    assert api.objects("pods") == []


def test_a_program_for_credentials_may_read_its_input(api: KubeApi, config: Path) -> None:
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "good"},
    }
    command = f"cat > /dev/null; echo {shlex.quote(json.dumps(answer))}"
    plugin = {"apiVersion": answer["apiVersion"], "command": "sh", "args": ["-c", command], "interactiveMode": "Never"}
    api.write_config(config, {"exec": plugin})
    fleet = launch(api)
    fleet.stop(0.0)
    assert "DELETE jobs" in api.requests


def test_a_field_of_the_template_that_pods_do_not_have_is_refused_by_its_name(api: KubeApi) -> None:
    api.unknown = "nodeSelectr"
    launcher = KubernetesLauncher(image="any", pod_template={"spec": {"nodeSelectr": {"disk": "fast"}}})
    with pytest.raises(LaunchError, match=r'unknown field "spec\.nodeSelectr"\. Correct it .*pod_template'):
        launcher.launch(TICKET, 1)
    worker = {"name": "worker", "nodeSelectr": {}}  # Nobody has that but a worker's Pod.
    launcher = KubernetesLauncher(image="any", pod_template={"spec": {"containers": [worker]}})
    with pytest.raises(LaunchError, match=r"Pod of worker 0 is refused: .* unknown field"):
        launcher.launch(TICKET, 1)
