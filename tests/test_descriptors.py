"""Many workers take many open files: that is found out before any is started."""

from __future__ import annotations

import subprocess
import sys

# Prints what became of the limits, in a process whose own may not be changed back.
LIMITED = """
import resource, sys
soft, hard, num_workers = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from clusterenv import ClusterEnv
from clusterenv.errors import LaunchError
from tests.launchers import OwnLauncher

class NoLauncher(OwnLauncher):
    def launch(self, ticket, num_workers):
        raise LaunchError("this is as far as it goes")

try:
    ClusterEnv("CartPole-v1", num_workers, num_workers=num_workers, launcher=NoLauncher())
except LaunchError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def run(soft: int, hard: int, num_workers: int) -> list[str]:
    command = [sys.executable, "-c", LIMITED, *map(str, (soft, hard, num_workers))]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_more_workers_than_there_may_be_open_files_are_refused_before_any_is_started() -> None:
    refusal, limits = run(200, 200, 100)
    assert "100 workers take at least 200 open files" in refusal
    assert "this process may have 200 (`ulimit -Hn`)" in refusal
    assert limits == "200 200"


def test_a_limit_that_may_be_raised_is_raised_as_far_as_is_needed() -> None:
    reached, limits = run(128, 4096, 200)
    assert reached == "this is as far as it goes"
    soft, hard = map(int, limits.split())
    assert 200 * 8 < soft < 4096
    assert hard == 4096


def test_a_limit_that_is_enough_is_left_alone() -> None:
    assert run(1000, 4096, 2)[1] == "1000 4096"
