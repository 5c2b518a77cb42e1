"""Job: one Slurm job, submitted, followed and cancelled by Slurm's own commands. No accounting is needed."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterenv.errors import LaunchError
from clusterenv.launchers.slurm_log import Place, StepLog

log = logging.getLogger(__name__)

_SUBMIT_S = 60.0
_ANSWER_S = 30.0  # A busy controller may take long; nobody waits for it meanwhile.
_ASK_S = 5.0  # Where somebody does wait.
_POLL_S = 0.1
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 15.0
_ENDING_S = 5.0  # An epilog may hold a job in COMPLETING for minutes. Its workers are gone long before.
_TERM_S = 1.0  # What workers get between SIGTERM and SIGKILL, once they have not ended by themselves.
_KILL_S = 3.0  # After that Slurm needs no help to end them, only time.

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


@dataclass(frozen=True)
class JobState:
    """What `squeue` says of a job, in Slurm's own words.

    Attributes:
        name: Such as RUNNING; UNKNOWN once Slurm has forgotten the job.
        reason: Why it waits or has ended; empty if there is none.
        start: When this run of it began: another time after it was requeued.
        nodes: As a host list, such as `n[1-4]`.
    """

    name: str
    reason: str = ""
    start: str = ""
    nodes: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it has yet to run, for the first time or again."""
        return self.name in _WAITING

    @property
    def is_alive(self) -> bool:
        """Whether its processes run."""
        return self.name in _ALIVE

    @property
    def is_ending(self) -> bool:
        """Whether it is being ended: what comes then is not known yet."""
        return self.name == "COMPLETING"

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return not (self.is_waiting or self.is_alive or self.is_ending)

    def __str__(self) -> str:
        """Say it in words, with Slurm's own in brackets."""
        if self.is_over:
            own = ", ".join(filter(None, (self.name, self.reason)))
            return f"{_ENDED.get(self.name, 'ended')} ({own})"
        if self.is_alive and self.nodes:
            return f"is {self.name.lower()} on {self.nodes}"
        return f"is {self.name.lower()}" + (f" ({self.reason})" if self.reason else "")


class Job:
    """One job, as last seen.

    Attributes:
        id: Slurm's number.
        state: As last seen.
        is_requeued: Whether it has run and now waits to run again.
        seen_at: When Slurm was asked for that.
        trouble: Why Slurm did not answer when last asked; empty if it did.
        num_runs: How often it has begun, as far as seen.
        log_path: Where it writes, if its first node sees the head's files.
        log: What it has written.
    """

    def __init__(self, job_id: str, log_dir: Path) -> None:
        self.id = job_id
        self.state = JobState("PENDING")
        self.is_requeued = False
        self.trouble = ""
        self.log_path = log_dir / f"job-{job_id}.log"
        self.log = StepLog(self._read_log)
        self._hosts: tuple[str, list[str]] = ("", [])
        self.num_runs = 0
        self._start = ""
        self._is_closed = False
        self._query: subprocess.Popen[str] | None = None
        self._asked_at = self._due_at = self.seen_at = 0.0
        self._changed_at = time.monotonic()

    @staticmethod
    def submit(command: Sequence[str], script: str, environment: dict[str, str], log_dir: Path) -> Job:
        """Submit a job by this `sbatch --parsable` command.

        Raises:
            LaunchError: Slurm refuses it, in its own words.
        """
        try:
            done = subprocess.run(
                command, input=script, env=environment, capture_output=True, text=True, timeout=_SUBMIT_S, check=False
            )
        except FileNotFoundError as error:
            raise LaunchError(f"There is no {command[0]} on this machine: is it a node of a Slurm cluster?") from error
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"sbatch has not answered within {_SUBMIT_S:g} s; see `sdiag` and `sinfo`.") from error
        job_id = done.stdout.strip().partition(";")[0]
        if done.returncode != 0 or not job_id.isdigit():
            raise LaunchError(f"Slurm refused the job of workers:\n{(done.stderr or done.stdout).strip()}")
        log.info("submitted job %s", job_id)
        return Job(job_id, log_dir)

    def __str__(self) -> str:
        """Say what is known, e.g. "job 17 is pending (Resources)"."""
        return f"job {self.id} {self.state}" + (f"; {self.trouble}" if self.trouble else "")

    @property
    def ended(self) -> str:
        """How its processes have ended, all of them; empty if they have not, or not begun."""
        lasts_s = time.monotonic() - self._changed_at
        if self.is_requeued:
            return f"job {self.id} was requeued, and {self.state}"
        if self.state.is_over or (self.state.is_ending and lasts_s > _ENDING_S):
            return str(self)
        return ""

    @property
    def places(self) -> dict[int, Place]:
        """Where the workers of its latest run are, as far as known."""
        return self.log.places if self._has_own_log else {}

    @property
    def ends(self) -> dict[int, int]:
        """The exit status of each worker of its latest run that has ended."""
        return self.log.ends if self._has_own_log else {}

    @property
    def _has_own_log(self) -> bool:
        """Whether what the log says is of the latest run: Slurm may know of that before its first line is there."""
        return self.log.num_runs >= self.num_runs

    def has_node(self, name: str) -> bool:
        """Whether a node it began with is still part of it: one that fails is taken out."""
        if not self.state.is_alive or not self.state.nodes:
            return True
        if self._hosts[0] != self.state.nodes:
            self._hosts = self.state.nodes, _expand(self.state.nodes)
        return not self._hosts[1] or name in self._hosts[1]

    def hasten(self) -> None:
        """Ask Slurm at the next look, however long nothing has changed."""
        self._due_at = 0.0

    def look(self) -> None:
        """Note what Slurm says by now. Never waits: it is asked in the background.

        It is asked once a second at first, and less often the longer nothing changes: controllers have many askers.
        """
        now = time.monotonic()
        self.log.follow()
        if self._query is None:
            if now >= self._due_at and not self.state.is_over and not self._is_closed:
                self._ask(now)
        elif self._query.poll() is not None:
            self._read()
        elif now - self._asked_at > _ANSWER_S:
            self._give_up(_ANSWER_S)

    def ask(self) -> JobState:
        """Ask Slurm now, and wait some seconds at most for its answer."""
        if not self.state.is_over:
            if self._query is None:
                self._ask(time.monotonic())
            query = self._query
            if query is not None:
                try:
                    query.wait(_ASK_S)
                except subprocess.TimeoutExpired:
                    self._give_up(_ASK_S)
                else:
                    self._read()
        return self.state

    def settle(self) -> JobState:
        """Ask Slurm now; if the job is just ending, wait until it is known what comes then."""
        deadline = time.monotonic() + _ANSWER_S
        while self.ask().is_ending and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.state

    def stop(self, timeout_s: float) -> None:
        """Wait this long for it to end by itself, then cancel it. A job that waits is cancelled at once."""
        self._await_end(timeout_s)
        if not self.state.is_over:
            self._cancel()
            self._await_end(_TERM_S)
        if not self.state.is_over:
            self._cancel("--full", "--signal=KILL")
            self._await_end(_KILL_S)
        self._is_closed = True
        if self._query is not None:
            self._give_up(0.0)

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not (self.ask().is_over or self.state.is_waiting) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _cancel(self, *options: str) -> None:
        """Cancel it. Raises nothing: a job that is gone is as good as cancelled, and any other is warned of."""
        try:
            done = subprocess.run(
                ["scancel", *options, self.id], capture_output=True, text=True, timeout=_ASK_S, check=False
            )
            problem = done.stderr.strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem and "Invalid job id" not in problem and "already completing" not in problem:
            log.warning("could not cancel job %s; its workers end by themselves. scancel says: %s", self.id, problem)

    def _read_log(self, position: int) -> bytes:
        try:
            with self.log_path.open("rb") as file:  # Opened anew: over NFS that is when changes are looked for.
                file.seek(position)
                return file.read()
        except OSError:  # It has not begun, or its files are not ours.
            return b""

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._due_at = now + min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 0.1 * (now - self._changed_at)))
        command = ["squeue", f"--jobs={self.id}", "--states=all", "--noheader", "--format=%T|%r|%S|%N"]
        try:
            self._query = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C is for the head.
            )
        except OSError as error:
            self.trouble = f"squeue cannot be run: {error}"

    def _give_up(self, after_s: float) -> None:
        assert self._query is not None, "only a query can be given up"
        self._query.kill()
        self._query.communicate()
        self._query = None
        self.trouble = f"Slurm has not answered within {after_s:g} s"

    def _read(self) -> None:
        assert self._query is not None, "there was a query"
        out, err = self._query.communicate()
        status, self._query = self._query.returncode, None
        self.seen_at = self._asked_at
        if status == 0 and out.strip():
            name, reason, start, nodes = (out.strip().splitlines()[0].split("|") + ["", "", ""])[:4]
            self._note(JobState(name, "" if reason == "None" else reason, start, nodes))
        elif status == 0 or "Invalid job id" in err:
            self._note(JobState("UNKNOWN"))
        else:
            self.trouble = f"squeue says: {err.strip()}"

    def _note(self, state: JobState) -> None:
        self.trouble = ""
        was = self.state
        if state == was:
            return
        self._changed_at = time.monotonic()
        if (was.is_alive or was.is_ending) and state.is_waiting:
            self.is_requeued = True
        elif state.is_alive:
            self.is_requeued = False
            self.num_runs += state.start != self._start
            self._start = state.start
        self.state = state


def job_environment(own: dict[str, str]) -> dict[str, str]:
    """Return this process's environment for `sbatch` or `srun`, without what describes the job it may itself be in."""
    kept = {"SLURM_CONF", "SLURM_CLUSTERS"}
    outside = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("SLURM")}
    return outside | own


def _expand(nodes: str) -> list[str]:
    """Return the names in a host list, e.g. `n[1-2]`; empty if Slurm cannot say."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []
