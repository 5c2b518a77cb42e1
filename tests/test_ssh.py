"""Workers over a real sshd, and what can go wrong on the way to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clusterenv import ClusterEnv, Faults, SSHLauncher
from clusterenv.errors import ConfigError, LaunchError, WorkerLost
from tests.launcher_contract import LauncherContract
from tests.sshd import Sshd, sshd
from tests.worlds import assert_same, make_factories

__all__ = ["sshd"]


@pytest.mark.slow
class TestSSHLauncher(LauncherContract):
    """What every launcher must do."""

    programs = ("ssh",)
    stride = 7

    @pytest.fixture(autouse=True)
    def with_sshd(self, sshd: Sshd) -> None:
        self.sshd = sshd

    def make_launcher(self, log_dir: Path) -> SSHLauncher:
        return self.sshd.launcher(["host1", "host2"], log_dir=log_dir)


def test_two_runs_at_once_do_not_disturb_each_other(sshd: Sshd) -> None:
    makers = make_factories(2)
    with (
        ClusterEnv(makers, num_workers=1, launcher=sshd.launcher(["host1"])) as one,
        ClusterEnv(makers, num_workers=1, launcher=sshd.launcher(["host1"])) as other,
    ):
        assert_same(one.reset(seed=1), other.reset(seed=1))
        one.close()
        assert_same(other.step([0, 1])[1].shape, (2,))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("wrong-key", "Permission denied"),
        ("wrong-port", "Connection refused"),
        ("no-such-host", "Could not resolve hostname"),
    ],
)
def test_a_host_that_cannot_be_logged_in_to_is_named_with_the_words_of_ssh(sshd: Sshd, host: str, words: str) -> None:
    launcher = sshd.launcher(["host1", host])
    with pytest.raises(LaunchError, match=f"(?s)Worker 1 .*ssh could not connect to {host}.*{words}"):
        ClusterEnv(make_factories(2), num_workers=2, launcher=launcher)


def test_a_python_that_is_not_there_is_named(sshd: Sshd) -> None:
    launcher = sshd.launcher(["host1"], python="/nowhere/python3")
    with pytest.raises(LaunchError, match=r"(?s)exit status 127 on host1.*/nowhere/python3: No such file"):
        ClusterEnv(make_factories(1), num_workers=1, launcher=launcher)


def test_a_line_of_the_setup_that_fails_is_named(sshd: Sshd) -> None:
    launcher = sshd.launcher(["host1"], setup=["true", "module load no-such-thing"])
    with pytest.raises(LaunchError, match=r"(?s)exit status 1 on host1.*line 2 of the setup failed"):
        ClusterEnv(make_factories(1), num_workers=1, launcher=launcher)


def test_a_python_without_clusterenv_says_so(sshd: Sshd) -> None:
    launcher = sshd.launcher(["host1"], setup=["export PYTHONPATH="], python="/usr/bin/env python3 -S -E")
    with pytest.raises(LaunchError, match=r"(?s)exit status 1 on host1.*No module named"):
        ClusterEnv(make_factories(1), num_workers=1, launcher=launcher)


def test_a_worker_killed_during_a_run_is_named_with_its_host(sshd: Sshd) -> None:
    with ClusterEnv(
        make_factories(2), launcher=sshd.launcher(["host1", "host2"]), faults=Faults(on_loss="raise")
    ) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="killed by SIGKILL on host2") as caught:
            envs.step([0, 0])
    assert caught.value.worker_index == 1


def test_output_is_kept_where_it_is_wanted(sshd: Sshd, tmp_path: Path) -> None:
    launcher = sshd.launcher(["host1"], log_dir=tmp_path, setup=["echo set up"], python="echo worker says")
    with pytest.raises(LaunchError):
        ClusterEnv(make_factories(1), num_workers=1, launcher=launcher)
    assert "set up\nworker says -m clusterenv.worker" in next(tmp_path.glob("run-*/worker-0.log")).read_text()


def test_the_head_is_told_the_address_behind_an_alias(sshd: Sshd) -> None:
    assert sshd.launcher(["host2", "host1"]).route_to == sshd.addresses[1]


def test_what_would_run_is_shown_without_the_ticket(sshd: Sshd) -> None:
    text = sshd.launcher({"user@host1": 1}, setup=["module load swig"]).render(1)
    assert (
        "user@host1 'exec bash -l -s clusterenv-worker-0' <<'END'\n# Here the ticket is set.\nmodule load swig\n"
        in text
    )
    assert text.endswith(" -m clusterenv.worker\nEND")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hosts": []}, "at least one host"),
        ({"hosts": "gpu1"}, "must be a list"),
        ({"hosts": ["-oProxyCommand=touch me"]}, "not the name of a host"),
        ({"hosts": ["a", "a"]}, "names a twice"),
        ({"hosts": {"a": 0}}, "at least 1 worker"),
        ({"hosts": {"a": "many"}}, "at least 1 worker"),
        ({"hosts": ["a"], "setup": "module load"}, "must be a list"),
        ({"hosts": ["a"], "setup": ["#" * 40_000]}, "put it into a file"),
        ({"hosts": ["a"], "cpus": 0}, "at least 1"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is_written(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SSHLauncher(**settings)


def test_more_workers_than_the_hosts_are_for_are_refused() -> None:
    launcher = SSHLauncher(hosts={"a": 1, "b": 3})
    assert launcher.suggested_workers == 4
    assert hosts_of(launcher.render(3)) == ["a", "b", "b"]
    with pytest.raises(ConfigError, match=r"num_workers=5, but SSHLauncher\.hosts has places for 4"):
        launcher.render(5)


def test_hosts_in_a_list_get_equally_many_workers() -> None:
    launcher = SSHLauncher(hosts=["a", "b"])
    assert launcher.suggested_workers == 2
    assert hosts_of(launcher.render(1)) == ["a"]
    assert hosts_of(launcher.render(5)) == ["a", "a", "a", "b", "b"]


def hosts_of(text: str) -> list[str]:
    return [line.split(" -- ")[1].split()[0] for line in text.splitlines() if line.startswith("ssh ")]
