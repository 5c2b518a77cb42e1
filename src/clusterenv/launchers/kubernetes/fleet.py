"""KubernetesFleet: the Pods of a run, as reported by the client process beside the head."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from clusterenv.errors import LaunchError
from clusterenv.launchers.follower import Follower
from clusterenv.launchers.kubernetes.messages import (
    AskTail,
    Plan,
    Refused,
    Reply,
    Report,
    Request,
    Restart,
    Started,
    Stop,
    Stopped,
    Tail,
    Takeover,
    Warned,
    decode_reply,
    encode,
)
from clusterenv.launchers.processes import WorkerLog, describe_exit, make_run_dir, uninterrupted, wait_for

log = logging.getLogger(__name__)

_START_S = 60.0
_TAIL_S = 2.5  # Better an error without a log than a late one: the Pod's node may be cut off.
_REMOVE_S = 40.0  # More than the client needs to remove everything, even from nodes that do not answer.
_MAX_CLIENTS = 5  # If this many clients die
_SOON_S = 60.0  # within this time, the next one would, too.
_MAX_TEXTS = 3
_READ_BYTES = 1 << 16


class KubernetesFleet:
    """Workers that are Pods."""

    ends_predecessors = False  # A node that is cut off cannot be told to.

    def __init__(self, plan: Plan, log_dir: str | Path | None, *, shows_output: bool = False) -> None:
        """Have the Pods created.

        Args:
            plan: What to run.
            log_dir: Where to keep the workers' output. None: only for error messages.
            shows_output: Whether to show the output on this process's standard error.

        Raises:
            LaunchError: The cluster refuses, in its own words, or there is none; or logs cannot be written.
        """
        self._plan = plan
        self._num_workers = len(plan.pods)
        self._reports: dict[int, Report] = {}
        self._incarnations = [0] * self._num_workers
        self._tails: dict[int, str] = {}
        self._anchor_uid = ""
        self._refusal = ""
        self._left: str | None = None
        self._replaced_at: list[float] = []
        self._client: _Client | None = None
        self._follower: Follower | None = None
        self._remove_at_end: str | None = None
        self._is_stopping = False
        self._began_at = time.monotonic()
        try:
            if shows_output and log_dir is None:
                with uninterrupted():
                    log_dir = self._remove_at_end = tempfile.mkdtemp(prefix="clusterenv-")
            if (run_dir := make_run_dir(log_dir)) is not None:
                self._keep_logs(run_dir, shows_output)
            with uninterrupted():
                self._client = _Client(self._plan)
            self._await(lambda: bool(self._anchor_uid or self._refusal), _START_S)
            if not self._anchor_uid:
                why = self._refusal or self._describe_client()
                raise LaunchError(f"The workers cannot be started on Kubernetes. {why}")
        except BaseException:
            self.stop(0.0)
            raise

    def exits(self) -> dict[int, str]:
        """Return how each worker that is no longer running ended, and what Kubernetes says about it."""
        self._look()
        return {index: report.text for index, report in sorted(self._reports.items()) if report.kind == "ended"}

    def status(self) -> str:
        """Say how many workers run, and what the others wait for."""
        self._look()
        waits: dict[str, list[int]] = {}
        for worker_index in range(self._num_workers):
            report = self._reports.get(worker_index)
            if report is None or report.kind == "waiting":
                text = "the Pod is being created" if report is None else report.text
                waits.setdefault(text, []).append(worker_index)
        if not waits:
            return ""
        num_running = sum(report.kind == "running" for report in self._reports.values())
        parts = [f"{num_running} of {self._num_workers} workers running"]
        for text, indices in list(waits.items())[:_MAX_TEXTS]:
            names = f"worker {indices[0]}" if len(indices) == 1 else f"workers {_list(indices)}"
            parts.append(f"{names}: {text}")
        return "; ".join(parts)

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, and the events of its Pod."""
        report = self._reports.get(worker_index)
        if report is not None and report.kind == "ended" and report.tail:
            return report.tail
        if not self._is_stopping:
            self._tails.pop(worker_index, None)
            self._send(AskTail(worker_index))
            self._await(lambda: worker_index in self._tails, _TAIL_S)
        return self._tails.get(worker_index, "")

    def restart(self, worker_index: int) -> None:
        """Have another Pod created for a worker; the old one is deleted."""
        self._look()
        with uninterrupted():
            self._reports.pop(worker_index, None)
            self._tails.pop(worker_index, None)
            self._incarnations[worker_index] += 1
            self._send(Restart(worker_index))

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to exit on their own, then have everything removed."""
        if self._client is not None:
            self._stop_client(timeout_s)
        if self._follower is not None:
            self._follower.close()
        if self._remove_at_end is not None:
            shutil.rmtree(self._remove_at_end, ignore_errors=True)

    def _keep_logs(self, run_dir: Path, shows_output: bool) -> None:
        """Have the client keep the workers' output in a directory, and show it if requested."""
        logs: list[WorkerLog] = []
        try:
            for worker_index in range(self._num_workers):
                logs.append(WorkerLog(run_dir, f"worker-{worker_index}"))
            if shows_output:
                self._follower = Follower(logs)
        finally:
            for each in logs:
                each.close()
        self._plan = msgspec.structs.replace(self._plan, log_dir=str(run_dir))

    def _stop_client(self, timeout_s: float) -> None:
        assert self._client is not None, "it runs"
        self._is_stopping = True
        self._have_removed(timeout_s)
        if self._client.has_ended and self._left is None and not self._refusal:  # It died before it was done.
            self._replace_client()
            self._have_removed(0.0)
        if self._left is None or self._left:
            log.warning(
                "could not remove everything from the cluster (%s); Kubernetes does within %d s",
                self._left or self._describe_client(),
                self._plan.lease_s,
            )
        with uninterrupted():
            self._client.close()
            self._client = None

    def _have_removed(self, timeout_s: float) -> None:
        self._send(Stop(timeout_s))
        self._await(lambda: self._left is not None, timeout_s + _REMOVE_S)

    def _look(self) -> None:
        """Note what the client has reported, without waiting."""
        if self._client is None:
            return
        for reply in self._client.replies():
            self._note(reply)
        if self._client.has_ended and not self._is_stopping and self._anchor_uid:
            soon = time.monotonic() - _SOON_S
            self._replaced_at = [moment for moment in self._replaced_at if moment > soon]
            if len(self._replaced_at) < _MAX_CLIENTS:
                self._replace_client()
            else:
                self._give_up()

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, Report):
            if reply.incarnation == self._incarnations[reply.worker_index]:
                self._reports[reply.worker_index] = reply
        elif isinstance(reply, Tail):
            self._tails[reply.worker_index] = reply.text
        elif isinstance(reply, Warned):
            log.warning("%s", reply.text)
        elif isinstance(reply, Started):
            self._anchor_uid = reply.anchor_uid
        elif isinstance(reply, Refused):
            self._refusal = reply.reason
        elif isinstance(reply, Stopped) and (self._is_stopping or not self._anchor_uid):  # Else a successor continues.
            self._left = reply.left

    def _replace_client(self) -> None:
        """Start another client, which takes over the Pods: they do not depend on the client."""
        assert self._client is not None, "it has ended"
        log.warning("%s; another takes over", self._describe_client())
        with uninterrupted():
            self._client.close()
            self._replaced_at.append(time.monotonic())
            takeover = Takeover(self._anchor_uid, time.monotonic() - self._began_at, list(self._incarnations))
            self._client = _Client(msgspec.structs.replace(self._plan, takeover=takeover))

    def _give_up(self) -> None:
        """Note that the missing workers can no longer be started."""
        for worker_index, incarnation in enumerate(self._incarnations):
            if worker_index not in self._reports:
                text = f"could not be started: {self._refusal or self._describe_client()}"
                self._reports[worker_index] = Report(worker_index, incarnation, "ended", text)

    def _await(self, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Listen to the client until a condition holds, the client ends, or time is up."""
        deadline = time.monotonic() + timeout_s
        self._look()
        while not is_true() and self._client is not None and not self._client.has_ended:
            if (left_s := deadline - time.monotonic()) <= 0.0:
                return
            self._client.wait(left_s)
            self._look()

    def _send(self, request: Request) -> None:
        if self._client is not None:
            self._client.send(request)

    def _describe_client(self) -> str:
        return "there is no Kubernetes client" if self._client is None else self._client.describe()


class _Client:
    """The process that talks to the cluster."""

    def __init__(self, plan: Plan) -> None:
        self.has_ended = False
        self._rest = b""
        self._errors = WorkerLog(None, "client")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "clusterenv.launchers.kubernetes.client"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors.file,
                process_group=0,  # Ctrl-C is for the head, which then has everything removed.
            )
        except OSError as error:
            self._errors.close()
            raise LaunchError(f"The Kubernetes client cannot be started: {error}.") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._send(encode(plan))

    def send(self, request: Request) -> None:
        """Send a request; this does not block, as the pipe holds a thousand requests and the client always reads."""
        self._send(encode(request))

    def replies(self) -> list[Reply]:
        """Return the client's new replies, without waiting."""
        lines: list[bytes] = []
        while not self.has_ended:
            try:
                data = os.read(self._stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            self.has_ended = not data
            *more, self._rest = (self._rest + data).split(b"\n")
            lines += more
        return [decode_reply(line) for line in lines]

    def wait(self, timeout_s: float) -> None:
        """Wait until the client sends something, or time is up."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def describe(self) -> str:
        """Describe the state of the client."""
        if not self.has_ended:
            return "The cluster has not answered in time"
        wait_for(self._process, time.monotonic() + 1.0)
        how = "is ending" if self._process.returncode is None else f"ended ({describe_exit(self._process.returncode)})"
        return f"the Kubernetes client {how}: {self._errors.tail()}".rstrip(": ")

    def close(self) -> None:
        """End the client; Kubernetes removes what the client has not removed by now."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        if not wait_for(self._process, time.monotonic() + 1.0):
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._errors.close()

    def _send(self, line: bytes) -> None:
        with uninterrupted(), contextlib.suppress(OSError):  # If the client has ended, that is noticed elsewhere.
            self._stdin.write(line)
            self._stdin.flush()


def _list(indices: list[int]) -> str:
    """Format numbers as people write them: "2, 3, 5 to 9"."""
    groups: list[list[int]] = []
    for index in indices:
        if groups and index == groups[-1][-1] + 1:
            groups[-1].append(index)
        else:
            groups.append([index])
    texts = [", ".join(map(str, group)) if len(group) < 3 else f"{group[0]} to {group[-1]}" for group in groups]
    return ", ".join(texts)
