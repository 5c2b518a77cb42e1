"""Workers on which other versions are installed: it is told once, with who differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import gymnasium as gym
import pytest

from clusterenv import ClusterEnv
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.compatibility import imported_packages, version_of
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests.launchers import OwnLauncher
from tests.policies import Linear


class Machines(OwnLauncher):
    """Each worker on a machine of its own: a directory with what is installed there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def install(self, worker_index: int, module: str, source: str) -> None:
        path = self._directory / str(worker_index) / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            environment = os.environ | {TICKET_VARIABLE: ticket.encode(), WORKER_VARIABLE: str(worker_index)}
            environment["PYTHONPATH"] = os.pathsep.join([str(self._directory / str(worker_index)), *sys.path])
            command = [sys.executable, "-m", "clusterenv.worker"]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

        return ProcessFleet(start, num_workers)


class Importing(Linear):
    """A policy that imports something when it first acts."""

    def act(self, *args: Any, **kwargs: Any) -> Any:
        __import__("ce_network")
        return super().act(*args, **kwargs)


def make_importing() -> gym.Env[Any, Any]:
    __import__("ce_simulator")
    __import__("ce_own")
    return gym.make("CartPole-v1")


def differences(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "other versions" in record.getMessage()]


def test_other_versions_are_told_once_with_who_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path)
    for worker_index, version in enumerate(["3.1", "3.2", "3.2"]):
        machines.install(worker_index, "ce_simulator", f"__version__ = '{version}'")
        machines.install(worker_index, "ce_own", f"CONSTANT = {'1' if worker_index < 2 else '2'}")
        machines.install(worker_index, "ce_network", "__version__ = '1.0'")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ce_simulator.py").write_text("__version__ = '3.2'")
    monkeypatch.syspath_prepend(tmp_path / "here")
    __import__("ce_simulator")
    try:
        host = os.uname().nodename
        with ClusterEnv([make_importing] * 3, num_workers=3, launcher=machines) as envs:
            (told,) = differences(caplog)
            assert f"ce_simulator 3.2 here, 3.1 on {host} (worker 0)" in told
            assert f"ce_own of source {version_in(tmp_path / '0')} on {host} (workers 0, 1), of source" in told
            envs.reset(seed=1)
            envs.rollout(Importing(), 4)
            assert len(differences(caplog)) == 1, "all have the same ce_network"
            os.kill(envs.worker_pids[0], 9)
            envs.rollout(Importing(), 4)
            assert len(differences(caplog)) == 1, "that is known"
    finally:
        del sys.modules["ce_simulator"]


def test_a_policy_that_imports_other_versions_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(tmp_path)
    for worker_index in range(2):
        machines.install(worker_index, "ce_network", f"__version__ = '2.{worker_index}'")
    with ClusterEnv("CartPole-v1", 2, num_workers=2, launcher=machines) as envs:
        envs.reset(seed=1)
        assert differences(caplog) == []
        envs.rollout(Importing(), 4)
        (told,) = differences(caplog)
        assert "ce_network 2.0 on" in told
        assert ", 2.1 on" in told


def test_a_package_has_its_own_version_or_the_installed_ones_or_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version_of("numpy") == sys.modules["numpy"].__version__
    assert version_of("no_such_thing") == ""
    before = set(sys.modules)
    package = tmp_path / "ce_package"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    __import__("ce_package")
    try:
        first = imported_packages(before)["ce_package"]
        assert first.startswith("of source ")
        (package / "inner.py").write_text("CONSTANT = 1")
        assert imported_packages(before)["ce_package"] != first
        assert "sys" not in imported_packages()
    finally:
        del sys.modules["ce_package"]


def version_in(directory: Path) -> str:
    """Return the digest of `ce_own` in a directory, as a process that imports it there finds it."""
    code = (
        "import ce_own; from clusterenv.wire.compatibility import version_of; print(version_of('ce_own').split()[-1])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
