"""Secret: removes a variable from this process's environment, so that it cannot be read there afterwards."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# Fields of /proc/self/stat, counted after the command's name: where the environment begins and ends.
_ENV_START, _ENV_END = 47, 48


def take_variable(name: str) -> str:
    """Return a variable's value ("" if unset), and hide it from environments and the processes they start.

    `os.environ` is a copy, and `unsetenv` only drops a pointer: the original value stays in the process's memory, where
    `/proc/<pid>/environ` shows it. So it is overwritten there.
    """
    value = os.environ.pop(name, "")
    if sys.platform == "linux":
        _overwrite(os.fsencode(name) + b"=")
    return value


def _overwrite(beginning: bytes) -> None:
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    except (OSError, IndexError, ValueError):  # Without /proc, it cannot be read there either.
        return
    if not 0 < start < end:
        return
    offset = 0
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.startswith(beginning):
            ctypes.memset(start + offset + len(beginning), 0, len(entry) - len(beginning))
        offset += len(entry) + 1
