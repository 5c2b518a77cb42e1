"""Processes of this machine and their descendants; on Linux only, elsewhere none are found."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
# Fields of /proc/<pid>/stat, counted from the one after the command's name.
_STATE, _PARENT, _GROUP, _START = 0, 1, 2, 19


class Process(NamedTuple):
    """A process, identified by id and start time: the id alone may be reused.

    Attributes:
        started: In clock ticks since the machine started.
    """

    pid: int
    started: int


class ProcessInfo(NamedTuple):
    """What the kernel says about a process.

    Attributes:
        name: The name of its main thread, which it may have set itself.
        is_zombie: Whether it has ended, and only waits to be reaped.
    """

    process: Process
    name: str
    parent_pid: int
    group_pid: int
    is_zombie: bool


def look_at(pid: int) -> ProcessInfo | None:
    """Return what is known about a process; None if there is none with this id."""
    try:
        before, _, after = (_PROC / str(pid) / "stat").read_text().rpartition(")")
    except (OSError, UnicodeDecodeError):
        return None
    fields = after.split()
    return ProcessInfo(
        Process(pid, int(fields[_START])),
        before.partition("(")[2],
        int(fields[_PARENT]),
        int(fields[_GROUP]),
        fields[_STATE] in "ZX",
    )


def command_of(pid: int) -> list[str]:
    """Return a process's command line; nothing if it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def children_by_parent() -> dict[int, list[ProcessInfo]]:
    """Return all processes that have not ended, by the ids of their parents."""
    children: dict[int, list[ProcessInfo]] = {}
    names = os.listdir(_PROC) if _PROC.is_dir() else []
    for name in names:
        if name.isdecimal() and (info := look_at(int(name))) is not None and not info.is_zombie:
            children.setdefault(info.parent_pid, []).append(info)
    return children


def descendants(pid: int) -> list[Process]:
    """Return the children of a process, their children, and so on."""
    children = children_by_parent()
    found = list(children.get(pid, ()))
    for info in found:  # Which grows meanwhile.
        found += children.get(info.process.pid, ())
    return [info.process for info in found]


def is_running(process: Process) -> bool:
    """Return whether this very process is still running, not another one with the same id."""
    info = look_at(process.pid)
    return info is not None and info.process == process and not info.is_zombie


def wait_for_end(processes: Collection[Process], timeout_s: float) -> list[Process]:
    """Wait for processes to end, woken by the kernel; return those that are still running."""
    ends_at = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(process.pid)
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                if is_running(process):
                    poll.poll(max(0.0, ends_at - time.monotonic()) * 1000)
            finally:
                os.close(handle)
    return [process for process in processes if is_running(process)]
