"""Witness: a launcher that remembers what became of its workers, after the head has put them away."""

from __future__ import annotations

from clusterenv.launchers.base import Fleet, Launcher
from clusterenv.wire.ticket import Ticket


class Witness:
    """Launches as another launcher does.

    Attributes:
        endpoint: Where the workers were told to find the head; None as long as it has none.
        has_started: Whether the launcher did its part.
        exits: How workers ended that ended by themselves.
        tails: The ends of all workers' logs.
        status: What workers last waited for.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.endpoint: str | None = None
        self.has_started = False
        self.exits: dict[int, str] = {}
        self.tails: dict[int, str] = {}
        self.status = ""
        self._launcher = launcher

    @property
    def num_workers(self) -> int | None:
        """The other's."""
        return self._launcher.num_workers

    @property
    def route_to(self) -> str | None:
        """The other's."""
        return self._launcher.route_to

    def launch(self, ticket: Ticket, num_workers: int) -> Fleet:
        """Launch, and keep an eye on the fleet."""
        self.endpoint = ticket.endpoint
        fleet = self._launcher.launch(ticket, num_workers)
        self.has_started = True
        return _WatchedFleet(fleet, self, num_workers)

    def render(self, num_workers: int) -> str:
        """Show what the other shows."""
        return self._launcher.render(num_workers)


class _WatchedFleet:
    def __init__(self, fleet: Fleet, witness: Witness, num_workers: int) -> None:
        self._fleet = fleet
        self._witness = witness
        self._num_workers = num_workers
        self.exits = fleet.exits
        self.log_tail = fleet.log_tail
        self.restart = fleet.restart

    def status(self) -> str:
        self._witness.status = self._fleet.status()
        return self._witness.status

    def stop(self, timeout_s: float) -> None:
        self._witness.exits = self._fleet.exits()
        self._witness.tails = {index: self._fleet.log_tail(index) for index in range(self._num_workers)}
        self._fleet.stop(timeout_s)
