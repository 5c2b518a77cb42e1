"""PodState: what a Pod's status and events say about its worker, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clusterenv.launchers.kubernetes.manifest import CONTAINER
from clusterenv.launchers.processes import describe_exit

# Reasons why a container has not started, and never will.
_HOPELESS = {
    "InvalidImageName": "its image has a name that cannot be",
    "ErrImageNeverPull": "its image is not on the node, and may not be pulled",
}
# Reasons that may pass: a registry may be busy, a node may not know a Secret yet.
_FAILING = {
    "CreateContainerConfigError": "its container cannot be configured",
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be run",
}
_NO_SUCH_IMAGE = re.compile(
    r"not.?found|manifest unknown|denied|unauthori[sz]ed|forbidden|no match|does not exist", re.I
)

# Why Kubernetes ends Pods, by the reason of their condition DisruptionTarget (1.26 and later) or of an event.
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by the scheduler",
    "DeletionByTaintManager": "evicted from a node that is lost or tainted",
    "EvictionByEvictionAPI": "evicted, as when a node is drained",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node",
    "Preempted": "preempted by the scheduler",
    "Evicted": "evicted by its node",
    "TaintManagerEviction": "evicted from a node that is lost or tainted",
    "NodeNotReady": "its node is not ready",
    "NodeLost": "its node is lost",
    "NodeShutdown": "its node was shut down",
    "Terminated": "its node was shut down",
}
_IMAGE_ADVICE = (
    "Check the name, that the image was pushed, and for a private registry KubernetesLauncher(image_pull_secrets=...)"
)
_KILLED = 137
_START_FAILED = 128
_MAX_CHARACTERS = 400

Object = Mapping[str, Any]


@dataclass(frozen=True)
class PodState:
    """What has become of a worker.

    Attributes:
        kind: Whether the worker waits to be run, runs or has ended.
        text: What it waits for, where it runs, or how it ended.
        is_failing: Whether it waits for something that has failed so far.
    """

    kind: Literal["waiting", "running", "ended"]
    text: str
    is_failing: bool = False


def read_pod(pod: Object, memory: str = "") -> PodState:
    """Return what a Pod's status says about its worker.

    Args:
        pod: The Pod, as the API server returns it.
        memory: The worker's memory limit, for the error if it was exceeded.
    """
    status = pod.get("status") or {}
    container: Object = next((c for c in status.get("containerStatuses") or () if c["name"] == CONTAINER), {})
    state = container.get("state") or {}
    place = f"in Pod {pod['metadata']['name']}" + (f" on {node}" if (node := _node(pod)) else "")
    disruption = _read_disruption(pod)
    if ended := state.get("terminated"):
        return PodState("ended", _join(_read_end(ended, memory, place), disruption))
    if status.get("phase") in ("Failed", "Succeeded") or status.get("reason") == "NodeLost":
        reason = " ".join(filter(None, (status.get("reason"), status.get("message"))))
        return PodState("ended", _join(f"ended {place}", disruption or reason))
    if "running" in state:
        return PodState("running", place)
    return _read_wait(pod, state.get("waiting") or {}, place)


def read_events(events: Sequence[Object]) -> str:
    """Format events as lines, the latest last."""
    lines = [f"{event.get('reason')}: {_shorten(event.get('message') or '')}" for event in sorted(events, key=_when)]
    return "\n".join(dict.fromkeys(lines))


def read_last_event(events: Sequence[Object]) -> str:
    """Return the message of the latest event."""
    return _shorten(max(events, key=_when).get("message") or "") if events else ""


def find_disruption(events: Sequence[Object]) -> str:
    """Return why Kubernetes ended a Pod, if an event says so."""
    for event in sorted(events, key=_when, reverse=True):
        if (words := _DISRUPTIONS.get(event.get("reason") or "")) is not None:
            return f"{words}: {_shorten(event.get('message') or '')}"
    return ""


def _read_end(ended: Object, memory: str, place: str) -> str:
    code, reason, message = ended.get("exitCode", 0), ended.get("reason") or "", _shorten(ended.get("message") or "")
    if reason == "OOMKilled":
        limit = f" of {memory}" if memory else ""
        return (
            f"{describe_exit(_KILLED)} {place}: it used more memory than its limit{limit} (OOMKilled). "
            "KubernetesLauncher(memory=...) gives it more"
        )
    if code == _START_FAILED and message:
        return (
            f"could not be started {place}: {message}. KubernetesLauncher(python=...) names the command for Python in "
            "the image"
        )
    said = "" if reason in ("", "Error", "Completed") else f" ({reason}{f': {message}' if message else ''})"
    return f"{describe_exit(code)} {place}{said}"


def _read_wait(pod: Object, waiting: Object, place: str) -> PodState:
    reason, message = waiting.get("reason") or "", _shorten(waiting.get("message") or "")
    if reason in _HOPELESS:
        return PodState("ended", f"could not be started: {_HOPELESS[reason]} ({reason}: {message}), {place}")
    if reason in _FAILING:
        text = f"{_FAILING[reason]} ({reason}: {message}), {place}"
        if "Image" not in reason:
            return PodState("waiting", text, is_failing=True)
        if _NO_SUCH_IMAGE.search(message):
            return PodState("ended", f"could not be started: {text}. {_IMAGE_ADVICE}")
        return PodState("waiting", f"{text}. {_IMAGE_ADVICE}", is_failing=True)
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return PodState("waiting", _read_unscheduled(pod, condition))
    return PodState("waiting", f"{reason or 'the container is being created'} {place}")


def _read_unscheduled(pod: Object, condition: Object) -> str:
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod["spec"].get("schedulingGates") or ())
        return f"held back by {gates or 'a scheduling gate'}"
    return _shorten(condition.get("message") or "").rstrip(".") or "waits for a node"


def _read_disruption(pod: Object) -> str:
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = condition.get("reason") or ""
            return f"{_DISRUPTIONS.get(reason, reason)}: {_shorten(condition.get('message') or '')}"
    if (reason := status.get("reason") or "") in _DISRUPTIONS:
        return f"{_DISRUPTIONS[reason]}: {_shorten(status.get('message') or '')}"
    return ""


def _node(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _join(how: str, why: str) -> str:
    return f"{how}; {why}" if why else how


def _when(event: Object) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return str(next(filter(None, times), ""))


def _shorten(text: str) -> str:
    """Return a text in one line, shortened and without control characters."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."
