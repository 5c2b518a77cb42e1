"""What SlurmLauncher is told: wrong settings are refused where they are written, right ones reach Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterenv import SlurmLauncher
from clusterenv.errors import ConfigError
from clusterenv.launchers.slurm_job import expand_hosts


def test_nodes_times_workers_per_node_is_the_number_of_workers_it_suggests() -> None:
    assert SlurmLauncher(nodes=3, workers_per_node=4).suggested_workers == 12
    assert SlurmLauncher(nodes=3).suggested_workers is None
    with pytest.raises(ConfigError, match="room for 2"):
        SlurmLauncher(nodes=2, workers_per_node=1).render(3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 1.5},
        {"workers_per_node": 0},
        {"cpus": 0},
        {"cpus": None},
        {"gpus": 0},
        {"memory": "lots"},
        {"memory": "2048"},
        {"memory": 2048},
        {"time": "two hours"},
        {"warning_s": 0},
        {"setup": "module load python"},
        {"options": {"--mail-type": "END"}},
        {"options": {"partition": "cpu"}},
        {"options": {"gpus-per-task": 1}},
        {"options": {"array": "1-4"}},
        {"options": {"clusters": "other"}},
        {"options": {"a b": True}},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"SlurmLauncher\.{next(iter(wrong))}"):
        SlurmLauncher(**wrong)


def test_every_setting_reaches_sbatch(tmp_path: Path) -> None:
    launcher = SlurmLauncher(
        nodes=4,
        workers_per_node=4,
        cpus=2,
        memory="3G",
        gpus=1,
        partition="cpu",
        account="lab",
        qos="high",
        constraint="avx2&ib",
        reservation="course",
        time="1-00:00:00",
        exclusive=True,
        requeue=False,
        warning_s=120,
        setup=["module load python"],
        python="python3",
        log_dir=tmp_path,
        options={"gres": "license:1", "mail-type": "END", "contiguous": True, "export": "NONE"},
    )
    command, _, script = launcher.render(16).partition("\n")
    for option in (
        "--nodes=4 --ntasks=16 --cpus-per-task=2 --gpus-per-task=1 --ntasks-per-node=4 --mem-per-cpu=1536M",
        "--partition=cpu --account=lab --qos=high '--constraint=avx2&ib' --reservation=course",
        "--time=1-00:00:00 --exclusive --no-requeue",
        "--signal=TERM@120",
        "--gres=license:1 --mail-type=END --contiguous",
        "--export=CLUSTERENV_TICKET",
    ):
        assert option in command
    assert "module load python\n" in script
    assert "python3 -m clusterenv.worker\n" in script
    assert "export OMP_NUM_THREADS=2\n" in script
    assert "PYTHONPATH" not in script


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2,08],gpu-[098-101]x,n5", ["n1", "n2", "n08", "gpu-098x", "gpu-099x", "gpu-100x", "gpu-101x", "n5"]),
        ("rack[0-1]n[7-8]", ["rack0n7", "rack0n8", "rack1n7", "rack1n8"]),
        ("bgl[000x133]", []),
    ],
)
def test_host_lists_are_read_as_slurm_writes_them(hosts: str, names: list[str]) -> None:
    assert expand_hosts(hosts) == names
