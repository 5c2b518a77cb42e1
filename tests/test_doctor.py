"""The doctor, on patients that are well and on patients that are not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import BinaryIO

import pytest

from clusterenv import LocalLauncher
from clusterenv.cli import main
from clusterenv.doctor.diagnosis import Finding
from clusterenv.doctor.examination import examine
from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests.launchers import OwnLauncher
from tests.sshd import Sshd, sshd

__all__ = ["sshd"]

ALL = ["start", "python", "reach", "versions", "threads", "environment", "round trip", "bandwidth"]
ONE_THREAD = LocalLauncher(cpus=1)


class Scripted(OwnLauncher):
    """Runs a program of the test's own in the place of a worker."""

    def __init__(self, code: str) -> None:
        self._code = code

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        environment = os.environ | {TICKET_VARIABLE: ticket.encode()}

        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            variables = environment | {WORKER_VARIABLE: str(worker_index)}
            return subprocess.Popen([sys.executable, "-c", self._code], env=variables, stdout=log, stderr=log)

        return ProcessFleet(start, num_workers)


def findings(launcher: Launcher, env_id: str | None = None, join_s: float = 30.0) -> list[Finding]:
    return list(examine(launcher, 1, env_id=env_id, join_s=join_s))


def subjects(found: Sequence[Finding]) -> list[str]:
    return [finding.subject for finding in found]


def test_all_is_well_with_local_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "local", "--num-workers", "1", "--env", "CartPole-v1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[8:21].strip() for line in lines] == ALL
    assert all(line.startswith("ok ") for line in lines)
    assert "ms for a step" in lines[-2]
    assert "Mbit/s" in lines[-1]


def test_without_a_launcher_it_is_about_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--env", "NoSuchThing-v0", "--num-workers", "1", "--cpus", "1"]) == 1
    printed = capsys.readouterr().out
    assert "failed  environment  NoSuchThing-v0 on this machine, worker 0: NameNotFound" in printed
    assert "next: Check the spelling" in printed


def test_all_is_well_over_ssh(sshd: Sshd) -> None:
    found = findings(sshd.launcher(["host1"]), "CartPole-v1")
    assert subjects(found) == ALL
    assert all(finding.is_ok for finding in found), found


def test_a_host_that_refuses_is_named_with_the_next_step(sshd: Sshd, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hosts", "wrong-key", "--ssh-options=-F", f"--ssh-options={sshd.config}"]
    assert main(["doctor", "ssh", *options, "--env", "CartPole-v1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("failed  start        Worker 0 ended (ssh could not connect to wrong-key, exit status 255)")
    assert "Permission denied (publickey)" in out
    assert "next: Try `ssh -o BatchMode=yes wrong-key true`" in out


def test_a_mistyped_host_is_told_from_a_closed_port(sshd: Sshd, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # Nobody listens there any more when this is closed.
    options = ["--ssh-options=-p", f"--ssh-options={port}"]
    assert main(["doctor", "ssh", "--hosts", "127.0.0.1", "gpu1.invalid", *options]) == 1
    closed = " ".join(capsys.readouterr().out.split())
    assert f"next: 127.0.0.1 is there, but no ssh server listens at its port {port}" in closed
    assert main(["doctor", "ssh", "--hosts", "gpu1.invalid", "127.0.0.1", *options]) == 1
    mistyped = " ".join(capsys.readouterr().out.split())
    assert "SSHLauncher.hosts names gpu1.invalid, and no such host is known here" in mistyped
    assert "next: No host is called gpu1.invalid: correct --hosts" in mistyped


def test_a_setup_that_fails_is_found(sshd: Sshd) -> None:
    (failed,) = findings(sshd.launcher(["host1"], setup=["module load no-such-thing"]))
    assert (failed.subject, failed.is_ok) == ("start", False)
    assert "Correct --setup" in failed.next_step


def test_a_python_that_is_not_there_is_found(sshd: Sshd) -> None:
    well, failed = findings(sshd.launcher(["host1"], python="/nowhere/python3"))
    assert well.is_ok
    assert (failed.subject, failed.is_ok) == ("python", False)
    assert "--python" in failed.next_step


def test_a_python_without_clusterenv_is_found() -> None:
    *_, failed = findings(Scripted("import sys; sys.exit(\"No module named 'clusterenv'\")"))
    assert (failed.subject, failed.is_ok) == ("python", False)
    assert "Install clusterenv" in failed.next_step


def test_a_head_that_cannot_be_reached_is_found() -> None:
    # Nobody listens at port 9 of the loopback: the worker itself finds that out, and says so.
    start, python, failed = examine(ONE_THREAD, 1, addresses=("127.0.0.1", "127.0.0.1:9"), join_s=30.0)
    assert start.is_ok
    assert python.is_ok
    assert (failed.subject, failed.is_ok) == ("reach", False)
    assert "nobody listens at tcp://127.0.0.1:9" in failed.text
    assert "--listen" in failed.next_step


def test_workers_that_are_never_heard_of_are_found() -> None:
    *_, failed = findings(Scripted("import signal; signal.pause()"), join_s=0.5)
    assert (failed.subject, failed.is_ok) == ("reach", False)
    assert "firewall" in failed.next_step


def test_versions_that_do_not_fit_are_found() -> None:
    old = """
import platform
platform.python_version = lambda: "3.5.0"
from clusterenv.worker.__main__ import main
main()
"""
    *well, failed = findings(Scripted(old))
    assert subjects(well) == ["start", "python", "reach"]
    assert (failed.subject, failed.is_ok) == ("versions", False)
    assert "python 3.5.0" in failed.text


def test_an_environment_that_is_only_here_is_found() -> None:
    *_, failed, _, _ = findings(ONE_THREAD, "no_such_module:Nowhere-v0")
    assert (failed.subject, failed.is_ok) == ("environment", False)
    assert "this machine, worker 0: ModuleNotFoundError: No module named 'no_such_module'" in failed.text
    assert "PYTHONPATH" in failed.next_step


def test_threads_that_exceed_the_cores_are_found() -> None:
    found = findings(replace(ONE_THREAD, cpus=10_000))
    (failed,) = [finding for finding in found if not finding.is_ok]
    assert failed.subject == "threads"
    assert "1 worker with 10000 threads" in failed.text


def test_an_address_that_is_not_ours_is_told() -> None:
    (failed,) = examine(ONE_THREAD, 1, addresses=("192.0.2.7", None), join_s=30.0)
    assert not failed.is_ok
    assert "Cannot listen on 192.0.2.7" in failed.text
