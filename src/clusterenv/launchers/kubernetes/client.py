"""The head's Kubernetes client: `python -m clusterenv.launchers.kubernetes.client`, a process beside the head.

It creates the Pods of a run, watches them, reports to the head what becomes of them, and removes everything at the end.
The head writes requests to the client's standard input and reads replies from its standard output (`messages`), so that
the head never waits for the network; when the head is gone, however it ended, the input ends and everything is removed.

One thread decides. Others wait for the API server, and give that thread what to do next (`background`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from clusterenv.launchers.kubernetes.anchor import Anchor
from clusterenv.launchers.kubernetes.api import RIGHTS_ADVICE, Api, Refusal
from clusterenv.launchers.kubernetes.background import Background
from clusterenv.launchers.kubernetes.manifest import CONTAINER, WORKER_LABEL, merge
from clusterenv.launchers.kubernetes.messages import (
    AskTail,
    Plan,
    Refused,
    Reply,
    Report,
    Restart,
    Started,
    Stop,
    Stopped,
    Tail,
    Warned,
    decode_plan,
    decode_request,
    encode,
)
from clusterenv.launchers.kubernetes.pod import PodState, read_last_event, read_pod
from clusterenv.launchers.kubernetes.pod_logs import copy_log, fetch_events, fetch_tail
from clusterenv.launchers.kubernetes.watch import watch_pods

_TICK_S = 0.25
_RETRY_S = 2.0
_START_S = 20.0  # How long to keep trying to create a Pod that the cluster refuses, at the start
_GIVE_UP_S = 60.0  # and later.
_FAILING_S = 20.0  # How long an image may fail to be pulled.
_LOOK_S = 5.0  # How often to check what a Pod that does not start waits for.
_HASTY_S = 1  # The grace period of a worker that hangs and is replaced.
_GRACE_S = 2  # The grace period at the end of the run; a kubelet gives no less.
_GONE_S = 6.0  # How long to wait until deleted Pods are gone.
_FORCED_S = 3.0  # And after that, for those on nodes that do not answer.
_INSIST_S = 12.0  # How long to keep trying to remove the anchor while the head waits.
_LATE_S = 5.0  # How long after its grace period a deleted Pod counts as gone: its node does not answer.
_RENEWALS = 4  # How often the anchor's deadline is extended before it can pass,
_ATTEMPTS = 40  # and how often that is tried if it fails.


@dataclass
class _Seat:
    """One worker's Pod, and what is known about it.

    Attributes:
        incarnation: How often the worker was restarted.
        pod: The Pod as last seen.
        created_at: When the cluster was known to have the Pod; None until then.
        state: The state last reported to the head.
        create_at: When to try (again) to create the Pod.
        give_up_at: When to stop trying.
        failing_since: Since when the Pod has been failing to start.
        deleted_at: When the Pod was first seen to have been deleted.
        look_at: When to ask for events next.
        is_ending: Whether the worker has ended, and the cluster is being asked why.
        avoided_node: The node where the worker's predecessor was not seen to end.
    """

    index: int
    incarnation: int = 0
    pod: dict[str, Any] | None = None
    created_at: float | None = None
    state: PodState = field(default=PodState("waiting", "the Pod is being created"))
    create_at: float | None = None
    give_up_at: float = 0.0
    failing_since: float | None = None
    deleted_at: float | None = None
    look_at: float = 0.0
    is_ending: bool = False
    avoided_node: str | None = None


class _Client:
    """One run's objects in a cluster, from the first to the last."""

    def __init__(self, plan: Plan, api: Api, requests: BinaryIO) -> None:
        self._plan = plan
        self._api = api
        self._requests = requests
        self._background = Background()
        self._seats = [_Seat(index) for index in range(len(plan.pods))]
        self._names: dict[str, _Seat | None] = {}  # Of all Pods that are, or may be, there; the anchor's has no seat.
        self._delete_at: dict[str, float] = {}  # When to try again to delete a replaced worker's Pod.
        self._followers: dict[str, threading.Thread] = {}
        self._anchor = Anchor(api, plan)
        self._renew_at = float("inf")
        self._renewed_at = time.monotonic()
        self._warned_at = float("-inf")
        self._has_started = plan.takeover is not None
        self._parent = os.getppid()
        self._stop_at: float | None = None
        self._insist_s = _INSIST_S
        self._steps = self._remove()
        self._is_done = False
        if plan.takeover is not None:  # Before any request: the head may ask for a restart immediately.
            for seat in self._seats:
                seat.incarnation, seat.created_at = plan.takeover.incarnations[seat.index], time.monotonic()
                self._names[self._name_of(seat)] = seat

    def run(self) -> None:
        """Run until everything is removed."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._background.put(partial(self._stop, 0.0)))
        self._background.start(self._listen)
        self._background.change(self._prepare, self._begin)
        while not self._is_done:
            self._background.take(_TICK_S)
            self._tick(time.monotonic())

    def _listen(self) -> None:
        """Read the head's requests, until it is gone."""
        for line in self._requests:
            self._background.put(partial(self._take, line))
        self._background.put(self._note_head_gone)

    def _note_head_gone(self) -> None:
        """Remove everything, trying for as long as Kubernetes would take to do so itself."""
        self._insist_s = self._plan.lease_s
        self._stop(0.0)

    def _take(self, line: bytes) -> None:
        request = decode_request(line)
        if isinstance(request, Stop):
            self._stop(request.timeout_s)
        elif isinstance(request, Restart):
            self._restart(self._seats[request.worker_index])
        elif isinstance(request, AskTail):
            seat = self._seats[request.worker_index]
            self._background.ask(partial(fetch_tail, self._api, seat.pod), partial(self._tell_tail, seat.index))

    def _prepare(self) -> None:
        """Create what the Pods need; after a takeover it is there already."""
        if self._plan.takeover is not None:
            return
        try:
            missing = self._api.missing_rights()
        except Refusal as refusal:
            if refusal.status not in (403, 404):
                raise
            missing = []  # We may not even ask about rights: missing ones will show later.
        if missing:
            raise Refusal(
                f"You lack rights in namespace {self._api.namespace}: you may not {', '.join(missing)}. "
                f"{RIGHTS_ADVICE}."
            )
        self._anchor.create()

    def _begin(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._refuse(str(refusal))
            return
        self._renewed_at = time.monotonic()
        self._renew_at = self._renewed_at + self._plan.lease_s / _RENEWALS
        self._background.start(partial(watch_pods, self._api, self._plan.run, self._note_list, self._note_event))
        for seat in self._seats:
            if self._plan.takeover is None:
                seat.give_up_at = time.monotonic() + _START_S
                self._create(seat)
        self._check_started()

    def _check_started(self) -> None:
        if not self._has_started and all(seat.created_at is not None for seat in self._seats) and self._stop_at is None:
            self._has_started = True
            _say(Started(self._anchor.uid))

    def _refuse(self, reason: str) -> None:
        if self._stop_at is None:
            _say(Refused(reason))
            self._stop(0.0)

    def _name_of(self, seat: _Seat) -> str:
        name = self._plan.pods[seat.index]["metadata"]["name"]
        return f"{name}-again{seat.incarnation}" if seat.incarnation else str(name)

    def _create(self, seat: _Seat) -> None:
        name = self._name_of(seat)
        manifest = _elsewhere(self._plan.pods[seat.index], seat.avoided_node)
        seat.create_at = None
        self._names[name] = seat
        self._background.change(
            partial(self._create_pod, manifest, name), partial(self._note_created, seat, seat.incarnation, name)
        )

    def _create_pod(self, manifest: dict[str, Any], name: str) -> None:
        if self._has_started:
            self._anchor.renew()  # Otherwise what it owns could be removed immediately.
        metadata = manifest["metadata"] | {"name": name, "ownerReferences": self._anchor.references}
        try:
            self._api.create("pods", manifest | {"metadata": metadata})
        except Refusal as refusal:
            if refusal.status != 409 or "already exists" not in str(refusal):  # An answer was lost.
                raise

    def _note_created(self, seat: _Seat, incarnation: int, name: str, refusal: Refusal | None) -> None:
        if refusal is None:
            if seat.incarnation != incarnation:
                self._delete(name, _HASTY_S)
            else:
                seat.created_at = time.monotonic()
                self._check_started()
            return
        self._names.pop(name, None)
        if seat.incarnation != incarnation or self._stop_at is not None:
            return
        now = time.monotonic()
        if not self._has_started and (not refusal.is_passing or refusal.is_quota or now >= seat.give_up_at):
            self._refuse(f"The Pod of worker {seat.index} is refused: {refusal}")
        elif refusal.is_passing and now < seat.give_up_at:
            seat.create_at = now + _RETRY_S
            self._tell(seat, PodState("waiting", f"its Pod is refused so far: {refusal}"))
        else:
            self._tell(seat, PodState("ended", f"could not be started: {refusal}"))

    def _restart(self, seat: _Seat) -> None:
        if self._stop_at is not None:
            return
        if seat.created_at is not None:
            self._delete(self._name_of(seat), _HASTY_S)
        new = _Seat(seat.index, seat.incarnation + 1, give_up_at=time.monotonic() + _GIVE_UP_S)
        if seat.pod is not None and seat.state.kind == "running":  # It hangs, or its node is dead or cut off.
            new.avoided_node = seat.pod["spec"].get("nodeName")
        self._seats[seat.index] = new
        seat.incarnation = -1  # Results of pending calls for it are ignored.
        self._create(new)

    def _delete(self, name: str, grace_s: int) -> None:
        self._background.change(partial(self._delete_pod, name, grace_s), partial(self._note_deleted, name))

    def _delete_pod(self, name: str, grace_s: int) -> None:
        self._api.request("DELETE", self._api.path("pods", name), {"gracePeriodSeconds": grace_s})

    def _note_deleted(self, name: str, refusal: Refusal | None) -> None:
        if refusal is None:
            return
        if refusal.status == 404:
            self._names.pop(name, None)
        else:
            self._delete_at[name] = time.monotonic() + _RETRY_S

    def _note_list(self, pods: list[dict[str, Any]], asked_at: float) -> None:
        self._background.put(partial(self._note_all, pods, asked_at))

    def _note_event(self, pod: dict[str, Any], is_gone: bool) -> None:
        self._background.put(partial(self._note_pod, pod, is_gone))

    def _note_all(self, pods: list[dict[str, Any]], asked_at: float) -> None:
        """Take a list of all Pods: those that existed when it was requested, but are not in it, are gone."""
        present = {pod["metadata"]["name"] for pod in pods}
        for name, seat in list(self._names.items()):
            if name in present:
                continue
            if seat is None:
                self._names.pop(name)
            elif seat.pod is not None and seat.pod["metadata"]["name"] == name:
                self._note_pod(seat.pod, is_gone=True)
            elif seat.pod is None and seat.created_at is not None and seat.created_at < asked_at:
                self._names.pop(name)
                self._tell(seat, PodState("ended", f"Pod {name} is gone"))
        for pod in pods:
            self._note_pod(pod, is_gone=False)

    def _is_inherited(self, seat: _Seat) -> bool:
        """Whether a predecessor of this client has started the worker."""
        takeover = self._plan.takeover
        return takeover is not None and seat.incarnation == takeover.incarnations[seat.index]

    def _note_pod(self, pod: dict[str, Any], is_gone: bool) -> None:
        name = pod["metadata"]["name"]
        if is_gone:
            self._names.pop(name, None)
        label = pod["metadata"]["labels"].get(WORKER_LABEL)
        seat = None if label is None else self._seats[int(label)]
        if seat is None or name != self._name_of(seat):
            if not is_gone:
                self._names.setdefault(name, seat)
            return
        seat.pod, seat.created_at = pod, seat.created_at or time.monotonic()
        if seat.is_ending or seat.state.kind == "ended":
            return
        state = read_pod(pod, self._plan.memory)
        now = time.monotonic()
        if "deletionTimestamp" in pod["metadata"] and seat.deleted_at is None:
            seat.deleted_at = now
        if state.kind != "ended" and (is_gone or (seat.deleted_at is not None and state.kind == "waiting")):
            state = PodState("ended", f"Pod {name} was deleted{'' if is_gone else ' before it ran'}")
        elif seat.deleted_at is not None and state.kind == "ended":
            state = PodState("ended", f"{state.text}; its Pod was deleted")
        if state.is_failing:
            seat.failing_since = seat.failing_since or now
        else:
            seat.failing_since = None
        if state.kind != "waiting":
            self._follow(pod)
        if state.kind == "ended":
            self._end(seat, state)
        else:
            seat.look_at = max(seat.look_at, now + _TICK_S)
            self._tell(seat, state)

    def _end(self, seat: _Seat, state: PodState) -> None:
        """Report that a worker has ended, once its log and events are known."""
        seat.is_ending = True
        self._background.ask(partial(fetch_tail, self._api, seat.pod), partial(self._tell_end, seat, state))

    def _tell_end(self, seat: _Seat, state: PodState, fetched: tuple[str, str] | Refusal) -> None:
        tail, disruption = ("", "") if isinstance(fetched, Refusal) else fetched
        text = state.text
        if disruption and disruption.partition(":")[0] not in text:
            text = f"{text}; {disruption}"
        if "No module named" in tail and "clusterenv" in tail.rpartition("No module named")[2][:40]:
            text += (
                f". Its image has no clusterenv: {self._image(seat)}. Build one that has the same version as here "
                "(docs/how-to/kubernetes.md has a Dockerfile)"
            )
        self._tell(seat, PodState("ended", text), tail)

    def _image(self, seat: _Seat) -> str:
        containers = self._plan.pods[seat.index]["spec"]["containers"]
        return next(str(each["image"]) for each in containers if each["name"] == CONTAINER)

    def _tell(self, seat: _Seat, state: PodState, tail: str = "") -> None:
        if seat.incarnation >= 0 and (state.kind, state.text) != (seat.state.kind, seat.state.text):
            seat.state = state
            _say(Report(seat.index, seat.incarnation, state.kind, state.text, tail))

    def _tell_tail(self, worker_index: int, fetched: tuple[str, str] | Refusal) -> None:
        _say(Tail(worker_index, str(fetched) if isinstance(fetched, Refusal) else fetched[0]))

    def _follow(self, pod: dict[str, Any]) -> None:
        """Keep a worker's output, if there is a log directory."""
        name, worker_index = pod["metadata"]["name"], int(pod["metadata"]["labels"][WORKER_LABEL])
        if self._is_inherited(self._seats[worker_index]):
            return  # Only the previous client knew how much of it was kept.
        if self._plan.log_dir is None or name in self._followers:
            return
        file = Path(self._plan.log_dir) / f"worker-{worker_index}.log"
        self._followers[name] = threading.Thread(target=copy_log, args=(self._api, name, file), daemon=True)
        self._followers[name].start()

    def _tick(self, now: float) -> None:
        if self._stop_at is None and os.getppid() != self._parent:
            self._note_head_gone()
        if self._stop_at is not None:
            next(self._steps, None)
            return
        if now >= self._renew_at:
            self._renew_at = now + self._plan.lease_s / _RENEWALS
            self._background.change(self._anchor.renew, self._note_renewed)
        for name in [name for name, due_at in self._delete_at.items() if now >= due_at]:
            del self._delete_at[name]
            self._delete(name, _HASTY_S)
        for seat in self._seats:
            if seat.create_at is not None and now >= seat.create_at:
                self._create(seat)
            elif seat.pod is not None and not seat.is_ending and seat.state.kind != "ended":
                self._look_at(seat, seat.pod, now)

    def _note_renewed(self, refusal: Refusal | None) -> None:
        now = time.monotonic()
        if refusal is None:
            self._renewed_at = now
            return
        self._renew_at = min(self._renew_at, now + self._plan.lease_s / _ATTEMPTS)
        if self._warned_at < self._renewed_at:
            self._warned_at = now
            left_s = self._renewed_at + self._plan.lease_s - now
            _say(
                Warned(f"Unless this mends itself, Kubernetes ends all workers in {max(0.0, left_s):.0f} s: {refusal}")
            )

    def _look_at(self, seat: _Seat, pod: dict[str, Any], now: float) -> None:
        """Check whether a Pod has been in the same state for too long."""
        if seat.failing_since is not None and now - seat.failing_since > _FAILING_S:
            self._end(seat, PodState("ended", f"could not be started: {seat.state.text}"))
        elif seat.deleted_at is not None:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            if now - seat.deleted_at > grace_s + _LATE_S:
                text = f"Pod {pod['metadata']['name']} was deleted, and its node does not answer"
                self._end(seat, PodState("ended", text))
        elif seat.state.kind == "waiting" and pod["spec"].get("nodeName") and now >= seat.look_at > 0.0:
            seat.look_at = now + _LOOK_S
            self._background.ask(partial(fetch_events, self._api, pod), partial(self._note_events, seat))

    def _note_events(self, seat: _Seat, events: list[dict[str, Any]] | Refusal) -> None:
        """Report what a Pod that has a node but does not run is waiting for: its image, or a volume."""
        is_waiting = seat.state.kind == "waiting" and not seat.is_ending and not seat.state.is_failing
        if (
            is_waiting
            and seat.pod is not None
            and not isinstance(events, Refusal)
            and (text := read_last_event(events))
        ):
            self._tell(seat, PodState("waiting", f"{text} (on {seat.pod['spec']['nodeName']})"))

    def _stop(self, timeout_s: float) -> None:
        stop_at = time.monotonic() + timeout_s
        self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)

    def _remove(self) -> Any:
        """Remove everything, step by step; yield whenever there is something to wait for."""
        while any(seat.state.kind == "running" for seat in self._seats) and time.monotonic() < (self._stop_at or 0.0):
            yield
        yield from self._await_answers()  # Objects that are just being created can be deleted only afterwards.
        if not self._anchor.may_exist and not self._background.num_changes:
            self._finish("")
            return
        answers: list[Refusal | None] = []
        began_at = time.monotonic()
        while True:
            self._background.change(self._anchor.delete, answers.append)
            yield from self._await_answers()
            is_settled = any(each is None or not (each.is_passing or each.status == 401) for each in answers)
            if is_settled or time.monotonic() - began_at > self._insist_s:  # After a 401, somebody may log in again.
                break
            yield from self._pause(_RETRY_S)
        failures = [] if None in answers else [str(answers[-1]) if answers else "the cluster does not answer"]
        # From here on, if this process is killed, Kubernetes does the rest.
        for name in self._names:
            self._delete(name, _GRACE_S)
        secret = self._api.path("secrets", self._plan.secret["metadata"]["name"])
        self._background.change(partial(self._api.request, "DELETE", secret), partial(_collect, failures))
        yield from self._await_gone(_GRACE_S + _GONE_S)
        for name in self._names:  # On nodes that do not answer; when they do, they will end these Pods.
            self._delete(name, 0)
        yield from self._await_gone(_FORCED_S)
        for follower in self._followers.values():
            follower.join(_TICK_S)
        left = sorted(self._names)
        self._finish("; ".join([*failures, *([f"Pods {', '.join(left)}"] if left else [])]))

    def _finish(self, left: str) -> None:
        _say(Stopped(left))
        self._is_done = True

    def _await_gone(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while (self._names or self._background.num_changes) and time.monotonic() < deadline:
            yield

    def _pause(self, duration_s: float) -> Any:
        ends_at = time.monotonic() + duration_s
        while time.monotonic() < ends_at:
            yield

    def _await_answers(self) -> Any:
        deadline = time.monotonic() + _GONE_S
        while self._background.num_changes and time.monotonic() < deadline:
            yield


def _elsewhere(manifest: dict[str, Any], node: str | None) -> dict[str, Any]:
    """Return a Pod's manifest with a preference against a node."""
    if node is None:
        return manifest
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]}
    preferred = [{"weight": 100, "preference": {"matchExpressions": [away]}}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    merged: dict[str, Any] = merge(manifest, {"spec": {"affinity": affinity}})
    return merged


def _collect(failures: list[str], result: Any) -> None:
    if isinstance(result, Refusal) and result.status != 404:
        failures.append(str(result))


def _say(reply: Reply) -> None:
    with contextlib.suppress(OSError):  # The head is gone.
        sys.stdout.buffer.write(encode(reply))
        sys.stdout.buffer.flush()


def main() -> None:
    """Serve one head."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # A program that the kubeconfig names for credentials may read its input.
    plan = decode_plan(requests.readline())
    try:
        api = Api(plan.context, plan.namespace)
    except Refusal as refusal:
        _say(Refused(str(refusal)))
        _say(Stopped(""))
        return
    status = 1
    try:
        _Client(plan, api, requests).run()
        status = 0
    except BaseException:  # noqa: BLE001 - it is shown, and the head starts another client
        traceback.print_exc()
    finally:
        os._exit(status)  # Threads that wait for the network have nothing more to say.


if __name__ == "__main__":
    main()
