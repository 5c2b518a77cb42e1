"""SlurmFleet: workers that Slurm runs, all in one job or step, and those that were restarted in their place."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterenv.errors import LaunchError
from clusterenv.launchers.command import Command
from clusterenv.launchers.follower import Follower
from clusterenv.launchers.processes import describe_exit, uninterrupted
from clusterenv.launchers.slurm_job import Holder, Job, SlurmStep, job_environment

log = logging.getLogger(__name__)

_SUBMIT_S = 60.0
_DECIDE_S = 5.0  # How long to wait for Slurm's word on a job before going by what it said last.
_SETTLE_S = 30.0  # How long to wait for what becomes of a job that is just ending.
_LAST_WORDS_S = 0.5  # How long to wait for Slurm to say that not only this worker ended, but its job.
_UNSEEN_S = 10.0  # How long a file may take from one machine to another: NFS looks every 3 s, or less often.
_POLL_S = 0.05
_SUSPECT_S = (
    600.0  # How long to avoid a node: Slurm itself takes 300 s to find that one is dead, if not told otherwise.
)

# Has the guardian kill a worker with all it has started; if that fails, kills the guardian.
_END = """
kill -QUIT -- -{group}
for _ in $(seq 30); do kill -0 -- -{group} 2>/dev/null || exit 0; sleep 0.1; done
kill -KILL -- -{group}
"""


@dataclass(frozen=True, kw_only=True)
class SlurmCommands:
    """What a fleet runs.

    Attributes:
        job: The `sbatch --parsable` of all workers.
        script: The batch script for it, given the directory for its log.
        step: The `srun` of all workers, for a head that is in a job itself.
        one: An `srun` of one worker in a job, given the job's number, where in it (options of srun), and the index.
        alone: The beginning of an `srun` of something else, given the job's number and where.
        environment: The environment of all these commands; it holds the ticket.
    """

    job: list[str]
    script: Callable[[Path], str]
    step: list[str]
    one: Callable[[str, Sequence[str], int], list[str]]
    alone: Callable[[str, Sequence[str]], list[str]]
    environment: dict[str, str]


class SlurmFleet:
    """Workers in a separate job, or in a step of the job the head is in."""

    def __init__(
        self,
        commands: SlurmCommands,
        num_workers: int,
        job_id: str | None,
        log_dir: str | Path | None,
        *,
        shows_output: bool = False,
    ) -> None:
        """Start the workers in the job that the head is in, or submit one.

        Args:
            commands: What to run.
            num_workers: The number of workers.
            job_id: The job that the head is in; None: a job is submitted.
            log_dir: Where to keep the workers' output. None: only for error messages.
            shows_output: Whether to show the output on this process's standard error.

        Raises:
            LaunchError: Slurm refuses, or is not there.
        """
        self._commands = commands
        self._num_workers = num_workers
        self._log_dir = None if log_dir is None else Path(log_dir).absolute()
        self._remove_at_end: Path | None = None
        self._follower: Follower | None = None
        self._has_seen_log = False  # Or has said that it has not.
        self._submission: Command | None = None
        self._all: Job | SlurmStep
        self._replacements: dict[int, SlurmStep] = {}
        self._endings: list[SlurmStep] = []  # Steps that were told to end, or that end others.
        self._wishes: dict[int, float] = {}  # Workers to be started again, and since when.
        self._failures: dict[int, str] = {}
        self._awaited: set[int] = set()  # Those to come back with the job's next run; they are not missed meanwhile.
        self._fresh: set[int] = set()  # Those that are back with a run that began before anybody asked for them.
        self._run = ("", 0)
        self._ended_at: dict[int, float] = {}
        self._suspected_at: dict[str, float] = {}  # Nodes whose workers were not seen to end, and when.
        try:
            if job_id is None or shows_output:
                with uninterrupted():
                    self._make_log_dir()
            if shows_output:
                self._follower = Follower()
            if job_id is not None:
                with uninterrupted():
                    self._all = SlurmStep(commands.step, commands.environment, self._log_dir, job_id)
                    self._show(self._all, None)
            else:
                with uninterrupted():
                    self._submit()
                assert self._submission is not None, "it is under way"
                self._submission.wait(_SUBMIT_S + _DECIDE_S)
                self._end_submission()
        except BaseException:
            self.stop(0.0)
            raise

    def exits(self) -> dict[int, str]:
        self._look()
        found = {worker_index: self._end_of(worker_index) for worker_index in range(self._num_workers)}
        return {worker_index: how for worker_index, how in found.items() if how}

    def status(self) -> str:
        self._look()
        return str(self._all) if self._submission is None else "another job is being submitted"

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, or where they are if the head cannot see them."""
        self._look()
        if tail := self._holder(worker_index).log.tail(worker_index):
            return tail
        if isinstance(self._all, Job) and not self._all.state.is_waiting and not self._all.log_path.exists():
            return f"({_describe_unseen_log(self._all)})"
        return ""

    def restart(self, worker_index: int) -> None:
        """Restart a worker: in its job while that runs, together with it if it is requeued, otherwise in a new job.

        A worker is not restarted if its job was cancelled, since that was intended.
        """
        self._failures.pop(worker_index, None)
        self._ended_at.pop(worker_index, None)
        self._wishes[worker_index] = time.monotonic()
        self._look()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to exit on their own, then cancel them."""
        deadline = time.monotonic() + timeout_s
        self._wishes.clear()
        if self._submission is not None:
            self._abandon_submission()
        if hasattr(self, "_all"):  # Else it was not even submitted.
            self._look()
            while self._all.places and self._are_at_work() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                self._look()
            # If the log cannot be seen, only Slurm knows that they have ended. If they have, this is soon done.
            patience_s = max(0.0, deadline - time.monotonic())
            self._all.stop(min(patience_s, _LAST_WORDS_S) if self._all.places else patience_s)
        for step in [*self._replacements.values(), *self._endings]:
            step.stop(0.0)
        self._endings.clear()
        if self._follower is not None:
            self._follower.close()
        if self._remove_at_end is not None:
            shutil.rmtree(self._remove_at_end, ignore_errors=True)

    def _look(self) -> None:
        """Update what is known, and take the next step of whatever is under way, without waiting."""
        self._all.look()
        self._warn_of_unseen_log()
        for step in self._replacements.values():
            step.look()
        self._endings = [step for step in self._endings if not step.reap()]
        if self._submission is not None and self._submission.poll():
            try:
                self._end_submission()
            except LaunchError as error:
                self._submission = None
                self._failures |= dict.fromkeys(self._awaited, f"could not be started: {error}")
                self._awaited.clear()
        if isinstance(self._all, Job) and self._run != (self._all.id, self._all.num_runs) and self._all.num_runs:
            self._begin((self._all.id, self._all.num_runs))
        for worker_index, since in list(self._wishes.items()):
            if problem := self._grant(worker_index, since):
                del self._wishes[worker_index]
                self._failures[worker_index] = f"could not be started: {problem}"

    def _begin(self, run: tuple[str, int]) -> None:
        """Note that the job runs, for the first time or again: all workers are in it."""
        is_first = self._run == ("", 0)
        self._fresh = set() if is_first else set(range(self._num_workers)) - self._awaited
        self._run = run
        self._awaited.clear()
        self._ended_at.clear()
        for worker_index in list(self._replacements):
            self._retire(worker_index)

    def _grant(self, worker_index: int, since: float) -> str:
        """Restart a worker, once it is known where; return why that is not possible, if it is not."""
        if isinstance(self._all, Job):
            job, now = self._all, time.monotonic()
            if self._submission is None and not job.state.is_over:
                if job.seen_at < since:
                    job.hasten()
                    if now - since < _DECIDE_S:
                        return ""
                if job.state.is_ending:
                    return "" if now - since < _SETTLE_S else str(job)
            if job.state.name == "CANCELLED":
                return str(job)
            if job.state.is_over or job.state.is_waiting:
                return self._await_next_run(worker_index, job)
            if worker_index in self._fresh and worker_index not in job.ends:
                self._fresh.remove(worker_index)
                del self._wishes[worker_index]
                return ""
        return self._start_one(worker_index)

    def _await_next_run(self, worker_index: int, job: Job) -> str:
        """Let a worker come back with the pending job, or with a new one."""
        if job.state.is_over and self._submission is None:
            try:
                with uninterrupted():
                    self._submit()
            except LaunchError as error:
                return str(error)
        self._retire(worker_index)
        self._awaited.add(worker_index)
        del self._wishes[worker_index]
        return ""

    def _start_one(self, worker_index: int) -> str:
        """Start one more step in the running job, on the CPUs that the worker's predecessor leaves free."""
        try:
            where = self._vacate(worker_index)
            self._retire(worker_index)
            command = self._commands.one(self._all.id, where, worker_index)
            with uninterrupted():
                step = SlurmStep(command, self._commands.environment, self._log_dir, self._all.id)
                self._replacements[worker_index] = step
                self._show(step, worker_index)
                del self._wishes[worker_index]
        except LaunchError as error:
            return str(error)
        return ""

    def _vacate(self, worker_index: int) -> list[str]:
        """Make sure that a worker ends; return the srun options that say where to put its successor.

        A worker that was not seen to end hangs, or its node is dead or cut off. So it is killed without waiting, and
        its successor should preferably run on another node that is not suspect.
        """
        holder = self._holder(worker_index)
        place = holder.places.get(worker_index)
        if place is not None and self._all.has_node(place.node):
            if worker_index in holder.ends:
                return [f"--nodelist={place.node}"]
            self._suspected_at[place.node] = time.monotonic()
            end = ["bash", "-c", _END.format(group=place.process_group)]
            command = [*self._commands.alone(self._all.id, [f"--nodelist={place.node}"]), *end]
            with uninterrupted():
                self._endings.append(SlurmStep(command, job_environment({}), None, self._all.id))
        return self._avoid_suspects(worker_index)

    def _avoid_suspects(self, worker_index: int) -> list[str]:
        """Return the option that keeps a worker off nodes that may be dead, unless there are no others."""
        since = time.monotonic() - _SUSPECT_S
        suspects = {node for node, moment in self._suspected_at.items() if moment > since} & self._all.nodes
        if suspects == self._all.nodes:  # Where others that were started again run, it was the worker that hung.
            others = {index: step for index, step in self._replacements.items() if index != worker_index}
            suspects -= {
                step.places[index].node
                for index, step in others.items()
                if index in step.places and index not in step.ends and index not in self._wishes
            }
        return [f"--exclude={','.join(sorted(suspects))}"] if suspects and suspects < self._all.nodes else []

    def _retire(self, worker_index: int) -> None:
        """End a worker's own step, if it has one, in the background."""
        with uninterrupted():
            if (step := self._replacements.pop(worker_index, None)) is not None:
                step.end()
                self._endings.append(step)

    def _are_at_work(self) -> bool:
        workers = range(self._num_workers)
        return not self._all.ended and any(index not in self._holder(index).ends for index in workers)

    def _holder(self, worker_index: int) -> Holder:
        return self._replacements.get(worker_index, self._all)

    def _end_of(self, worker_index: int) -> str:
        """Say how a worker ended; empty if it has not, or is being restarted."""
        if worker_index in self._failures:
            return self._failures[worker_index]
        holder = self._holder(worker_index)
        is_expected = worker_index in self._awaited and (holder.is_requeued or self._submission is not None)
        if worker_index in self._wishes or is_expected:
            return ""
        ended = holder.ended or (self._all.ended if isinstance(self._all, Job) else "")
        status = holder.ends.get(worker_index)
        if status is not None and not holder.is_requeued:
            if not ended and self._is_in_doubt(worker_index):
                return ""
            is_ending = isinstance(self._all, Job) and self._all.state.is_ending
            return "; ".join(filter(None, (describe_exit(status), ended or (str(self._all) if is_ending else ""))))
        place = holder.places.get(worker_index)
        if place is not None and not ended and not self._all.has_node(place.node):
            return f"job {self._all.id} has lost node {place.node}"
        return ended

    def _is_in_doubt(self, worker_index: int) -> bool:
        """Whether a worker may have ended together with its whole job; Slurm is given a moment to answer."""
        if not isinstance(self._all, Job):
            return False
        now = time.monotonic()
        if worker_index not in self._ended_at:
            self._ended_at[worker_index] = now
            self._all.hasten()
        since = self._ended_at[worker_index]
        goes_on = self._all.seen_at > since and self._all.state.is_alive
        return not goes_on and now - since < _LAST_WORDS_S

    def _show(self, holder: Job | SlurmStep, worker_index: int | None) -> None:
        """Show the output of one worker, or of all that the log has labels for."""
        if self._follower is not None and holder.log_path is not None:
            self._follower.add(holder.log_path, worker_index)

    def _warn_of_unseen_log(self) -> None:
        """Warn once that there is nothing to show, after the nodes have had time to write something."""
        if self._follower is None or self._has_seen_log or not isinstance(self._all, Job):
            return
        if self._all.log_path.exists():
            self._has_seen_log = True
        elif self._all.state.is_alive and time.monotonic() - self._all.changed_at > _UNSEEN_S:
            self._has_seen_log = True
            log.warning("what workers print cannot be shown. %s", _describe_unseen_log(self._all))

    def _make_log_dir(self) -> None:
        try:
            if self._log_dir is None:
                # Not in the temporary directory: the nodes are more likely to see the working directory.
                self._log_dir = self._remove_at_end = Path(tempfile.mkdtemp(prefix=".clusterenv-", dir=Path.cwd()))
            else:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._log_dir).close()  # Better now than on the node.
        except OSError as error:
            raise LaunchError(
                f"Cannot keep logs: {error}. Name a directory with SlurmLauncher(log_dir=...)."
            ) from error

    def _submit(self) -> None:
        assert self._log_dir is not None, "it was made"
        script = self._commands.script(self._log_dir)
        try:
            self._submission = Command(
                self._commands.job, _SUBMIT_S, stdin=script, environment=self._commands.environment
            )
        except FileNotFoundError as error:
            raise LaunchError("There is no sbatch on this machine: is it a node of a Slurm cluster?") from error
        except OSError as error:
            raise LaunchError(f"sbatch cannot be run: {error}.") from error

    def _end_submission(self) -> None:
        """Follow the job that was submitted.

        Raises:
            LaunchError: Slurm refuses it, in its own words, or does not answer.
        """
        assert self._submission is not None, "it has ended"
        assert self._log_dir is not None, "it was made"
        job_id = self._submission.out.partition(";")[0]
        if self._submission.has_timed_out or self._submission.status is None:
            raise LaunchError(f"sbatch has not answered within {_SUBMIT_S:g} s; see `sdiag` and `sinfo`.")
        if self._submission.status != 0 or not job_id.isdigit():
            raise LaunchError(f"Slurm refused the job of workers:\n{self._submission.err or self._submission.out}")
        log.info("submitted job %s", job_id)
        if isinstance(before := getattr(self, "_all", None), Job):
            before.close()
        self._all = Job(job_id, self._log_dir)
        self._submission = None
        self._show(self._all, None)

    def _abandon_submission(self) -> None:
        """Wait for a submission to finish, so that the job can be cancelled."""
        assert self._submission is not None, "it is under way"
        if not self._submission.wait(_DECIDE_S):
            log.warning("sbatch does not answer; if it has submitted a job, its workers end on their own")
            self._submission.kill()
            self._submission.wait(_DECIDE_S)
        try:
            self._end_submission()
        except LaunchError:  # Then there is no job.
            self._submission = None


def _describe_unseen_log(job: Job) -> str:
    return (
        f"There is no {job.log_path} here. If job {job.id} has run, its nodes do not share that directory with this "
        "machine: give SlurmLauncher(log_dir=...) one that they share, or have the log kept on the node with "
        'options={"output": ...}.'
    )
