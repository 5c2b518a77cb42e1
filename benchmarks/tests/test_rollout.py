"""What can be proven of the rollout benchmark without measuring anything."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.peers.bare_rollout import AgentShard
from benchmarks.peers.json_push import COLUMNS, JsonPush
from benchmarks.peers.rollout_cells import READING_ORDER, ROLLOUT_TASKS, list_targets, plan_cell

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_pushed_weights_step_the_environments_as_the_bare_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    num_steps = 40  # Some CartPole of the four is finished and reset by then.
    push = JsonPush("cartpole", num_envs=4, num_steps=num_steps)
    try:
        for _ in range(num_steps):
            assert push.step() == 4
    finally:
        push.close()
    shard = AgentShard("cartpole", 2, num_steps=num_steps)
    shard.collect()
    shard.close()
    assert shard.dones.any()
    for name in COLUMNS:
        for worker in range(2):
            np.testing.assert_array_equal(push.columns[name][:, 2 * worker : 2 * worker + 2], getattr(shard, name))


@pytest.mark.slow
def test_a_short_run_of_cheap_contenders_writes_its_table_and_every_round(tmp_path: Path) -> None:
    command = (
        "-m benchmarks.peers.rollout --tasks cartpole --only rollout-shm central-sync --rounds 1 --seconds 0.05 "
        f"--out {tmp_path / 'out'} --cache {tmp_path / 'cache'}"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "rollout-partial.md").read_text()
    assert "ClusterEnv rollout, shm >= 1 x bare loops" in table
    assert str(tmp_path) not in table
    with (tmp_path / "out" / "rollout-partial-rounds.csv").open() as file:
        rates = {row["contender"]: float(row["env_steps_per_s"]) for row in csv.DictReader(file)}
    assert set(rates) == {"bare-rollout", "rollout-shm", "central-sync"}
    assert min(rates.values()) > 0


@pytest.mark.parametrize("task", ROLLOUT_TASKS)
def test_every_contender_has_its_place_in_the_table_and_every_target_a_contender(task: str, tmp_path: Path) -> None:
    names = [entry.contender.name for entry in plan_cell(task, tmp_path).entries]
    assert sorted(names) == sorted(READING_ORDER)
    assert {name for target in list_targets(task) for name in (target.name, target.rival)} <= set(names)
