"""A short run of benchmarks/studies/scale.py: a head and light workers go through everything that is measured."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_light_workers_serve_a_head_through_rollouts_streams_checks_pulls_and_a_storm(tmp_path: Path) -> None:
    command = f"-m benchmarks.studies.scale --sizes 8 --observations --rounds 1 --rollouts 8 --out {tmp_path}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "scale-quick.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["num_workers"] for row in rows} == {"8"}
    assert all(float(row["cpu_us"]) > 0 for row in rows)
    # A version is compared once for all eight workers, and each of them pulls it.
    for count, phase, each in (("checks", "rollout, checked", 1 / 8), ("pulls", "rollout, pulled", 1)):
        by_phase = {row["phase"]: float(row[count]) for row in rows}
        assert (by_phase["rollout"], by_phase[phase]) == (0, each)
