"""The messages between the head and its Kubernetes client, as lines of JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Takeover(msgspec.Struct, frozen=True):
    """What a client needs to know if its predecessor has died.

    Attributes:
        anchor_uid: The uid of the Job that owns everything else.
        elapsed_s: How long ago that Job was created.
        incarnations: How often each worker was restarted.
    """

    anchor_uid: str
    elapsed_s: float
    incarnations: list[int]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: the first message to a client.

    Attributes:
        context: A context of the kubeconfig; None for the current one.
        namespace: None for that of the context, or of this Pod.
        run: The value of the run's label.
        lease_s: How long the anchor lives on without being renewed.
        memory: The memory limit of each worker, for error messages.
        anchor: The Job that owns the other objects.
        secret: The Secret with the ticket.
        pods: The Pod of each worker.
        log_dir: Where to keep the workers' output.
        takeover: What a predecessor has left running.
    """

    context: str | None
    namespace: str | None
    run: str
    lease_s: int
    memory: str
    anchor: dict[str, Any]
    secret: dict[str, Any]
    pods: list[dict[str, Any]]
    log_dir: str | None = None
    takeover: Takeover | None = None


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Replace a worker."""

    worker_index: int


class AskTail(msgspec.Struct, frozen=True, tag=True):
    """Request the last lines of a worker's log."""

    worker_index: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Wait this long for workers to exit on their own, then remove everything; a closed pipe means a wait of 0."""

    timeout_s: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """The cluster has accepted everything."""

    anchor_uid: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The cluster has refused something, and what it has accepted is being removed."""

    reason: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """What has become of a worker.

    Attributes:
        incarnation: How often the worker was restarted: the head may have requested another restart since.
        kind: Whether it waits, runs or has ended.
        text: What it waits for, where it runs, or how it ended.
        tail: The last lines of its log, once it has ended.
    """

    worker_index: int
    incarnation: int
    kind: Literal["waiting", "running", "ended"]
    text: str
    tail: str = ""


class Tail(msgspec.Struct, frozen=True, tag=True):
    """The last lines of a worker's log, and the events of its Pod."""

    worker_index: int
    text: str


class Warned(msgspec.Struct, frozen=True, tag=True):
    """A problem that has done no harm yet."""

    text: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Everything was removed except what `left` names; empty if nothing is left."""

    left: str


Request = Restart | AskTail | Stop
Reply = Started | Refused | Report | Tail | Warned | Stopped


def encode(message: Plan | Request | Reply) -> bytes:
    """Write a message as one line."""
    return msgspec.json.encode(message) + b"\n"


decode_plan = msgspec.json.Decoder(Plan).decode
decode_request = msgspec.json.Decoder(Request).decode
decode_reply = msgspec.json.Decoder(Reply).decode
