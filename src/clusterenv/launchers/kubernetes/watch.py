"""Watches the Pods of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from clusterenv.launchers.kubernetes.api import Api, Refusal
from clusterenv.launchers.kubernetes.manifest import RUN_LABEL

_WATCH_S = 60
_RETRY_S = 1.0


def watch_pods(
    api: Api,
    run: str,
    note_all: Callable[[list[dict[str, Any]], float], None],
    note: Callable[[dict[str, Any], bool], None],
) -> None:
    """Report changes of a run's Pods, forever.

    Args:
        api: The cluster.
        run: The run.
        note_all: Called with all Pods and the time of the request: at first, and when changes may have been missed.
        note: Called with a Pod that has changed, and whether it is gone.
    """
    path, selector = api.path("pods"), f"{RUN_LABEL}={run}"
    version = ""
    while True:
        try:
            if not version:
                asked_at = time.monotonic()
                listed = api.request("GET", path, labelSelector=selector)
                version = listed["metadata"]["resourceVersion"]
                note_all(listed["items"], asked_at)
            query = {"labelSelector": selector, "resourceVersion": version, "allowWatchBookmarks": "true"}
            rest = b""
            for piece in api.follow(path, watch="true", timeoutSeconds=_WATCH_S, **query):
                *lines, rest = (rest + piece).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":  # The server no longer has the changes since (410 Gone).
                        raise LookupError(event["object"].get("message"))
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        note(event["object"], event["type"] == "DELETED")
        except (Refusal, ValueError, LookupError):
            version = ""
            time.sleep(_RETRY_S)
