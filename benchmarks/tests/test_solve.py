"""A short run of benchmarks/studies/solve.py: everybody trains, and what is there is not run again."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3")
pytest.importorskip("Box2D")

ROOT = Path(__file__).parent.parent.parent
TINY = "--num-envs 4 --num-steps 32 --max-env-steps 256 --minibatch-size 64 --update-epochs 1"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_execution_trains_and_finished_runs_are_kept(tmp_path: Path) -> None:
    command = f"-m benchmarks.studies.solve --seeds 1 --out {tmp_path} --cache {tmp_path / 'runs'} {TINY}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    times = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        times.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()})
    assert times[0] == times[1]
    with (tmp_path / "solve-curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["execution"] for row in rows} == {"sync", "async", "sb3", "step", "rollout", "stream"}
    assert {row["env_steps"] for row in rows} == {"128", "256"}
    first = {row["execution"]: row["mean_return"] for row in rows if row["env_steps"] == "256"}
    assert first["sync"] == first["step"] == first["async"], "the same seeds and actions, the same run"
    assert "ClusterEnv, stream" in (tmp_path / "solve.md").read_text()
