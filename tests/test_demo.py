"""The demo, through its real command: what it shows, what it leaves, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples.demo.course import Course, Point
from examples.demo.display import Lines, Panel, open_display
from examples.demo.summary import summarise

from tests.conftest import descendants, wait_until_gone

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("Box2D")

ROOT = Path(__file__).parent.parent
SMALL = ["--num-envs", "8", "--seed", "3"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "examples.demo", *arguments]


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def make_course(*means: float, seconds: float = 10.0) -> Course:
    """A course of made-up numbers, 100 flights and an update each."""
    course = Course(num_envs=32, num_workers=2, budget_s=100.0, threshold=0.05)
    for number, mean in enumerate(means, 1):
        course.returns += [mean] * 100
        course.ended_at += [number * 8192] * 100
        course.points.append(Point(number * seconds, number * 8192, mean, 0.01 * number, 2 * number, 3 * number))
    return course


class Terminal:
    """A real terminal: the end that a program writes to, and the screen."""

    def __init__(self) -> None:
        self._screen, program = os.openpty()
        self.stream = os.fdopen(program, "w", encoding="utf-8")

    def read(self) -> str:
        self.stream.flush()
        return os.read(self._screen, 100_000).decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._screen)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.mark.slow
def test_a_short_run_leaves_pictures_and_a_summary_without_control_characters(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--seconds", "3", *SMALL, "--out", str(tmp_path / "deep" / "out")),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "800 steps compared, equal bit for bit." in unwrapped(done.stdout)
    assert re.search(r"\d steps/s   return .*divergence .* of 0.050   pulls \d+ made, \d+ saved\n", done.stdout)
    assert "They pulled weights" in unwrapped(done.stdout)
    assert not re.search(r"[^\n -~]", done.stdout), "only plain characters where there is no terminal"
    for name, start in {"learning.png": b"\x89PNG", "landing.png": b"\x89PNG", "landing.gif": b"GIF8"}.items():
        assert (tmp_path / "deep" / "out" / name).read_bytes().startswith(start)
        assert str(tmp_path / "deep" / "out" / name) in done.stdout


def test_ctrl_c_ends_it_with_a_summary_and_no_worker_left(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--seconds", "60", *SMALL, "--out", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "steps/s" in line:
                break
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does: to the workers as well.
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err == ""
    assert "Stopped; the workers have ended." in out
    assert "the learner learned from them in" in unwrapped(out)
    assert wait_until_gone(descendants()) == []
    assert list(tmp_path.iterdir()) == []


def test_without_what_it_needs_it_says_what_to_install() -> None:
    bare = subprocess.run(
        [sys.executable, "-S", "-m", "examples.demo"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert bare.returncode == 2
    assert bare.stderr.startswith("The demo needs torch, matplotlib, tyro")
    assert "make demo" in bare.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--seconds", "0"], "--seconds must be positive, got 0"), (["--num-envs", "0"], "--num-envs must be at least 1")],
)
def test_a_senseless_option_is_refused(arguments: list[str], complaint: str) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_a_terminal_gets_a_panel_that_is_drawn_over_the_last_one(terminal: Terminal) -> None:
    display = open_display(terminal.stream, {"TERM": "xterm"})
    display.show(make_course(-200.0))
    assert "\x1b[5A" not in terminal.read()
    display.show(make_course(-200.0, -50.0, 130.0))
    screen = terminal.read()
    assert screen.startswith("\x1b[5A\x1b[J"), "back to the first of five lines"
    assert "▁" in screen
    assert "130.0" in screen
    assert "at most 70 s left" in screen


def test_no_line_of_the_panel_is_wider_than_a_narrow_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    open_display(terminal.stream, {"TERM": "xterm", "NO_COLOR": "1"}).show(make_course(-200.0, 10.0))
    assert max(len(line) for line in terminal.read().splitlines()) < 30


def test_no_color_is_respected(terminal: Terminal) -> None:
    open_display(terminal.stream, {"TERM": "xterm", "NO_COLOR": "1"}).show(make_course(-200.0, 10.0))
    assert "\x1b" not in terminal.read()


def test_a_terminal_without_such_characters_gets_others(terminal: Terminal) -> None:
    terminal.stream.reconfigure(encoding="ascii")
    open_display(terminal.stream, {"TERM": "xterm"}).show(make_course(-200.0, 10.0))
    assert "####" in terminal.read()


def test_a_dumb_terminal_gets_plain_lines(terminal: Terminal) -> None:
    assert isinstance(open_display(terminal.stream, {"TERM": "dumb"}), Lines)
    assert isinstance(open_display(terminal.stream, {}), Lines)
    assert isinstance(open_display(terminal.stream, {"TERM": "xterm"}), Panel)


def test_the_summary_says_what_was_reached_and_no_more() -> None:
    assert "it has learned to land" in summarise(make_course(-180.0, 205.0))[1]
    missed = summarise(make_course(-180.0, 120.0))[1]
    assert "from -180 (the first 100 flights) to 120 (the last 100); 200 counts as solved, so it was not" in missed
    assert "too short" in summarise(make_course(-180.0))[1]
    assert summarise(make_course()) == ["Nothing was learned yet: not one update was made."]
    assert "60% of the pulls" in summarise(make_course(-180.0, 120.0))[2]
