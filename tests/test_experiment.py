"""The experiment: what it writes, what it does not do twice, and whether its numbers are right."""

from __future__ import annotations

import csv
import io
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from experiments import aps
from experiments.record import COLUMNS, Curve, read_record
from experiments.rules import EVERY, Rule, read_rule
from experiments.runner import Folder, Run
from experiments.settings import PpoSettings
from experiments.summary import match_period, spread, summarize, to_table, write_summary
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
PPO = ["--task", "CartPole-v1", "--steps", "16384", "--thresholds", "9", "--periods", "--seeds", "1"]
DQN = ["--learner", "dqn", "--steps", "1600", "--thresholds", "9", "--periods", "--seeds", "1"]


@pytest.fixture(scope="module", autouse=True)
def fonts_are_warm() -> None:
    """Let matplotlib open now the font files that it keeps open for the life of the process."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.suptitle("$10^1 x$")
    figure.savefig(io.BytesIO(), format="png")


def run(out: Path, arguments: list[str]) -> int:
    return aps.main([*arguments, "--out", str(out), "--workers", "1", "--jobs", "2"])


def contents(out: Path) -> dict[str, int]:
    """Every record with the time of its last change."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "updates").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [PPO, DQN], ids=["ppo", "dqn"])
def test_an_experiment_leaves_records_tables_and_figures_and_is_not_repeated(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tyro")
    assert run(tmp_path, arguments) == 0
    written = {"settings.json", "updates", "runs.csv", "summary.csv", "curves.png", "pulls.png", "traffic.png"}
    assert {path.name for path in tmp_path.iterdir()} == written
    records = contents(tmp_path)
    assert set(records) == {"every-seed1.csv", "adaptive-9-seed1.csv"}
    every, adaptive = (read_record(tmp_path / "updates" / name) for name in sorted(records, reverse=True))
    assert every["pulls"][-1] == every["versions"][-1] - 1 > adaptive["pulls"][-1]
    assert every["bytes_checks"][-1] == 0 < adaptive["bytes_checks"][-1]
    assert np.isfinite(adaptive["divergence"][1:]).any()

    table = capsys.readouterr().out
    assert run(tmp_path, arguments) == 0
    assert contents(tmp_path) == records
    again = capsys.readouterr()
    assert again.out == table
    assert "2 of 2 runs are on record already" in again.err


def test_an_interrupted_run_is_not_counted_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.aps", *PPO, "--steps", "800000", "--workers", "1"]
    command += ["--jobs", "1", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    record = Folder(tmp_path).record(Run(EVERY, 1))
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
    assert "No run is complete yet." in out.decode()
    assert not record.exists()


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
    folder = Folder(tmp_path)
    aps.open_folder(folder, PpoSettings())
    assert run(tmp_path, PPO) == 1
    message = capsys.readouterr().err
    assert "task LunarLander-v3 there, CartPole-v1 here; steps 1000000 there, 16384 here" in message
    assert "--out" in message


def test_a_failed_run_shows_the_end_of_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [*PPO, "--task", "Nowhere-v0"]) == 1
    message = capsys.readouterr().err
    assert "failed with status 1" in message
    assert "Nowhere" in message


def make_curve(returns: list[float], pulls: float) -> Curve:
    """Make the record of a run that sent 100 bytes of weights with each pull."""
    count = len(returns)
    columns: dict[str, NDArray[np.float64]] = {name: np.zeros(count) for name in COLUMNS}
    columns["env_steps"] = np.linspace(100, 100 * count, count)
    columns["versions"] = np.arange(1.0, count + 1)
    columns["return"] = np.array(returns)
    columns["episodes"] = np.where(np.isnan(columns["return"]), 0, np.arange(1, count + 1))
    columns["pulls"] = np.linspace(0, pulls, count)
    columns["bytes_weights"] = 100 * (1 + columns["pulls"])
    return columns


def test_a_summary_has_the_right_numbers(tmp_path: Path) -> None:
    gap = math.nan
    adaptive = Rule(threshold=0.1)
    curves = {
        Run(EVERY, 1): make_curve([10.0] * 19 + [30.0], 19),
        Run(adaptive, 1): make_curve([gap, 0.0, gap, *[10.0] * 15, 20.0, 40.0], 4),
        Run(EVERY, 2): make_curve([10.0] * 19 + [50.0], 19),
        Run(adaptive, 2): make_curve([10.0] * 18 + [40.0, gap], 3),
    }
    every, sparse = summarize(curves, 0.1)
    # The last tenth is the last two of twenty, weighted by their 19 and 20 episodes.
    assert every.numbers["final_return"] == pytest.approx([(19 * 10 + 20 * 30) / 39, (19 * 10 + 20 * 50) / 39])
    assert sparse.numbers["final_return"] == pytest.approx([(19 * 20 + 20 * 40) / 39, 40])
    # A gap counts as what was before it; before the first episode nothing counts.
    assert sparse.numbers["mean_return"] == pytest.approx([(15 * 10 + 20 + 40) / 19, (18 * 10 + 80) / 20])
    assert every.numbers["updates"] == pytest.approx([19, 19])
    assert (every.mean("pulls"), sparse.mean("pulls")) == (19, 3.5)
    assert sparse.numbers["bytes_weights"] == pytest.approx([500, 400])
    differences = sparse.numbers["final_return"] - every.numbers["final_return"]
    assert sparse.gap(every, "final_return") == pytest.approx((differences.mean(), spread(differences)))
    assert match_period(sparse) == 5
    assert "| adaptive, threshold 0.1 | 2 |" in to_table([every, sparse])
    assert "3.5 of 19 | 5.4 times |" in to_table([every, sparse])

    write_summary(tmp_path / "summary.csv", [every, sparse])
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rule"], row["seeds"], row["pulls"]) for row in rows] == [
        ("every", "2", "19"),
        ("adaptive-0.1", "2", "3.5"),
    ]


def test_the_spread_is_the_95_percent_interval_of_the_mean() -> None:
    # 0, 1, ..., 4: standard deviation sqrt(2.5), and Student's t for 4 degrees of freedom is 2.776.
    assert spread(np.arange(5.0)) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert math.isnan(spread(np.array([1.0])))


@pytest.mark.parametrize(
    "rule",
    [
        EVERY,
        Rule(threshold=0.05),
        Rule(period=7),
        Rule(0.1, is_plain=True),
        Rule(0.1, is_plain=True, is_protected=False),
    ],
)
def test_a_rule_is_found_by_its_name(rule: Rule) -> None:
    assert read_rule(rule.name) == rule
