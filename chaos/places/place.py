"""Place: where workers run while they are harmed, and what every place needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts import Host

from chaos.faults import POLL_S, Fault, Scratch
from clusterenv import ClusterEnv

SCRATCH_BYTES = 32 * 2**20
LOGS = "logs"
BRIEF = 0.4  # of the silence: too short a cut for anybody to be lost


@dataclass(frozen=True)
class Place:
    """Somewhere for workers to run.

    Attributes:
        options: What ClusterEnv must be given so that they run there.
        faults: What can befall them there and nowhere else.
        env_type: What to make of them; a place whose processes have other numbers there tells those that count here.
        call_s: After how long without a step a worker there is hung.
        deadline_s: How long it may take to go on after a fault.
    """

    options: Mapping[str, Any]
    faults: Sequence[Fault] = ()
    env_type: type[ClusterEnv] = ClusterEnv
    call_s: float = 6.0
    deadline_s: float = 60.0


@contextlib.contextmanager
def open_scratch() -> Iterator[Scratch | None]:
    """Mount a small disk, and have temporary files made there; None where one may not mount."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        path = Path(directory)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SCRATCH_BYTES}", "tmpfs", str(path)]
        is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = tempfile.tempdir = str(path)
        try:
            yield Scratch(path) if is_mounted else None
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before
            if is_mounted:
                subprocess.run(["umount", "--lazy", str(path)], check=True)


def host_of(pid: int, hosts: Sequence[Host]) -> Host | None:
    """Return on which of these hosts a process is; None if on none of them, or gone."""
    try:
        network = os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None
    return next((host for host in hosts if os.stat(f"/run/netns/{host.namespace}").st_ino == network), None)


def wait_until(has_come: Callable[[], bool], describe: Callable[[], str], deadline_s: float = 60.0) -> None:
    """Wait for something that only a cluster can be asked about; what it describes is in the error if it is late."""
    ends_at = time.monotonic() + deadline_s
    while not has_come():
        assert time.monotonic() < ends_at, describe()
        time.sleep(POLL_S)
