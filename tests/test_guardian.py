"""The process around each worker: what it ends, what it writes, and how little it is."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clusterenv import ClusterEnv, Faults, LocalLauncher
from clusterenv.errors import WorkerLost
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, Ticket
from tests.conftest import Backend, guardian_of, wait_until_gone
from tests.launchers import OwnLauncher, start_module
from tests.test_cleanup import IDLE_S, cpu_s
from tests.worlds import Factory, World

ROOT = Path(__file__).parent.parent
ACTIONS = np.zeros(2, np.int64)
END_S = 6.0  # A worker ends with its head within this time, whatever it is doing.
DEADLINE_S = 30.0

SCRIPT = """
import json, sys, threading
from clusterenv import ClusterEnv, Network, LocalLauncher
from tests.test_guardian import ElsewhereLauncher, Stuck
from tests.worlds import Factory, World

transport, place, gate = sys.argv[1:]

def start():
    global envs
    launcher = ElsewhereLauncher() if place == "elsewhere" else LocalLauncher()
    envs = ClusterEnv([World, lambda: Stuck(gate)], num_workers=2, launcher=launcher,
                      network=Network(transport=transport))
    envs.reset(seed=1)
    print(json.dumps(envs.worker_pids), flush=True)

if place == "a thread that has ended":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
envs.step([0, 0])
"""


class Stuck(World):
    """Starts helpers, tells their process ids, and then lets no thread of its process run any more."""

    def __init__(self, gate: str) -> None:
        super().__init__(longest_episode=99)
        self._gate = gate

    def step(self, action: Any) -> Any:
        helpers = start_helpers()
        with open(self._gate, "w") as gate:
            json.dump(helpers, gate)
        ctypes.PyDLL(None).sleep(60)  # Unlike ctypes.CDLL, this keeps the interpreter's lock.
        return super().step(action)


class ElsewhereLauncher(OwnLauncher):
    """Its workers are not told that the head is their parent, as if srun or sshd had started them."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        return ProcessFleet(lambda index, log: start_module("clusterenv.worker", ticket, index, log), num_workers)


@dataclass(frozen=True, kw_only=True)
class HastyLauncher(LocalLauncher):
    """Its workers count as hung after three seconds."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        return super().launch(msgspec.structs.replace(ticket, hang_s=3.0), num_workers)


@dataclass(frozen=True, kw_only=True)
class FullDiskLauncher(LocalLauncher):
    """No file of its workers may grow beyond a kilobyte: to write more fails, as on a disk that is full."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            return super().launch(ticket, num_workers)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def start_helpers() -> list[int]:
    """Start a helper as most libraries do, one in a session of its own as simulators do, and one that has a child."""
    child = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    helpers = [
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sleep", "1000"], start_new_session=True),
        parent,
    ]
    return [*(helper.pid for helper in helpers), int(parent.stdout.readline())]


class Busy(World):
    """Does what it is told, by name, unless it is the first."""

    def __init__(self, index: int) -> None:
        super().__init__(longest_episode=99, index=index)
        self.pause_s = 0.0

    def perform(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments) if self.index else None

    def step(self, action: Any) -> Any:
        time.sleep(self.pause_s)
        return super().step(action)

    def start_helpers(self) -> list[int]:
        return start_helpers()

    def crash(self) -> None:
        ctypes.string_at(0)

    def hold_lock(self) -> None:
        ctypes.PyDLL(None).sleep(60)

    def wait(self) -> None:
        signal.pause()

    def wait_for(self, gate: str) -> str:
        return Path(gate).read_text()

    def talk(self, text: str, times: int) -> None:
        for _ in range(times):
            print(text)  # noqa: T201 - what environments do

    def find_ticket(self) -> list[bytes]:
        command = ["cat", f"/proc/{os.getppid()}/environ", "/proc/self/environ"]
        shown = subprocess.run(command, capture_output=True, check=True)
        return [Path("/proc/self/environ").read_bytes(), shown.stdout, repr(os.environ).encode()]


BUSY: list[Factory] = [lambda: Busy(0), lambda: Busy(1)]


def end_s() -> float:
    """How long workers may live on without their head: END_S, and in proportion longer where others have the cores."""
    return END_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def log_of(log_dir: Path, worker_index: int) -> Path:
    (log,) = log_dir.rglob(f"worker-{worker_index}.log")
    return log


def wait_for_text(log: Path, text: str, envs: ClusterEnv) -> str:
    ends_at = time.monotonic() + DEADLINE_S
    while text not in (found := log.read_text()):
        assert time.monotonic() < ends_at, f"{text!r} is not in the log:\n{found}"
        assert wait_until_gone(envs.worker_pids[:1], 0.05), "the first worker lives on"
    return found


@pytest.fixture
def run(remote: Backend, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Runs SCRIPT, whose environment waits for somebody to read `gate`."""
    scripts: list[subprocess.Popen[str]] = []
    os.mkfifo(tmp_path / "gate")

    def start(place: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, remote["network"].transport, place, str(tmp_path / "gate")]
        scripts.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return scripts[-1]

    yield start
    for script in scripts:
        script.kill()
        script.communicate()


@pytest.mark.parametrize("place", ["here", "a thread that has ended", "elsewhere"])
def test_workers_and_helpers_end_with_a_killed_head_while_c_code_holds_the_lock(
    run: Callable[[str], subprocess.Popen[str]], place: str, tmp_path: Path
) -> None:
    script = run(place)
    assert script.stdout is not None
    pids = json.loads(script.stdout.readline())
    guardians = [guardian_of(pid) for pid in pids]
    helpers = json.loads((tmp_path / "gate").read_text())
    assert wait_until_gone([*pids, *helpers], 0.0) == [*pids, *helpers]
    script.kill()
    script.wait()
    assert wait_until_gone([*pids, *helpers, *guardians], end_s()) == []


@pytest.mark.parametrize("end", ["crash", signal.SIGKILL, signal.SIGTERM, "close"])
def test_helpers_end_with_their_worker_however_it_ends(remote: Backend, end: Any) -> None:
    with ClusterEnv(BUSY, **remote, faults=Faults(on_loss="raise")) as envs:
        helpers = envs.call("perform", "start_helpers")[1]
        assert wait_until_gone(helpers, 0.0) == helpers
        if end == "crash":
            with pytest.raises(WorkerLost, match="SIGSEGV"):
                envs.call("perform", "crash")
        elif end == "close":
            envs.close()
        else:
            os.kill(envs.worker_pids[1], end)
        assert wait_until_gone(helpers) == []


def test_what_a_worker_leaves_may_still_tidy_up() -> None:
    with ClusterEnv(BUSY, num_workers=2, faults=Faults(on_loss="raise")) as envs:
        (name,) = envs.apply(lambda _: shared_memory.SharedMemory(create=True, size=8).name, [1])
        assert Path("/dev/shm", name).exists()
        with pytest.raises(WorkerLost, match="SIGSEGV"):
            envs.call("perform", "crash")
        ends_at = time.monotonic() + DEADLINE_S
        while Path("/dev/shm", name).exists():  # By multiprocessing's resource tracker, a process of its own.
            assert time.monotonic() < ends_at
            assert wait_until_gone(envs.worker_pids[:1], 0.05)


def test_the_stack_of_a_crash_is_in_the_error(remote: Backend) -> None:
    with (
        ClusterEnv(BUSY, **remote, faults=Faults(on_loss="raise")) as envs,
        pytest.raises(WorkerLost, match=r"(?s)Segmentation fault.*in crash") as caught,
    ):
        envs.call("perform", "crash")
    assert caught.value.worker_index == 1


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN], ids=["in a terminal", "in the background"])
def test_sigquit_ends_a_worker_and_its_helpers_at_once(inherited: signal.Handlers) -> None:
    before = signal.signal(signal.SIGQUIT, inherited)
    try:
        _quit_a_worker()
    finally:
        signal.signal(signal.SIGQUIT, before)


def _quit_a_worker() -> None:
    with ClusterEnv(BUSY, num_workers=2, faults=Faults(on_loss="raise")) as envs:
        pids = [*envs.call("perform", "start_helpers")[1], envs.worker_pids[1]]
        envs.call_async("perform", "hold_lock")
        os.kill(guardian_of(envs.worker_pids[1]), signal.SIGQUIT)
        assert wait_until_gone(pids) == []
        with pytest.raises(WorkerLost, match="SIGKILL"):
            envs.call_wait()


def test_sigterm_lets_a_worker_answer_first_even_if_it_comes_twice(remote: Backend, tmp_path: Path) -> None:
    gate, launcher = tmp_path / "gate", LocalLauncher(log_dir=tmp_path)
    os.mkfifo(gate)
    with ClusterEnv(BUSY, **remote, launcher=launcher, faults=Faults(on_loss="raise")) as envs:
        pid = envs.worker_pids[1]
        envs.call_async("perform", "wait_for", str(gate))
        with gate.open("w") as opened:
            os.kill(guardian_of(pid), signal.SIGTERM)  # As a scheduler does: to all processes of a job.
            os.kill(pid, signal.SIGTERM)
            wait_for_text(log_of(tmp_path, 1), "SIGTERM", envs)
            opened.write("good morning")
        assert envs.call_wait() == (None, "good morning")
        assert wait_until_gone([pid]) == []
        with pytest.raises(WorkerLost, match=r"143|SIGTERM"):
            envs.reset()


def test_a_killed_guardian_takes_its_worker_along(remote: Backend) -> None:
    with ClusterEnv([World, World], **remote, faults=Faults(on_loss="raise")) as envs:
        os.kill(guardian_of(envs.worker_pids[0]), signal.SIGKILL)
        assert wait_until_gone(envs.worker_pids[:1]) == []


def test_a_guardian_is_small_and_idle(remote: Backend) -> None:
    with ClusterEnv([World, World], **remote) as envs:
        envs.reset(seed=1)
        guardians = [guardian_of(pid) for pid in envs.worker_pids]
        before = [cpu_s(pid) for pid in guardians]
        for pid in guardians:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "numpy" not in maps
            assert "zmq" not in maps
            assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
            assert len(os.listdir(f"/proc/{pid}/fd")) < 12
        assert wait_until_gone(guardians[:1], IDLE_S) == guardians[:1]
        used = [cpu_s(pid) - was for pid, was in zip(guardians, before, strict=True)]
        assert max(used) < 0.01 * IDLE_S


def test_the_ticket_can_be_read_nowhere_in_a_worker(remote: Backend) -> None:
    tickets: list[str] = []

    class Noting(LocalLauncher):
        def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
            tickets.append(ticket.encode())
            return super().launch(ticket, num_workers)

    with ClusterEnv(BUSY, **remote, launcher=Noting()) as envs:
        seen: list[bytes] = list(envs.call("perform", "find_ticket")[1])
        for pid in envs.worker_pids:
            seen += [Path(f"/proc/{each}/environ").read_bytes() for each in (pid, guardian_of(pid))]
    assert all(b"PATH" in text for text in seen), "the rest is there"
    for text in seen:
        assert tickets[0][:40].encode() not in text
        assert not text.partition(f"{TICKET_VARIABLE}=".encode())[2].partition(b"\0")[0]


@pytest.mark.parametrize("method", ["wait", "hold_lock"])
def test_the_stack_of_a_hung_worker_is_in_its_log(remote: Backend, method: str, tmp_path: Path) -> None:
    with ClusterEnv(BUSY, **remote, launcher=HastyLauncher(log_dir=tmp_path)) as envs:
        envs.call_async("perform", method)
        wait_for_text(log_of(tmp_path, 1), f" in {method}\n", envs)
        envs.close(terminate=True)
    assert log_of(tmp_path, 1).read_text().count(f" in {method}\n") == 1, "once per hang"
    assert " in perform\n" not in log_of(tmp_path, 0).read_text()


def test_a_rollout_that_gets_on_is_not_taken_for_hung(remote: Backend, tmp_path: Path) -> None:
    with ClusterEnv(BUSY, **remote, launcher=HastyLauncher(log_dir=tmp_path)) as envs:
        envs.set_attr("pause_s", 0.3)
        envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 20)
    assert " in step\n" not in log_of(tmp_path, 1).read_text()


def test_what_is_printed_is_in_the_log_at_once(remote: Backend, tmp_path: Path) -> None:
    with ClusterEnv(BUSY, **remote, launcher=LocalLauncher(log_dir=tmp_path)) as envs:
        envs.call("perform", "talk", "good morning", 1)
        wait_for_text(log_of(tmp_path, 1), "good morning\n", envs)


def test_a_log_keeps_the_beginning_and_the_end_of_a_flood(tmp_path: Path) -> None:
    with ClusterEnv(BUSY, num_workers=2, launcher=LocalLauncher(log_dir=tmp_path)) as envs:
        envs.call("perform", "talk", "the first", 1)
        envs.call("perform", "talk", "x" * 999, 100_000)
        envs.call("perform", "talk", "the last", 1)
        wait_for_text(log_of(tmp_path, 1), "the last\n", envs)  # Also while the worker lives.
        envs.call("perform", "talk", "x" * 999, 100_000)
        envs.call("perform", "talk", "the very last", 1)
    text = log_of(tmp_path, 1).read_text()
    assert "the first\n" in text
    assert "the last\n" in text
    assert "bytes of output were dropped here" in text
    assert text.endswith("the very last\n")
    assert len(text) < 9 << 20


def test_a_full_disk_under_the_log_stops_nobody(remote: Backend, tmp_path: Path) -> None:
    with ClusterEnv(BUSY, **remote, launcher=FullDiskLauncher(log_dir=tmp_path)) as envs:
        envs.reset(seed=1)
        envs.call("perform", "talk", "x" * 999, 1000)
        envs.step(ACTIONS)
    assert log_of(tmp_path, 1).stat().st_size <= 1024
