"""A real OpenSSH server for tests: keys of its own, addresses of its own on the loopback, gone when the test is."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from clusterenv.launchers.ssh import SSHLauncher
from tests.conftest import MARK

Enter = Callable[..., list[str]]

ROOT = Path(__file__).parent.parent
PORT = 2222
CLOSED_PORT = 2223

SERVER = """
Port {port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PidFile none
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 10:100:10
SetEnv {mark_name}={mark}
"""

CLIENT = """
Host *
  User {user}
  Port {port}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {directory}/known_hosts
  GlobalKnownHostsFile none
  StrictHostKeyChecking yes
  LogLevel ERROR
  # What people like when they log in must not matter to workers.
  RequestTTY yes
  RemoteCommand tmux attach
"""


class Sshd:
    """OpenSSH servers, one an address, that let this user in by key; `ssh -F config` knows them as host1, host2, ...

    Processes they start carry the mark of the test, so that a test which leaves one behind fails.

    Attributes:
        config: The client's configuration. It also knows `wrong-key`, `wrong-port` and `no-such-host`.
        addresses: Where the hosts listen.
    """

    def __init__(self, directory: Path, addresses: Mapping[str, Enter]) -> None:
        """Start it.

        Args:
            directory: For keys and configurations; an empty one.
            addresses: Where to listen: one for each host, and how to run a command on that host.
        """
        self.addresses = tuple(addresses)
        self.config = directory / "ssh_config"
        for name in ("host_key", "user_key", "stranger_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name))
        shutil.copy(directory / "user_key.pub", directory / "authorized_keys")
        host_key = " ".join((directory / "host_key.pub").read_text().split()[:2])
        (directory / "known_hosts").write_text("".join(f"[{address}]:{PORT} {host_key}\n" for address in addresses))
        settings = {"directory": directory, "port": PORT, "user": getpass.getuser()}
        hosts = [(f"host{number}", address, "user_key", PORT) for number, address in enumerate(addresses, start=1)]
        hosts += [
            ("wrong-key", self.addresses[0], "stranger_key", PORT),
            ("wrong-port", self.addresses[0], "user_key", CLOSED_PORT),
            ("no-such-host", "no-such-host.invalid", "user_key", PORT),
        ]
        # The first value of a setting holds, so what is particular comes first.
        particular = [
            f"Host {name}\n  HostName {address}\n  IdentityFile {directory / key}\n  Port {port}\n"
            for name, address, key, port in hosts
        ]
        self.config.write_text("".join(particular) + CLIENT.format(**settings))
        self.config.chmod(0o600)
        if os.getuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)  # sshd insists on it; packages make it when the service starts.
        server = directory / "sshd_config"
        server.write_text(SERVER.format(**settings, mark_name=MARK, mark=os.environ[MARK]))
        self._processes = []
        for address, enter in addresses.items():
            command = enter(_find("sshd"), "-D", "-e", "-f", str(server), "-o", f"ListenAddress={address}")
            self._processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        for process in self._processes:
            assert process.stderr is not None
            for line in process.stderr:
                if "Server listening" in line:
                    break
            else:
                raise AssertionError("sshd ended instead of listening")

    def launcher(self, hosts: Any, **settings: Any) -> SSHLauncher:
        """Return a launcher for these hosts whose workers find this project and the tests."""
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        settings = {
            "python": sys.executable,
            "setup": [f"export PYTHONPATH={path}"],
            "ssh_options": ["-F", str(self.config)],
            **settings,
        }
        return SSHLauncher(hosts=hosts, **settings)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let nobody log in for a while; whoever tries waits."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in self._processes:
                process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.communicate(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture
def sshd(nothing_is_left_behind: None) -> Iterator[Sshd]:
    """Two hosts on the loopback."""
    require_sshd()
    # The whole of 127/8 is this machine: addresses made of our process id are nobody else's.
    block = f"127.{os.getpid() >> 14 & 127 | 128}.{os.getpid() >> 6 & 255}"
    host = (os.getpid() & 63) * 4 + 1
    with (
        tempfile.TemporaryDirectory(prefix="sshd") as directory,
        Sshd(Path(directory), dict.fromkeys([f"{block}.{host}", f"{block}.{host + 1}"], enter_here)) as server,
    ):
        yield server


def enter_here(*command: str) -> list[str]:
    """Run a command on this machine."""
    return list(command)


def require_sshd() -> None:
    """Skip the test where there is no sshd."""
    for program in ("ssh", "ssh-keygen", "sshd"):
        if shutil.which(program, path=_path()) is None:
            pytest.skip(f"needs {program}; see scripts/install_infrastructure")


def _find(program: str) -> str:
    path = shutil.which(program, path=_path())
    assert path is not None, program
    return path


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=30)
