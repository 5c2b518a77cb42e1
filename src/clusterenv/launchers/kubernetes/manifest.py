"""Manifests: the objects of a run, as they are sent to the API server or printed for `kubectl apply`."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterenv.config import thread_variables
from clusterenv.errors import ConfigError
from clusterenv.launchers.base import run_labels
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE

Manifest = dict[str, Any]

APP_LABEL, APP = "app.kubernetes.io/name", "clusterenv"
RUN_LABEL = "clusterenv/run"
WORKER_LABEL = "clusterenv/worker"
NAME_LABEL = "clusterenv/name"
USER_LABEL = "clusterenv/user"
CONTAINER = "worker"

# Everything a head does in its namespace. The client checks these rights first; docs/how-to/kubernetes.md shows them.
RIGHTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "pods"): ("create", "list", "watch", "delete"),
    ("", "pods/log"): ("get",),
    ("", "secrets"): ("create", "delete"),
    ("", "events"): ("list",),
    ("batch", "jobs"): ("create", "patch", "delete"),
}

_TICKET_KEY = "ticket"
_NO_TICKET = "THE-TICKET-OF-THE-RUN"
_TICKET_DIR = "/etc/clusterenv"
_SCRIPT_DIR = "/clusterenv"
_HEAD_KEPT_S = 86400  # A head's Pod holds its log.
_HEAD_GRACE_S = 5  # As the first process of a container, Python ignores SIGTERM unless the script handles it.
_WORKERS_KEPT_S = 600
_SCRIPT_BYTES = 1 << 20  # What etcd takes.
_MODE = 0o444  # Within the container, which may run as anybody; outside only the node's root can see it.

# For the first process of a container, which the kernel lets ignore what it does not wait for. An anchor that is asked
# to go, as by a drained node, has failed: one that succeeds would end the run.
_WAIT = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, [s.SIGTERM]); s.{}; raise SystemExit(1)"
_WAIT_FOR_THE_END = _WAIT.format("sigwait([s.SIGTERM])")
_LITTLE = {"cpu": "10m", "memory": "32Mi"}
_NOT_FOR_ANCHORS = ("containers", "initContainers", "volumes")
_MAX_ANCHORS = 1000
_MAX_RESTARTS = 1_000_000  # Of a restless anchor: four months if the lease is 10 s, 19 years by default.
_ANCHOR_GRACE_S = 1

# Lists whose items have names.
_KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The checked settings of a `KubernetesLauncher` for each Pod."""

    image: str
    namespace: str | None
    cpus: int | float
    memory: str
    gpus: int
    env: dict[str, str]
    labels: dict[str, str]
    node_selector: dict[str, str]
    tolerations: list[dict[str, Any]]
    service_account: str | None
    image_pull_secrets: list[str]
    priority_class: str | None
    python: str
    template: Mapping[str, Any]


class Manifests:
    """The objects of one run, labelled with the names of the script and of the user who runs it.

    Attributes:
        run: An id that distinguishes its objects from another run's.
    """

    def __init__(self, recipe: Recipe, run: str) -> None:
        self.run = run
        self._recipe = recipe
        whose = run_labels()
        self._name, self._user = whose["run"], whose["user"]

    @property
    def name(self) -> str:
        """The name of the run's Job and Secret; a Pod's name adds the worker's index."""
        return f"clusterenv-{self.run}"

    def pod(self, worker_index: int) -> Manifest:
        """Return the Pod of one worker."""
        variables: list[Manifest] = [
            {"name": TICKET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": self.name, "key": _TICKET_KEY}}},
            {"name": WORKER_VARIABLE, "value": str(worker_index)},
        ]
        command = [self._recipe.python, "-m", "clusterenv.worker"]
        pod = self._pod_template(variables, command, {WORKER_LABEL: str(worker_index)})
        pod["metadata"] |= self._named(f"{self.name}-{worker_index}")
        return {"apiVersion": "v1", "kind": "Pod", **pod}

    def secret(self, ticket: str | None) -> Manifest:
        """Return the Secret that holds the ticket, or a placeholder if there is none."""
        data = base64.b64encode((ticket or _NO_TICKET).encode()).decode()
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**self._named(self.name), "labels": self._labels()},
            "type": "Opaque",
            "immutable": True,
            "data": {_TICKET_KEY: data},
        }

    def anchor(self, lease_s: int) -> Manifest:
        """Return the Job that owns the run's other objects.

        The head keeps extending its deadline. Once that has passed, Kubernetes removes the Job and what it owns. Its
        Pod only waits to be ended: a Job without a Pod never starts, and its deadline never passes.
        """
        pod = self._pod_template([], [self._recipe.python, "-IS", "-c", _WAIT_FOR_THE_END], {})
        (worker,) = (each for each in pod["spec"]["containers"] if each["name"] == CONTAINER)
        container = {name: worker[name] for name in ("image", "command", "env", "securityContext") if name in worker}
        container |= {"name": "anchor", "resources": {"requests": _LITTLE, "limits": {"memory": _LITTLE["memory"]}}}
        spec = {name: value for name, value in pod["spec"].items() if name not in _NOT_FOR_ANCHORS}
        # Signalled before it listens, it would use up the whole grace period.
        spec |= {"containers": [container], "terminationGracePeriodSeconds": _ANCHOR_GRACE_S}
        pod = {"metadata": {"labels": self._labels()}, "spec": spec}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**self._named(self.name), "labels": self._labels()},
            "spec": {
                "activeDeadlineSeconds": lease_s,
                "ttlSecondsAfterFinished": 0,
                "backoffLimit": _MAX_ANCHORS,
                "template": pod,
            },
        }

    def indexed_job(self, num_workers: int) -> Manifest:
        """Return a Job whose Pods are the workers of a head that waits for them."""
        recipe = self._recipe
        command = [recipe.python, "-m", "clusterenv", "worker", "--ticket", f"{_TICKET_DIR}/{_TICKET_KEY}"]
        command += ["--cpus", str(_threads(recipe.cpus))]
        pod = self._pod_template([], command, {})
        volume = {"name": "clusterenv-ticket", "secret": {"secretName": self.name, "defaultMode": _MODE}}
        mount = {"name": "clusterenv-ticket", "mountPath": _TICKET_DIR, "readOnly": True}
        spec = {"volumes": [volume], "containers": [{"name": CONTAINER, "volumeMounts": [mount]}]}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**self._named(self.name), "labels": self._labels()},
            "spec": {
                "completionMode": "Indexed",
                "completions": num_workers,
                "parallelism": num_workers,
                "backoffLimit": 3 * num_workers,
                "ttlSecondsAfterFinished": _WORKERS_KEPT_S,
                "template": merge(pod, {"spec": spec}),
            },
        }

    def head(self, script: Path) -> list[Manifest]:
        """Return a Job that runs a script with the rights of a head, and the objects it needs.

        Raises:
            ConfigError: The script cannot be read, or is too long.
        """
        try:
            text = script.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The script {script} cannot be read: {error}.") from error
        if len(text.encode()) > _SCRIPT_BYTES // 2:
            raise ConfigError(f"The script {script} is too long for a ConfigMap: build it into the image.")
        stem = re.sub(r"[^a-z0-9]+", "-", script.stem.lower()).strip("-")[:40].strip("-") or "head"
        job = f"{stem}-{self.run}"
        file = f"{re.sub(r'[^-._a-zA-Z0-9]+', '-', script.stem)}.py"  # What a ConfigMap takes as a key.
        labels = {APP_LABEL: APP, NAME_LABEL: stem, USER_LABEL: self._user}
        # All have the Job's name: whoever deletes this run's objects takes nothing from another run's head.
        metadata = {**self._named(job), "labels": labels}
        rules = [
            {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
            for (group, resource), verbs in RIGHTS.items()
        ]
        return [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules},
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": metadata,
                "subjects": [{"kind": "ServiceAccount", **self._named(job)}],
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": job},
            },
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {file: text}},
            self._head_job(job, file, labels),
        ]

    def _head_job(self, name: str, script: str, labels: dict[str, str]) -> Manifest:
        recipe = self._recipe
        # The name of the user: in the container it is another one, or none.
        variables = {"PYTHONUNBUFFERED": "1", "USER": self._user} | recipe.env
        container = {
            "name": "head",
            "image": recipe.image,
            "command": [recipe.python, f"{_SCRIPT_DIR}/{script}"],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "volumeMounts": [{"name": "script", "mountPath": _SCRIPT_DIR, "readOnly": True}],
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _HEAD_GRACE_S,
            "serviceAccountName": name,
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": name}}],
        }
        if recipe.image_pull_secrets:
            spec["imagePullSecrets"] = [{"name": each} for each in recipe.image_pull_secrets]
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**self._named(name), "labels": labels},
            "spec": {
                "backoffLimit": 0,
                "ttlSecondsAfterFinished": _HEAD_KEPT_S,
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        }

    def _pod_template(self, variables: list[Manifest], command: list[str], labels: dict[str, str]) -> Manifest:
        recipe = self._recipe
        common = {**thread_variables(_threads(recipe.cpus)), "PYTHONUNBUFFERED": "1"} | recipe.env
        requests: Manifest = {"cpu": f"{round(recipe.cpus * 1000)}m" if recipe.cpus % 1 else str(int(recipe.cpus))}
        requests["memory"] = recipe.memory
        limits = {"memory": recipe.memory} | ({"nvidia.com/gpu": recipe.gpus} if recipe.gpus else {})
        container = {
            "name": CONTAINER,
            "image": recipe.image,
            "command": command,
            "env": [*({"name": name, "value": value} for name, value in common.items()), *variables],
            "resources": {"requests": requests, "limits": limits},
        }
        spec: Manifest = {
            "restartPolicy": "Never",
            "nodeSelector": recipe.node_selector,
            "tolerations": recipe.tolerations,
            "serviceAccountName": recipe.service_account,
            "imagePullSecrets": [{"name": name} for name in recipe.image_pull_secrets],
            "priorityClassName": recipe.priority_class,
            "containers": [container],
        }
        ours = {"metadata": {"labels": self._labels() | recipe.labels | labels}, "spec": _without_empty(spec)}
        # Defaults if neither says otherwise: a worker needs no access to the cluster, nor its Services' addresses.
        apart = {"automountServiceAccountToken": recipe.service_account is not None, "enableServiceLinks": False}
        theirs = {part: recipe.template.get(part) or {} for part in ("metadata", "spec")}
        theirs["metadata"] = {
            part: value for part, value in theirs["metadata"].items() if part in ("labels", "annotations")
        }
        pod: Manifest = merge(merge({"spec": apart}, theirs), ours)
        for container in pod["spec"]["containers"]:
            if container["name"] == CONTAINER:
                container.pop("args", None)  # The template's: they belong to a command that is not run.
        return pod

    def _labels(self) -> dict[str, str]:
        return {APP_LABEL: APP, RUN_LABEL: self.run, NAME_LABEL: self._name, USER_LABEL: self._user}

    def _named(self, name: str) -> Manifest:
        return {"name": name, **self._space()}

    def _space(self) -> dict[str, str]:
        return {} if self._recipe.namespace is None else {"namespace": self._recipe.namespace}


def restless(anchor: Manifest) -> Manifest:
    """Return an anchor whose Pod restarts once per lease.

    Any change of its Pod makes Kubernetes look at a Job, and see that its deadline has passed.
    """
    lease_s = anchor["spec"]["activeDeadlineSeconds"]
    (container,) = anchor["spec"]["template"]["spec"]["containers"]
    wait = _WAIT.format(f"sigtimedwait([s.SIGTERM], {lease_s})")
    changed = {"name": container["name"], "command": [*container["command"][:-1], wait]}
    pod = {"spec": {"restartPolicy": "OnFailure", "containers": [changed]}}
    merged: Manifest = merge(anchor, {"spec": {"backoffLimit": _MAX_RESTARTS, "template": pod}})
    return merged


def merge(under: Any, over: Any, key: str = "") -> Any:
    """Merge one part of a manifest over another: mappings by entry, lists by concatenation; otherwise `over` wins.

    For items of the same name (variables, volumes) the one in `over` wins, and containers are merged.
    """
    if isinstance(under, Mapping) and isinstance(over, Mapping):
        both = {name: merge(under[name], over[name], name) for name in under if name in over}
        return {**under, **over, **both}
    if key == "command" or not (_is_list(under) and _is_list(over)):
        return over
    if key not in _KEYS:
        return [*under, *(item for item in over if item not in under)]
    name = _KEYS[key]
    named = {item.get(name): item for item in under}
    for item in over:
        named[item[name]] = merge(named.get(item[name], {}), item) if key == "containers" else item
    return list(named.values())


def dump(*objects: Manifest) -> str:
    """Write objects as one YAML stream."""
    yaml = _import_yaml()
    return str(yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=False, width=120)).rstrip()


def load(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: The file does not exist, or is not YAML.
    """
    yaml = _import_yaml()
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _import_yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "KubernetesLauncher reads and writes YAML, and PyYAML is not installed here: "
            "pip install 'clusterenv-rl[kubernetes]'"
        ) from error
    return yaml


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _threads(cpus: int | float) -> int:
    return max(1, int(cpus))


def _without_empty(spec: Manifest) -> Manifest:
    return {name: value for name, value in spec.items() if value not in (None, [], {})}
