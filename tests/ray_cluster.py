"""A real Ray cluster for tests: nodes are processes of this machine, started and ended one by one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterenv import RayLauncher
from tests.conftest import MARK, wait_until_gone
from tests.hosts import Host

_START_S = 60.0
# Ports that Ray would take wherever it is: several clusters may be on this machine.
_PORTS = ("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")


class RayCluster:
    """One Ray cluster, its token, and its directory for sockets and logs.

    Attributes:
        address: Where its head node listens.
        variables: What a process needs in its environment to use it.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ce-ray-", dir="/tmp"))  # Short: names of sockets are in it.
        token = self.directory / "token"
        token.touch(0o600)
        token.write_text(uuid.uuid4().hex)
        self.variables = {
            "RAY_AUTH_MODE": "token",  # Else it would depend on whether the user has a token.
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.directory),
            # To find out in 2 s rather than 20 that a node is dead.
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.address = ""
        self._nodes: list[tuple[subprocess.Popen[bytes], Host | None]] = []

    def start_head(self, *options: str, host: Host | None = None) -> None:
        """Start the first node, on a host or this machine, and wait until it is up."""
        self._start(host, "--head", "--port=0", "--include-dashboard=false", *options)
        file = self.directory / "ray" / "ray_current_cluster"
        self._wait_until(file.exists)
        self._wait_until(lambda: bool(file.read_text().strip()))
        self.address = file.read_text().strip()
        self._wait_until(self._is_up)

    def add_node(self, *options: str, host: Host, waits: bool = True) -> None:
        """Start another node, which joins the first."""
        self._start(host, f"--address={self.address}", *options)
        if waits:
            self._wait_until(self._is_up)

    def kill_node(self, host: Host) -> None:
        """Kill all that runs on a host, as if it had lost its power."""
        command = ["ip", "netns", "pids", host.namespace]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for pid in map(int, found.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node, place in self._nodes:
            if place is host:
                node.wait()

    def stop(self) -> None:
        """Stop all nodes as `ray stop` does: SIGTERM to their processes; then insist."""
        running = [node for node, _ in self._nodes if node.poll() is None]
        left = [pid for node in running for pid in _session_of(node.pid)]
        for node in reversed(running):  # The first one last: the others would wait for it.
            node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(5.0)
            node.kill()
            node.wait()
        for pid in wait_until_gone(left, 5.0):
            os.kill(pid, signal.SIGKILL)

    def launcher(self, **settings: Any) -> RayLauncher:
        """Return a launcher for it, whose actors carry the mark of the test."""
        variables = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        return RayLauncher(**{"address": self.address, "runtime_env": {"env_vars": variables}, **settings})

    def close(self) -> None:
        """End it, and remove its directory."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self.directory / f"node-{len(self._nodes)}.log"

    def _start(self, host: Host | None, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--object-store-memory=100000000", *_PORTS, *options]
        command += [f"--node-ip-address={'127.0.0.1' if host is None else host.address}"]
        environment = os.environ | self.variables
        environment.pop(MARK, None)  # It outlives the test.
        with (self.directory / f"node-{len(self._nodes) + 1}.log").open("wb") as log:
            node = subprocess.Popen(
                command if host is None else host.command(*command),
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._nodes.append((node, host))

    def _is_up(self) -> bool:
        return "Ray runtime started" in self._log.read_text()

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        node, _ = self._nodes[-1]
        ends_at = time.monotonic() + _START_S
        while not is_true():
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(0.05)
            assert node.poll() is None, self._log.read_text()
            assert time.monotonic() < ends_at, self._log.read_text()


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Make a cluster without nodes, and end it with all it has."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'clusterenv-rl[ray]'")
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.close()


def _session_of(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(name)) == leader:
                found.append(int(name))
    return found
