"""Scripts of users, run in a process of their own where what is tried may take the process with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import descendants, wait_until_gone

ROOT = Path(__file__).parent.parent


def run_script(source: str, *arguments: str, deadline_s: float = 60.0) -> list[Any]:
    """Run a script to its end, and return the lines of JSON it has printed; it must succeed and leave nothing.

    Raises:
        AssertionError: It failed, took too long, or left processes behind; with what it said.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", source, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
        ending = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        ending = f"was still running after {deadline_s:g} s"
        os.killpg(process.pid, signal.SIGABRT)  # Faulthandler says where it was.
        try:
            out, err = process.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    left = wait_until_gone(descendants())
    assert process.returncode == 0, f"The script {ending}:\n{out}\n{err}"
    assert left == [], f"The script left processes:\n{out}\n{err}"
    return [json.loads(line) for line in out.splitlines()]
