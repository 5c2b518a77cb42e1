"""The experiment: what it runs, what it does not do twice, and whether its comparisons are right."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experiments import aps
from experiments.plan import PILOT_SEEDS, PLAIN, SEEDS, Block, Match, Run, match_bytes, plan_blocks, plan_pilots
from experiments.record import COLUMNS, Curve, Record, read_record
from experiments.report import count_trapped, write_report
from experiments.results import Results, total
from experiments.rules import ADAPTIVE, EVERY, Rule, Staggered, read_rule
from experiments.runner import Folder
from experiments.statistics import Interval, interval_of, judge_gap, judge_loss, pool
from experiments.tasks import TASKS, read_task, write_tasks
from numpy.typing import NDArray

from clusterenv.policy.sync import Case

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
PREREGISTRATION = (ROOT / "experiments/PREREGISTRATION.md").read_text()
PERIODIC = Rule("periodic", 5)


@pytest.fixture(scope="module", autouse=True)
def fonts_are_warm() -> None:
    """Let matplotlib open now the font files that it keeps open for the life of the process."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.suptitle("$10^1 x$")
    figure.savefig(io.BytesIO(), format="png")


def contents(out: Path) -> dict[str, int]:
    """Every record with the time of its last change."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.glob("*/*")}


@pytest.mark.slow
def test_a_tiny_experiment_leaves_records_comparisons_and_figures_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "ppo-cartpole"
    arguments = ["--tasks", task, "--blocks", "pilot", "mandatory", "--seeds", "1", "--share", "0.05"]
    arguments += ["--jobs", "2", "--out", str(tmp_path)]
    assert aps.main(arguments) == 0
    written = {"settings.json", task, "runs.csv", "comparisons.csv", "report.md", "curves.png", "traffic.png"}
    assert {path.name for path in tmp_path.iterdir()} == written
    records = contents(tmp_path)
    assert {name for name in records if "periodic" not in name} == {
        *(f"{task}/adaptive-0.05-seed{seed}.csv" for seed in (*PILOT_SEEDS, SEEDS[0])),
        f"{task}/every-seed{SEEDS[0]}.csv",
    }
    every, adaptive = (read_record(tmp_path / f"{Run(task, rule, SEEDS[0]).name}.csv") for rule in (EVERY, ADAPTIVE))
    assert every["pulls"][-1] == every["versions"][-1] - 1 >= adaptive["pulls"][-1]
    assert every["bytes_checks"][-1] == 0 < adaptive["bytes_checks"][-1]
    # Both begin with the same policy, which was evaluated on the same episodes.
    assert every["own_return"][0] == adaptive["own_return"][0]
    assert np.isfinite([every["own_return"][-1], adaptive["own_return"][-1]]).all()

    report = (tmp_path / "report.md").read_text()
    assert "| pilot | 2 | 2 | 0 |" in report
    assert "| mandatory | 3 | 3 | 0 |" in report
    assert aps.main(arguments) == 0
    assert contents(tmp_path) == records
    assert (tmp_path / "report.md").read_text() == report
    assert "3 of 3 runs are on record already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "module", "steps"),
    [("ppo-halfcheetah", "mujoco", 3 * 64), ("sac-pendulum", "tyro", 1100), ("dqn-cartpole", "tyro", 1100)],
)
def test_every_learner_changes_its_policy_and_is_evaluated_before_and_after(
    task: str, module: str, steps: int, tmp_path: Path
) -> None:
    pytest.importorskip(module)
    from experiments.training import train  # Needs torch.

    settings = replace(TASKS[task], steps=steps, num_envs=4, num_steps=16, eval_episodes=2, num_workers=1)
    with Record(tmp_path / "run.csv", settings) as record:
        train(settings, ADAPTIVE, 1, record)
    curve = read_record(tmp_path / "run.csv")
    first, last = curve["own_return"][[0, -1]]
    assert first != last
    assert np.isfinite([first, last]).all()
    assert curve["env_steps"][-1] >= steps
    assert curve["versions"][-1] > 1


def test_an_interrupted_run_is_not_counted_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.aps", "--tasks", "ppo-cartpole", "--jobs", "1"]
    command += ["--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    screen, terminal = os.openpty()
    with open(screen, "rb", buffering=0) as shown:
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=terminal) as process:
            os.close(terminal)
            seen = read_until(shown, " left; 0 of 2 runs done")  # It knows what is left when a run has come somewhere.
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        seen += read_until(shown, None)
    assert process.returncode == 130
    assert "\r\x1b[K·" in seen, "a bar, drawn over itself"
    assert "the same command goes on from here" in seen
    assert "there is nothing to compare" in out.decode()
    assert contents(tmp_path) == {}


def read_until(shown: io.RawIOBase, words: str | None) -> str:
    """Read what comes to a terminal until these words are there, or until nobody writes any more."""
    seen = b""
    while words is None or words not in seen.decode(errors="replace"):
        try:
            seen += shown.read(4096) or b""
        except OSError:  # How Linux says that the other end was closed.
            break
    return seen.decode(errors="replace")


def test_runs_with_other_settings_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aps.open_folder(Folder(tmp_path), TASKS)
    assert aps.main(["--share", "0.5", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert re.search(r"ppo-cartpole: steps (\d+) there, \d+ here", message)
    assert "--out" in message


def test_a_failed_run_shows_the_end_of_its_output_and_the_others_are_carried_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--tasks",
        "ppo-cartpole",
        "--blocks",
        "pilot",
        "--share",
        "0.01",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
    ]
    in_the_way = Folder(tmp_path).record(plan_pilots({"ppo-cartpole": TASKS["ppo-cartpole"]}).runs[0])
    in_the_way.with_suffix(".partial").mkdir(parents=True)  # So the record cannot be written.
    assert aps.main(arguments) == 1
    message = capsys.readouterr().err
    assert "Run ppo-cartpole/adaptive-0.05-seed901 failed with status 1" in message
    assert "IsADirectoryError" in message
    assert (tmp_path / "ppo-cartpole/adaptive-0.05-seed902.csv").exists()


def test_what_depends_on_the_pilots_is_refused_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aps.main(["--blocks", "mandatory", "--share", "0.01", "--out", str(tmp_path)]) == 1
    assert "Add --blocks pilot" in capsys.readouterr().err


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_tasks(tmp_path / "settings.json", TASKS)
    assert {name: read_task(tmp_path / "settings.json", name) for name in TASKS} == TASKS


def make_curve(own: tuple[float, float], returns: Sequence[float], pulls: float, checks: float = 0.0) -> Curve:
    """Make the record of a run that sent 100 bytes of weights with each pull by all workers."""
    count = len(returns) + 1
    columns: dict[str, NDArray[np.float64]] = {name: np.zeros(count) for name in COLUMNS}
    columns["env_steps"] = np.linspace(0, 100 * len(returns), count)
    columns["own_return"] = np.array([own[0], *[math.nan] * (count - 2), own[1]])
    columns["versions"] = np.arange(float(count))
    columns["return"] = np.array([math.nan, *returns])
    columns["episodes"] = np.where(np.isnan(columns["return"]), 0, np.arange(count))
    columns["pulls"] = np.linspace(0, pulls, count)
    columns["bytes_weights"] = 100 * (1 + columns["pulls"])
    columns["bytes_checks"] = np.linspace(0, checks, count)
    return columns


def test_a_run_has_the_right_numbers() -> None:
    gap = math.nan
    numbers = total(make_curve((5.0, 90.0), [gap, 0.0, gap, *[10.0] * 13, 20.0, gap, 30.0, 40.0], 4, 50))
    assert (numbers["own_initial"], numbers["own_final"]) == (5, 90)
    # The last fifth is the last four of twenty, weighted by their 17, 19 and 20 episodes.
    assert numbers["workers_final"] == pytest.approx((17 * 20 + 19 * 30 + 20 * 40) / 56)
    # A gap counts as what was before it; before the first episode nothing counts.
    assert numbers["workers_whole"] == pytest.approx((0 + 0 + 13 * 10 + 20 + 20 + 30 + 40) / 19)
    assert (numbers["updates"], numbers["pulls"], numbers["bytes"]) == (19, 4, 550)


def test_the_period_sends_at_least_as_many_bytes_as_the_pilots_and_the_next_one_fewer() -> None:
    # 500 bytes of weights and 30 of checks, over 99 updates: 5.3 copies, of which one comes first.
    pilots = [make_curve((0, 1), [0.0] * 100, pulls, 30.0) for pulls in (3, 5)]
    match = match_bytes(pilots, num_workers=4)
    assert 100 * (1 + 99 // match.period) >= 530 > 100 * (1 + 99 // (match.period + 1))
    assert match.period == 19
    assert match.pulls_per_update == pytest.approx(4 * 4 / 99, rel=0.01)


def test_intervals_are_student_s_and_pooled_ones_weigh_tasks_alike() -> None:
    # 0, 1, ..., 4: standard deviation sqrt(2.5), and Student's t for 4 degrees of freedom is 2.776.
    assert interval_of(np.arange(5.0)) == pytest.approx((2.0, 2.776 * math.sqrt(2.5 / 5)))
    assert math.isnan(interval_of(np.array([1.0])).half)
    assert interval_of(np.array([3.0, 3.0])) == (3.0, 0.0)
    # Two tasks with means 2 and 10, and squared errors of 0.5 and 2.0; a quarter of the sum, with
    # 2.5**2 / (0.5**2 / 4 + 2.0**2 / 4) = 5.88 degrees of freedom: counted as 5.
    pooled = pool([np.arange(5.0), 10 + 2 * np.arange(-2.0, 3.0)])
    assert pooled == pytest.approx((6.0, 2.571 * math.sqrt(2.5 / 4)))
    assert math.isnan(pool([]).mean)


def test_verdicts_follow_the_interval() -> None:
    assert judge_loss(Interval(-0.02, 0.02), 0.05) == "non-inferior"
    assert judge_loss(Interval(-0.04, 0.02), 0.05) == "undecided"
    assert judge_loss(Interval(-0.10, 0.02), 0.05) == "worse"
    assert judge_loss(Interval(0.0, math.nan), 0.05) == "undecided"
    assert judge_gap(Interval(3.0, 2.0)) == "ahead"
    assert judge_gap(Interval(-3.0, 2.0)) == "behind"
    assert judge_gap(Interval(3.0, 4.0)) == judge_gap(Interval(3.0, math.nan)) == "no difference shown"


def make_results(finals: Mapping[Rule, Sequence[float]], pulls: Mapping[Rule, float]) -> Results:
    """Make the results of one task that begins at 0, with as many seeds as there are final returns."""
    totals = {
        Run("ppo-cartpole", rule, SEEDS[i]): total(make_curve((0.0, final), [final] * 20, pulls[rule]))
        for rule, returns in finals.items()
        for i, final in enumerate(returns)
    }
    return Results({"ppo-cartpole": TASKS["ppo-cartpole"]}, {"ppo-cartpole": Match(5, 0.8)}, totals)


def test_a_report_has_every_comparison_as_computed_by_hand(tmp_path: Path) -> None:
    results = make_results(
        {EVERY: [98.0, 100.0, 102.0], ADAPTIVE: [97.0, 100.0, 103.0], PERIODIC: [79.0, 79.0, 82.0]},
        {EVERY: 19, ADAPTIVE: 1, PERIODIC: 3},
    )
    assert results.range_of("ppo-cartpole") == pytest.approx(100)
    folder = Folder(tmp_path)
    blocks = [Block("mandatory", list(results.totals))]
    write_report(tmp_path / "report.md", results, blocks, folder)
    report = (tmp_path / "report.md").read_text()
    # Differences -1, 0, 1: a standard deviation of 1, and t is 4.303 with 2 degrees of freedom.
    half = 4.303 / math.sqrt(3)
    row = next(line for line in report.splitlines() if line.startswith("| adaptive, threshold 0.05 | 3 |"))
    assert f"| +0.0 ± {half:.1f} % | non-inferior |" in row
    assert "| 1.0 of 19 | 0.000 | 10.0 |" in row  # 2 copies rather than 20.
    assert f"| +0.0 ± {half:.1f} % of the range, non-inferior; 10.0 times fewer | reached |" in report
    # -19, -21, -20 against every update, 18, 21, 21 below adaptive.
    assert f"| every 5th | 3 | 80.0 ± 4.3 | -20.0 ± {half:.1f} % | worse |" in report
    ahead = math.sqrt(3) * half  # Their standard deviation is the root of 3.
    assert f"| ppo-cartpole | every 5th | 20.0 ± {ahead:.1f} |" in report
    assert f"| +20.0 ± {ahead:.1f} % of the range, ahead; 1 of 1 tasks | reached |" in report
    assert "| mandatory | 9 | 0 | 9 | ppo-cartpole/every-seed301" in report
    with (tmp_path / "comparisons.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["rule"], row["against"]) == ("periodic-5", "every")]
    assert [row["outcome"] for row in rows] == ["own_final", "workers_final", "workers_whole"]
    assert float(rows[0]["difference"]) == pytest.approx(-20, rel=1e-4)
    assert float(rows[0]["half_interval_percent"]) == pytest.approx(half, rel=1e-4)


@pytest.mark.parametrize(
    ("final", "pulls", "verdict"),
    [(60.0, 9, "worse"), (60.0, 1, "neither"), (95.0, 9, "neither"), (95.0, 4, "better")],
)
def test_one_setting_beats_another_with_a_smaller_worst_loss_and_no_more_bytes(
    final: float, pulls: float, verdict: str, tmp_path: Path
) -> None:
    period = Rule("periodic", 4)
    results = make_results(
        {EVERY: [99.0, 101.0], ADAPTIVE: [89.0, 91.0], period: [final - 1, final + 1]},
        {EVERY: 19, ADAPTIVE: 4, period: pulls},
    )
    write_report(tmp_path / "report.md", results, [], Folder(tmp_path))
    section = (tmp_path / "report.md").read_text().partition("## One setting")[2]
    row = next(line for line in section.splitlines() if line.startswith("| every 4th |"))
    assert f"| ppo-cartpole | {final - 100:+.1f} ± 0.0 % | {verdict}" in row


def test_a_task_that_every_update_does_not_learn_is_not_pooled() -> None:
    results = make_results({EVERY: [-9.0, 10.0], ADAPTIVE: [5.0, 6.0]}, {EVERY: 19, ADAPTIVE: 1})
    assert math.isnan(results.range_of("ppo-cartpole"))
    pooled, counted = results.pooled({"ppo-cartpole": (ADAPTIVE, EVERY)}, "own_final")
    assert counted == []
    assert math.isnan(pooled.mean)


def test_a_run_of_plain_ppo_is_trapped_if_it_gains_less_than_half_of_what_it_could() -> None:
    every, adaptive, _ = PLAIN
    results = make_results({every: [100.0, 100.0, -5.0], adaptive: [49.0, 51.0, 3.0]}, {every: 19, adaptive: 0})
    assert count_trapped(results, adaptive) == (1, 2)


def test_the_plan_has_the_mandatory_runs_first_and_no_seed_of_the_pilots() -> None:
    blocks = plan_blocks(TASKS, dict.fromkeys(TASKS, Match(5, 0.8)))
    assert [block.name for block in blocks] == [name for name in aps.BLOCKS if name != "pilot"]
    assert len(blocks[0].runs) == 6 * 3 * 5
    assert {run.seed for run in blocks[0].runs[:18]} == {SEEDS[0]}
    assert not {run.seed for block in blocks for run in block.runs} & set(PILOT_SEEDS)


def test_staggered_workers_pull_in_turn_and_each_with_its_period() -> None:
    rule = Staggered(k=6, num_workers=4)
    held = [1, 1, 1, 1]
    ages: list[list[int]] = []
    pulls: list[int] = []
    for newest in range(2, 30):
        before = list(held)
        for own in sorted(set(before)):
            holders = [i for i, version in enumerate(before) if version == own]
            verdict = rule.judge(Case(own, newest, None, len(holders)))
            for i in holders[: verdict.at_most] if verdict.pulls else []:
                held[i] = newest
        pulls.append(sum(a != b for a, b in zip(before, held, strict=True)))
        ages.append([newest - version for version in held])
    assert set(pulls) == {0, 1}, "never two at a time"
    assert sum(pulls[-24:]) == 4 * 24 / 6
    assert max(map(max, ages)) == 5


@pytest.mark.parametrize("rule", [EVERY, ADAPTIVE, PERIODIC, Rule("staggered", 7), Rule("budget", 0.61), *PLAIN])
def test_a_rule_is_found_by_its_name(rule: Rule) -> None:
    assert read_rule(rule.name) == rule


@pytest.mark.parametrize("task", TASKS)
def test_the_preregistration_has_the_settings_that_are_run(task: str) -> None:
    settings = TASKS[task]
    row = next(line for line in PREREGISTRATION.splitlines() if line.startswith(f"| `{task}` |"))
    assert [settings.env_id, f"{settings.steps:,}", f"{settings.num_envs} x {settings.num_steps}"] == [
        cell.strip() for cell in row.split("|")[2:5]
    ]
