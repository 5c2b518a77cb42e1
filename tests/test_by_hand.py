"""Workers that others start with a ticket file."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ByHandLauncher, ClusterEnv, Faults, Network, Timeouts
from clusterenv.errors import ConfigError, LaunchError, WorkerLost
from clusterenv.launchers.base import Fleet
from clusterenv.launchers.by_hand import find_index
from clusterenv.wire.ticket import Ticket
from tests.conftest import guardian_of
from tests.launchers import OwnLauncher
from tests.policies import Linear
from tests.sshd import Sshd, sshd
from tests.worlds import assert_same, make_factories

__all__ = ["sshd"]

TICKET = Ticket(endpoint="tcp://127.0.0.1:9", head_key="h" * 40, public_key="p" * 40, secret_key="s" * 40)

Command = Callable[[Path, int], list[list[str]]]


def one_command_each(file: Path, num_workers: int) -> list[list[str]]:
    """What a person types, once for each worker."""
    start = [sys.executable, "-m", "clusterenv", "worker", "--ticket", str(file), "--index"]
    return [[*start, str(worker_index)] for worker_index in range(num_workers)]


def one_launch(file: Path, num_workers: int) -> list[list[str]]:
    """What a person types to have a launcher start them all."""
    return [
        [
            sys.executable,
            "-m",
            "clusterenv",
            "launch",
            "local",
            "--ticket",
            str(file),
            "--num-workers",
            str(num_workers),
        ]
    ]


class Operator(OwnLauncher):
    """Somebody who starts workers as soon as the ticket file is there."""

    def __init__(self, launcher: ByHandLauncher, command: Command = one_command_each) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._launcher = launcher
        self._command = command

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        fleet = self._launcher.launch(ticket, num_workers)
        assert self._launcher.ticket_file is not None
        for command in self._command(Path(self._launcher.ticket_file), num_workers):
            self.run(command)
        return fleet

    def run(self, command: list[str]) -> None:
        self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))

    def finish(self) -> list[tuple[int, str]]:
        """Return how the commands ended, and what they said."""
        return [(process.wait(timeout=30), process.communicate()[0]) for process in self.processes]


@pytest.fixture
def ticket_file(tmp_path: Path) -> Path:
    return tmp_path / "ticket"


@pytest.fixture
def operate(ticket_file: Path) -> Iterator[Callable[..., Operator]]:
    """Makes operators whose commands are over when the test is."""
    operators = []

    def make(command: Command = one_command_each) -> Operator:
        operators.append(Operator(ByHandLauncher(ticket_file=ticket_file), command))
        return operators[-1]

    yield make
    for operator in operators:
        for process in operator.processes:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=30)


@pytest.mark.parametrize("command", [one_command_each, one_launch])
def test_workers_started_by_hand_serve_as_any_others(
    operate: Callable[..., Operator], ticket_file: Path, command: Command
) -> None:
    operator = operate(command)
    factories = make_factories(3)
    with ClusterEnv(factories, num_workers=2, launcher=operator) as ours:
        assert stat.S_IMODE(ticket_file.stat().st_mode) == 0o600
        theirs = SyncVectorEnv(factories)
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        for _ in range(5):
            assert_same(ours.step([0, 1, 2]), theirs.step([0, 1, 2]))
    assert not ticket_file.exists()
    assert [status for status, _ in operator.finish()] == [0] * len(operator.processes)


def test_a_launcher_starts_workers_for_a_head_that_waits(operate: Callable[..., Operator], sshd: Sshd) -> None:
    launcher = sshd.launcher(["host1"])
    options = ["--hosts", "host1=2", "--python", launcher.python, "--setup", launcher.setup[0]]
    options += [f"--ssh-options={option}" for option in launcher.ssh_options]

    def launch_ssh(file: Path, num_workers: int) -> list[list[str]]:
        return [[sys.executable, "-m", "clusterenv", "launch", "ssh", "--ticket", str(file), *options]]

    operator = operate(launch_ssh)
    with ClusterEnv(make_factories(2), num_workers=2, launcher=operator) as envs:
        envs.reset(seed=1)
    ((status, said),) = operator.finish()
    assert status == 0, said
    assert "2 workers started" in said
    assert "worker 1 ended: exit status 0 on host1" in said


def test_policies_act_on_workers_started_by_hand(operate: Callable[..., Operator]) -> None:
    with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=operate(), network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Linear(), num_steps=8)
    assert rollout.obs.shape == (8, 4, 4)


def test_a_worker_that_dies_is_noticed_though_nobody_tells(operate: Callable[..., Operator]) -> None:
    with ClusterEnv(make_factories(2), num_workers=2, launcher=operate(), faults=Faults(on_loss="raise")) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            envs.step([0, 0])
    assert caught.value.worker_index == 1


def test_a_worker_that_is_started_again_takes_over(
    operate: Callable[..., Operator], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = operate()

    class Attentive(logging.Handler):
        """Does what the head asks for in its log."""

        def emit(self, record: logging.LogRecord) -> None:
            _, found, command = record.getMessage().partition("worker 1 is needed again: clusterenv ")
            if found:
                operator.run([sys.executable, "-m", "clusterenv", *shlex.split(command)])

    monkeypatch.setattr(logging.getLogger("clusterenv.launchers.by_hand"), "handlers", [Attentive()])
    with ClusterEnv(make_factories(2), num_workers=2, launcher=operator) as envs:
        envs.reset(seed=1)
        old = envs.worker_pids
        os.kill(old[1], signal.SIGKILL)
        *_, infos = envs.step([0, 0])
        assert infos["worker_lost"].tolist() == [False, True]
        assert envs.worker_pids[0] == old[0]
        assert guardian_of(envs.worker_pids[1]) == operator.processes[2].pid


def test_the_head_says_what_to_start(caplog: pytest.LogCaptureFixture) -> None:
    timeouts = Timeouts(join_s=0.2)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(LaunchError, match=r"waiting for workers to be started by hand with .*ticket"),
    ):
        ClusterEnv(make_factories(2), num_workers=2, launcher=ByHandLauncher(route_to=None), timeouts=timeouts)
    (command,) = [text for text in caplog.messages if "clusterenv worker --ticket" in text]
    assert re.search(r"start 2 worker\(s\) where ipc:///\S+/head can be reached", command)
    assert command.endswith("--index 0 and so on, up to --index 1")


def test_what_somebody_has_to_run_is_shown() -> None:
    assert ByHandLauncher(ticket_file="my ticket").render(2).splitlines() == [
        "clusterenv worker --ticket 'my ticket' --index 0",
        "clusterenv worker --ticket 'my ticket' --index 1",
    ]


def test_a_file_that_exists_is_left_alone(ticket_file: Path) -> None:
    ticket_file.write_text("mine")
    with pytest.raises(LaunchError, match="exists"):
        ByHandLauncher(ticket_file=ticket_file).launch(TICKET, 1)
    assert ticket_file.read_text() == "mine"


def test_a_link_in_the_place_of_the_file_is_not_followed(ticket_file: Path, tmp_path: Path) -> None:
    ticket_file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="exists"):
        ByHandLauncher(ticket_file=ticket_file).launch(TICKET, 1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nowhere/ticket cannot be written: No such file"):
        ByHandLauncher(ticket_file=tmp_path / "nowhere" / "ticket").launch(TICKET, 1)


def run_worker(*arguments: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "clusterenv", "worker", *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_ticket_that_others_can_read_is_refused(ticket_file: Path, tmp_path: Path) -> None:
    fleet = ByHandLauncher(ticket_file=ticket_file).launch(TICKET, 1)
    copy = tmp_path / "copy"
    shutil.copy(ticket_file, copy)
    fleet.stop(0.0)
    copy.chmod(0o644)
    status, said = run_worker("--ticket", str(copy), "--index", "0")
    assert status == 2
    assert f"chmod 600 {copy}" in said


@pytest.mark.parametrize("text", ["", "garbled", TICKET.encode()[:50]])
def test_a_file_that_holds_no_ticket_is_named(ticket_file: Path, text: str) -> None:
    ticket_file.touch(0o600)
    ticket_file.write_text(text)
    status, said = run_worker("--ticket", str(ticket_file), "--index", "0")
    assert status == 2
    assert f"{ticket_file} holds no ticket" in said
    assert "Traceback" not in said


def test_a_missing_file_is_named(ticket_file: Path) -> None:
    status, said = run_worker("--ticket", str(ticket_file), "--index", "0")
    assert status == 2
    assert f"{ticket_file} cannot be read: No such file" in said


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CLUSTERENV_WORKER": "3", "SLURM_PROCID": "9"}, 3),
        ({"SLURM_PROCID": "4"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "5"}, 5),
        ({"PBS_ARRAY_INDEX": "6"}, 6),
        ({"SGE_TASK_ID": "1"}, 0),
        ({"SGE_TASK_ID": "undefined", "PMI_RANK": "7"}, 7),
    ],
)
def test_the_index_is_taken_from_the_scheduler(variables: dict[str, str], expected: int) -> None:
    assert find_index(variables) == expected


def test_without_an_index_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="Give --index"):
        find_index({})
