"""Ticket files: a ticket that only its owner can read, for workers that others start."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from clusterenv.errors import ConfigError, LaunchError
from clusterenv.wire.ticket import Ticket

_MAX_BYTES = 1 << 16


def write_ticket(ticket: Ticket, file: Path) -> None:
    """Write a ticket to a new file that only its owner can read.

    Raises:
        LaunchError: It cannot be written, or exists.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(ticket.encode() + "\n")
    except FileExistsError as error:
        raise LaunchError(
            f"The ticket file {file} exists. If no other run is using it, remove it; else choose another name."
        ) from error
    except OSError as error:
        raise LaunchError(f"The ticket file {file} cannot be written: {error.strerror}.") from error


def read_ticket(file: Path) -> Ticket:
    """Read a ticket file.

    Raises:
        ConfigError: There is none, it is no ticket, or others can read it.
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
    if stat.S_ISREG(state.st_mode) and state.st_mode & 0o077:
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
