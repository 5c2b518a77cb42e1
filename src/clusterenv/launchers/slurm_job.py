"""What Slurm runs for a fleet: a job, a step inside a job, and the log that their workers write.

It uses only Slurm's own commands, and needs no accounting.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import signal
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterenv.errors import LaunchError
from clusterenv.launchers.command import Command
from clusterenv.launchers.processes import WorkerLog, describe_exit, uninterrupted, wait_for

log = logging.getLogger(__name__)

SAYS = "clusterenv:"  # How the lines begin that the head reads in a log.

_ANSWER_S = 30.0  # A busy controller may take long; nobody waits for it meanwhile.
_ASK_S = 5.0  # Where somebody does wait.
_POLL_S = 0.1
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 15.0
_ENDING_S = 5.0  # An epilog may hold a job in COMPLETING for minutes. Its workers are gone long before.
_TERM_S = 1.0  # What workers get between SIGTERM and SIGKILL, once they have not ended on their own.
_KILL_S = 3.0  # After that Slurm needs no help to end them, only time.
_SRUN_S = 2.0  # srun ends the step's processes when it is terminated; then it is killed itself.
_TAIL_LINES = 40
# Cancels a step until Slurm says that there is none: a step that is being launched cannot be cancelled immediately, and
# slurmctld may not answer.
_CANCEL_STEP = """
until step=$(squeue --noheader --steps --jobs={job} --name={name} --format=%i) && [ -z "$step" ]; do
    [ -z "$step" ] || scancel --signal=KILL $step
    sleep 0.1
done
"""

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ALIVE = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
_ENDED = {
    "COMPLETED": "has ended",
    "FAILED": "failed",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "DEADLINE": "reached its deadline",
    "BOOT_FAIL": "could not boot a node",
    "UNKNOWN": "is no longer known to Slurm",
}

_LABEL = re.compile(r"^ *(\d+): (.*)$")  # srun --label
_START = re.compile(rf"^{SAYS} worker (\d+) starts on (\S*) in process group (\d+)$")
_END = re.compile(rf"{SAYS} worker (\d+) ended with status (\d+)$")  # Behind its last words, if their line is open.
_NEW_RUN = re.compile(rf"^{SAYS} job (\d+) starts on (.*)$")

ReadFrom = Callable[[int], bytes]  # Returns what is in a log from this position on; nothing while there is none.


@dataclass(frozen=True)
class JobState:
    """What `squeue` says about a job, in Slurm's own words.

    Attributes:
        name: Such as RUNNING; UNKNOWN once Slurm has forgotten the job.
        reason: Why it waits or has ended; empty if there is none.
        start: When the job's current run began; changes when it is requeued.
        nodes: As a host list, such as `n[1-4]`.
    """

    name: str
    reason: str = ""
    start: str = ""
    nodes: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the job has yet to run, for the first time or again."""
        return self.name in _WAITING

    @property
    def is_alive(self) -> bool:
        """Whether the job's processes are running."""
        return self.name in _ALIVE

    @property
    def is_ending(self) -> bool:
        """Whether the job is being ended; what follows is not known yet."""
        return self.name == "COMPLETING"

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good."""
        return not (self.is_waiting or self.is_alive or self.is_ending)

    def __str__(self) -> str:
        """Describe the state in words, with Slurm's own in brackets."""
        if self.is_over:
            own = ", ".join(filter(None, (self.name, self.reason)))
            return f"{_ENDED.get(self.name, 'ended')} ({own})"
        if self.is_alive and self.nodes:
            return f"is {self.name.lower()} on {self.nodes}"
        return f"is {self.name.lower()}" + (f" ({self.reason})" if self.reason else "")


class Holder:
    """What workers run in: a job, or a step of one.

    Attributes:
        id: The job's number.
        log: What its workers have written.
        is_requeued: Whether the job has run and now waits to run again.
    """

    def __init__(self, job_id: str, read_from: ReadFrom) -> None:
        self.id = job_id
        self.log = StepLog(read_from)
        self.is_requeued = False

    @property
    def ended(self) -> str:
        """How all of its processes ended; empty if they have not ended, or not begun."""
        raise NotImplementedError

    @property
    def places(self) -> dict[int, NodeOfWorker]:
        """Where the workers of its latest run are, as far as known."""
        return self.log.places

    @property
    def ends(self) -> dict[int, int]:
        """The exit status of each worker of its latest run that has ended."""
        return self.log.ends

    @property
    def nodes(self) -> set[str]:
        """The nodes it may use, as far as known."""
        raise NotImplementedError

    def has_node(self, name: str) -> bool:
        """Whether a node it began with is still part of it."""
        return True

    def look(self) -> None:
        """Update what is known, without waiting."""
        self.log.follow()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for it to end on its own, then end it."""
        raise NotImplementedError


class Job(Holder):
    """One job, as last seen.

    Attributes:
        state: The state last seen.
        seen_at: When Slurm was asked for that state.
        changed_at: When that state was first seen.
        trouble: Why Slurm did not answer when last asked; empty if it did.
        num_runs: How often the job was seen to begin.
        log_path: Where the job writes, if its first node sees the head's files.
    """

    def __init__(self, job_id: str, log_dir: Path) -> None:
        super().__init__(job_id, self._read_log)
        self.state = JobState("PENDING")
        self.seen_at = 0.0
        self.trouble = ""
        self.num_runs = 0
        self.log_path = log_dir / f"job-{job_id}.log"
        self._start = ""
        self._nodes: set[str] = set()
        self._is_closed = False
        self._query: Command | None = None
        self._asked_at = self._due_at = 0.0
        self.changed_at = time.monotonic()

    def __str__(self) -> str:
        """Say what is known, e.g. "job 17 is pending (Resources)"."""
        return f"job {self.id} {self.state}" + (f"; {self.trouble}" if self.trouble else "")

    @property
    def ended(self) -> str:
        """How its processes have ended."""
        if self.is_requeued:
            return f"job {self.id} was requeued, and {self.state}"
        if self.state.is_over or (self.state.is_ending and time.monotonic() - self.changed_at > _ENDING_S):
            return str(self)
        return ""

    @property
    def places(self) -> dict[int, NodeOfWorker]:
        """Where the workers of its latest run are."""
        return self.log.places if self._has_own_log else {}

    @property
    def ends(self) -> dict[int, int]:
        """The exit status of each worker of its latest run that has ended."""
        return self.log.ends if self._has_own_log else {}

    @property
    def _has_own_log(self) -> bool:
        """Whether the log is up to date with the latest run, which Slurm may know of before its first line is there."""
        return self.log.num_runs >= self.num_runs

    @property
    def nodes(self) -> set[str]:
        """The nodes that are part of it."""
        return self._nodes

    def has_node(self, name: str) -> bool:
        """Whether a node is still part of the job: Slurm removes one that fails."""
        return not self.state.is_alive or not self._nodes or name in self._nodes

    def hasten(self) -> None:
        """Ask Slurm at the next `look`, however long nothing has changed."""
        self._due_at = 0.0

    def look(self) -> None:
        """Note what Slurm has answered, without waiting: it is asked in the background.

        Slurm is asked once a second at first, and less often the longer nothing changes: many others ask it, too.
        """
        now = time.monotonic()
        self.log.follow()
        if self._query is None:
            if now >= self._due_at and not self.state.is_over and not self._is_closed:
                self._ask(now)
        elif self._query.poll():
            self._read(self._query)

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the job to end on its own, then cancel it; cancel a pending job immediately."""
        self._await_end(timeout_s)
        if not self.state.is_over:
            self._cancel()
            self._await_end(_TERM_S)
        if not self.state.is_over:
            self._cancel("--full", "--signal=KILL")
            self._await_end(_KILL_S)
        self.close()

    def close(self) -> None:
        """Stop asking Slurm."""
        self._is_closed = True
        if self._query is not None:
            self._query.kill()
            self._query.wait(_ASK_S)
            self._query = None

    def _await_end(self, timeout_s: float) -> None:
        """Ask Slurm, at least once, until the job is over or pending."""
        deadline = time.monotonic() + timeout_s
        while not self.state.is_over:
            if self._query is None:
                self._ask(time.monotonic())
            if self._query is not None:
                if not self._query.wait(_ASK_S):
                    self._query.kill()
                    self._query.wait(_ASK_S)
                self._read(self._query)
            if self.state.is_waiting or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _cancel(self, *options: str) -> None:
        """Cancel the job; raise nothing: a job that is gone needs no cancelling, and any other failure is logged."""
        try:
            with uninterrupted():
                scancel = Command(["scancel", *options, self.id], _ASK_S)
        except OSError as error:
            problem = str(error)
        else:
            try:
                scancel.wait(_ASK_S)
            finally:
                scancel.kill()
                scancel.wait(_POLL_S)
            problem = "nothing" if scancel.has_timed_out else scancel.err if scancel.status else ""
        if problem and "Invalid job id" not in problem and "already completing" not in problem:
            log.warning("could not cancel job %s; its workers end on their own. scancel says: %s", self.id, problem)

    def _read_log(self, position: int) -> bytes:
        try:
            with self.log_path.open("rb") as file:  # Opened anew: over NFS that is when changes are looked for.
                file.seek(position)
                return file.read()
        except OSError:  # The job has not begun, or does not share our files.
            return b""

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._due_at = now + min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 0.1 * (now - self.changed_at)))
        command = ["squeue", f"--jobs={self.id}", "--states=all", "--noheader", "--format=%T|%r|%S|%N"]
        try:
            with uninterrupted():
                self._query = Command(command, _ANSWER_S)
        except OSError as error:
            self.trouble = f"squeue cannot be run: {error}"

    def _read(self, query: Command) -> None:
        self._query = None
        if query.has_timed_out:
            self.trouble = "Slurm does not answer squeue"
            return
        self.seen_at = self._asked_at
        if query.status == 0 and query.out:
            name, reason, start, nodes = (query.out.splitlines()[0].split("|") + ["", "", ""])[:4]
            self._note(JobState(name, "" if reason == "None" else reason, start, nodes))
        elif query.status == 0 or "Invalid job id" in query.err:
            self._note(JobState("UNKNOWN"))
        else:
            self.trouble = f"squeue says: {query.err}"

    def _note(self, state: JobState) -> None:
        self.trouble = ""
        was = self.state
        if state == was:
            return
        self.changed_at = time.monotonic()
        if (was.is_alive or was.is_ending) and state.is_waiting:
            self.is_requeued = True
        elif state.is_alive:
            self.is_requeued = False
            self.num_runs += state.start != self._start
            self._start = state.start
        self.state = state
        self._nodes = set(expand_hosts(state.nodes))


class SlurmStep(Holder):
    """One `srun` inside a job, a child process of the head; workers' output reaches the head without shared files.

    It ends with its job, and is never requeued; nodes that fail srun notices itself.

    Attributes:
        log_path: Where the output is kept; None if it is not.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log_dir: Path | None, job_id: str) -> None:
        """Start an `srun` in a job.

        Raises:
            LaunchError: There is no srun, or the log cannot be written.
        """
        self._output = WorkerLog(log_dir, f"job-{job_id}-step")
        self.log_path = self._output.path
        super().__init__(job_id, self._output.read)
        self._name = f"clusterenv-{secrets.token_hex(4)}"
        self._kill_at: float | None = None
        self._cancellation: Command | None = None
        try:
            self._process = subprocess.Popen(
                [command[0], f"--job-name={self._name}", *command[1:]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output.file,
                stderr=self._output.file,
                process_group=0,  # Ctrl-C is for the head.
            )
        except OSError as error:
            self._output.close()
            raise LaunchError(f"Could not run srun: {error}.") from error

    def __str__(self) -> str:
        """Say where the step runs."""
        return f"they are starting in job {self.id}"

    @property
    def ended(self) -> str:
        """How srun ended."""
        status = self._process.poll()
        return "" if status is None else f"srun ended in job {self.id}, {describe_exit(status)}"

    @property
    def nodes(self) -> set[str]:
        """The nodes of the job that the head is in."""
        return set(expand_hosts(os.environ.get("SLURM_JOB_NODELIST", "")))

    def end(self) -> None:
        """Tell the step to end, without waiting: `reap` does the rest."""
        if self._kill_at is None and self._process.poll() is None:
            self._kill_at = time.monotonic() + _SRUN_S
            self._process.terminate()

    def reap(self) -> bool:
        """Return whether a step that is no longer needed has ended; kill it if it was told to and does not.

        While srun launches its step, it ignores being told to end, and leaves the step behind when it is killed.
        """
        if self._process.poll() is None:
            if self._kill_at is not None:
                self._process.send_signal(signal.SIGTERM if time.monotonic() < self._kill_at else signal.SIGKILL)
            return False
        if self._cancellation is None and (self._kill_at is not None or self._process.returncode < 0):
            command = ["bash", "-c", _CANCEL_STEP.format(job=self.id, name=self._name)]
            try:
                with uninterrupted():
                    self._cancellation = Command(command, _ASK_S)
            except OSError as error:
                log.warning("workers of job %s whose srun was killed may live on: %s", self.id, error)
        if self._cancellation is not None and not self._cancellation.poll():
            return False
        self._output.close()
        return True

    def stop(self, timeout_s: float) -> None:
        """Wait this long for it to end on its own, then end it."""
        wait_for(self._process, time.monotonic() + timeout_s)
        self.end()
        while not self.reap():
            wait_for(self._process, time.monotonic() + _POLL_S)
            if self._cancellation is not None:
                self._cancellation.wait(_POLL_S)
        self.log.follow()
        self._output.close()


@dataclass(frozen=True)
class NodeOfWorker:
    """Where a worker runs.

    Attributes:
        node: Slurm's name for the node.
        process_group: The process group of the shell that waits for the worker to end.
    """

    node: str
    process_group: int


class StepLog:
    """Follows what the workers of a step write, one labelled line after another, as it grows.

    Attributes:
        num_runs: How often the job has begun: a requeued job continues in the same log.
        places: Where each worker of the latest run has started.
        ends: The exit status of each worker of the latest run that has ended, as a shell reports it: 128 + n if signal
            n killed it.
    """

    def __init__(self, read_from: ReadFrom) -> None:
        self.num_runs = 0
        self.places: dict[int, NodeOfWorker] = {}
        self.ends: dict[int, int] = {}
        self._read_from = read_from
        self._position = 0
        self._rest = b""
        self._tails: defaultdict[int | None, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))
        self._num_lines = 0

    def follow(self) -> None:
        """Read what has been written since."""
        data = self._read_from(self._position)
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))

    def tail(self, worker_index: int) -> str:
        """Return the last lines of a worker, interleaved with those of Slurm itself, in the order written."""
        lines = sorted([*self._tails[worker_index], *self._tails[None]])
        return "\n".join(text for _, text in lines[-_TAIL_LINES:])

    def _take(self, line: str) -> None:
        label = _LABEL.match(line)
        text = line if label is None else label[2]
        if start := _START.match(text):
            self.places[int(start[1])] = NodeOfWorker(start[2], int(start[3]))
        elif end := _END.search(text):
            self.ends[int(end[1])] = int(end[2])
        elif _NEW_RUN.match(text):
            self.num_runs += 1
            self.places.clear()
            self.ends.clear()
        self._num_lines += 1
        self._tails[None if label is None else int(label[1])].append((self._num_lines, text))


def job_environment(own: dict[str, str]) -> dict[str, str]:
    """Return this process's environment for `sbatch` or `srun`, without variables that describe its own job, if any."""
    kept = {"SLURM_CONF", "SLURM_CLUSTERS"}
    outside = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("SLURM")}
    return outside | own


def expand_hosts(hosts: str) -> list[str]:
    """Return the names in one of Slurm's host lists: `n[1-2,08],login` names n1, n2, n08 and login.

    A list that cannot be parsed names no hosts.
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", hosts):
        texts = re.split(r"\[([^]]*)\]", part)  # Every other one was in brackets.
        try:
            choices = [_expand_ranges(text) if number % 2 else [text] for number, text in enumerate(texts)]
        except ValueError:
            return []
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers in `001-003,7`, with their leading zeros."""
    numbers = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return numbers
