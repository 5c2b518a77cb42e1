"""The benchmark's side of a contender's process: start it, let it run for a moment, keep it frozen in between.

A frozen contender (SIGSTOP to its whole process tree) burns no CPU, however its idle workers wait. All are treated
alike.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import interpreters
from benchmarks.peers.cells import Entry, Settings
from benchmarks.processes import (
    child_environment,
    kill_survivors,
    measure_cpu,
    measure_machine_cpu,
    read_tree,
    signal_tree,
)

# Two hundred and fifty-six processes on two cores take their time to start.
SETUP_TIMEOUT_S = 240.0
RUN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 20.0


class ContenderFailed(Exception):
    """A contender could not be set up or stopped working; the text says why, for the table."""


@dataclass(frozen=True)
class Measurement:
    """Environment steps per second, and how many cores other programs took meanwhile."""

    rate: float
    cores_of_others: float


class RunningContender:
    """A contender in its own process, frozen except while one of its methods is running.

    Args:
        entry: The contender and its size.
        task: A key of `tasks.TASKS`.
        settings: One of the contender's settings.
        cache: The benchmark's cache directory: peers' interpreters, logs, and the contender's working directory.

    Raises:
        ContenderFailed: It could not be set up; nothing is left running.
    """

    def __init__(self, entry: Entry, task: str, settings: Settings, cache: Path) -> None:
        self.entry = entry
        self.settings = settings
        contender = entry.contender
        try:
            python = interpreters.find_python(contender.peer, cache) if contender.peer else Path(sys.executable)
        except interpreters.PeerUnavailable as error:
            raise ContenderFailed(f"not installed: {error}") from error
        # Importing PufferLib drops a symbolic link into the working directory, which must not be the repository's.
        scratch = cache / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        self._log = cache / "logs" / f"{name_log(entry, task, settings)}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    python,
                    "-m",
                    "benchmarks.peers.contender",
                    contender.builder,
                    task,
                    str(entry.num_envs),
                    json.dumps(settings),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=scratch,
                env=child_environment(),
                start_new_session=True,
            )
        self._received = b""
        self._is_closed = False
        try:
            self._expect("ready", SETUP_TIMEOUT_S)
        except BaseException:
            # It would not listen to a `quit` before it is ready.
            self._end(0.0)
            raise
        self._freeze()

    def run(self, seconds: float, warmup_s: float) -> Measurement:
        """Thaw it, let it warm up, and measure.

        Raises:
            ContenderFailed: It stopped working.
        """
        self._thaw()
        try:
            self._run(warmup_s)
            began, cpu_before = time.perf_counter(), self._measure_cpu_of_others()
            rate = self._run(seconds)
            cpu_s = max(0.0, self._measure_cpu_of_others() - cpu_before)
            return Measurement(rate, cpu_s / (time.perf_counter() - began))
        finally:
            self._freeze()

    def measure_idle_cpu(self, settle_s: float, seconds: float) -> float:
        """Measure how many cores it keeps busy with nothing to do, some time after it was last used."""
        self._thaw()
        try:
            self._run(0.05)
            time.sleep(settle_s)
            before, began = measure_cpu(self._process.pid), time.perf_counter()
            time.sleep(seconds)
            after, ended = measure_cpu(self._process.pid), time.perf_counter()
        finally:
            self._freeze()
        return (after - before) / (ended - began)

    def close(self) -> None:
        """Ask it to end, and after a while make it; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thaw()
        self._end(CLOSE_TIMEOUT_S)

    def _end(self, timeout_s: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Known beforehand: once the first process has ended, nothing leads to those it left behind.
        members = read_tree(self._process.pid)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"quit\n")
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        kill_survivors([*members, *read_tree(self._process.pid)])
        self._process.wait()
        self._process.stdout.close()

    def _run(self, seconds: float) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"run {seconds}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ContenderFailed(f"failed: it ended; see {self._log.name}") from error
        return float(self._expect("rate", RUN_TIMEOUT_S + seconds))

    def _expect(self, word: str, timeout_s: float) -> str:
        """Read a line that must start with a word; returns the rest of it."""
        line = self._read_line(timeout_s)
        first, _, rest = line.partition(" ")
        if first == "missing":
            raise ContenderFailed(f"not installed: {rest}")
        if first == "cannot":
            raise ContenderFailed(f"not possible: {rest}")
        if first != word:
            raise ContenderFailed(f"failed: {rest or line}")
        return rest

    def _read_line(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise ContenderFailed(f"failed: no answer within {timeout_s:g} s")
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                raise ContenderFailed(f"failed: it ended without a word; see {self._log.name}")
            self._received += chunk
        line, self._received = self._received.split(b"\n", 1)
        return line.decode()

    def _measure_cpu_of_others(self) -> float:
        """Sum the CPU seconds of everybody but the contender and the benchmark itself."""
        return measure_machine_cpu() - measure_cpu(self._process.pid) - time.process_time()

    def _freeze(self) -> None:
        signal_tree(self._process.pid, signal.SIGSTOP)

    def _thaw(self) -> None:
        signal_tree(self._process.pid, signal.SIGCONT)


def name_log(entry: Entry, task: str, settings: Settings) -> str:
    """Name a contender's log, so that those of other settings, set up at the same time, have other logs."""
    values = [str(value) for value in settings.values()]
    return "-".join([entry.contender.name, task, str(entry.num_envs), *(text for text in values if os.sep not in text)])
