"""SlurmFleet: workers that Slurm runs, all in one job or step, and those that were started again in their stead."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from clusterenv.errors import LaunchError
from clusterenv.launchers.slurm_job import Job, job_environment
from clusterenv.launchers.slurm_script import single_step
from clusterenv.launchers.slurm_step import Step, describe_status

_LAST_WORDS_S = 0.5  # How long to wait for Slurm to say that not only this worker ended, but its job.
_POLL_S = 0.05

StartAll = Callable[[], Job | Step]
StartOne = Callable[[str, int, str | None], Step]


class SlurmFleet:
    """Workers in a job of their own, or in a step of the job the head is in."""

    def __init__(
        self, start_all: StartAll, start_one: StartOne, num_workers: int, remove_at_end: Path | None = None
    ) -> None:
        """Start the workers.

        Args:
            start_all: Starts all of them.
            start_one: Starts one more step with one worker, given the job's number, the worker's index, and the node to
                use if it matters.
            num_workers: How many.
            remove_at_end: A directory to remove in the end.
        """
        self._start_all = start_all
        self._start_one = start_one
        self._num_workers = num_workers
        self._remove_at_end = remove_at_end
        self._replacements: dict[int, Step] = {}
        self._awaited: set[int] = set()  # Those to come back with the job's next run; they are not missed meanwhile.
        self._fresh: set[int] = set()  # Those that are back with a run that began before anybody asked for them.
        self._endings: list[Step] = []
        self._run = ("", 0)
        self._ended_at: dict[int, float] = {}
        try:
            self._all = start_all()
        except BaseException:
            self._remove_files()
            raise

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended. Never waits for Slurm."""
        self._look()
        found = {worker_index: self._end_of(worker_index) for worker_index in range(self._num_workers)}
        return {worker_index: how for worker_index, how in found.items() if how}

    def status(self) -> str:
        """Say what the job waits for, or where it runs."""
        return str(self._all)

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, or where they are if the head cannot see them."""
        self._look()
        if tail := self._holder(worker_index).log.tail(worker_index):
            return tail
        if isinstance(self._all, Job) and not self._all.state.is_waiting and not self._all.log_path.exists():
            return (
                f"(There is no {self._all.log_path} here. If job {self._all.id} has run, its nodes do not share that "
                "directory with this machine: give SlurmLauncher(log_dir=...) one that they share, or have the log "
                'kept on the node with options={"output": ...}.)'
            )
        return ""

    def restart(self, worker_index: int) -> None:
        """Start a worker once more: in its job while that runs, with the job if it is requeued, else in a new job.

        Raises:
            LaunchError: Slurm refuses, or the job was cancelled: whoever did that wants it to stay so.
        """
        if isinstance(self._all, Job):
            state = self._all.settle()
            if state.name == "CANCELLED":
                raise LaunchError(f"Worker {worker_index} cannot be started again: {self._all}.")
            if state.is_over:
                self._all.stop(0.0)
                self._all = self._start_all()
            if state.is_over or state.is_waiting:
                self._awaited.add(worker_index)
                return
        self._look()
        if worker_index in self._fresh and worker_index not in self._all.ends:
            self._fresh.remove(worker_index)
            return
        self._ended_at.pop(worker_index, None)
        node = self._vacate(worker_index)
        replaced = self._replacements.pop(worker_index, None)
        if replaced is not None:
            replaced.stop(0.0)
        self._replacements[worker_index] = self._start_one(self._all.id, worker_index, node)

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end by themselves, then cancel them."""
        deadline = time.monotonic() + timeout_s
        self._look()
        while self._all.places and self._are_at_work() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._look()
        # Where the log cannot be seen, only Slurm knows that they have ended. Where they have, it is soon done.
        patience_s = max(0.0, deadline - time.monotonic())
        self._all.stop(min(patience_s, _LAST_WORDS_S) if self._all.places else patience_s)
        for step in [*self._replacements.values(), *self._endings]:
            step.stop(0.0)
        self._endings.clear()
        self._remove_files()

    def _look(self) -> None:
        self._all.look()
        for step in self._replacements.values():
            step.look()
        for step in [step for step in self._endings if step.ended]:
            step.stop(0.0)
            self._endings.remove(step)
        if isinstance(self._all, Job) and self._run != (self._all.id, self._all.num_runs) and self._all.num_runs:
            self._begin((self._all.id, self._all.num_runs))

    def _begin(self, run: tuple[str, int]) -> None:
        """Note that the job runs, for the first time or once more: all workers are in it."""
        is_first = self._run == ("", 0)
        self._fresh = set() if is_first else set(range(self._num_workers)) - self._awaited
        self._run = run
        self._awaited.clear()
        self._ended_at.clear()
        for step in self._replacements.values():
            step.stop(0.0)
        self._replacements.clear()

    def _are_at_work(self) -> bool:
        workers = range(self._num_workers)
        return not self._all.ended and any(index not in self._holder(index).ends for index in workers)

    def _holder(self, worker_index: int) -> Job | Step:
        return self._replacements.get(worker_index, self._all)

    def _end_of(self, worker_index: int) -> str:
        """Say how a worker ended; empty if it has not."""
        holder = self._holder(worker_index)
        ended = holder.ended or (self._all.ended if isinstance(self._all, Job) else "")
        if holder.is_requeued and worker_index in self._awaited:
            return ""
        status = holder.ends.get(worker_index)
        if status is not None and not holder.is_requeued:
            if not ended and self._is_in_doubt(worker_index):
                return ""
            is_ending = isinstance(self._all, Job) and self._all.state.is_ending
            return "; ".join(filter(None, (describe_status(status), ended or (str(self._all) if is_ending else ""))))
        place = holder.places.get(worker_index)
        if place is not None and not ended and not self._all.has_node(place.node):
            return f"job {self._all.id} has lost node {place.node}"
        return ended

    def _vacate(self, worker_index: int) -> str | None:
        """Make sure that a worker has ended; returns on which node to put its successor, None if on any.

        A worker that has not been seen to end hangs, or its node is dead or cut off. So it is ended without waiting for
        that, and its successor had better be elsewhere.
        """
        holder = self._holder(worker_index)
        place = holder.places.get(worker_index)
        if place is None or not self._all.has_node(place.node):
            return None
        if worker_index in holder.ends:
            return place.node
        command = [*single_step(self._all.id, place.node), "bash", "-c", f"kill -KILL -- -{place.process_group}"]
        self._endings.append(Step(command, job_environment({}), None, self._all.id))
        return None

    def _is_in_doubt(self, worker_index: int) -> bool:
        """Whether a worker that has ended may have done so with its whole job: Slurm is asked, for a moment."""
        if not isinstance(self._all, Job):
            return False
        now = time.monotonic()
        if worker_index not in self._ended_at:
            self._ended_at[worker_index] = now
            self._all.hasten()
        since = self._ended_at[worker_index]
        goes_on = self._all.seen_at > since and self._all.state.is_alive
        return not goes_on and now - since < _LAST_WORDS_S

    def _remove_files(self) -> None:
        if self._remove_at_end is not None:
            shutil.rmtree(self._remove_at_end, ignore_errors=True)
