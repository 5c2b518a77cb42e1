"""Child processes of the head (workers, or clients that start workers elsewhere) and the files they write to."""

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
_QUIT_S = 3.0  # A worker's guardian kills it in milliseconds, and within 2 s also what its environments started.
_KILL_S = 5.0  # Only a process that the kernel cannot let go of takes longer.
_TAIL_BYTES = 4096
# Windows has only one way to end a process, and it is immediate.
_QUIT = getattr(signal, "SIGQUIT", signal.SIGTERM)
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)

T = TypeVar("T")
StartProcess = Callable[[int, BinaryIO], "subprocess.Popen[bytes]"]


class ProcessFleet:
    """Workers that are child processes, and the files they write to.

    SIGTERM asks a worker to shut down cleanly. SIGQUIT makes its guardian kill it immediately, with all it has started.
    SIGKILL is for a guardian that is stopped or hangs: the kernel then signals its worker.
    """

    def __init__(self, start: StartProcess, num_workers: int, log_dir: str | os.PathLike[str] | None = None) -> None:
        """Start the workers.

        Args:
            start: Starts one worker's process, given its index and the file for its output.
            num_workers: The number of workers.
            log_dir: Where to keep the workers' output. None: only for error messages.

        Raises:
            LaunchError: A worker cannot be started, or its log cannot be written; those already started were killed.
        """
        self._start = start
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[WorkerLog] = []
        self._kill_at: dict[int, float] = {}  # When to send SIGKILL to workers that are being replaced.
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
        """Say whose predecessors are still being killed; all other workers are up as soon as they are started."""
        self._advance()
        return f"ending what is left of worker {', '.join(map(str, self._kill_at))}" if self._kill_at else ""

    def log_tail(self, worker_index: int) -> str:
        return self._logs[worker_index].tail()

    def restart(self, worker_index: int) -> None:
        """Restart a worker once the old one is gone; its log continues in the same file."""
        self._failures.pop(worker_index, None)
        self._kill_at[worker_index] = time.monotonic() + _QUIT_S
        self._processes[worker_index].send_signal(_QUIT)
        self._advance()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to exit on their own, then end them, cleanly if possible."""
        self._kill_at.clear()
        self._await_all(timeout_s)
        for number, patience_s in (
            (signal.SIGTERM, min(_TERM_S, timeout_s)),
            (_QUIT, _QUIT_S),
            (_KILL, _KILL_S),
        ):
            for process in self._processes:
                process.send_signal(number)  # Does nothing if the process has ended.
            self._await_all(patience_s)
        for log in self._logs:
            log.close()

    def _advance(self) -> None:
        """Start the workers to be restarted whose predecessors have been reaped."""
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
        file: The open file; give it to the process as its standard output and error.
        path: The file's path; None if it has no name.
    """

    def __init__(self, directory: Path | None, name: str) -> None:
        """Open a new file `<name>.log` in a directory; without a directory, a nameless file that is gone when closed.

        Raises:
            LaunchError: The directory cannot be written to.
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
        """Return up to `size_bytes` of the log from `start` on, or everything; nothing once it is closed."""
        if self.file.closed:
            return b""
        # The file position is shared with the worker that writes the file: read without moving it.
        return os.pread(
            self.file.fileno(), max(0, self.size_bytes - start) if size_bytes is None else size_bytes, start
        )

    def start_over(self) -> None:
        """Note that what follows comes from another process, and begin a new line."""
        if self.read(max(0, self.size_bytes - 1)) not in (b"", b"\n"):
            with contextlib.suppress(OSError):  # The disk is full.
                os.write(self.file.fileno(), b"\n")
        self._start = self.size_bytes

    def tail(self) -> str:
        """Return the last lines that the latest process wrote; nothing once the log is closed."""
        if self.file.closed:
            return ""
        return self.read(max(self._start, self.size_bytes - _TAIL_BYTES)).decode(errors="replace").strip()

    def close(self) -> None:
        """Close the file; if it has a name, it stays on disk."""
        self.file.close()


def make_run_dir(log_dir: str | os.PathLike[str] | None) -> Path | None:
    """Make a new directory for the logs of one run, named after the time: other runs may use the same `log_dir`.

    Raises:
        LaunchError: The directory cannot be made.
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
    """Defer Ctrl-C and SIGTERM while something is started and noted, so that whatever was started can be stopped."""
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
    """Wait for a process to end, until this time of `time.monotonic`; return False if it is still running."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def describe_exit(status: int) -> str:
    """Say how a process ended: its status is an exit status, minus a signal's number, or, from a shell, 128 plus it."""
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(number).name}"
    return f"exit status {status}" if status >= 0 else f"killed by signal {number}"


def _take_free_name(directory: Path, name: str, suffix: str, make: Callable[[Path], T]) -> T:
    """Make something new with this name, or with the first free number appended to it."""
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
