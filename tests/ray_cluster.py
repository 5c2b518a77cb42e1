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

Command = Callable[..., list[str]]
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
        }
        self.address = ""
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start_head(self, *options: str, host: str = "127.0.0.1", command: Command = lambda *words: list(words)) -> None:
        """Start the first node, on this host."""
        self._start(command, "--head", "--port=0", f"--node-ip-address={host}", *options)
        file = self.directory / "ray" / "ray_current_cluster"
        ends_at = time.monotonic() + _START_S
        while not file.exists() or not (address := file.read_text().strip()):
            self._check(ends_at)
        self.address = address

    def add_node(self, *options: str, host: str, command: Command = lambda *words: list(words)) -> int:
        """Start another node, which joins the first; returns its number."""
        self._start(command, f"--address={self.address}", f"--node-ip-address={host}", *options)
        return len(self._nodes) - 1

    def kill_node(self, number: int) -> None:
        """Kill all processes of a node at once, as if its machine had lost its power."""
        group = self._nodes[number].pid
        os.killpg(group, signal.SIGKILL)
        for pid in _session_of(group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._nodes[number].wait()

    def stop_node(self, number: int) -> None:
        """Stop a node as `ray stop` does: SIGTERM to its processes."""
        self._nodes[number].terminate()
        self._nodes[number].wait(_START_S)

    def launcher(self, **settings: Any) -> RayLauncher:
        """Return a launcher for it, whose actors carry the mark of the test."""
        variables = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        return RayLauncher(**{"address": self.address, "runtime_env": {"env_vars": variables}, **settings})

    def close(self) -> None:
        """End it."""
        for number, node in enumerate(self._nodes):
            if node.poll() is None:
                left = _session_of(node.pid)
                node.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.wait(10.0)
                if node.poll() is None:
                    self.kill_node(number)
                for pid in wait_until_gone(left, 5.0):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, command: Command, *options: str) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--include-dashboard=false"]
        ray += ["--disable-usage-stats", "--object-store-memory=100000000", *_PORTS, *options]
        if "--head" not in options:
            ray.remove("--include-dashboard=false")
        with (self.directory / f"node-{len(self._nodes)}.log").open("wb") as log:
            self._nodes.append(
                subprocess.Popen(
                    command(*ray), env=os.environ | self.variables, stdout=log, stderr=log, start_new_session=True
                )
            )

    def _check(self, ends_at: float) -> None:
        node = self._nodes[-1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(0.05)
        log = self.directory / f"node-{len(self._nodes) - 1}.log"
        assert node.poll() is None, log.read_text()
        assert time.monotonic() < ends_at, log.read_text()


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Make a cluster without nodes, and end it with all it has."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'clusterenv[ray]'")
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
