"""Hosts on one machine: network namespaces, each with its own address and host name, on a switch of their own.

Nothing is added to the machine's own network, and the hosts reach nothing but each other. Processes on them are
ordinary processes of this kernel, so a test can find and kill them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("ip", "unshare", "mount")
_NAMESPACES = Path("/run/netns")
_count = itertools.count()

# What a process on a host sees of its own: the name, the other hosts' names, and directories that others do not share.
_ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
[ -z "$3" ] || mount -t tmpfs tmpfs "$3"
shift 3
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        private: A directory that is another one on each host, though it has the same name.
    """

    name: str
    address: str
    namespace: str
    hosts_file: Path
    private: Path | None

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "--propagation", "slave"]
        private = "" if self.private is None else str(self.private)
        return [*enter, "bash", "-c", _ENTER, "_", self.name, str(self.hosts_file), private, *command]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Be on this host's network for a while, with all that this thread starts meanwhile."""
        with open("/proc/thread-self/ns/net", "rb") as before, open(_NAMESPACES / self.namespace, "rb") as here:
            _enter(here.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self) -> None:
        """Pull the plug: nothing gets in or out any more."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")


@contextlib.contextmanager
def connected_hosts(names: Sequence[str], directory: Path, *, private: Path | None = None) -> Iterator[list[Host]]:
    """Make hosts that reach each other, and remove them in the end.

    Args:
        names: Their host names.
        directory: Where a file may be kept.
        private: An existing directory that each of them shall have for itself.
    """
    require(*PROGRAMS)
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    prefix = f"ce{os.getpid()}-{next(_count)}"
    switch = f"{prefix}-switch"
    hosts_file = directory / "hosts"
    hosts = [
        Host(name, f"10.88.0.{number}", f"{prefix}-{name}", hosts_file, private)
        for number, name in enumerate(names, start=1)
    ]
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    hosts_file.write_text("\n".join(lines) + "\n")
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, host in enumerate(hosts, start=1):
            _connect(host, switch, f"port{number}")
        yield hosts
    finally:
        for namespace in (switch, *(host.namespace for host in hosts)):
            if (_NAMESPACES / namespace).exists():
                _ip("netns", "delete", namespace)


def require(*programs: str) -> None:
    """Skip the test if a program is missing here, and say which."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}; see scripts/install_infrastructure")


def _connect(host: Host, switch: str, port: str) -> None:
    _ip("netns", "add", host.namespace)
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("link", "add", "eth0", "netns", host.namespace, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
