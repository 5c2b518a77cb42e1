"""A short run of benchmarks/studies/pulls.py: workers that share machines are sent one copy for each."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_workers_that_share_a_machine_are_sent_one_copy(tmp_path: Path) -> None:
    command = f"-m benchmarks.studies.pulls --machines 2 --workers 4 --rounds 1 --out {tmp_path}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "pulls-quick.csv").open() as file:
        alone, shared = csv.DictReader(file)
    assert (alone["per_machine"], shared["per_machine"]) == ("1", "4")
    assert float(alone["counted_bytes"]) == 4 * float(shared["counted_bytes"]) > 0
    assert float(shared["device_bytes"]) < 0.5 * float(alone["device_bytes"])
