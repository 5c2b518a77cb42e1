"""The logs and events of Pods."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from clusterenv.launchers.kubernetes.api import Api, Refusal
from clusterenv.launchers.kubernetes.manifest import CONTAINER
from clusterenv.launchers.kubernetes.pod import find_disruption, read_events

_TAIL_LINES = 40
_TAIL_BYTES = 1 << 14
_RETRY_S = 2.0


def fetch_events(api: Api, pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a Pod."""
    selector = f"involvedObject.kind=Pod,involvedObject.name={pod['metadata']['name']}"
    return list(api.request("GET", api.path("events"), fieldSelector=selector)["items"])


def fetch_tail(api: Api, pod: dict[str, Any] | None) -> tuple[str, str]:
    """Return the end of a Pod's log with its events, and why Kubernetes ended it if an event says so."""
    if pod is None:
        return "", ""
    name, notes = pod["metadata"]["name"], []
    events: list[dict[str, Any]] = []
    try:
        events = fetch_events(api, pod)
        if events:
            notes.append(f"The events of Pod {name}:\n{read_events(events)}")
    except Refusal as refusal:
        notes.append(f"(The events of Pod {name} cannot be read: {refusal})")
    log = ""
    try:
        data = api.read(f"{api.path('pods', name)}/log", container=CONTAINER, tailLines=_TAIL_LINES)
        log = data[-_TAIL_BYTES:].decode(errors="replace").strip()
    except Refusal as refusal:
        if refusal.status not in (400, 404):  # The container has not begun, or the Pod is gone.
            why = "its node does not answer" if refusal.status in (0, 500, 502, 503, 504) else str(refusal)
            notes.append(f"(The log of Pod {name} cannot be read: {why})")
    return "\n".join(filter(None, (log, *notes))), find_disruption(events)


def copy_log(api: Api, name: str, file: Path) -> None:
    """Append a Pod's output to a file, beginning on a new line, until the Pod ends."""
    num_written = 0
    _end_line(file)
    path = f"{api.path('pods', name)}/log"
    while True:
        try:
            num_read = 0
            with file.open("ab", buffering=0) as log:
                for piece in api.follow(path, container=CONTAINER, follow="true"):
                    new = piece[max(0, num_written - num_read) :]  # A new connection starts from the beginning.
                    num_read += len(piece)
                    num_written += log.write(new) or 0
            return
        except Refusal as refusal:
            if refusal.status in (400, 403, 404):
                return
        except OSError:  # The disk is full.
            return
        time.sleep(_RETRY_S)


def _end_line(file: Path) -> None:
    """Make sure that a file ends with a newline before more is appended."""
    with contextlib.suppress(OSError), file.open("r+b", buffering=0) as log:
        if log.seek(0, os.SEEK_END) and log.seek(-1, os.SEEK_END) >= 0 and log.read(1) != b"\n":
            log.write(b"\n")
