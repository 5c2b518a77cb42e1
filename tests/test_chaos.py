"""Short runs of `python -m chaos`: faults in every place and mode, while every transition is checked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hosts, kube_cluster, slurm_cluster

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_chaos(*arguments: str) -> None:
    """Run it; it ends with 0 only if all is well."""
    command = [sys.executable, "-m", "chaos", "--workers=2", "--silence=4", *arguments]
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


transports = pytest.mark.parametrize("transport", ["shm", "zmq"])


@transports
def test_nothing_is_inconsistent_while_workers_die_and_freeze_and_the_head_is_interrupted(transport: str) -> None:
    kinds = ("kill", "freeze", "SIGTERM", "segfault", "interrupted head")
    run_chaos("--place=local", f"--transport={transport}", "--seed=3", "--faults=12", "--kinds", *kinds)


@transports
def test_nothing_is_inconsistent_while_environments_hang_raise_oddly_and_fill_the_disk(transport: str) -> None:
    kinds = ("hung environment", "odd exception", "full disk")
    run_chaos("--place=local", f"--transport={transport}", "--seed=3", "--faults=12", "--kinds", *kinds)


def test_nothing_is_inconsistent_while_links_are_cut_delayed_and_lossy() -> None:
    hosts.require(*hosts.PROGRAMS)
    run_chaos("--place=hosts", "--faults=4", "--modes", "step", "stream", "--kinds", "partition", "slow link")


def test_nothing_is_inconsistent_while_slurm_ends_workers_steps_and_jobs() -> None:
    hosts.require(*hosts.PROGRAMS, *slurm_cluster.PROGRAMS)
    kinds = ("kill", "cancelled step", "requeued job")
    run_chaos("--place=slurm", "--faults=3", "--modes", "step", "--kinds", *kinds)


@pytest.mark.xdist_group("kubernetes")
def test_nothing_is_inconsistent_while_kubernetes_ends_pods_and_nodes() -> None:
    hosts.require(*hosts.PROGRAMS, *kube_cluster.PROGRAMS)
    kube_cluster.require_bed()
    kinds = ("kill", "deleted Pod", "evicted Pod", "drained node", "killed client", "deleted Job")
    run_chaos("--place=kubernetes", "--seed=1", "--faults=8", "--modes", "step", "stream", "--kinds", *kinds)


@pytest.mark.xdist_group("ray hosts")
def test_nothing_is_inconsistent_while_ray_loses_actors_its_driver_and_a_node() -> None:
    hosts.require(*hosts.PROGRAMS)
    pytest.importorskip("ray", reason="needs ray: pip install 'clusterenv-rl[ray]'")
    kinds = ("kill", "killed actor", "ended actor", "killed driver", "lost node")
    run_chaos("--place=ray", "--seed=1", "--faults=5", "--modes", "step", "stream", "--kinds", *kinds)


def test_all_modes_in_turn_hold_no_more_after_a_while_than_before() -> None:
    run_chaos("--place=local", "--transport=shm", "--faults=0", "--seconds=10")
