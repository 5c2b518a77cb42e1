"""A short run of benchmarks/chaos.py: every kind of fault, while every transition is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_nothing_is_inconsistent_while_workers_die_freeze_and_stumble(transport: str) -> None:
    command = "-m benchmarks.chaos --seconds 8 --faults 6 --workers 2 --seed 3 --silence 2 --transport"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command.split(), transport], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
