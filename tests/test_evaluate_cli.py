"""`clusterenv evaluate`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from clusterenv.cli import main
from tests.script import ROOT
from tests.uneven import play_plainly

LEAN = """
import numpy as np
from clusterenv.policy import BasePolicy, Categorical

def lean(obs):
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)

def make(sign=1.0):
    return lean

def broken():
    raise ValueError("no checkpoint")

class Dice(BasePolicy):
    def distribution(self, obs, state=None):
        return Categorical(logits=np.stack([-obs[:, 2] - obs[:, 3], obs[:, 2] + obs[:, 3]], axis=1))
"""


def lean(obs: Any) -> Any:
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lean_policies.py").write_text(LEAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "lean_policies", raising=False)
    return "lean_policies"


@pytest.mark.parametrize(
    "arguments",
    [["lean", "--workers", "0"], ["make", "--workers", "0"], ["Dice", "--workers", "0", "--deterministic"]],
    ids=["a function", "what makes one", "a class"],
)
def test_the_table_is_printed_as_json(module: str, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    name, *others = arguments
    assert main(["evaluate", "--env", "CartPole-v1", "--policy", f"{module}:{name}", *_OPTIONS, *others, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with gym.make("CartPole-v1") as env:
        expected = play_plainly(env, lean, range(3, 9), max_steps=60)
    table = found["table"]
    columns = [table[name] for name in ("seed", "return", "length", "terminated", "truncated")]
    assert list(zip(*columns, strict=True)) == expected
    assert found["mean"] == np.mean([row[1] for row in expected])
    assert found["manifest"]["env"] == "CartPole-v1"


_OPTIONS = ["--episodes", "6", "--seed", "3", "--max-steps", "60"]


def test_workers_import_the_policys_module_too_and_a_file_is_resumed(module: str) -> None:
    command = [sys.executable, "-m", "clusterenv", "evaluate", "--env", "CartPole-v1", "--policy", f"{module}:lean"]
    command += [*_OPTIONS, "--workers", "1", "--resume", "eval.jsonl"]
    said = [subprocess.run(command, capture_output=True, timeout=100, check=True, text=True) for _ in range(2)]
    assert said[0].stdout == said[1].stdout
    assert "6 episodes of CartPole-v1" in said[0].stdout
    assert "evaluating" not in said[0].stderr  # No bar where there is no terminal.
    assert Path("eval.jsonl").read_bytes().count(b"\n") == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "lean_policies"], "--policy must be MODULE:NAME"),
        (["--policy", "no_such_module:f"], "there is no module 'no_such_module'"),
        (["--policy", "lean_policies.py:lean"], "named without .py"),
        (["--policy", "lean_policies:broken"], "raised ValueError: no checkpoint (line 12 of "),
        (["--policy", "lean_policies:nothing"], "has no nothing"),
        (["--policy", "lean_policies:lean", "--env", "NoSuch-v0"], "NoSuch"),
        (["--policy", "lean_policies:lean", "--seed", "-1"], "Seeds must be from 0"),
        (["--policy", "lean_policies:lean", "--deterministic"], "takes no deterministic"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(
    module: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["evaluate", "--env", "CartPole-v1", "--workers", "0", "--episodes", "2", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_terminal_shows_how_far_it_is(module: str) -> None:
    command = [sys.executable, "-m", "clusterenv", "evaluate", "--env", "CartPole-v1", "--policy", f"{module}:lean"]
    command += ["--episodes", "60", "--workers", "0", "--num-envs", "1"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TERM": "xterm"}
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
            os.close(theirs)
            shown = b""
            try:
                while part := os.read(ours, 4096):
                    shown += part
            except OSError:  # Linux's way to say that the other end was closed.
                pass
            out, _ = process.communicate(timeout=100)
    finally:
        os.close(ours)
    assert process.returncode == 0
    assert b"60 episodes of CartPole-v1" in out
    assert b"evaluating" in shown
