"""What the head and its Kubernetes client tell each other, as lines of JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Takeover(msgspec.Struct, frozen=True):
    """What a client must know whose predecessor has died.

    Attributes:
        anchor_uid: Of the Job that owns all else.
        elapsed_s: How long ago that was created.
        incarnations: Of each worker: how often it was started again.
    """

    anchor_uid: str
    elapsed_s: float
    incarnations: list[int]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: the first that a client is told.

    Attributes:
        context: Of the kubeconfig; None for the current one.
        namespace: None for that of the context, or of this Pod.
        run: The value of the run's label.
        lease_s: How long the anchor outlives those who keep it alive.
        memory: The limit of each worker, for error messages.
        anchor: The Job that owns the others.
        secret: The Secret with the ticket.
        pods: Of each worker.
        log_dir: Where to keep what workers print.
        takeover: What runs already.
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
    """Tell what a worker printed last."""

    worker_index: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Wait so long for workers to end on their own, and then remove everything. A closed pipe says the same, and 0."""

    timeout_s: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """The cluster has taken everything."""

    anchor_uid: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It has not, and what it has taken is being removed."""

    reason: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """What has become of a worker.

    Attributes:
        incarnation: How often it was started again: the head may have asked for another since.
        kind: Whether it waits, runs or has ended.
        text: What for, where or how.
        tail: What it printed last, once it has ended.
    """

    worker_index: int
    incarnation: int
    kind: Literal["waiting", "running", "ended"]
    text: str
    tail: str = ""


class Tail(msgspec.Struct, frozen=True, tag=True):
    """What a worker printed last, and what Kubernetes tells about its Pod."""

    worker_index: int
    text: str


class Warned(msgspec.Struct, frozen=True, tag=True):
    """Something is wrong that has harmed nobody yet."""

    text: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Everything is removed, but for what could not be: empty if nothing is left."""

    left: str


Request = Restart | AskTail | Stop
Reply = Started | Refused | Report | Tail | Warned | Stopped


def encode(message: Plan | Request | Reply) -> bytes:
    """Write a message as one line."""
    return msgspec.json.encode(message) + b"\n"


decode_plan = msgspec.json.Decoder(Plan).decode
decode_request = msgspec.json.Decoder(Request).decode
decode_reply = msgspec.json.Decoder(Reply).decode
