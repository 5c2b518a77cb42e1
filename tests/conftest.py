"""Every test has a deadline and leaves nothing behind: no process, file, descriptor, thread or shared memory."""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

TEST_DEADLINE_S = 120.0
MARK = "CLUSTERENV_TEST_MARK"
Backend = dict[str, Any]

# What ClusterEnv is asked for beyond its environments: three ways to run the same thing, and each must be right.
BACKENDS: dict[str, Backend] = {
    "in process": {"num_workers": 0},
    "shm": {"num_workers": 2, "transport": "shm"},
    "zmq": {"num_workers": 2, "transport": "zmq"},
}
REMOTE_BACKENDS = {name: backend for name, backend in BACKENDS.items() if backend["num_workers"]}


class DeadlineExceeded(BaseException):
    """A test took too long; no `except Exception` on the way may hide that."""


@pytest.fixture(scope="session", autouse=True)
def libraries_are_warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let libraries make now what they make once and keep for the life of the process: it is not ours.

    Torch makes a cache in the temporary directory of the moment, pyzmq a thread for all zero-copy sends.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torch"))
    with zmq.Context() as context, context.socket(zmq.PAIR) as near, context.socket(zmq.PAIR) as far:
        near.bind("inproc://warm")
        far.connect("inproc://warm")
        far.send(bytes(10**6), copy=False)
        near.recv()


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS), scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Keyword arguments of ClusterEnv that choose where and how the environments run."""
    return dict(request.param)


@pytest.fixture(params=list(REMOTE_BACKENDS.values()), ids=list(REMOTE_BACKENDS), scope="module")
def remote(request: pytest.FixtureRequest) -> Backend:
    """Like `backend`, but only those with real worker processes."""
    return dict(request.param)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End the test by force after `TEST_DEADLINE_S`, and the whole run if even that does not stop it."""

    def give_up(signum: int, frame: object) -> None:
        raise DeadlineExceeded(f"The test was still running after {TEST_DEADLINE_S:g} s.")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, TEST_DEADLINE_S)
    faulthandler.dump_traceback_later(2 * TEST_DEADLINE_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(
    deadline: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fail a test that leaves something of its own behind; what others do on this machine is not its fault."""
    tmp_path_factory.getbasetemp()  # Made now, pytest's own directory does not land in the one we watch.
    with tempfile.TemporaryDirectory(prefix="ce") as scratch:
        monkeypatch.setenv(MARK, uuid.uuid4().hex)
        monkeypatch.setenv("TMPDIR", scratch)
        monkeypatch.setattr(tempfile, "tempdir", None)
        before = _belongings()
        shared_before = _shared_memory()
        yield
        gc.collect()  # Objects in reference cycles are not what we are after.
        left = sorted(_belongings() - before)
        for pid in descendants():
            left.append(f"process {pid}: {_command(pid)}")
            os.kill(pid, signal.SIGKILL)  # It has been seen; the next test shall not suffer from it.
        left += [f"/dev/shm/{name}" for name in _unused(_shared_memory() - shared_before)]
        left += [str(path) for path in Path(scratch).rglob("*")]
        monkeypatch.undo()
    assert not left, "The test left behind:\n" + "\n".join(left)


def wait_until_gone(pids: Sequence[int], deadline_s: float = 10.0) -> list[int]:
    """Wait for processes to end, woken by the kernel; return those that live on past the deadline."""
    ends_at = time.monotonic() + deadline_s
    alive = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, ends_at - time.monotonic()) * 1000):
                alive.append(pid)
        finally:
            os.close(handle)
    return alive


def descendants() -> list[int]:
    """Find the processes this test started, orphans included, by the mark they inherited in their environment."""
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for pid in _pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:  # It ended meanwhile, or is somebody else's.
            continue
    return found


@pytest.fixture
def seconds() -> Callable[[], float]:
    """A stopwatch: each call returns the seconds since the test began."""
    start = time.monotonic()
    return lambda: time.monotonic() - start


def _belongings() -> set[str]:
    children = {f"child {pid}: {_command(pid)}" for pid in _children()}
    threads = {f"thread {thread.name}" for thread in threading.enumerate()}
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"descriptor {number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # The listing's own descriptor.
            continue
    return children | threads | descriptors


def _children() -> list[int]:
    children = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children += [int(pid) for pid in (task / "children").read_text().split()]
        except FileNotFoundError:  # A thread that has just ended.
            continue
    return children


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") or "a zombie"
    except OSError:
        return "just gone"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _unused(names: set[str]) -> list[str]:
    """Of these names in /dev/shm, those no other living process maps or holds: the others are not ours."""
    if not names:
        return []
    used = ""
    for pid in _pids():
        try:
            used += Path(f"/proc/{pid}/maps").read_text()
            used += "\n".join(os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
    return sorted(name for name in names if f"/dev/shm/{name}" not in used and os.path.exists(f"/dev/shm/{name}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where everything is installed (CI), a skipped test is a failed one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CLUSTERENV_NO_SKIPS") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
