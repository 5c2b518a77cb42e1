"""Child processes of the head: workers, or the clients that start them elsewhere; and the files they write to."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TypeVar

from clusterenv.errors import LaunchError

_TERM_S = 1.0  # For workers that were told to stop, did not, and get SIGTERM.
_QUIT_S = 3.0  # A worker's guardian ends it in milliseconds, and within 2 s also what its environments started.
_KILL_S = 5.0  # Only a process that the kernel cannot let go of takes longer.
_TAIL_BYTES = 4096
# Windows knows one way to end a process, and that is at once.
_QUIT = getattr(signal, "SIGQUIT", signal.SIGTERM)
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)

T = TypeVar("T")
StartProcess = Callable[[int, BinaryIO], "subprocess.Popen[bytes]"]


class ProcessFleet:
    """Workers that are child processes, and the files they write to.

    SIGTERM asks a worker to leave in order. SIGQUIT makes its guardian end it at once, with all it has started. SIGKILL
    is for a guardian that is stopped or hangs: its worker is told by the kernel.
    """

    def __init__(self, start: StartProcess, num_workers: int, log_dir: str | os.PathLike[str] | None = None) -> None:
        """Start the workers.

        Args:
            start: Starts the process of one worker, which writes to the file it is given.
            num_workers: How many.
            log_dir: Where to keep what workers print. None: only for error messages.

        Raises:
            LaunchError: One cannot be started, or its log not be written; those that were started have been ended.
        """
        self._start = start
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[WorkerLog] = []
        self._kill_at: dict[int, float] = {}  # Of workers whose successor is wanted: when to lose patience with them.
        self._failures: dict[int, str] = {}
        try:
            run_dir = make_run_dir(log_dir)
            for worker_index in range(num_workers):
                with uninterrupted():
                    self._logs.append(WorkerLog(run_dir, f"worker-{worker_index}"))
                    self._processes.append(start(worker_index, self._logs[-1].file))
        except OSError as error:
            self.stop(timeout_s=0.0)
            raise LaunchError(f"Could not start worker {len(self._processes)} of {num_workers}: {error}.") from error
        except BaseException:
            self.stop(timeout_s=0.0)
            raise

    def exits(self) -> dict[int, str]:
        self._advance()
        statuses = {index: process.poll() for index, process in enumerate(self._processes)}
        ended = {
            index: describe_exit(status)
            for index, status in statuses.items()
            if status is not None and index not in self._kill_at
        }
        return ended | self._failures

    def status(self) -> str:
        """Say whose predecessors are still being ended; all others are up as soon as they are started."""
        self._advance()
        return f"ending what is left of worker {', '.join(map(str, self._kill_at))}" if self._kill_at else ""

    def log_tail(self, worker_index: int) -> str:
        return self._logs[worker_index].tail()

    def restart(self, worker_index: int) -> None:
        """Have a worker started once more, when the old one is gone; its log goes on in the same file."""
        self._failures.pop(worker_index, None)
        self._kill_at[worker_index] = time.monotonic() + _QUIT_S
        self._processes[worker_index].send_signal(_QUIT)
        self._advance()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end on their own, then end them, in order if they can."""
        self._kill_at.clear()
        self._await_all(timeout_s)
        for number, patience_s in (
            (signal.SIGTERM, min(_TERM_S, timeout_s)),
            (_QUIT, _QUIT_S),
            (_KILL, _KILL_S),
        ):
            for process in self._processes:
                process.send_signal(number)  # Does nothing to one that has ended.
            self._await_all(patience_s)
        for log in self._logs:
            log.close()

    def _advance(self) -> None:
        """Start whoever is wanted again and whose predecessor has been reaped."""
        for worker_index, kill_at in list(self._kill_at.items()):
            if self._processes[worker_index].poll() is None:
                if time.monotonic() > kill_at:
                    self._processes[worker_index].kill()
                continue
            with uninterrupted():
                del self._kill_at[worker_index]
                try:
                    self._logs[worker_index].start_over()
                    self._processes[worker_index] = self._start(worker_index, self._logs[worker_index].file)
                except OSError as error:
                    self._failures[worker_index] = f"could not be started: {error}"

    def _await_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            wait_for(process, deadline)


class WorkerLog:
    """A file for one worker's output.

    Attributes:
        file: Where to write; give it to the process as its standard output and error.
        path: Where that is; None if it has no name.
    """

    def __init__(self, directory: Path | None, name: str) -> None:
        """Open a new file `<name>.log` in a directory; without one it has no name and is gone when closed.

        Raises:
            LaunchError: That cannot be written to.
        """
        self.file: BinaryIO
        self.path: Path | None = None
        self._start = 0
        with _explained(directory):
            if directory is None:
                self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the log
            else:
                directory.mkdir(parents=True, exist_ok=True)
                self.file = _take_free_name(directory, name, ".log", lambda path: path.open("x+b"))
                self.path = Path(self.file.name)

    @property
    def size_bytes(self) -> int:
        """How much has been written so far."""
        return os.fstat(self.file.fileno()).st_size

    def read(self, start: int, size_bytes: int | None = None) -> bytes:
        """Return a part of it, or all from there on; nothing once it is closed."""
        if self.file.closed:
            return b""
        # The file's position is shared with the worker that writes it: read without moving it.
        return os.pread(
            self.file.fileno(), max(0, self.size_bytes - start) if size_bytes is None else size_bytes, start
        )

    def start_over(self) -> None:
        """Note that what follows is of another process, and begins a line."""
        if self.read(max(0, self.size_bytes - 1)) not in (b"", b"\n"):
            with contextlib.suppress(OSError):  # The disk is full.
                os.write(self.file.fileno(), b"\n")
        self._start = self.size_bytes

    def tail(self) -> str:
        """Return the last lines of the last process; nothing once it is closed."""
        if self.file.closed:
            return ""
        return self.read(max(self._start, self.size_bytes - _TAIL_BYTES)).decode(errors="replace").strip()

    def close(self) -> None:
        """Close it; if it has a name, it stays."""
        self.file.close()


def make_run_dir(log_dir: str | os.PathLike[str] | None) -> Path | None:
    """Make a new directory for the logs of one run, named after the time: other runs may have the same `log_dir`.

    Raises:
        LaunchError: It cannot be made.
    """
    if log_dir is None:
        return None

    def make(path: Path) -> Path:
        path.mkdir(parents=True)
        return path

    with _explained(log_dir):
        return _take_free_name(Path(log_dir).absolute(), time.strftime("run-%Y%m%d-%H%M%S"), "", make)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM while something is started and noted; else nobody might know what to end."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received, frame in came:
            handlers[signal.Signals(received)](received, frame)


def wait_for(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for a process to end, until this moment of `time.monotonic`; False if it still runs."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def describe_exit(status: int) -> str:
    """Say how a process ended: by its exit status, minus the signal that killed it, or 128 plus it as a shell says."""
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"exit status {status}" if status >= 0 else f"killed by signal {number}"


def _take_free_name(directory: Path, name: str, suffix: str, make: Callable[[Path], T]) -> T:
    """Make something of this name, or with the next number behind it, that was not there before."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            return make(directory / f"{name}{'' if number == 1 else f'-{number}'}{suffix}")
    raise AssertionError("there is always another number")


@contextlib.contextmanager
def _explained(log_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = "the temporary directory" if log_dir is None else str(log_dir)
        raise LaunchError(
            f"Cannot keep what workers print in {where}: {error.strerror}. Name a directory with room that can be "
            "written to: log_dir=... of the launcher, or $TMPDIR."
        ) from error
