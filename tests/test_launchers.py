"""LocalLauncher, the launcher that is used unless another is named, does what every launcher must; and its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from clusterenv import LocalLauncher
from clusterenv.config import usable_cores
from clusterenv.errors import ConfigError
from clusterenv.launchers.base import Fleet, Launcher, run_labels
from clusterenv.launchers.processes import ProcessFleet
from tests.conftest import wait_until_gone
from tests.hosts import require
from tests.launcher_contract import DEADLINE_S, LauncherContract

# Says when it is ready, and then waits for a signal that it minds.
STUBBORN = """
import os, signal
for number in (signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
signal.pause()
"""

# A log directory without room for a file.
ON_A_FULL_DISK = """
mount -t tmpfs -o nr_inodes={inodes} full "$1" && exec "$2" -c '
import sys
from clusterenv import LocalLauncher
from clusterenv.errors import LaunchError
from clusterenv.wire.ticket import Ticket
ticket = Ticket(endpoint="tcp://127.0.0.1:9", head_key="h" * 40, public_key="p" * 40, secret_key="s" * 40)
try:
    LocalLauncher(log_dir=sys.argv[1]).launch(ticket, 2)
except LaunchError as error:
    print(error)
' "$1"
"""


class TestLocalLauncher(LauncherContract):
    def make_launcher(self, log_dir: Path) -> Launcher:
        return LocalLauncher(log_dir=log_dir)


Start = Callable[[int, BinaryIO], "subprocess.Popen[bytes]"]


def start_stubborn(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=log, stderr=log)


@pytest.fixture
def make_fleet() -> Iterator[Callable[[Start], ProcessFleet]]:
    """Makes fleets of one worker that are gone when the test is."""
    fleets = []

    def make(start: Start) -> ProcessFleet:
        fleets.append(ProcessFleet(start, 1))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.stop(0.0)


def await_ready(fleet: Fleet, predecessor: int | None = None) -> int:
    """Wait until the worker, or the one after `predecessor`, has said that it is ready; returns its process id."""
    ends_at = time.monotonic() + DEADLINE_S
    while not (words := fleet.log_tail(0).split()) or int(words[-1]) == predecessor:
        assert fleet.exits() == {}
        assert time.monotonic() < ends_at, "in vain"
        select.select([], [], [], 0.02)
    assert len(words) == 2, "the log's tail holds no word of a predecessor"
    return int(words[1])


def test_a_worker_that_minds_no_signal_is_killed_before_another_is_started(
    make_fleet: Callable[[Start], ProcessFleet],
) -> None:
    pids: list[int] = []
    left: list[int] = []

    def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
        left.extend(pid for pid in pids if Path(f"/proc/{pid}").exists())
        process = start_stubborn(worker_index, log)
        pids.append(process.pid)
        return process

    fleet = make_fleet(start)
    first = await_ready(fleet)
    fleet.restart(0)
    assert fleet.exits() == {}
    assert fleet.status() == "ending what is left of worker 0"
    assert [first, await_ready(fleet, first)] == pids
    assert fleet.status() == ""
    assert left == [], "not even a zombie"


def test_a_worker_that_cannot_be_started_again_is_told_by_exits(
    make_fleet: Callable[[Start], ProcessFleet],
) -> None:
    is_broken = False

    def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
        if is_broken:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start_stubborn(worker_index, log)

    fleet = make_fleet(start)
    pid = await_ready(fleet)
    is_broken = True
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])
    fleet.restart(0)
    assert fleet.exits() == {0: "could not be started: [Errno 11] Resource temporarily unavailable"}
    is_broken = False
    fleet.restart(0)
    await_ready(fleet, pid)


def test_stopping_ends_workers_that_mind_no_signal(make_fleet: Callable[[Start], ProcessFleet]) -> None:
    fleet = make_fleet(start_stubborn)
    pid = await_ready(fleet)
    fleet.stop(0.1)
    assert wait_until_gone([pid], 0.0) == []


@pytest.mark.parametrize("inodes", [1, 2, 3])
def test_a_full_disk_under_the_logs_is_told(tmp_path: Path, inodes: int) -> None:
    require("unshare")
    script = ON_A_FULL_DISK.format(inodes=inodes)  # Enough for the directory itself, for the run's, or for one file.
    command = ["unshare", "--mount", "bash", "-c", script, "bash", str(tmp_path), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"in {tmp_path}" in done.stdout, done.stderr
    assert "No space left on device. Name a directory with room" in done.stdout


def test_each_run_has_a_directory_of_its_own_for_its_logs(tmp_path: Path) -> None:
    for _ in range(3):
        ProcessFleet(start_stubborn, 2, tmp_path).stop(0.0)
    runs = sorted(tmp_path.iterdir())
    assert len(runs) == 3
    for run in runs:
        assert run.name.startswith("run-")
        assert sorted(path.name for path in run.iterdir()) == ["worker-0.log", "worker-1.log"]


@pytest.mark.parametrize("cpus", [0, -1, 1.5, "2"])
def test_wrong_numbers_of_cpus_are_refused(cpus: int) -> None:
    with pytest.raises(ConfigError, match=r"LocalLauncher\.cpus must be an int"):
        LocalLauncher(cpus=cpus)


@pytest.mark.parametrize(
    ("script", "run"),
    [
        ("/home/ada/My Runs/train_ppo.v2.py", "train-ppo-v2"),
        ("/home/ada/walkers/__main__.py", "walkers"),
        ("-c", "python"),
        ("", "python"),
        ("x" * 200, "x" * 40),
    ],
)
def test_a_run_goes_by_the_name_of_its_script(script: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setenv("LOGNAME", "Ada L.")
    assert run_labels() == {"run": run, "user": "ada-l"}


ONE_CORE, HALF_A_CORE, NO_LIMIT = "100000 100000\n", "50000 100000\n", "max 100000\n"


@pytest.mark.parametrize(
    ("cgroups", "files", "cores"),
    [
        ("0::/\n", {}, 2),
        ("0::/\n", {"cpu.max": ONE_CORE}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": NO_LIMIT, "a/cpu.max": ONE_CORE}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": ONE_CORE, "a/cpu.max": NO_LIMIT}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": HALF_A_CORE}, 1),
        ("0::/a\n", {"a/cpu.max": "150000 100000\n"}, 2),
        ("0::/a\n", {"other/cpu.max": ONE_CORE}, 2),
        ("0::/of/the/machine\n", {"cpu.max": ONE_CORE}, 1),
        ("0::/../sibling\n", {"cpu.max": ONE_CORE}, 1),
        ("3:cpu,cpuacct:/a/b\n0::/\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n"}, 1),
        ("1:cpu:/a/b\n0::/\n", {"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_quota_us": "50000\n"}, 1),
        ("1:cpu:/a/b\n", {"cpu/a/b/cpu.cfs_quota_us": "-1\n"}, 2),
        ("1:memory:/a\n", {"memory/a/cpu.max": ONE_CORE}, 2),
    ],
)
def test_quotas_of_all_enclosing_cgroups_count(tmp_path: Path, cgroups: str, files: dict[str, str], cores: int) -> None:
    contents = {"proc/self/cgroup": cgroups} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith("cfs_quota_us"):
            (path.parent / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(str(tmp_path)) == min(cores, len(os.sched_getaffinity(0)))
