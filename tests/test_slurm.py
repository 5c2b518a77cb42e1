"""SlurmLauncher on a real Slurm: a login node and compute nodes with addresses and host names of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv import ClusterEnv, Faults, Network, SlurmLauncher, Timeouts
from clusterenv.errors import LaunchError, WorkerLost
from clusterenv.launchers.base import Launcher, run_labels
from clusterenv.wire.messages import Join
from tests.conftest import wait_until_gone
from tests.launcher_contract import Door, LauncherContract, fleet_is_alive, tells_secret
from tests.located import Farewell, make_located
from tests.policies import Linear
from tests.remains import command_of, descendants
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.test_guardian import end_s
from tests.test_readme import blocks_of
from tests.worlds import Talker

ROOT = Path(__file__).parent.parent
TIMEOUTS = Timeouts(join_s=60, call_s=60, close_s=5)
IMPATIENT = Timeouts(join_s=60, call_s=60, close_s=5, silence_s=3)


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
        left = cluster.jobs()
        for job_id in left:
            cluster.run("scancel", job_id)
        cluster.wait_until_idle()
    assert not left


@pytest.fixture
def door(login: SlurmCluster) -> Iterator[Door]:
    door = Door(login.login.address)
    yield door
    door.close()


def launch(
    launcher: Launcher,
    num_workers: int = 2,
    env: Any = "CartPole-v1",
    on_loss: str = "replace",
    timeouts: Timeouts = TIMEOUTS,
) -> ClusterEnv:
    """Open a ClusterEnv with two environments a worker, which shares nothing with this process but the network."""
    return ClusterEnv(
        env,
        2 * num_workers,
        num_workers=num_workers,
        launcher=launcher,
        network=Network(transport="zmq"),
        timeouts=timeouts,
        faults=Faults(on_loss=on_loss),
    )


@pytest.mark.slow  # Inside an allocation, jobs need not be scheduled first.
class TestSlurmLauncher(LauncherContract):
    address = "10.88.0.1"
    options = {"network": Network(transport="zmq")}  # noqa: RUF012 - a constant
    programs = ("sbatch", "srun", "squeue", "scancel", "scontrol")
    stride = 11

    def make_launcher(self, log_dir: Path) -> Launcher:
        return SlurmLauncher(nodes=2, log_dir=log_dir)


class TestSlurmLauncherInsideAnAllocation(LauncherContract):
    address = "10.88.0.1"
    options = {"network": Network(transport="zmq")}  # noqa: RUF012 - a constant
    programs = ("sbatch", "srun", "squeue", "scancel", "scontrol")
    stride = 11

    @pytest.fixture(autouse=True)
    def allocation(self, login: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        done = subprocess.run(
            ["salloc", "--no-shell", "--nodes=2", "--ntasks=4"], capture_output=True, text=True, check=True
        )
        job_id = done.stderr.split("allocation ")[1].split()[0]
        monkeypatch.setenv("SLURM_JOB_ID", job_id)
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        monkeypatch.setenv("SLURM_NTASKS", "4")
        yield
        assert login.jobs() == [job_id], "it is the user's, and no other was submitted"
        login.run("scancel", job_id)
        login.wait_until_idle()

    def make_launcher(self, log_dir: Path) -> Launcher:
        return SlurmLauncher(nodes=2, log_dir=log_dir)

    @pytest.mark.parametrize("num_failures", [0, 1])
    def test_workers_whose_srun_has_to_be_killed_are_ended_too(
        self,
        launcher: Launcher,
        door: Door,
        login: SlurmCluster,
        num_failures: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        squeue = tmp_path / "squeue"
        squeue.write_text(
            f'#!/bin/sh\necho >> "$0.calls"\n[ "$(wc -l < "$0.calls")" -gt {num_failures} ] || exit 1\n'
            'PATH=${PATH#*:} exec squeue "$@"'
        )
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        fleet = launcher.launch(door.ticket, 2)
        pids = [door.await_join(fleet).pid for _ in range(2)]
        for pid in descendants():
            if command_of(pid).startswith("srun "):
                os.kill(pid, signal.SIGSTOP)  # It hears of nothing that it should pass on.
        fleet.stop(0.0)
        assert login.run("squeue", "--noheader", "--steps", "--format=%i") == ""
        assert wait_until_gone(pids, 2.0) == []


def test_the_issues_example_runs_on_all_nodes(login: SlurmCluster) -> None:
    launcher = SlurmLauncher(nodes=2, partition="cpu", time="02:00:00")
    with launch(launcher, 5, make_located) as envs:
        hosts = envs.get_attr("host")
        assert set(hosts) == {"n1", "n2"}
        assert list(hosts) == sorted(hosts), "neighbours in the batch are neighbours on the cluster"
        envs.reset(seed=1)
        envs.step(np.zeros(10, np.int64))
        rollout = envs.rollout(Linear(seed=1), 8)
        assert rollout.rewards.shape == (8, 10)
        shown = login.run("squeue", "--noheader", "--format=%P %l %D %j")
        assert shown == f"cpu 2:00:00 2 clusterenv-{run_labels()['run']}"


BLOCKS = [
    *blocks_of(ROOT / "docs" / "how-to" / "slurm.md"),
    *blocks_of(ROOT / "docs" / "tutorials" / "slurm.md"),
    *(b for b in blocks_of(ROOT / "README.md") if "SlurmLauncher" in b),
]


@pytest.mark.parametrize("block", BLOCKS, ids=("run", "render", "tutorial", "readme"))
def test_the_blocks_of_the_manual_run(login: SlurmCluster, block: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if "render" in block:
        shown = (ROOT / "docs" / "how-to" / "slurm.md").read_text().replace("/home/me", str(tmp_path))
        assert done.stdout in shown, "the manual shows what is submitted"


def test_without_a_number_of_nodes_slurm_chooses(login: SlurmCluster) -> None:
    with launch(SlurmLauncher(cpus=2), 3, make_located) as envs:
        assert set(envs.get_attr("host")) <= {"n1", "n2"}
        assert login.run("squeue", "--noheader", "--format=%C") == "6"


def test_a_refused_submission_says_what_slurm_says(login: SlurmCluster) -> None:
    with pytest.raises(LaunchError, match="invalid partition specified: nowhere"):
        launch(SlurmLauncher(partition="nowhere"))


def test_a_machine_without_slurm_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as here:
        here.setenv("PATH", str(tmp_path))
        with pytest.raises(LaunchError, match="no sinfo on this machine"):
            launch(SlurmLauncher(log_dir=tmp_path))


def test_a_job_that_fails_at_once_says_why(login: SlurmCluster) -> None:
    with pytest.raises(LaunchError, match="exit status 127") as caught:
        launch(SlurmLauncher(python="/opt/no/such/python"))
    assert "/opt/no/such/python: No such file or directory" in str(caught.value)


def test_a_setup_line_that_fails_is_named(login: SlurmCluster) -> None:
    with pytest.raises(LaunchError, match="exit status 1") as caught:
        launch(SlurmLauncher(setup=["true", "module load python/3.11", "true"]))
    assert "module: command not found" in str(caught.value)
    assert "line 2 of the setup failed" in str(caught.value)


def test_nothing_a_user_writes_is_read_as_shell_but_the_setup(
    login: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / 'it\'s; $(touch pwned) & "so"'
    odd.mkdir()
    (odd / "python").symlink_to(sys.executable)
    launcher = SlurmLauncher(
        setup=["""export GREETING='it'"'"'s "fine"; $HOME'  # and 'a' comment""", "cat /dev/null | cat"],
        python=str(odd / "python"),
        log_dir=odd,
        options={"job-name": "a b; touch pwned", "comment": "$(touch pwned)"},
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(sys.path)
    )  # A python that is not the head's is not given its path.
    with launch(launcher, 1, make_located) as envs:
        assert envs.call("variable", "GREETING") == ('it\'s "fine"; $HOME',) * 2
        assert login.run("squeue", "--noheader", "--format=%j|%k") == "a b; touch pwned|$(touch pwned)"
    assert not [folder for folder, _, files in os.walk(ROOT) if "pwned" in files]


def test_workers_use_as_many_threads_as_they_have_cpus(login: SlurmCluster) -> None:
    launcher = SlurmLauncher(cpus=2, options={"export": "NONE"})
    with launch(launcher, 1, make_located) as envs:
        assert envs.call("variable", "OMP_NUM_THREADS") == ("2", "2")


def test_slurm_is_told_no_secret_that_it_shows(login: SlurmCluster, door: Door, tmp_path: Path) -> None:
    fleet = SlurmLauncher(log_dir=tmp_path).launch(door.ticket, 2)
    try:
        (job_id,) = login.jobs()
        door.await_join(fleet)
        login.run("scontrol", "write", "batch_script", job_id, str(tmp_path / "script"))
        shown = login.run("scontrol", "--details", "show", "job", job_id)
    finally:
        fleet.stop(0.0)
    for text in (shown, (tmp_path / "script").read_text(), *(path.read_text() for path in tmp_path.glob("*.log"))):
        assert text
        assert not tells_secret(text.encode(), door.ticket)


def test_a_job_that_waits_says_for_what_and_is_cancelled_by_stop(login: SlurmCluster, door: Door) -> None:
    with launch(SlurmLauncher(exclusive=True, nodes=2)):
        fleet = SlurmLauncher(nodes=2).launch(door.ticket, 2)
        job_id = login.jobs()[0]
        reasons = [f"job {job_id} is pending ({reason})" for reason in ("Resources", "Priority")]
        door.wait_until(lambda: fleet.status() in reasons or bool(fleet.exits()), fleet)  # At first there is none.
        assert fleet.exits() == {}
        began_at = time.monotonic()
        fleet.stop(20.0)
        assert time.monotonic() - began_at < 10.0, "there is nothing to wait for"
        assert len(login.jobs()) == 1


def test_a_job_that_somebody_cancels_is_named(login: SlurmCluster, tmp_path: Path) -> None:
    with launch(SlurmLauncher(), 2, lambda: Farewell(tmp_path), on_loss="raise") as envs:
        envs.reset(seed=1)
        (job_id,) = login.jobs()
        login.run("scancel", job_id)
        with pytest.raises(WorkerLost) as caught:
            step_for_ever(envs)
    assert re.search(rf"job {job_id} |STEP {job_id}.0 ", str(caught.value))  # Said of the worker, or in its log.
    assert "CANCELLED" in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2, "the workers closed their environments"


def step_for_ever(envs: ClusterEnv) -> None:
    while True:
        envs.step(np.zeros(envs.num_envs, np.int64))


def test_workers_of_a_preempted_job_come_back(login: SlurmCluster, door: Door, tmp_path: Path) -> None:
    fleet = SlurmLauncher(nodes=2, partition="cpu", log_dir=tmp_path).launch(door.ticket, 2)
    try:
        before = {door.await_join(fleet).pid for _ in range(2)}
        (job_id,) = login.jobs()
        hog = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
        urgent_id = login.run(*hog, "--wrap=sleep 60")
        door.wait_until(lambda: f"job {job_id} was requeued" in fleet.exits().get(1, ""), fleet)
        assert list(fleet.exits()) == [0, 1]
        fleet.restart(0)
        fleet.restart(1)
        assert fleet.exits() == {}
        door.wait_until(lambda: fleet.status() == f"job {job_id} is pending (BeginTime)", fleet)
        assert fleet.exits() == {}
        assert wait_until_gone(list(before), 0.0) == []
        door.wait_until(lambda: login.state_of(urgent_id) == "RUNNING", fleet)
        login.run("scancel", urgent_id)
        door.wait_until(lambda: login.jobs() == [job_id], fleet)
        # Slurm would let it wait for two minutes, so that nothing is left of the first run, not even its SIGTERM.
        door.wait_until(lambda: login.state_of(job_id) == "PENDING" and login.node_states() == {"idle"}, fleet)
        login.run("scontrol", "update", f"job={job_id}", "StartTime=now")
        joins: list[Join] = []
        door.wait_until(lambda: bool(fleet.exits()) or len(joins) == 2, fleet, joins)
        assert fleet.exits() == {}, "the ends of the first run are not the second's"
        assert {join.worker_index for join in joins} == {0, 1}
        assert "DUE TO PREEMPTION" in (tmp_path / f"job-{job_id}.log").read_text()
    finally:
        fleet.stop(0.0)


def test_workers_of_a_job_that_is_over_are_started_in_another(login: SlurmCluster, door: Door, tmp_path: Path) -> None:
    fleet = SlurmLauncher(log_dir=tmp_path).launch(door.ticket, 2)
    try:
        for _ in range(2):
            os.kill(door.await_join(fleet).pid, signal.SIGKILL)
        (job_id,) = login.jobs()
        door.wait_until(lambda: all("failed" in how for how in (fleet.exits() or {0: ""}).values()), fleet)
        fleet.restart(0)
        fleet.restart(1)
        assert {door.await_join(fleet).worker_index for _ in range(2)} == {0, 1}
        assert login.jobs() != [job_id]
        assert len(login.jobs()) == 1
    finally:
        fleet.stop(0.0)


def test_a_job_that_cannot_be_submitted_again_is_told_by_exits(
    login: SlurmCluster, door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        '#!/bin/sh\n[ -e "$0.closed" ] && { echo no more jobs today >&2; exit 1; }\nPATH=${PATH#*:} exec sbatch "$@"'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    fleet = SlurmLauncher(log_dir=tmp_path).launch(door.ticket, 1)
    try:
        os.kill(door.await_join(fleet).pid, signal.SIGKILL)
        door.wait_until(lambda: "failed" in fleet.exits().get(0, ""), fleet)
        (tmp_path / "sbatch.closed").touch()
        fleet.restart(0)
        assert "could not be started: Slurm refused the job" in door.await_exit(fleet, 0)
        assert "no more jobs today" in fleet.exits()[0]
        (tmp_path / "sbatch.closed").unlink()
        fleet.restart(0)
        assert fleet.exits() == {}
        door.await_join(fleet)
    finally:
        fleet.stop(0.0)


def test_the_last_worker_that_came_with_a_job_does_not_take_the_others_with_it(
    login: SlurmCluster, door: Door, tmp_path: Path
) -> None:
    fleet = SlurmLauncher(nodes=2, log_dir=tmp_path).launch(door.ticket, 2)
    try:
        first = {join.worker_index: join.pid for join in (door.await_join(fleet), door.await_join(fleet))}
        jobs = login.jobs()
        os.kill(first[0], signal.SIGKILL)
        door.await_exit(fleet, 0)
        fleet.restart(0)
        successor = door.await_join(fleet).pid
        os.kill(first[1], signal.SIGKILL)
        assert "killed by SIGKILL" in door.await_exit(fleet, 1)
        assert list(fleet.exits()) == [1]
        fleet.restart(1)
        assert door.await_join(fleet).worker_index == 1
        assert wait_until_gone([successor], 0.0) == [successor], "it is still there"
        assert login.jobs() == jobs
    finally:
        fleet.stop(0.0)


def test_ending_a_worker_that_hangs_keeps_no_descriptor(login: SlurmCluster, door: Door, tmp_path: Path) -> None:
    def count_nameless_files() -> int:
        links = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return sum(link.endswith("(deleted)") for link in links)

    fleet = SlurmLauncher(nodes=2, log_dir=tmp_path).launch(door.ticket, 1)
    try:
        before = count_nameless_files()
        hung = door.await_join(fleet).pid
        os.kill(hung, signal.SIGSTOP)
        fleet.restart(0)
        assert door.await_join(fleet).pid != hung
        assert wait_until_gone([hung]) == []
        door.wait_until(lambda: fleet.exits() == {} and count_nameless_files() == before, fleet)
    finally:
        fleet.stop(0.0)


def test_a_cancelled_job_is_not_started_again(login: SlurmCluster, door: Door, tmp_path: Path) -> None:
    fleet = SlurmLauncher(log_dir=tmp_path).launch(door.ticket, 1)
    try:
        door.await_join(fleet)
        login.run("scancel", *login.jobs())
        door.wait_until(lambda: "CANCELLED" in fleet.exits().get(0, ""), fleet)
        fleet.restart(0)
        door.wait_until(lambda: "could not be started: job" in fleet.exits().get(0, ""), fleet)
        assert "was cancelled" in fleet.exits()[0]
    finally:
        fleet.stop(0.0)


def test_by_default_logs_are_kept_only_for_errors(
    login: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with launch(SlurmLauncher(), 1):
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(LaunchError):
        launch(SlurmLauncher(partition="nowhere"))
    assert not list(tmp_path.iterdir())


def test_without_a_shared_directory_workers_run_and_errors_say_where_logs_would_be(login: SlurmCluster) -> None:
    hidden = login.private / "logs"
    with launch(SlurmLauncher(log_dir=hidden), 2) as envs:
        envs.reset(seed=1)
    assert not list(hidden.iterdir())
    with pytest.raises(LaunchError, match="FAILED") as caught:
        launch(SlurmLauncher(log_dir=hidden, python="/opt/no/such/python"))
    assert str(hidden) in str(caught.value)
    assert "do not share that directory" in str(caught.value)


@pytest.mark.slow
def test_output_that_cannot_be_shown_is_a_warning(
    login: SlurmCluster, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = SlurmLauncher(log_dir=login.private / "logs", show_output=True).launch(door.ticket, 1)
    try:
        door.await_join(fleet)
        door.wait_until(lambda: "what workers print cannot be shown" in caplog.text, fleet)
        assert "do not share that directory" in caplog.text
    finally:
        door.dismiss()
        fleet.stop(5.0)


def test_last_words_without_a_lines_end_do_not_hide_how_a_worker_ended(login: SlurmCluster, tmp_path: Path) -> None:
    with (
        launch(SlurmLauncher(log_dir=tmp_path), 1, Talker, on_loss="raise") as envs,
        pytest.raises(WorkerLost, match=r"(?s)exit status 7.*and the end"),
    ):
        envs.apply(lambda env: env.die("and the end"), [0])


INSIDE = """
from clusterenv import ClusterEnv, Network, SlurmLauncher
from tests.located import make_located
with ClusterEnv(make_located, 4, num_workers=4, network=Network(transport="zmq"), launcher=SlurmLauncher()) as envs:
    envs.reset(seed=1)
    print(*envs.get_attr("host"))
"""


@pytest.mark.slow
def test_a_head_in_a_batch_job_uses_the_nodes_of_its_job(login: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "head.py").write_text(INSIDE)
    command = f"PYTHONPATH={ROOT}:$PYTHONPATH {sys.executable} {tmp_path}/head.py"
    options = ["--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/out", f"--wrap={command}"]
    login.run("sbatch", "--wait", *options)
    assert "n1 n1 n2 n2\n" in (tmp_path / "out").read_text()


HEAD = """
import json, os, sys
from clusterenv import ClusterEnv, Network, SlurmLauncher
launcher = SlurmLauncher(nodes=2, log_dir=sys.argv[1])
envs = ClusterEnv("CartPole-v1", 4, num_workers=2, network=Network(transport="zmq"), launcher=launcher)
envs.reset(seed=1)
print(json.dumps(envs.worker_pids), flush=True)
sys.stdin.read()
"""


def test_the_job_of_a_head_that_is_killed_ends_by_itself(login: SlurmCluster, tmp_path: Path) -> None:
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with head:
        assert head.stdout is not None
        pids = json.loads(head.stdout.readline())
        assert fleet_is_alive(pids)
        head.kill()
    assert wait_until_gone(pids, 40.0) == []
    login.wait_until_idle()


STUCK_HEAD = """
import ctypes, json, subprocess, sys
import gymnasium as gym
from clusterenv import ClusterEnv, Network, SlurmLauncher

gate = sys.argv[1] + "/gate"

class Stuck(gym.Wrapper):
    def step(self, action):
        helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(gate, "w") as opened:
            opened.write(str(helper.pid))
        ctypes.PyDLL(None).sleep(60)  # No thread of this process runs meanwhile.

launcher = SlurmLauncher(nodes=1, log_dir=sys.argv[1])
make = lambda: Stuck(gym.make("CartPole-v1"))
envs = ClusterEnv(make, 1, num_workers=1, network=Network(transport="zmq"), launcher=launcher)
envs.reset(seed=1)
print(json.dumps(envs.worker_pids), flush=True)
envs.step([0])
"""


def test_a_worker_and_its_helper_end_with_a_killed_head_while_c_code_holds_the_lock(
    login: SlurmCluster, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    head = subprocess.Popen(
        [sys.executable, "-c", STUCK_HEAD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with head:
        assert head.stdout is not None
        pids = [*json.loads(head.stdout.readline()), int((tmp_path / "gate").read_text())]
        assert fleet_is_alive(pids)
        head.kill()
    assert wait_until_gone(pids, end_s()) == []
    login.wait_until_idle()


@pytest.mark.slow
def test_workers_that_find_no_head_end_and_so_does_their_job(login: SlurmCluster, tmp_path: Path) -> None:
    door = Door(login.login.address)
    door.close()
    fleet = SlurmLauncher(nodes=2, log_dir=tmp_path).launch(door.ticket, 2)
    login.wait_until_idle()
    fleet.stop(0.0)
    (log,) = tmp_path.iterdir()
    assert log.read_text().count("the head has ended") == 2


def test_two_runs_at_once_do_not_mind_each_other(login: SlurmCluster) -> None:
    with launch(SlurmLauncher(nodes=2)) as kept:
        with launch(SlurmLauncher(nodes=2)) as closed:
            assert len(login.jobs()) == 2
            kept.reset(seed=1)
            closed.reset(seed=1)
        assert len(login.jobs()) == 1
        kept.step(np.zeros(4, np.int64))


@pytest.fixture
def fragile(tmp_path: Path, login: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster of the test's own, with the test on its login node."""
    with slurm_cluster(tmp_path, num_nodes=2) as cluster, cluster.logged_in():
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["dies", "is cut off"])
def test_a_node_that_is_lost_is_survived_on_the_others(fragile: SlurmCluster, tmp_path: Path, fate: str) -> None:
    launcher = SlurmLauncher(nodes=2, log_dir=tmp_path / "logs")
    with launch(launcher, 2, make_located, timeouts=IMPATIENT) as envs:
        assert envs.get_attr("host") == ("n1", "n1", "n2", "n2")
        envs.reset(seed=1)
        if fate == "dies":
            fragile.kill_node(fragile.nodes[1])
        else:
            fragile.nodes[1].cut()
        infos = envs.step(np.zeros(4, np.int64))[-1]
        assert infos["worker_lost"].tolist() == [False, False, True, True]
        assert envs.get_attr("host") == ("n1", "n1", "n1", "n1")
        envs.rollout(Linear(seed=1), 4)


@pytest.fixture
def larger(tmp_path: Path, login: SlurmCluster) -> Iterator[SlurmCluster]:
    """A cluster of the test's own with three nodes, which takes as long as most to find that one is dead."""
    with slurm_cluster(tmp_path, num_nodes=3, node_timeout_s=300) as cluster, cluster.logged_in():
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("dead", [(1, 2), (0, 1)], ids=["others", "with the one that the job's script runs on"])
def test_two_nodes_that_die_at_once_are_survived_on_the_third(
    larger: SlurmCluster, tmp_path: Path, dead: tuple[int, int]
) -> None:
    launcher = SlurmLauncher(nodes=3, log_dir=tmp_path / "logs")
    with launch(launcher, 3, make_located, timeouts=IMPATIENT) as envs:
        assert envs.get_attr("host") == ("n1", "n1", "n2", "n2", "n3", "n3")
        envs.reset(seed=1)
        for index in dead:
            larger.kill_node(larger.nodes[index])
        infos = envs.step(np.zeros(6, np.int64))[-1]
        assert infos["worker_lost"].tolist() == [env_index // 2 in dead for env_index in range(6)]
        (host,) = set(envs.get_attr("host"))
        assert host not in [larger.nodes[index].name for index in dead]
        assert sorted(loss.worker_index for loss in envs.losses) == list(dead)
        envs.rollout(Linear(seed=1), 4)


@pytest.mark.slow
def test_a_worker_that_hangs_on_the_last_node_that_lives_is_replaced_there(
    larger: SlurmCluster, tmp_path: Path
) -> None:
    launcher = SlurmLauncher(nodes=3, log_dir=tmp_path / "logs")
    with launch(launcher, 3, make_located, timeouts=IMPATIENT) as envs:
        envs.reset(seed=1)
        for node in larger.nodes[:2]:
            larger.kill_node(node)
        envs.step(np.zeros(6, np.int64))
        os.kill(envs.worker_pids[2], signal.SIGSTOP)
        envs.step(np.zeros(6, np.int64))
        assert set(envs.get_attr("host")) == {"n3"}
        assert [loss.reason.count("Task launch") for loss in envs.losses if loss.worker_index == 2] == [0]


@pytest.mark.slow
def test_when_all_nodes_die_at_once_and_none_comes_back_a_sentence_says_what_became_of_the_job(
    fragile: SlurmCluster, tmp_path: Path
) -> None:
    launcher = SlurmLauncher(nodes=2, log_dir=tmp_path / "logs")
    impatient = Timeouts(join_s=15, call_s=30, close_s=5, silence_s=3)
    with launch(launcher, 2, timeouts=impatient) as envs:
        envs.reset(seed=1)
        for node in fragile.nodes:
            fragile.kill_node(node)
        with pytest.raises(WorkerLost, match=r"srun ended in job \d+|job \d+ (was|is|lost|has)"):
            step_for_ever(envs)
