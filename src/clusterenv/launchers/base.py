"""What a launcher is: a recipe for starting workers somewhere, and the fleet it started."""

from __future__ import annotations

from typing import Protocol

from clusterenv.wire.ticket import Ticket

ELSEWHERE = "192.0.2.1"  # Stands for any other machine (RFC 5737): nothing is ever sent there.


class Fleet(Protocol):
    """Workers that a launcher started."""

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended: its index and e.g. "killed by SIGKILL"."""

    def status(self) -> str:
        """Say in a line what workers that are not up yet wait for, e.g. "job 17 is pending (Resources)"; or nothing."""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines a worker wrote, or an empty string."""

    def restart(self, worker_index: int) -> None:
        """Start a worker once more, with the same ticket and index; ends the old one first if it still lives.

        Returns at once. `exits` no longer names the old one.

        Raises:
            LaunchError: It cannot be started.
        """

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end by themselves, then end them; leaves nothing behind."""


class Launcher(Protocol):
    """A recipe for starting workers somewhere."""

    @property
    def num_workers(self) -> int | None:
        """How many workers the recipe is for; None if the caller may choose."""

    @property
    def route_to(self) -> str | None:
        """A host the workers run on, so that the head listens where they can reach it; None for this very machine."""

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        """Start the workers and return at once; they join the head when they are up.

        Raises:
            LaunchError: They cannot be started.
        """

    def render(self, num_workers: int) -> str:
        """Show what `launch` would run, as a person would type it; without the ticket."""
