"""Interfaces of launchers, which are recipes for starting workers somewhere, and of the fleets they start.

All launchers use the same names for the resources of each worker, as far as they can provide them: `cpus` (which is
also the number of BLAS, OpenMP and torch threads), `memory` ("4G") and `gpus`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Protocol

from clusterenv.wire.ticket import Ticket

ELSEWHERE = "192.0.2.1"  # Stands for any other machine (RFC 5737): nothing is ever sent there.


class Fleet(Protocol):
    """Workers that a launcher started.

    The head calls `exits` about ten times a second while it waits. So `exits`, `status` and `restart` never wait for a
    process, a scheduler or a network: slow work runs in the background, and each call takes the next step.
    """

    def exits(self) -> dict[int, str]:
        """Return how each worker that is no longer running ended, by index: e.g. "killed by SIGKILL".

        A worker that could not be started or restarted is included: "could not be started: ...".
        """

    def status(self) -> str:
        """Say in one line what workers that are not up yet are waiting for, e.g. "job 17 is pending (Resources)"."""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, or an empty string."""

    def restart(self, worker_index: int) -> None:
        """Restart a worker with the same ticket and index; the old one is killed if it is still alive.

        Notes the request and returns. From then on `exits` no longer reports the old worker; later calls of `exits` and
        `status` start the new one. If it cannot be started, `exits` says so.
        """

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to exit on their own, then kill them; leave nothing behind.

        May be called again, and must be after an interrupt: it continues where it stopped.
        """


class Launcher(Protocol):
    """A recipe for starting workers somewhere; the defaults suit workers that start immediately on this machine."""

    @property
    def suggested_workers(self) -> int | None:
        """How many workers to start if `ClusterEnv(num_workers=None)`; None: one per core of this machine."""
        return None

    @property
    def route_to(self) -> str | None:
        """A host the workers run on, so that the head listens where they can reach it; None for this machine."""
        return None

    @property
    def queues(self) -> bool:
        """Whether workers may have to wait in a queue, so that mistakes should be found before they are submitted."""
        return False

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        """Start the workers; they join the head when they are up.

        Raises:
            ConfigError: The launcher has no room for this many workers.
            LaunchError: The workers cannot be started.
        """

    def render(self, num_workers: int) -> str:
        """Show what `launch` would run, as a person would type it, without the ticket."""


def run_labels() -> dict[str, str]:
    """Return labels that identify this run in a cluster's job names, comments and labels.

    Returns:
        `run`, named after the script, and `user`; both are short, of letters, digits and dashes, as clusters require.
    """
    import getpass  # Few launchers need it; importing it above would slow every import down.

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A user id without a name, as in many containers.
        user = ""
    path = Path(sys.argv[0] if sys.argv else "")
    script = path.parent.name if path.stem == "__main__" else path.stem  # `python -m package` is the former.
    if script.startswith("-"):  # python -c
        script = ""
    return {"run": _label(script) or "python", "user": _label(user) or "unknown"}


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
