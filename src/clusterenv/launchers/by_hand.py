"""ByHandLauncher: somebody else starts the workers, with a ticket file: a person, a script, any scheduler."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterenv.errors import ConfigError
from clusterenv.launchers.base import ELSEWHERE
from clusterenv.launchers.ticket_file import write_ticket
from clusterenv.wire.ticket import WORKER_VARIABLE, Ticket

log = logging.getLogger(__name__)

# Where a scheduler says which of many equal processes this one is, and the number it gives the first.
_INDEX_VARIABLES = {
    WORKER_VARIABLE: 0,
    "SLURM_PROCID": 0,
    "OMPI_COMM_WORLD_RANK": 0,
    "PMI_RANK": 0,
    "PBS_ARRAY_INDEX": 0,
    "SGE_TASK_ID": 1,
    "LSB_JOBINDEX": 1,
}


@dataclass(frozen=True, kw_only=True)
class ByHandLauncher:
    """Writes the ticket to a file that only you can read, says how to start workers with it, and lets the head wait.

    The file may be copied to other machines. It is removed when the run ends; by then it opens nothing any more.

    Attributes:
        num_workers: How many workers there will be; None leaves it to `ClusterEnv(num_workers=...)`.
        ticket_file: Where to write the ticket; it must not exist. By default in a new private directory.
        route_to: A host that workers will run on, so that the head listens where they can reach it. By default any
            other machine; None for this machine only.
    """

    num_workers: int | None = None
    ticket_file: str | Path | None = None
    route_to: str | None = ELSEWHERE

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise ConfigError(f"ByHandLauncher.num_workers must be at least 1, got {self.num_workers}.")

    def launch(self, ticket: Ticket, num_workers: int) -> ByHandFleet:
        """Write the ticket, say how to use it, and return at once."""
        return ByHandFleet(ticket, num_workers, self.ticket_file)

    def render(self, num_workers: int) -> str:
        """Show the command line that somebody has to run for each worker."""
        file = Path(self.ticket_file or "TICKET_FILE")
        return "\n".join(_command(file, worker_index) for worker_index in range(num_workers))


class ByHandFleet:
    """Workers of which only the ticket file is ours."""

    def __init__(self, ticket: Ticket, num_workers: int, ticket_file: str | Path | None) -> None:
        """Write the ticket file and say how to start workers with it.

        Raises:
            LaunchError: It cannot be written, or exists.
        """
        self._directory: Path | None = None
        if ticket_file is None:
            self._directory = Path(tempfile.mkdtemp(prefix="clusterenv-"))  # Nobody else can enter it.
            self._file = self._directory / "ticket"
        else:
            self._file = Path(ticket_file).absolute()
        write_ticket(ticket, self._file)
        self._is_stopped = False
        log.warning(
            "start %d worker(s) where %s can be reached: %s%s",
            num_workers,
            ticket.endpoint,
            _command(self._file, 0),
            f" and so on, up to --index {num_workers - 1}" if num_workers > 1 else "",
        )

    def exits(self) -> dict[int, str]:
        """Return nothing: nobody tells us."""
        return {}

    def status(self) -> str:
        """Say what is waited for."""
        return f"waiting for workers to be started by hand with {self._file}"

    def log_tail(self, worker_index: int) -> str:
        """Return nothing: whoever started a worker sees what it prints."""
        return ""

    def restart(self, worker_index: int) -> None:
        """Ask for the worker to be started again."""
        log.warning("worker %d is needed again: %s", worker_index, _command(self._file, worker_index))

    def stop(self, timeout_s: float) -> None:
        """Remove the ticket file. The head has told workers to stop, and they notice when it is gone."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._file.unlink(missing_ok=True)
        if self._directory is not None:
            self._directory.rmdir()


def find_index(variables: Mapping[str, str]) -> int:
    """Find a worker's index in its environment variables, where the head's launcher or a scheduler put it.

    Raises:
        ConfigError: There is none.
    """
    for name, first in _INDEX_VARIABLES.items():
        if variables.get(name, "").isdecimal():  # SGE_TASK_ID is "undefined" outside an array.
            return int(variables[name]) - first
    raise ConfigError(
        "Which worker is this? Give --index: 0 for the first, 1 for the second and so on, each once; or set one of "
        f"{', '.join(_INDEX_VARIABLES)}."
    )


def _command(file: Path, worker_index: int) -> str:
    return f"clusterenv worker --ticket {shlex.quote(str(file))} --index {worker_index}"
