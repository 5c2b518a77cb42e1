"""The doctor on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from clusterenv.cli import main
from tests.slurm_cluster import SlurmCluster, slurm_cluster

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm with two nodes."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def login(cluster: SlurmCluster, nothing_is_left_behind: None) -> Iterator[SlurmCluster]:
    """Every test runs on the login node, and leaves no job."""
    with cluster.logged_in():
        yield cluster
        cluster.wait_until_idle()


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Asks the doctor about two nodes; returns the exit status and what was said."""

    def ask(*options: str) -> tuple[int, str]:
        status = main(["doctor", "slurm", "--nodes", "2", "--workers-per-node", "1", "--timeout", "60", *options])
        return status, capsys.readouterr().out

    return ask


def test_all_is_well_on_a_slurm(doctor: Doctor, login: SlurmCluster) -> None:
    status, said = doctor("--env", "CartPole-v1")
    assert status == 0, said
    assert "workers are started: 1 on n1, 1 on n2" in said
    assert f"reach this machine at tcp://{login.login.address}:" in said


def test_a_partition_that_is_not_there_is_told(doctor: Doctor) -> None:
    status, said = doctor("--partition", "nowhere")
    assert status == 1
    assert said.startswith("failed  start")
    assert "invalid partition specified: nowhere" in said


def test_a_setup_that_fails_is_found(doctor: Doctor) -> None:
    status, said = doctor("--setup", "module load no-such-thing")
    assert status == 1
    assert said.startswith("failed  start")
    assert "next: Correct --setup" in said


def test_a_python_that_is_not_there_is_found(doctor: Doctor) -> None:
    status, said = doctor("--python", "/nowhere/python3")
    assert status == 1
    assert "failed  python" in said
    assert "next: Name the Python there" in said


def test_a_job_that_waits_in_the_queue_is_told(doctor: Doctor, login: SlurmCluster) -> None:
    job_id = login.run("sbatch", "--parsable", "--exclusive", "-N2", "--output=/dev/null", "--wrap", "sleep 1000")
    status, said = doctor("--timeout", "6")
    login.run("scancel", job_id.strip())
    assert status == 1
    assert said.startswith("failed  start")
    assert "is pending" in said
    assert "next: They were not up in time" in said
