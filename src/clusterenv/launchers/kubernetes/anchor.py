"""The Job that owns all objects of a run: when nobody extends its deadline, Kubernetes removes everything."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from clusterenv.launchers.kubernetes.api import Api, Refusal
from clusterenv.launchers.kubernetes.manifest import restless
from clusterenv.launchers.kubernetes.messages import Plan

# Conditions of a Job that ends. In newer versions the last two say that it will end once its Pods have.
_ENDS = ("Failed", "Complete", "FailureTarget", "SuccessCriteriaMet")
# Until this version, 1.25, a Job whose deadline was extended ends only if something else happens to it or to its Pod.
_KEEPS_EXTENDED_DEADLINES = 25


class Anchor:
    """The Job that owns everything else, and is removed when nobody extends its deadline.

    Attributes:
        uid: The Job's uid, once it exists.
        may_exist: Whether the cluster was asked to create the Job.
    """

    def __init__(self, api: Api, plan: Plan) -> None:
        self.may_exist = plan.takeover is not None
        self.uid = "" if plan.takeover is None else plan.takeover.anchor_uid
        self._api = api
        self._plan = plan
        self._name = plan.anchor["metadata"]["name"]
        self._created_at = time.monotonic() - (0.0 if plan.takeover is None else plan.takeover.elapsed_s)
        self._renewed_at = 0.0
        self._has_secret = plan.takeover is not None
        self._lock = threading.Lock()

    @property
    def references(self) -> list[dict[str, Any]]:
        """The owner references of objects that belong to the Job."""
        return [{"apiVersion": "batch/v1", "kind": "Job", "name": self._name, "uid": self.uid, "controller": False}]

    def create(self) -> None:
        """Create the Job and the Secret."""
        metadata = self._plan.anchor["metadata"] | {"ownerReferences": self._own_pod()}
        minor = self._api.minor_version()
        is_old = minor is not None and minor < _KEEPS_EXTENDED_DEADLINES
        anchor = restless(self._plan.anchor) if is_old else self._plan.anchor
        self._created_at = time.monotonic()
        self.may_exist = True
        created = self._api.create("jobs", anchor | {"metadata": metadata})
        self.uid = created["metadata"]["uid"]
        self._create_secret()
        self._renewed_at = self._created_at

    def renew(self) -> None:
        """Extend the Job's deadline; if the Job is gone, with all it owned, or the Secret is, create it again."""
        with self._lock:
            now = time.monotonic()
            if now - self._renewed_at < 1.0:
                return
            lasts_s = int(now - self._created_at) + self._plan.lease_s
            path = self._api.path("jobs", self._name)
            try:
                answer = self._api.request("PATCH", path, {"spec": {"activeDeadlineSeconds": lasts_s}})
                status = answer.get("status") or {}
                is_gone = "deletionTimestamp" in answer["metadata"] or any(
                    each["type"] in _ENDS and each["status"] == "True" for each in status.get("conditions") or ()
                )
            except Refusal as refusal:
                if refusal.status != 404:
                    raise
                is_gone = True
            if is_gone:
                self._has_secret = False
                self.create()
                return
            self.uid = answer["metadata"]["uid"]  # A previous client may have created it again.
            if not self._has_secret or self._is_secret_missing():
                self._create_secret()
            self._renewed_at = now

    def delete(self) -> None:
        """Delete the Job."""
        try:
            self._api.request("DELETE", self._api.path("jobs", self._name), {"propagationPolicy": "Background"})
        except Refusal as refusal:
            if refusal.status != 404:
                raise

    def _is_secret_missing(self) -> bool:
        """Whether somebody has deleted the Secret: a head may not read Secrets, but may ask if it could create one."""
        try:
            self._api.request("POST", self._api.path("secrets"), self._plan.secret, dryRun="All")
        except Refusal:
            return False  # It exists, or the cluster does not say; if it is missing after all, the next time may tell.
        return True

    def _create_secret(self) -> None:
        metadata = self._plan.secret["metadata"] | {"ownerReferences": self.references}
        try:
            self._api.create("secrets", self._plan.secret | {"metadata": metadata})
        except Refusal as refusal:
            if refusal.status != 409:
                raise
            # The Secret of a deleted Job is being removed with it. Or it is our own, and an answer was lost.
            with contextlib.suppress(Refusal):
                self._api.request("DELETE", self._api.path("secrets", metadata["name"]))
            self._api.create("secrets", self._plan.secret | {"metadata": metadata})
        self._has_secret = True

    def _own_pod(self) -> list[dict[str, Any]]:
        """Return an owner reference to the Pod this process runs in, if that is in the same namespace."""
        if self._api.pod_name is None:
            return []
        selector = f"metadata.name={self._api.pod_name}"
        pods = self._api.request("GET", self._api.path("pods"), fieldSelector=selector)["items"]
        return [
            {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
            for pod in pods
        ]
