"""KubernetesLauncher: every worker is a Pod, created and watched by the head.

Nothing here talks to a cluster: a separate process beside the head does (`client`), so that the head never waits for
the network, and everything it started is removed even if the head is killed.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import ELSEWHERE
from clusterenv.launchers.kubernetes.fleet import KubernetesFleet
from clusterenv.launchers.kubernetes.manifest import Manifests, Recipe, dump, load
from clusterenv.launchers.kubernetes.messages import Plan
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DOTTED_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_MEMORY = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)")
_REGISTRY = r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:\d+)?|[A-Za-z0-9-]+:\d+|\[[0-9A-Fa-f:]+\](:\d+)?"
_IMAGE = re.compile(
    rf"(({_REGISTRY})/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]*)?(@[A-Za-z0-9.+_-]+:[0-9A-Fa-f]+)?", re.ASCII
)
_YAML_TEXT = re.compile(r"\n|:\s|^\s*\{")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOLERATION = re.compile(r"(?P<key>[^=:\s]+)(=(?P<value>[^:\s]*))?(:(?P<effect>\w+))?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TOLERATION_KEYS = {"key", "operator", "value", "effect", "tolerationSeconds"}
_TEMPLATE_KEYS = {"apiVersion", "kind", "metadata", "spec"}
_METADATA_KEYS = {"labels", "annotations"}
_OTHERS_METADATA_KEYS = {"name", "generateName", "namespace", "creationTimestamp"}  # From another Pod; ignored.


@dataclass(frozen=True, kw_only=True)
class KubernetesLauncher:
    """Starts workers as Pods, one each, in the cluster that `kubectl` talks to or that the head itself runs in.

    Workers connect to the head, so it must run in a Pod or where Pods can reach it. All created objects belong to one
    Job, which the head keeps alive; whatever ends the head, its Pods and its Secret are removed.

    Attributes:
        image: A container image with Python and the same clusterenv version as on the head.
        namespace: Where to create the objects. By default that of the context, or of the Pod the head runs in.
        cpus: CPUs requested per worker, possibly a fraction, and as many BLAS, OpenMP and torch threads.
        memory: Memory per worker, with a unit: "1Gi". A worker that uses more is killed.
        gpus: NVIDIA GPUs per worker; request others in `pod_template`.
        env: Environment variables for the workers, and for a head that is started with `render_head`.
        labels: Further labels for the Pods, such as a queue's.
        node_selector: Labels of nodes that workers may run on.
        tolerations: Node taints that workers tolerate, as `kubectl taint` writes them: "spot=true:NoSchedule"; or as in
            a manifest.
        service_account: The workers' service account. By default they have no access to the cluster.
        image_pull_secrets: Names of Secrets with the registry's credentials.
        priority_class: The name of a PriorityClass.
        pod_template: A Pod as a mapping, or the path of a YAML file, for settings that have no field here. Fields of
            this launcher take precedence; the container is called "worker".
        context: A context of the kubeconfig. By default the current one.
        python: The command for Python in the image.
        log_dir: Where to keep the workers' output: one directory per run, `run-<time>`, with one file per worker. By
            default output is read from the cluster for error messages only.
        show_output: Whether to also show the workers' output on this process's standard error, each line prefixed with
            `[worker <index>]`; very large output is shown only in part.
        lease_s: How long Pods and Secret remain at most if the head's machine is lost; up to twice that before
            Kubernetes 1.25. If only the head is killed, they are removed immediately.
    """

    image: str
    namespace: str | None = None
    cpus: int | float = 1
    memory: str = "1Gi"
    gpus: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[str | Mapping[str, Any]] = ()
    service_account: str | None = None
    image_pull_secrets: Sequence[str] = ()
    priority_class: str | None = None
    pod_template: str | Path | Mapping[str, Any] | None = None
    context: str | None = None
    python: str = "python"
    log_dir: str | Path | None = None
    show_output: bool = False
    lease_s: int = 600

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_mappings()
        for toleration in self._sequence("tolerations"):
            _read_toleration(toleration)
        self._read_template()

    @property
    def suggested_workers(self) -> None:
        """One per core of this machine: a cluster may have any number of nodes."""
        return None

    @property
    def queues(self) -> bool:
        """Yes: Pods may wait for nodes, quotas or a queue."""
        return True

    @property
    def route_to(self) -> str | None:
        """The API server's host: Pods are likely to be in the same network.

        If that is this machine (kind, minikube, a tunnel), a stand-in for any other machine. None if there is no
        cluster: `launch` then raises.
        """
        host = _read_context(self.context)[0] or os.environ.get("KUBERNETES_SERVICE_HOST")
        return ELSEWHERE if host is not None and _is_loopback(host) else host

    def launch(self, ticket: Ticket, num_workers: int) -> KubernetesFleet:
        """Create the Pods; return when the cluster has accepted them.

        Raises:
            LaunchError: There is no cluster, it refuses, or its Python client is not installed.
        """
        if importlib.util.find_spec("kubernetes") is None:
            raise LaunchError(
                "KubernetesLauncher needs the package kubernetes, and it is not installed here: "
                "pip install 'clusterenv-rl[kubernetes]'"
            )
        manifests = self._manifests(secrets.token_hex(4))
        plan = Plan(
            context=self.context,
            namespace=self.namespace,
            run=manifests.run,
            lease_s=self.lease_s,
            memory=self.memory,
            anchor=manifests.anchor(self.lease_s),
            secret=manifests.secret(ticket.encode()),
            pods=[manifests.pod(worker_index) for worker_index in range(num_workers)],
        )
        return KubernetesFleet(plan, self.log_dir, shows_output=self.show_output)

    def render(self, num_workers: int) -> str:
        """Show the objects as YAML, with "run" in place of the random id, and without the ticket."""
        manifests = self._manifests("run")
        objects = [manifests.anchor(self.lease_s), manifests.secret(None)]
        return dump(*objects, *(manifests.pod(worker_index) for worker_index in range(num_workers)))

    def render_indexed_job(self, num_workers: int, ticket: Ticket | None = None) -> str:
        """Return an Indexed Job of workers, and the Secret with their ticket, as YAML for `kubectl apply`.

        This is for heads that may not create Pods: they use a `ByHandLauncher`.
        """
        manifests = self._manifests("run" if ticket is None else secrets.token_hex(4))
        return dump(
            manifests.secret(None if ticket is None else ticket.encode()),
            manifests.indexed_job(num_workers),
        )

    def render_head(self, script: str | Path) -> str:
        """Return a Job that runs a script as a head in the cluster, with the permissions it needs, as YAML.

        Raises:
            ConfigError: The script cannot be read, or is too long for a ConfigMap.
        """
        namespace = self.namespace or _read_context(self.context)[1] or "default"
        return dump(*replace(self, namespace=namespace)._manifests(secrets.token_hex(4)).head(Path(script)))

    def _manifests(self, run: str) -> Manifests:
        return Manifests(
            Recipe(
                image=self.image,
                namespace=self.namespace,
                cpus=self.cpus,
                memory=self.memory,
                gpus=self.gpus,
                env=dict(self.env),
                labels=dict(self.labels),
                node_selector=dict(self.node_selector),
                tolerations=[_read_toleration(toleration) for toleration in self.tolerations],
                service_account=self.service_account,
                image_pull_secrets=list(self.image_pull_secrets),
                priority_class=self.priority_class,
                python=self.python,
                template=self._read_template(),
            ),
            run,
        )

    def _check_numbers(self) -> None:
        if isinstance(self.cpus, bool) or not isinstance(self.cpus, int | float) or not 0.001 <= self.cpus < 1e6:
            raise ConfigError(f"KubernetesLauncher.cpus must be a number above 0, like 1 or 0.5, got {self.cpus!r}.")
        for name, least in (("gpus", 0), ("lease_s", 10)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"KubernetesLauncher.{name} must be an int of at least {least}, got {value!r}.")
        if not isinstance(self.memory, str) or not _MEMORY.fullmatch(self.memory):
            raise ConfigError(
                'KubernetesLauncher.memory must have a unit (Ki, Mi, Gi, Ti) and be more than 0, like "1Gi", got '
                f"{self.memory!r}."
            )

    def _check_names(self) -> None:
        if not isinstance(self.image, str) or not _IMAGE.fullmatch(self.image):
            raise ConfigError(
                'KubernetesLauncher.image must name an image, like "registry.example.org/rl:1", without "https://" '
                f"and in small letters except for the registry and the tag; got {self.image!r}."
            )
        if not isinstance(self.python, str) or not self.python or re.search(r"\s", self.python):
            raise ConfigError(f"KubernetesLauncher.python must be one command, without options, got {self.python!r}.")
        if self.context is not None and (not isinstance(self.context, str) or not self.context):
            raise ConfigError(f"KubernetesLauncher.context must name a context, got {self.context!r}.")
        pull_secrets = [("image_pull_secrets", name) for name in self._sequence("image_pull_secrets")]
        single = ("service_account", "priority_class")
        for field_name, name in [*((name, getattr(self, name)) for name in single), *pull_secrets]:
            if name is not None and (not isinstance(name, str) or not _DOTTED_NAME.fullmatch(name)):
                raise ConfigError(
                    f"KubernetesLauncher.{field_name} must be a name as Kubernetes has them (small letters, digits, "
                    f"dashes and dots), got {name!r}."
                )
        space = self.namespace
        if space is not None and (not isinstance(space, str) or len(space) > 63 or not _NAME.fullmatch(space)):
            raise ConfigError(
                "KubernetesLauncher.namespace must be a name as Kubernetes has them (small letters, digits and dashes, "
                f"at most 63), got {space!r}."
            )

    def _check_mappings(self) -> None:
        for name in ("env", "labels", "node_selector"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ConfigError(f"KubernetesLauncher.{name} must be a mapping, got {value!r}.")
            for key, text in value.items():
                if not isinstance(text, str):
                    raise ConfigError(f"KubernetesLauncher.{name}[{key!r}] must be a text, got {text!r}: quote it.")
        for key in self.env:
            if not isinstance(key, str) or not _VARIABLE.fullmatch(key):
                raise ConfigError(f"KubernetesLauncher.env holds {key!r}, which cannot be a variable's name.")
            if key in (TICKET_VARIABLE, WORKER_VARIABLE):
                raise ConfigError(f"KubernetesLauncher.env may not have {key}: the launcher sets it.")
        for name in ("labels", "node_selector"):
            for key, text in getattr(self, name).items():
                if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(text):
                    raise ConfigError(
                        f"KubernetesLauncher.{name} holds {key!r}: {text!r}, which cannot be a label. Labels have "
                        "letters, digits, dashes, dots and underscores, at most 63; keys may have a prefix and a slash."
                    )
        if own := [key for key in self.labels if key.startswith("clusterenv/")]:
            raise ConfigError(f"KubernetesLauncher.labels may not have {own[0]}: the launcher tells its Pods by these.")

    def _sequence(self, name: str) -> Sequence[Any]:
        value = getattr(self, name)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"KubernetesLauncher.{name} must be a list, got {value!r}.")
        return value

    def _read_template(self) -> Mapping[str, Any]:
        template: Any = self.pod_template
        if template is None:
            return {}
        where = "KubernetesLauncher.pod_template"
        if isinstance(template, str | Path):
            try:
                template, where = load(Path(template)), f"{where} ({template})"
            except ConfigError as error:
                if not _YAML_TEXT.search(str(template)):
                    raise
                raise ConfigError(
                    f"{where} must be a mapping or the path of a YAML file, and this looks like YAML itself: write it "
                    "to a file, or pass what `yaml.safe_load` makes of it."
                ) from error
        if not isinstance(template, Mapping):
            raise ConfigError(f"{where} must be a mapping with `metadata` and `spec`, as in a manifest of a Pod.")
        if strange := sorted(map(str, set(template) - _TEMPLATE_KEYS)):
            hint = " It belongs under `spec`." if strange[0] in ("containers", "volumes", "affinity") else ""
            raise ConfigError(f"{where} holds {strange[0]!r}, but a Pod has `metadata` and `spec`.{hint}")
        if template.get("kind", "Pod") != "Pod":
            raise ConfigError(f"{where} must be of kind Pod, got {template['kind']!r}.")
        for part in ("metadata", "spec"):
            if not isinstance(template.get(part) or {}, Mapping):
                raise ConfigError(f"{where}: `{part}` must be a mapping, got {template[part]!r}.")
        if strange := sorted(map(str, set(template.get("metadata") or {}) - _METADATA_KEYS - _OTHERS_METADATA_KEYS)):
            raise ConfigError(f"{where}: of `metadata`, `labels` and `annotations` are used, and not {strange[0]!r}.")
        containers = (template.get("spec") or {}).get("containers") or []
        if not isinstance(containers, Sequence) or not all(isinstance(c, Mapping) and "name" in c for c in containers):
            raise ConfigError(f"{where}: `containers` must be a list of mappings with a `name`; ours is `worker`.")
        return template


def _read_toleration(toleration: Any) -> dict[str, Any]:
    """Return a toleration as in a manifest, given one or the notation of `kubectl taint`."""
    if isinstance(toleration, str) and (match := _TOLERATION.fullmatch(toleration)):
        read: dict[str, Any] = {"key": match["key"]}
        read |= {"operator": "Exists"} if match["value"] is None else {"operator": "Equal", "value": match["value"]}
        if match["effect"] is not None:
            read["effect"] = match["effect"]
    elif isinstance(toleration, Mapping) and not set(toleration) - _TOLERATION_KEYS:
        read = dict(toleration)
    else:
        raise ConfigError(
            'KubernetesLauncher.tolerations takes texts like "spot=true:NoSchedule", or mappings with '
            f"{', '.join(sorted(_TOLERATION_KEYS))}; got {toleration!r}."
        )
    if read.get("effect", "") not in ("", *_EFFECTS):
        raise ConfigError(
            f"KubernetesLauncher.tolerations: the effect is one of {', '.join(_EFFECTS)}, got {read['effect']!r}."
        )
    return read


def _read_context(context: str | None) -> tuple[str | None, str | None]:
    """Return the API server's host and the namespace from the kubeconfig, if it names them.

    Mistakes in the kubeconfig are left for the client to report.
    """
    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    configs = []
    for path in filter(None, paths.split(os.pathsep)):
        try:
            configs.append(load(Path(path).expanduser()))
        except ConfigError:
            continue
    try:
        name = context or next(c["current-context"] for c in configs if c.get("current-context"))
        found = _find(configs, "contexts", name)["context"]
        server = _find(configs, "clusters", found["cluster"])["cluster"]["server"]
        return urlsplit(server).hostname, found.get("namespace")
    except (StopIteration, LookupError, TypeError, AttributeError, ValueError):
        return None, None


def _find(configs: Sequence[Any], kind: str, name: str) -> Any:
    """Return an entry from the first kubeconfig that has it."""
    return next(entry for config in configs for entry in config.get(kind) or () if entry["name"] == name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
