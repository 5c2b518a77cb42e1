"""The command `clusterenv`, apart from its doctor."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import clusterenv
from clusterenv.cli import main
from clusterenv.cli.options import LAUNCHERS, Recipe, add_options, make_launcher
from clusterenv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """Has a field of every kind that launchers have.

    Attributes:
        hosts: Where, 100 % of them; this goes on
            in a second line.
        count: How many.
    """

    hosts: Sequence[str] | Mapping[str, int]
    count: int | None = None
    share: float = 0.5
    time: str | int | None = None
    is_alone: bool = False
    may_wait: bool | None = True
    setup: tuple[str, ...] | list[str] = ()
    log_dir: str | Path | None = None
    options: Mapping[str, str | int | bool] = field(default_factory=dict)


def parse(recipe: Recipe, *arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser, recipe)
    return make_launcher(recipe, parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["--hosts", "a", "--hosts", "b"], {"hosts": ["a", "b"]}),
        (["--hosts", "a=2", "--hosts", "b"], {"hosts": {"a": 2, "b": 1}}),
        (["--hosts", "a", "b", "--hosts", "c=3"], {"hosts": {"a": 1, "b": 1, "c": 3}}),
        (["--count", "3", "--share", "0.25"], {"count": 3, "share": 0.25}),
        (["--time", "30"], {"time": "30"}),
        (["--is-alone", "--no-may-wait"], {"is_alone": True, "may_wait": False}),
        (["--setup", "module load x", "--setup=-v"], {"setup": ["module load x", "-v"]}),
        (["--log-dir", "logs"], {"log_dir": "logs"}),
        (["--options", "job-name=x", "--options", "spread-job"], {"options": {"job-name": "x", "spread-job": True}}),
    ],
)
def test_options_become_the_fields_of_a_launcher(arguments: list[str], settings: dict[str, Any]) -> None:
    if "hosts" not in settings:
        arguments, settings = ["--hosts", "a", *arguments], {"hosts": ["a"], **settings}
    assert parse(Recipes, *arguments) == Recipes(**settings)


def test_a_value_that_is_not_a_number_is_named() -> None:
    with pytest.raises(ConfigError, match="--hosts a=many: 'many' is not a number"):
        parse(Recipes, "--hosts", "a=many")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_field_of_a_launcher_has_an_option_with_a_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["launch", name, "--help"])
    out = capsys.readouterr().out
    for each in dataclasses.fields(LAUNCHERS[name][0]):  # type: ignore[arg-type]  # every launcher is a dataclass
        _, option, after = out.partition(f"  --{each.name.replace('_', '-')}")
        assert option, f"{each.name} has none"
        assert len(after.split("\n  --")[0].split()) > 3, f"{each.name} is not explained"


def test_a_dry_run_shows_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "local", "--dry-run", "--num-workers", "2", "--cpus", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "OMP_NUM_THREADS=3" in lines[0]
    assert f"CLUSTERENV_WORKER=1 {sys.executable} -m clusterenv.worker" in lines[1]


def test_a_dry_run_over_ssh_counts_the_workers_by_the_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ssh", "--dry-run", "--hosts", "a=2", "--hosts", "b", "--ssh-options=-p2222"]) == 0
    out = capsys.readouterr().out
    assert [line.split(" -- ")[1][0] for line in out.splitlines() if line.startswith("ssh -p2222")] == ["a", "a", "b"]


def test_a_dry_run_shows_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--workers-per-node", "3", "--partition", "cpu", "--options", "job-name=walkers"]
    assert main(["launch", "slurm", "--dry-run", *options, "--submit"]) == 0
    out = capsys.readouterr().out
    for part in ("sbatch", "--nodes=2", "--ntasks=6", "--partition=cpu", "--job-name=walkers", "clusterenv.worker"):
        assert part in out


def test_a_launch_needs_to_know_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "local"])
    assert "one of the arguments --dry-run --ticket is required" in capsys.readouterr().err


def test_a_mistake_is_told_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ssh", "--dry-run", "--hosts", "a=0"]) == 2
    assert capsys.readouterr().err == "clusterenv: SSHLauncher.hosts: a must get at least 1 worker, got 0.\n"


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"clusterenv {clusterenv.__version__}\n"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "clusterenv", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for name in ("worker", "launch", "doctor"):
        assert name in done.stdout
