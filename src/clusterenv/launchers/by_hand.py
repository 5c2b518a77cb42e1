"""ByHandLauncher: a person, a script or any scheduler starts the workers, with a ticket file."""

from __future__ import annotations

import logging
import os
import shlex
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import ELSEWHERE, Launcher
from clusterenv.launchers.processes import uninterrupted
from clusterenv.wire.ticket import WORKER_VARIABLE, Ticket

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 16

# The variables in which schedulers give a process its index, and the index of the first process.
_INDEX_VARIABLES = {
    WORKER_VARIABLE: 0,
    "SLURM_PROCID": 0,
    "OMPI_COMM_WORLD_RANK": 0,
    "PMI_RANK": 0,
    "PBS_ARRAY_INDEX": 0,
    "JOB_COMPLETION_INDEX": 0,
    "SGE_TASK_ID": 1,
    "LSB_JOBINDEX": 1,
}


@dataclass(frozen=True, kw_only=True)
class ByHandLauncher(Launcher):
    """Writes the ticket to a file that only you can read, says how to start workers with it, and waits for them.

    The file may be copied to other machines. It is removed when the run ends; copies are useless from then on.

    Attributes:
        ticket_file: Where to write the ticket; the file must not exist. By default in a new private directory.
        route_to: A host that workers will run on, so that the head listens where they can reach it. By default any
            other machine; None for this machine only.
    """

    ticket_file: str | Path | None = None
    route_to: str | None = ELSEWHERE

    def launch(self, ticket: Ticket, num_workers: int) -> ByHandFleet:
        """Write the ticket, log how to use it, and return immediately.

        Raises:
            LaunchError: The file cannot be written, or already exists.
        """
        return ByHandFleet(ticket, num_workers, self.ticket_file)

    def render(self, num_workers: int) -> str:
        """Show the command line that somebody has to run for each worker."""
        file = Path(self.ticket_file or "TICKET_FILE")
        return "\n".join(_command(file, worker_index) for worker_index in range(num_workers))


class ByHandFleet:
    """Workers that somebody else starts: only the ticket file is ours."""

    def __init__(self, ticket: Ticket, num_workers: int, ticket_file: str | Path | None) -> None:
        self._directory: Path | None = None
        self._file: Path | None = None  # Until it is removed; only if we wrote it.
        try:
            with uninterrupted():
                if ticket_file is None:
                    self._directory = Path(tempfile.mkdtemp(prefix="clusterenv-"))  # Nobody else can enter it.
                    ticket_file = self._directory / "ticket"
                self._file = _write_ticket(ticket, Path(ticket_file).absolute())
            self._name = self._file
            log.warning(
                "start %d worker(s) where %s can be reached: %s%s",
                num_workers,
                ticket.endpoint,
                _command(self._name, 0),
                f" and so on, up to --index {num_workers - 1}" if num_workers > 1 else "",
            )
        except BaseException:
            self.stop(0.0)
            raise

    def exits(self) -> dict[int, str]:
        """Return nothing: exits are not reported to us."""
        return {}

    def status(self) -> str:
        return f"waiting for workers to be started by hand with {self._name}"

    def log_tail(self, worker_index: int) -> str:
        """Return nothing: whoever started a worker sees what it prints."""
        return ""

    def restart(self, worker_index: int) -> None:
        """Ask for the worker to be started again."""
        log.warning("worker %d is needed again: %s", worker_index, _command(self._name, worker_index))

    def stop(self, timeout_s: float) -> None:
        """Remove the ticket file. The head has told the workers to stop, and they notice when the head is gone."""
        with uninterrupted():
            if self._file is not None:
                self._file.unlink(missing_ok=True)
                self._file = None
            if self._directory is not None:
                self._directory.rmdir()
                self._directory = None


def read_ticket(file: Path) -> Ticket:
    """Read a ticket file.

    Raises:
        ConfigError: The file does not exist, does not hold a ticket, or can be read by others.
    """
    try:
        with file.open("rb") as opened:
            state = os.fstat(opened.fileno())
            text = opened.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"The ticket file {file} cannot be read: {error.strerror}. The head writes it when it starts, and "
            "removes it when it ends."
        ) from error
    if stat.S_ISREG(state.st_mode) and state.st_mode & 0o077 and not _is_secret_volume(file.parent):
        raise ConfigError(
            f"The ticket file {file} can be used by others (its mode is {stat.S_IMODE(state.st_mode):04o}): whoever "
            f"has it can pose as a worker. Protect it: chmod 600 {shlex.quote(str(file))}"
        )
    try:
        return Ticket.decode(text.decode("ascii", errors="replace").strip())
    except ConfigError as error:
        raise ConfigError(
            f"{file} holds no ticket, or only a part of one. Copy the whole file that the head wrote."
        ) from error


def find_index(variables: Mapping[str, str]) -> int:
    """Find a worker's index in its environment variables, where the head's launcher or a scheduler put it.

    Raises:
        ConfigError: No variable holds an index.
    """
    for name, first in _INDEX_VARIABLES.items():
        if variables.get(name, "").isdecimal():  # SGE_TASK_ID is "undefined" outside an array.
            return int(variables[name]) - first
    raise ConfigError(
        "Which worker is this? Give --index: 0 for the first, 1 for the second and so on, each once; or set one of "
        f"{', '.join(_INDEX_VARIABLES)}."
    )


def _is_secret_volume(directory: Path) -> bool:
    """Whether Kubernetes has mounted a Secret there: its file modes concern only the users of one container.

    The link of this name is how a kubelet replaces all files of such a volume at once.
    """
    return (directory / "..data").is_symlink()


def _write_ticket(ticket: Ticket, file: Path) -> Path:
    """Write a ticket to a new file that only its owner can read."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise LaunchError(
            f"The ticket file {file} exists. If no other run is using it, remove it; else choose another name."
        ) from error
    except OSError as error:
        raise LaunchError(f"The ticket file {file} cannot be written: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(ticket.encode() + "\n")
    except OSError as error:  # The disk is full.
        file.unlink()
        raise LaunchError(f"The ticket file {file} cannot be written: {error.strerror}.") from error
    return file


def _command(file: Path, worker_index: int) -> str:
    return f"clusterenv worker --ticket {shlex.quote(str(file))} --index {worker_index}"
