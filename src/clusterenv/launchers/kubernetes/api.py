"""Api: requests to the API server, with the credentials and the connection of the official client.

Objects stay mappings, as the server sends them, independent of the models of any one version of Kubernetes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes import client, config
from urllib3.util.ssl_ import create_urllib3_context

from clusterenv.launchers.kubernetes.manifest import RIGHTS

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_S = 5.0
_ANSWER_S = 30.0
_LOG_S = 1.5  # The API server asks the node for the log, and keeps asking one that is cut off.
_STREAM_S = 75.0  # More than a watch lasts, so that a silently dead connection is noticed.
_FORBIDDEN_TO = re.compile(r'cannot (\w+) resource "([\w/.-]+)"')
RIGHTS_ADVICE = (
    "The Role that a head needs is in docs/how-to/kubernetes.md, and `clusterenv launch kubernetes --head` prints it; "
    "an administrator of the namespace can give it to you"
)
_BAD_CONFIG = (config.ConfigException, yaml.YAMLError, OSError, LookupError, TypeError, ValueError, AttributeError)
_MERGE = "application/merge-patch+json"


class Refusal(Exception):
    """The cluster did not do what it was asked to.

    Attributes:
        status: The HTTP status; 0 if there was no answer.
        is_quota: Whether the namespace's quota is exceeded.
        is_passing: Whether the same request may succeed later.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        self.is_quota = status == 403 and "exceeded quota" in text
        self.is_passing = status in (0, 408, 409, 429) or status >= 500 or self.is_quota


class Api:
    """One cluster and one namespace of it.

    Attributes:
        namespace: The namespace of all objects.
        pod_name: The Pod this process runs in, if it is in this namespace of this cluster.
    """

    def __init__(self, context: str | None, namespace: str | None) -> None:
        """Find the cluster and the credentials as kubectl does.

        Raises:
            Refusal: There is no cluster, or no usable credentials.
        """
        self._context = context
        self._login_lock = threading.Lock()
        self._login, own, is_inside = _log_in(context)
        self.namespace = namespace or own
        self.pod_name = socket.gethostname() if is_inside and self.namespace == own else None

    def path(self, kind: str, name: str = "") -> str:
        """Return the path of an object, or of all of a kind: "pods", "secrets", "events", "jobs"."""
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        return f"{group}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str | int
    ) -> dict[str, Any]:
        """Return the server's answer.

        Raises:
            Refusal: The server refuses, or does not answer.
        """
        with self._open(method, path, body, query, _ANSWER_S) as response:
            try:
                answer: dict[str, Any] = json.loads(response.data)
            except (ValueError, urllib3.exceptions.HTTPError) as error:
                raise Refusal(f"{self._login.host} gives no proper answer: {error}.") from error
            return answer

    def create(self, kind: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, and return it as the server stores it.

        Raises:
            Refusal: As in `request`, or a field is unknown; before 1.25, servers silently drop unknown fields.
        """
        return self.request("POST", self.path(kind), manifest, fieldValidation="Strict")

    def read(self, path: str, **query: str | int) -> bytes:
        """Return a log.

        Raises:
            Refusal: As in `request`.
        """
        with self._open("GET", path, None, query, _LOG_S) as response:
            try:
                return bytes(response.data)
            except urllib3.exceptions.HTTPError as error:
                raise Refusal(f"{self._login.host} has broken off: {error}.") from error

    def follow(self, path: str, **query: str | int) -> Iterator[bytes]:
        """Yield a text piece by piece as it arrives, until the server ends it.

        Raises:
            Refusal: As in `request`, or the connection broke.
        """
        with self._open("GET", path, None, query, _STREAM_S if "watch" in query else None) as response:
            try:
                yield from response.stream()
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise Refusal(f"{self._login.host} has broken off: {error}.") from error

    def minor_version(self) -> int | None:
        """Return the 20 of Kubernetes 1.20; None if the server does not say.

        Raises:
            Refusal: The server does not answer.
        """
        try:
            answer = self.request("GET", "/version")
        except Refusal as refusal:
            if refusal.is_passing:
                raise
            return None
        digits = re.match(r"\d+", str(answer.get("minor")))  # Providers write "20+".
        return None if digits is None else int(digits[0])

    def missing_rights(self) -> list[str]:
        """Return the rights that a head needs and this one lacks, e.g. "delete secrets"."""
        missing = []
        for (group, resource), verbs in RIGHTS.items():
            kind, _, sub = resource.partition("/")
            for verb in verbs:
                asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": kind}
                body = {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": asked | ({"subresource": sub} if sub else {})},
                }
                answer = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
                if not (answer.get("status") or {}).get("allowed"):
                    missing.append(f"{verb} {resource}")
        return missing

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str | int],
        read_s: float | None,
    ) -> urllib3.BaseHTTPResponse:
        login = self._login
        response = login.send(method, path, body, query, read_s)
        if response.status == 401:
            response.drain_conn()
            response = self._log_in_again(login).send(method, path, body, query, read_s)
        if response.status < 300:
            return response
        try:
            text = response.data.decode(errors="replace")
        except urllib3.exceptions.HTTPError:
            text = ""
        raise Refusal(self._explain(response.status, text), response.status)

    def _log_in_again(self, refused: _Login) -> _Login:
        """Return new credentials in place of those that were refused, if the user has renewed them since."""
        with self._login_lock:
            if self._login is refused:
                self._login = _log_in(self._context)[0]
            return self._login

    def _explain(self, status: int, text: str) -> str:
        """Return what a refusal means, and what to do."""
        try:
            message = str(json.loads(text)["message"])
        except (ValueError, LookupError, TypeError):
            message = text.strip()[:400]
        if status == 401:
            return (
                f"The cluster at {self._login.host} does not accept your credentials (401 Unauthorized): they have "
                "expired, or are another cluster's. Log in again; `kubectl get pods` must work."
            )
        if status == 403 and (right := _FORBIDDEN_TO.search(message)):
            return f"You may not {right[1]} {right[2]} in namespace {self.namespace}: {message}. {RIGHTS_ADVICE}"
        if status == 404 and message.startswith("namespaces "):
            return f"{message}. Create it, or name another: KubernetesLauncher(namespace=...)."
        if "unknown field" in message:
            return f"{message}. Correct it in KubernetesLauncher(pod_template=...)."
        return message or f"HTTP status {status}"


class _Login:
    """A cluster's address, and our credentials for it."""

    def __init__(self, settings: client.Configuration) -> None:
        self.host = settings.host.rstrip("/")
        self._settings = settings
        self._client = client.ApiClient(settings)
        self._pool = self._client.rest_client.pool_manager
        _read_certificates(self._pool.connection_pool_kw)

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str | int],
        read_s: float | None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, and return the response as soon as it begins."""
        try:
            response: urllib3.BaseHTTPResponse = self._pool.request(
                method,
                f"{self.host}{path}?{urlencode(query)}",
                body=None if body is None else json.dumps(body),
                headers=self._headers(method),
                preload_content=False,
                retries=False,
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=read_s),
            )
        except (urllib3.exceptions.HTTPError, OSError, config.ConfigException) as error:
            raise Refusal(
                f"The cluster at {self.host} cannot be reached: {_cause(error)}. See that `kubectl get pods` works; "
                "KubernetesLauncher(context=...) chooses another cluster."
            ) from error
        return response

    def _headers(self, method: str) -> dict[str, str]:
        """Return the headers with our credentials; expired ones are renewed."""
        headers = {
            "Accept": "application/json, */*",
            "Content-Type": _MERGE if method == "PATCH" else "application/json",
        }
        headers |= self._client.default_headers
        for setting in self._settings.auth_settings().values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        return headers


def _log_in(context: str | None) -> tuple[_Login, str, bool]:
    """Find the cluster and the credentials; return our namespace, too, and whether this is a Pod there."""
    settings = client.Configuration()
    # Keys and certificates in a kubeconfig are written to files, which must not be left behind or found by others.
    with tempfile.TemporaryDirectory(prefix="clusterenv-") as directory:
        own, is_inside = _load(settings, context, directory)
        try:
            return _Login(settings), own, is_inside
        except (OSError, ValueError) as error:
            raise Refusal(f"The certificates of the kubeconfig cannot be used: {error}.") from error


def _load(settings: client.Configuration, context: str | None, directory: str) -> tuple[str, bool]:
    """Fill in the cluster's address and our credentials; return our namespace, and whether this is a Pod there."""
    paths = [Path(path).expanduser() for path in (os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)]
    try:
        if any(path.is_file() for path in paths):
            config.load_kube_config(context=context, client_configuration=settings, temp_file_path=directory)
            contexts, active = config.list_kube_config_contexts()
            chosen = next((each for each in contexts if each["name"] == context), active)
            return str(chosen["context"].get("namespace") or "default"), False
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=settings)
            return (_ACCOUNT / "namespace").read_text().strip(), True
    except _BAD_CONFIG as error:
        raise Refusal(_explain_config(error, context)) from error
    raise Refusal(
        f"There is no cluster: this is not a Pod, and there is no {os.pathsep.join(map(str, paths))}. "
        "Set KUBECONFIG, or make a cluster (docs/how-to/kubernetes.md begins with kind)."
    )


def _read_certificates(settings: dict[str, Any]) -> None:
    """Load the certificate files into an SSL context, so that the files may be deleted."""
    context = create_urllib3_context(cert_reqs=settings.get("cert_reqs"))
    authorities, certificate, key = (settings.pop(name, None) for name in ("ca_certs", "cert_file", "key_file"))
    if authorities:
        context.load_verify_locations(authorities)
    else:
        context.load_default_certs()
    if certificate:
        context.load_cert_chain(certificate, key)
    settings["ssl_context"] = context


def _explain_config(error: Exception, context: str | None) -> str:
    try:
        names = [each["name"] for each in config.list_kube_config_contexts()[0]]
    except _BAD_CONFIG:
        names = []
    if context is not None and names and context not in names:
        return f"The kubeconfig has no context {context!r}. It has {', '.join(names)}."
    return f"The kubeconfig cannot be used: {error}. See that `kubectl get pods` works."


def _cause(error: Exception) -> str:
    """Return the gist of one of urllib3's errors."""
    reason = getattr(error, "reason", None) or error
    return re.sub(r"^<[^>]*>:? ?|^[\w.]*Connection\(.*?\): ", "", str(reason))
