"""Runner: carries out the runs that are not on record yet, some at a time, each in its own process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.plan import Run
from experiments.progress import Progress, write_duration
from experiments.record import partial_path, read_steps
from experiments.tasks import AnySettings

LOOK_EVERY_S = 0.5
STOP_TIMEOUT_S = 30.0
LOG_LINES = 15


class RunFailed(Exception):
    """Runs ended with an error; the text says which, and shows the end of their output."""


class Folder:
    """Where the experiment's files are.

    Args:
        path: Of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.json"

    def record(self, run: Run) -> Path:
        """Return where a run's record is as soon as it is complete."""
        return self.path / f"{run.name}.csv"


@dataclass(frozen=True)
class Process:
    """A run under way."""

    run: Run
    popen: subprocess.Popen[bytes]
    log: Path


def run_all(runs: Sequence[Run], folder: Folder, tasks: Mapping[str, AnySettings], jobs: int) -> None:
    """Carry out the runs whose records are missing, in the given order.

    Raises:
        RunFailed: Some failed. The others were carried out all the same.
    """
    waiting = [run for run in runs if not folder.record(run).exists()]
    progress = Progress(sum(tasks[run.task].expected_s for run in waiting))
    if len(waiting) < len(runs):
        progress.say(f"{len(runs) - len(waiting)} of {len(runs)} runs are on record already")
    began, num_waiting = time.monotonic(), len(waiting)
    running: list[Process] = []
    failures: list[str] = []
    num_done, done_s = 0, 0.0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(start(waiting.pop(0), folder))
            time.sleep(LOOK_EVERY_S)
            for process in [each for each in running if each.popen.poll() is not None]:
                running.remove(process)
                failures += check(process, folder)
                num_done += 1
                done_s += tasks[process.run.task].expected_s
            under_way_s = sum(estimate_done_s(process.run, folder, tasks[process.run.task]) for process in running)
            names = ", ".join(process.run.name for process in running) or "done"
            progress.show(done_s + under_way_s, f"{num_done} of {num_waiting} runs done; now {names}")
    finally:
        stop(running)
    if num_waiting:
        progress.say(f"{num_waiting} runs took {write_duration(time.monotonic() - began)}")
    if failures:
        raise RunFailed("\n".join([*failures, "The same command tries them again."]))


def estimate_done_s(run: Run, folder: Folder, settings: AnySettings) -> float:
    """Return about how much of a run under way is done."""
    total = settings.num_rollouts * settings.num_steps * settings.num_envs
    return settings.expected_s * min(1.0, read_steps(partial_path(folder.record(run))) / total)


def start(run: Run, folder: Folder) -> Process:
    """Start a run."""
    record = folder.record(run)
    record.parent.mkdir(exist_ok=True)
    log = record.with_suffix(".log")
    command = [sys.executable, "-m", "experiments.training"]
    command += [str(folder.settings), run.task, run.rule.name, str(run.seed), str(record)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("w") as file:
        # A session of its own: Ctrl-C comes to us alone, and we end the runs one by one, workers and all.
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    return Process(run, popen, log)


def check(process: Process, folder: Folder) -> list[str]:
    """Return what went wrong in a run that has ended; nothing if it did so well."""
    if process.popen.returncode == 0 and folder.record(process.run).exists():
        process.log.unlink()
        return []
    tail = "\n".join(process.log.read_text().splitlines()[-LOG_LINES:])
    status = process.popen.returncode
    return [f"Run {process.run.name} failed with status {status}. The end of {process.log}:\n{tail}"]


def stop(processes: Sequence[Process]) -> None:
    """End runs early, so that they close their workers, and if need be by force."""
    for process in processes:
        process.popen.terminate()
    ends_at = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, ends_at - time.monotonic()))
        process.popen.kill()
        process.popen.wait()
        process.log.unlink()
