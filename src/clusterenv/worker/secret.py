"""Secret: a variable taken out of this process's environment, so that nobody can read it there afterwards."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# In /proc/self/stat, counted from the field behind the command's name: where the environment begins and ends.
_ENV_START, _ENV_END = 47, 48


def take_variable(name: str) -> str:
    """Return a variable's value, or nothing, and leave none of it for environments or for what they start.

    `os.environ` is a copy, and `unsetenv` drops a pointer: what the process was started with stays in its memory, where
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
    except (OSError, IndexError, ValueError):  # Without /proc nobody can read it there either.
        return
    if not 0 < start < end:
        return
    offset = 0
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.startswith(beginning):
            ctypes.memset(start + offset + len(beginning), 0, len(entry) - len(beginning))
        offset += len(entry) + 1
