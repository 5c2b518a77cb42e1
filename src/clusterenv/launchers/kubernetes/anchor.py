"""The Job that owns whatever a run has in a cluster: when nobody moves its deadline on, Kubernetes removes it all."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from clusterenv.launchers.kubernetes.api import Api, Refusal
from clusterenv.launchers.kubernetes.messages import Plan

# Conditions of a Job that ends. Newer versions say with the last two that it will, once its Pods have.
_ENDS = ("Failed", "Complete", "FailureTarget", "SuccessCriteriaMet")


class Anchor:
    """The Job that owns all else, and goes when nobody moves its deadline on.

    Attributes:
        uid: Its number, once it is there.
        may_exist: Whether the cluster was asked to create it.
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
        """What an object says that belongs to it."""
        return [{"apiVersion": "batch/v1", "kind": "Job", "name": self._name, "uid": self.uid, "controller": False}]

    def create(self) -> None:
        """Create it, and the Secret."""
        metadata = self._plan.anchor["metadata"] | {"ownerReferences": self._own_pod()}
        self._created_at = time.monotonic()
        self.may_exist = True
        created = self._api.create("jobs", self._plan.anchor | {"metadata": metadata})
        self.uid = created["metadata"]["uid"]
        self._create_secret()
        self._renewed_at = self._created_at

    def renew(self) -> None:
        """Move its deadline on. If it is gone, with all it owned, create it again."""
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
            self.uid = answer["metadata"]["uid"]  # A predecessor may have had to create it again.
            if not self._has_secret:
                self._create_secret()
            self._renewed_at = now

    def delete(self) -> None:
        """Remove it."""
        try:
            self._api.request("DELETE", self._api.path("jobs", self._name), {"propagationPolicy": "Background"})
        except Refusal as refusal:
            if refusal.status != 404:
                raise

    def _create_secret(self) -> None:
        metadata = self._plan.secret["metadata"] | {"ownerReferences": self.references}
        try:
            self._api.create("secrets", self._plan.secret | {"metadata": metadata})
        except Refusal as refusal:
            if refusal.status != 409:
                raise
            # That of a Job which is gone is being removed with it. Or it is this one, and an answer was lost.
            with contextlib.suppress(Refusal):
                self._api.request("DELETE", self._api.path("secrets", metadata["name"]))
            self._api.create("secrets", self._plan.secret | {"metadata": metadata})
        self._has_secret = True

    def _own_pod(self) -> list[dict[str, Any]]:
        """Say that it belongs to the Pod this process runs in, if it does run in one of the same namespace."""
        if self._api.pod_name is None:
            return []
        selector = f"metadata.name={self._api.pod_name}"
        pods = self._api.request("GET", self._api.path("pods"), fieldSelector=selector)["items"]
        return [
            {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
            for pod in pods
        ]
