"""What environments print and warn appears on the head's standard error, line by line, and never without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from clusterenv import ClusterEnv, Faults, LocalLauncher
from clusterenv.errors import WorkerLost
from clusterenv.launchers.follower import Follower
from clusterenv.worker.echo import Echo
from tests.remains import descendants
from tests.sshd import Sshd, sshd
from tests.worlds import Talker

__all__ = ["sshd"]

ROOT = Path(__file__).parent.parent


def talk(launcher: Any, name: str, *args: Any, which: int = 1) -> None:
    """Let one of two workers talk, and wait for its end."""
    with ClusterEnv([Talker, Talker], num_workers=2, launcher=launcher) as envs:
        envs.apply(lambda env: getattr(env, name)(*args), [which])


@pytest.mark.parametrize(
    ("name", "wanted"), [("say", "[worker 1] good morning\n"), ("write", "[worker 1] good morning\n")]
)
def test_what_is_printed_appears_with_the_name_of_the_worker(
    name: str, wanted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    talk(None, name, "good morning")
    assert capfd.readouterr() == ("", wanted)


def test_warnings_appear(capfd: pytest.CaptureFixture[str]) -> None:
    talk(None, "warn", "mind the step", which=0)
    assert "UserWarning: mind the step\n" in capfd.readouterr().err


def test_it_can_be_switched_off_and_still_be_in_the_log(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    talk(LocalLauncher(show_output=False, log_dir=tmp_path), "say", "good morning")
    assert capfd.readouterr().err == ""
    (log,) = tmp_path.rglob("worker-1.log")
    assert "good morning" in log.read_text()


def test_the_last_words_of_a_dead_worker_appear_and_are_in_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    words = "".join(f"line {number}\n" for number in range(1000)) + "and the end"
    with (
        pytest.raises(WorkerLost, match=r"(?s)exit status 7.*line 999\nand the end"),
        ClusterEnv([Talker], num_workers=1, faults=Faults(on_loss="raise")) as envs,
    ):
        envs.call("die", words)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "[worker 0] line 0"
    assert lines[-1] == "[worker 0] and the end"
    assert any("lines are left out here" in line for line in lines)
    assert len(lines) < 200


def test_a_replaced_worker_speaks_under_the_same_name(capfd: pytest.CaptureFixture[str]) -> None:
    with ClusterEnv([Talker, Talker], num_workers=2) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[1], 9)
        envs.step([0, 0])
        envs.apply(lambda env: env.say("here again"), [1])
    assert "[worker 1] here again\n" in capfd.readouterr().err


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", "| true"])
def test_a_standard_error_that_takes_nothing_harms_nobody(redirect: str) -> None:
    script = textwrap.dedent("""
        from clusterenv import ClusterEnv
        from tests.worlds import Talker
        with ClusterEnv([Talker], num_workers=1) as envs:
            envs.call("say", "x" * 100, 5000)
        import os; os.write(3, b"done")
    """)
    reading, writing = os.pipe()
    command = f"{sys.executable} -c '{script}' 3>&{writing} 2>&1 {redirect}".replace("2>&1 2>", "2>")
    subprocess.run(["bash", "-c", command], cwd=ROOT, pass_fds=[writing], check=False, timeout=60)
    os.close(writing)
    with open(reading, "rb") as told:
        assert told.read() == b"done"


def test_workers_elsewhere_are_shown_only_on_request(sshd: Sshd, capfd: pytest.CaptureFixture[str]) -> None:
    talk(sshd.launcher(["host1"]), "say", "good evening")
    assert capfd.readouterr().err == ""


def test_a_follower_that_was_killed_can_still_be_given_logs_and_be_closed(tmp_path: Path) -> None:
    follower = Follower()
    (pid,) = descendants()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    follower.add(tmp_path / "job.log", 0)
    follower.close()


def test_lines_are_whole_and_bear_a_name() -> None:
    echo = Echo(3)
    assert echo.take(b"one\ntw", 0.0) == b"[worker 3] one\n"
    assert echo.take(b"o\n\n", 0.0) == b"[worker 3] two\n[worker 3] \n"
    assert echo.take(b"never ends", 0.0) == b""
    assert echo.finish() == b"[worker 3] never ends\n"
    assert echo.finish() == b""


def test_a_progress_bar_is_its_last_state() -> None:
    assert Echo(0).take(b" 10%\r 50%\r100%\r\n", 0.0) == b"[worker 0] 100%\n"


def test_a_long_line_is_cut() -> None:
    shown = Echo(0).take(b"x" * 10_000 + b"\nnext\n", 0.0)
    first, second = shown.splitlines()
    assert first.endswith(b"xxx [...]")
    assert len(first) < 2100
    assert second == b"[worker 0] next"


def test_many_lines_are_counted_instead_of_shown_until_there_is_time_again() -> None:
    echo = Echo(0)
    assert echo.take(b"line\n" * 1000, 0.0).count(b"line\n") == 100
    shown = echo.take(b"later\n", 10.0).splitlines()
    assert shown[0].startswith(b"[worker 0] [clusterenv: 900 lines are left out here")
    assert shown[1] == b"[worker 0] later"
    assert len(echo.take(b"line\n" * 1000, 10.0).splitlines()) == 99
    assert echo.finish().splitlines()[-1] == b"[worker 0] line"
