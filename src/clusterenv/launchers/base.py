"""What a launcher is: a recipe for starting workers somewhere, and the fleet it started.

Launchers say of each worker what it gets by the same names: `cpus` (and as many threads of BLAS, OpenMP and torch),
`memory` ("4G") and `gpus`, as far as the place where they start workers can give them.
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

    The head asks `exits` about ten times a second while it waits. So `exits`, `status` and `restart` never wait for a
    process, a scheduler or a network: what takes time goes on in the background, and each call takes the next step.
    """

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended: its index and e.g. "killed by SIGKILL".

        A worker that could not be started (again) is among them: "could not be started: ...".
        """

    def status(self) -> str:
        """Say in a line what workers that are not up yet wait for, e.g. "job 17 is pending (Resources)"; or nothing."""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, or an empty string."""

    def restart(self, worker_index: int) -> None:
        """Have a worker started once more, with the same ticket and index; the old one is ended if it still lives.

        Notes the wish and returns. From then on `exits` does not name the old one any more; later calls of `exits` and
        `status` see to it that the new one starts. If it cannot be started, `exits` says so.
        """

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end on their own, then end them; leaves nothing behind.

        May be repeated, and must be after an interrupt: it goes on where it was.
        """


class Launcher(Protocol):
    """A recipe for starting workers somewhere. Whoever inherits from it starts them at once, on this very machine."""

    @property
    def suggested_workers(self) -> int | None:
        """How many workers to start if `ClusterEnv(num_workers=None)`; None: one per core of this machine."""
        return None

    @property
    def route_to(self) -> str | None:
        """A host the workers run on, so that the head listens where they can reach it; None for this very machine."""
        return None

    @property
    def queues(self) -> bool:
        """Whether workers may have to wait for their turn, so that mistakes should be found before they are queued."""
        return False

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        """Start the workers; they join the head when they are up.

        Raises:
            ConfigError: The recipe has no place for this many.
            LaunchError: They cannot be started.
        """

    def render(self, num_workers: int) -> str:
        """Show what `launch` would run, as a person would type it; without the ticket."""


def run_labels() -> dict[str, str]:
    """Return whose run this is, for the names, comments and labels by which a cluster shows its jobs.

    Returns:
        `run`, after the script, and `user`; short, and of letters, digits and dashes, as every cluster takes them.
    """
    import getpass  # Needed by few launchers, and imported with all of them it would cost everybody.

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
