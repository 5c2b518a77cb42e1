"""Short runs of benchmarks/chaos.py: every kind of fault in every place, while every transition is checked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hosts, slurm_cluster

ROOT = Path(__file__).parent.parent


def run_chaos(*arguments: str) -> None:
    """Run it; it ends with 0 only if all is well."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--workers=2", "--silence=2", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            said, _ = process.communicate()
        except BaseException:
            process.send_signal(signal.SIGINT)  # It removes its hosts and its Slurm; killed, it could not.
            raise
    assert process.returncode == 0, said


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_nothing_is_inconsistent_while_workers_die_freeze_and_stumble(transport: str) -> None:
    run_chaos("--seed=3", "--faults=6", "--seconds=8", f"--transport={transport}")


@pytest.mark.parametrize("workload", ["numbered", "stream"])
def test_nothing_is_inconsistent_while_links_are_cut_delayed_and_lossy(workload: str) -> None:
    hosts.require(*hosts.PROGRAMS)
    run_chaos(
        "--place=hosts",
        f"--workload={workload}",
        "--faults=4",
        "--seconds=4",
        "--kinds",
        *("partition", "delay", "loss"),
    )


def test_nothing_is_inconsistent_while_slurm_ends_workers_steps_and_jobs() -> None:
    hosts.require(*hosts.PROGRAMS, *slurm_cluster.PROGRAMS)
    run_chaos("--place=slurm", "--faults=3", "--seconds=4", "--kinds", *("kill", "cancel step", "requeue"))


def test_steps_rollouts_and_streams_in_turn_hold_no_more_after_a_while_than_before() -> None:
    run_chaos("--workload=soak", "--faults=0", "--seconds=10")
