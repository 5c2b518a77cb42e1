"""What is left of something that has ended: processes, descriptors, threads, shared memory, files.

Processes are known by a mark that they inherit in their environment, so that orphans are found too, and what others do
on this machine is not taken for ours.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

MARK = "CLUSTERENV_TEST_MARK"


def warm_up() -> None:
    """Let pyzmq make now the thread, and its sockets, that it keeps for the life of the process: they are not ours."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as near, context.socket(zmq.PAIR) as far:
        near.bind("inproc://warm")
        far.connect("inproc://warm")
        far.send(bytes(10**6), copy=False)
        near.recv()


def descendants() -> list[int]:
    """Find the processes that inherited the mark this process has now, orphans included."""
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for pid in _pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:  # It ended meanwhile, or is somebody else's.
            continue
    return found


def wait_until_gone(pids: Sequence[int], deadline_s: float = 30.0) -> list[int]:
    """Wait for processes to end, woken by the kernel; return those that live on past the deadline."""
    ends_at = time.monotonic() + deadline_s
    alive = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, ends_at - time.monotonic()) * 1000):
                alive.append(pid)
        finally:
            os.close(handle)
    return alive


def belongings() -> set[str]:
    """Describe what this process holds: its children, threads and descriptors."""
    children = {f"child {pid}: {command_of(pid)}" for pid in _children()}
    threads = {f"thread {thread.name}" for thread in threading.enumerate()}
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"descriptor {number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # The listing's own descriptor.
            continue
    return children | threads | descriptors


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def unused(names: set[str]) -> list[str]:
    """Of these names in /dev/shm, return those no other living process maps or holds: the others are not ours."""
    if not names:
        return []
    used = ""
    for pid in _pids():
        try:
            used += Path(f"/proc/{pid}/maps").read_text()
            used += "\n".join(os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
    return sorted(name for name in names if f"/dev/shm/{name}" not in used and os.path.exists(f"/dev/shm/{name}"))


def command_of(pid: int) -> str:
    """Return a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") or "a zombie"
    except OSError:
        return "just gone"


def _children() -> list[int]:
    children = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children += [int(pid) for pid in (task / "children").read_text().split()]
        except FileNotFoundError:  # A thread that has just ended.
            continue
    return children


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
