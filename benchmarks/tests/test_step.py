"""The benchmarks against peers, as far as they can be tried without measuring: tasks, plans, charts, a short run."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import step
from benchmarks.peers.builders import BUILDERS
from benchmarks.peers.cells import CONTENDERS, SIZES, plan_cells
from benchmarks.peers.report import READING_ORDER, SUMMARY_FIELDS
from benchmarks.progress import Forecast
from benchmarks.synthetic import exponential_quantiles
from benchmarks.tasks import TASKS, make_env, precompute_actions

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("task", TASKS)
def test_a_task_steps_with_precomputed_actions_of_its_own_space(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves its warnings in the working directory.
    actions = precompute_actions(task, 3)
    env = make_env(task)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    assert all(env.action_space.contains(action) for row in actions for action in row)
    assert len({action.tobytes() for row in actions for action in row}) > 1
    for row in actions[:3]:
        observation, *_ = env.step(row[0])
        assert env.observation_space.contains(observation)
    env.close()


def test_random_durations_are_unequal_and_have_the_mean_that_is_stated() -> None:
    durations = exponential_quantiles(3000)
    assert durations.mean() == pytest.approx(3000, rel=0.01)
    assert durations.min() >= 1
    assert durations.max() > 3 * durations.mean()
    assert np.median(durations) == pytest.approx(3000 * np.log(2), rel=0.05)


def test_every_contender_can_be_built_and_has_a_place_in_the_table() -> None:
    assert set(READING_ORDER) == set(CONTENDERS)
    assert {contender.builder for contender in CONTENDERS.values()} <= set(BUILDERS)
    assert set(SIZES) == set(TASKS)


def test_a_quick_run_has_every_task_once_and_a_whole_one_every_size() -> None:
    quick = plan_cells(TASKS, None, None, scaling=False, is_quick=True)
    assert [cell.task for cell in quick] == list(SIZES)
    whole = plan_cells(TASKS, None, None, scaling=True)
    assert len(whole) == 1 + sum(len(sizes) for sizes in SIZES.values())
    assert {cell.name for cell in quick} < {cell.name for cell in whole}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("", "step"),
        ("--rounds 30 --seconds 2", "step"),
        ("--quick", "step-quick"),
        ("--rounds 2", "step-quick"),
        ("--seconds 0.01", "step-quick"),
        ("--tasks wait", "step-partial"),
        ("--quick --only sync", "step-partial"),
        ("--envs 64", "step-partial"),
    ],
)
def test_only_a_whole_run_replaces_the_results_of_a_whole_run(command: str, name: str) -> None:
    assert step.name_results(step.parse_arguments(command.split())) == name


def test_a_forecast_learns_from_the_parts_that_are_done() -> None:
    forecast = Forecast([10.0, 20.0, 30.0])
    assert forecast.remaining_s(0.0) == 60.0
    assert forecast.remaining_s(4.0) == 56.0
    assert forecast.remaining_s(25.0) == 50.0  # The first part takes longer than expected; what follows is not known.
    forecast.finish_part(30.0)
    assert forecast.remaining_s(30.0) == 150.0
    forecast.finish_part(90.0)
    forecast.finish_part(180.0)
    assert forecast.remaining_s(181.0) == 0.0


def test_a_short_run_writes_who_competed_how_fast_and_who_could_not_with_the_reason(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = "benchmarks.peers.step --quick --tasks random --envs 4 --rounds 1 --seconds 0.05"
    said = run(*command.split(), "--only", "sync", "clusterenv-exchange", "envpool", f"--out={out}", f"--cache={cache}")
    with (out / "step-partial.csv").open() as file:
        rows = {row["contender"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"lockstep", "sync", "clusterenv-exchange", "envpool"}
    for name in ("lockstep", "sync", "clusterenv-exchange"):
        assert float(rows[name]["env_steps_per_s"]) > 0, rows[name]
    assert rows["lockstep"]["ratio_to_base"] == "1.0000"
    assert "workers" in rows["clusterenv-exchange"]["chosen"]
    assert rows["envpool"]["problem"].startswith("not possible: ")
    assert rows["envpool"]["problem"] in (out / "step-partial.md").read_text()
    assert len((out / "step-partial-rounds.csv").read_text().splitlines()) == 4
    assert "left]" in said


def test_a_chart_shows_each_task_once_with_all_who_competed_and_who_could_not(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    write_summary(
        path,
        *(row("cartpole", envs, "lockstep limit", 1.0) for envs in (16, 64, 256)),
        row("cartpole", 16, "Gymnasium, small", 0.4),
        row("cartpole", 64, "Gymnasium", 0.5),
        row("cartpole", 64, "ClusterEnv, shm", 0.97, chosen="16 workers"),
        row("wait", 16, "lockstep limit", 1.0),
        row("wait", 16, "EnvPool", None, problem="not possible: it has none"),
    )
    run("benchmarks.peers.charts", str(path))
    text = path.with_suffix(".svg").read_text()
    for shown in ("CartPole-v1, 64 environments", "Gymnasium", "ClusterEnv, shm", "0.97  16 workers", "not possible"):
        assert f">{shown}</text>" in text
    for hidden in ("CartPole-v1, 16 environments", "Gymnasium, small"):
        assert f">{hidden}</text>" not in text
    run("benchmarks.peers.charts", str(path))
    assert path.with_suffix(".svg").read_text() == text, "The same numbers must give the same picture."


def run(module: str, *arguments: str) -> str:
    """Run a program of the benchmarks to its end; returns what it said."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def row(
    task: str, num_envs: int, label: str, ratio: float | None, *, chosen: str = "", problem: str = ""
) -> dict[str, object]:
    ratios = {} if ratio is None else {"ratio_to_base": ratio, "ratio_q1": 0.9 * ratio, "ratio_q3": 1.1 * ratio}
    return {"cell": f"{task} {num_envs}", "task": task, "num_envs": num_envs, "contender": label, "label": label} | {
        **ratios,
        "chosen": chosen,
        "problem": problem,
    }


def write_summary(path: Path, *rows: dict[str, object]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, SUMMARY_FIELDS)
        writer.writeheader()
        writer.writerows(rows)
