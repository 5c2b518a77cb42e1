"""`clusterenv chaos`: the workers of a script are killed and frozen, nobody else, and it says what came of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from clusterenv.cli import main
from clusterenv.testing import chaos
from clusterenv.testing.chaos import Campaign, Plan, Target, find_workers
from clusterenv.testing.processes import descendants, look_at
from tests.conftest import wait_until_gone

ROOT = Path(__file__).parent.parent

# Steps until its standard input ends; then says how many losses it has survived.
TRAINING = """
import select, sys
from clusterenv import ClusterEnv, Timeouts
with ClusterEnv("CartPole-v1", num_envs=4, num_workers=2, timeouts=Timeouts(silence_s=100)) as envs:
    envs.reset(seed=1)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        envs.step(envs.action_space.sample())
    print(len(envs.losses), flush=True)
"""
# Steps until it has lost a worker and gone on; what befalls it before is a failed start.
UNTIL_A_LOSS = """
from clusterenv import ClusterEnv, ClusterEnvError
def make():
    while True:
        try:
            return ClusterEnv("CartPole-v1", num_envs=2, num_workers=2)
        except ClusterEnvError:
            continue
with make() as envs:
    envs.reset(seed=1)
    while not envs.losses:
        envs.step(envs.action_space.sample())
"""
# Does not survive a loss.
FRAGILE = """
from clusterenv import ClusterEnv, Faults
with ClusterEnv("CartPole-v1", num_envs=2, num_workers=2, faults=Faults(on_loss="raise")) as envs:
    envs.reset(seed=1)
    while True:
        envs.step(envs.action_space.sample())
"""


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    """Take back what the command does with signals, which is for a process of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def training() -> Iterator[subprocess.Popen[str]]:
    """Run a script that goes on until this is left."""
    command = [sys.executable, "-c", TRAINING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as script:
        try:
            assert read_line(script.stdout) == "ready\n"
            yield script
            assert script.stdin is not None
            script.stdin.close()
            assert int(read_line(script.stdout)) >= 0
            assert script.wait(60) == 0
        finally:
            pids = [process.pid for process in descendants(script.pid)]
            script.kill()
            wait_until_gone(pids, 30)


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """End a process however this is left, so that a test that fails does so at once."""
    try:
        yield
    finally:
        process.kill()


def read_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def await_state(pid: int, *, is_stopped: bool) -> None:
    """Wait until the kernel has stopped a process, which takes it a moment, or let it go on."""
    ends_at = time.monotonic() + 30
    while (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T") is not is_stopped:
        assert time.monotonic() < ends_at
        os.sched_yield()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_running_script_is_harassed_by_a_seed_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    with training() as script:
        for _ in range(2):
            before = {target.process for target in find_workers(script.pid)}
            options = ["--faults", "3", "--every", "1", "--freeze", "0.5", "--seed", "2"]
            assert main(["chaos", "--pid", str(script.pid), *options]) == 0
            said = capsys.readouterr().err
            assert re.search(r"\nchaos: 3 faults \(.*\); the script goes on, with all 2 workers\.\n$", said)
            plans.append(re.findall(r"s  (kill|freeze) worker (\d)", said))
            after = {target.process for target in find_workers(script.pid)}
            assert len(after) == 2
            assert after != before, "somebody was killed"
    assert plans[0] == plans[1]
    assert {kind for kind, _ in plans[0]} == {"kill", "freeze"}


@pytest.mark.timeout(300)
def test_a_script_that_it_has_started_survives(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--faults", "1000", "--kinds", "kill", "--every", "3"]
    assert main(["chaos", *options, "--", sys.executable, "-c", UNTIL_A_LOSS]) == 0
    said = capfd.readouterr().err
    assert re.search(r"^chaos: +[\d.]+ s  kill worker [01] \(pid \d+\)$", said, re.MULTILINE)
    assert re.search(
        r"^chaos: .* kills?\); the script ended with exit status 0: it has survived\.$", said, re.MULTILINE
    )


@pytest.mark.timeout(300)
def test_a_script_that_does_not_survive_is_named_so(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--faults", "5", "--kinds", "kill", "--every", "0.2"]
    assert main(["chaos", *options, "--", sys.executable, "-c", FRAGILE]) == 1
    said = capfd.readouterr().err
    assert "the script ended with exit status 1: it has not survived.\n" in said
    assert "clusterenv.errors." in said, "its traceback"


def test_a_script_that_ends_before_the_first_fault_has_shown_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--patience", "20", "--", sys.executable, "-c", "pass"]) == 1
    said = capfd.readouterr().err
    assert "the script ended with exit status 0 before the first fault" in said
    assert "survived" not in said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_frozen_is_thawed_when_it_is_interrupted(number: signal.Signals) -> None:
    with training() as script:
        options = ["--kinds", "freeze", "--freeze", "200", "--every", "0.1", "--faults", "1"]
        command = [sys.executable, "-m", "clusterenv", "chaos", "--pid", str(script.pid), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as chaos, ended(chaos):
            line = read_line(chaos.stderr)
            found = re.search(r"freeze worker \d \(pid (\d+)\) for 200 s", line)
            assert found, line
            await_state(int(found[1]), is_stopped=True)
            chaos.send_signal(number)
            assert chaos.wait(30) == 128 + number
        await_state(int(found[1]), is_stopped=False)


def pidfds() -> dict[int, int]:
    """Return the descriptors of processes that are open here, by process."""
    found = {}
    for entry in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # What lists them is one of them.
            if pid := re.search(r"^Pid:\t(\d+)$", entry.read_text(), re.MULTILINE):
                found[int(pid[1])] = int(entry.name)
    return found


@pytest.mark.timeout(300)
def test_one_that_cannot_be_thawed_leaves_no_other_frozen() -> None:
    with training() as script:
        plan = Plan(num_faults=100, every_s=0.1, kinds=["freeze"], freeze_s=200)
        campaign = Campaign(script.pid, plan).run()
        frozen: list[int] = []
        while len(frozen) < 2:
            found = re.search(r"freeze worker \d \(pid (\d+)\)", next(campaign))
            assert found
            frozen += [pid for pid in [int(found[1])] if pid not in frozen]
        for pid in frozen:
            await_state(pid, is_stopped=True)
        os.close(pidfds()[frozen[0]])
        with pytest.raises(OSError, match="Bad file descriptor"):
            campaign.close()
        await_state(frozen[1], is_stopped=False)
        os.kill(frozen[0], signal.SIGCONT)


def test_a_worker_that_ends_when_it_has_just_been_seen_is_said_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as worker, subprocess.Popen(["sleep", "600"]) as script, ended(script):
        info = look_at(worker.pid)
        assert info is not None
        target = Target(info.process, 0, script.pid)
        looks = 0

        def look(script_pid: int) -> list[Target]:
            nonlocal looks
            looks += 1
            if looks == 2:
                worker.kill()
                worker.wait()
            return [target] if looks <= 2 else []

        # No real one ends at will between two looks that follow each other.
        monkeypatch.setattr(chaos, "find_workers", look)
        campaign = Campaign(script.pid, Plan(num_faults=1, every_s=0.01, patience_s=0.1))
        (line,) = campaign.run()
    assert f"worker 0 (pid {worker.pid}) has just ended by itself" in line
    assert not campaign.done


@pytest.mark.timeout(300)
def test_a_script_that_it_has_started_ends_with_it() -> None:
    command = [sys.executable, "-m", "clusterenv", "chaos", "--every", "100", "--", sys.executable, "-c", FRAGILE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as chaos, ended(chaos):
        started: list[int] = []
        while len(started) < 5:  # The script, and two workers with their guardians.
            started = [process.pid for process in descendants(chaos.pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert chaos.wait(0.1) is None
        chaos.terminate()
        assert chaos.wait(60) == 128 + signal.SIGTERM
    assert wait_until_gone(started, 30) == []


def test_who_is_no_head_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--pid", str(os.getpid())]) == 2
    said = capsys.readouterr().err
    assert f"Process {os.getpid()} (" in said
    assert "is not the head of a ClusterEnv with workers on this machine" in said


def test_who_has_started_several_scripts_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with training() as one, training() as other:
        assert main(["chaos", "--pid", str(os.getpid()), "--faults", "1", "--every", "0.1"]) == 2
        said = capsys.readouterr().err
        assert "2 scripts with workers descend from process" in said
        assert f"{one.pid} (" in said
        assert f"{other.pid} (" in said


def test_a_process_of_another_user_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as stack:
        pid = 1
        if os.geteuid() == 0:
            other = stack.enter_context(subprocess.Popen(["sleep", "600"], user=65534))
            stack.callback(other.kill)
            pid = other.pid
        assert main(["chaos", "--pid", str(pid)]) == 2
    assert f"clusterenv: Process {pid} belongs to another user (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either --pid, of a running script, or a command that starts one: -- python train.py."),
        (["--pid", "1", "--", "true"], "Give either --pid"),
        (["--pid", str(2**22 + 1)], f"There is no process {2**22 + 1}."),
        (["--pid", "1", "--kinds", "kill,maim"], "The kinds of faults are kill and freeze, got 'kill, maim'."),
        (["--pid", "1", "--faults", "0"], "The number of faults must be at least 1, got 0."),
        (["--pid", "1", "--every", "0"], "--every must be a positive number of seconds, got 0."),
        (["--", "/no/such/program"], "Cannot start '/no/such/program': No such file or directory."),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", *arguments]) == 2
    assert message in capsys.readouterr().err
