"""What a launcher is: a recipe for starting workers somewhere, and the fleet it started."""

from __future__ import annotations

from typing import Protocol

from clusterenv.wire.ticket import Ticket


class Fleet(Protocol):
    """Workers that a launcher started."""

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended: its index and e.g. "killed by SIGKILL"."""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, or an empty string."""

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end by themselves, then end them; leaves nothing behind."""


class Launcher(Protocol):
    """A recipe for starting workers somewhere."""

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        """Start the workers and return at once; they join the head when they are up.

        Raises:
            LaunchError: They cannot be started.
        """
