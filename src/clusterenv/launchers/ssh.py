"""SSHLauncher: workers on machines you can log in to with ssh."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterenv.config import thread_variables
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.ssh_fleet import SSHFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket


@dataclass(frozen=True, kw_only=True)
class SSHLauncher:
    """Starts workers on other machines, through the `ssh` program with your own configuration and keys.

    There must be a way in without a password (a key, an agent, a shared connection), and a Python with clusterenv on
    the other side.

    Attributes:
        hosts: Names as you would give them to ssh (`host`, `user@host`, an alias of your ssh configuration). A mapping
            says how many workers each gets.
        workers_per_host: How many workers a host gets if `hosts` only names them.
        python: The command for Python there, as you would type it, e.g. `~/venv/bin/python`.
        setup: Lines of shell to run there first, e.g. `module load cuda` or `cd ~/project`. One that fails
            ends the worker.
        threads_per_worker: How many threads BLAS, OpenMP and torch may use in a worker. By default the cores of a host
            are shared out evenly among its workers. Variables set there already are left alone.
        ssh_options: More options for ssh, e.g. `-F`, `my_ssh_config`, `-p`, `2222`.
        shell: What reads the commands there, from its standard input. A login shell by default, so that
            everything is as when you log in.
        connect_timeout_s: How long ssh tries to reach a host.
        log_dir: Where to keep what workers print, a file each. By default it is kept only for error messages.
    """

    hosts: Sequence[str] | Mapping[str, int]
    workers_per_host: int = 1
    python: str = "python3"
    setup: Sequence[str] = ()
    threads_per_worker: int | None = None
    ssh_options: Sequence[str] = ()
    shell: str = "bash -l"
    connect_timeout_s: int = 10
    log_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "setup", "ssh_options"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"SSHLauncher.{name} must be a list, got the text {getattr(self, name)!r}.")
        if not self.hosts:
            raise ConfigError("SSHLauncher.hosts is empty: name at least one host.")
        for host in self.hosts:
            # A name that ssh would take for an option could make it run anything.
            if not host or host.startswith("-") or not host.isprintable() or " " in host:
                raise ConfigError(f"SSHLauncher.hosts holds {host!r}, which is no name of a host.")
        if repeated := {host for host in self.hosts if list(self.hosts).count(host) > 1}:
            raise ConfigError(
                f"SSHLauncher.hosts names {', '.join(sorted(repeated))} twice; say how many workers a host gets "
                "with a mapping, e.g. hosts={'gpu1': 8}."
            )
        if isinstance(self.hosts, Mapping) and self.workers_per_host != 1:
            raise ConfigError("SSHLauncher.workers_per_host is for a list of hosts; the mapping says it for each.")
        for host, count in self._counts().items():
            if count < 1:
                raise ConfigError(f"SSHLauncher: {host} must get at least 1 worker, got {count}.")
        for name in ("threads_per_worker", "connect_timeout_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"SSHLauncher.{name} must be at least 1, got {value}.")

    @property
    def num_workers(self) -> int:
        """As many as the hosts get."""
        return sum(self._counts().values())

    @property
    def route_to(self) -> str:
        """The first host's address, as the ssh configuration gives it.

        Raises:
            LaunchError: There is no ssh here, or it cannot read its configuration.
        """
        host = next(iter(self.hosts))
        answer = subprocess.run([_find_ssh(), *self.ssh_options, "-G", "--", host], capture_output=True, text=True)
        if answer.returncode != 0:
            raise LaunchError(f"ssh cannot tell what it knows of {host}: {answer.stderr.strip()}")
        # "hostname gpu1.example.org", one setting a line.
        settings = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
        return settings.get("hostname", host)

    def launch(self, ticket: Ticket, num_workers: int) -> SSHFleet:
        """Start connecting to the hosts and return at once."""
        seats = self._seats(num_workers)
        _find_ssh()
        return SSHFleet(
            seats,
            lambda host, name: self._command(host, f"exec {self.shell} -s {name}"),
            # A variable of the shell, until the worker starts: what the setup lines run need not know the keys.
            lambda worker_index: f"{TICKET_VARIABLE}={ticket.encode()}\n{self._script(worker_index, seats)}",
            self.log_dir,
        )

    def render(self, num_workers: int) -> str:
        """Show each ssh command and what the shell at the other end is given to read."""
        seats = self._seats(num_workers)
        parts = []
        for worker_index, host in enumerate(seats):
            command = " ".join(self._command(host, f"'exec {self.shell} -s clusterenv-worker-{worker_index}'"))
            parts.append(f"{command} <<'END'\n# Here the ticket is set.\n{self._script(worker_index, seats)}END")
        return "\n".join(parts)

    def _counts(self) -> dict[str, int]:
        return dict(self.hosts) if isinstance(self.hosts, Mapping) else dict.fromkeys(self.hosts, self.workers_per_host)

    def _seats(self, num_workers: int) -> list[str]:
        """Return the host of each worker; if there are fewer than seats, the last hosts get fewer."""
        seats = [host for host, count in self._counts().items() for _ in range(count)]
        if not 0 < num_workers <= len(seats):
            raise ConfigError(
                f"SSHLauncher has hosts for {len(seats)} workers, but {num_workers} are wanted. "
                "Give it more hosts or more workers_per_host, or ask for fewer with ClusterEnv(num_workers=...)."
            )
        return seats[:num_workers]

    def _command(self, host: str, remote_command: str) -> list[str]:
        return [
            "ssh",
            *self.ssh_options,
            "-T",
            *("-o", "RemoteCommand=none"),  # Such as `tmux attach`, for people who log in.
            *("-o", "BatchMode=yes"),  # Nobody is there to type a password.
            *("-o", f"ConnectTimeout={self.connect_timeout_s}"),
            *("-o", "ServerAliveInterval=10"),
            # A shared connection that you have opened is used, but none is opened that would outlive the run.
            *("-o", "ControlMaster=no"),
            *("-o", "ClearAllForwardings=yes"),
            "--",
            host,
            remote_command,
        ]

    def _script(self, worker_index: int, seats: Sequence[str]) -> str:
        """Return the shell lines that become the worker, once the shell has the ticket."""
        if self.threads_per_worker is None:
            cores = "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 1)"
            threads = f"$(( {cores} / {seats.count(seats[worker_index])} ))"
        else:
            threads = str(self.threads_per_worker)
        setup = [
            f'{line}\n[ $? -eq 0 ] || {{ echo "line {number} of the setup failed"; exit 1; }}'
            for number, line in enumerate(self.setup, start=1)
        ]
        return "\n".join(
            [
                *setup,
                f"threads={threads}; [ $threads -ge 1 ] || threads=1",
                *(f'export {name}="${{{name}:-$threads}}"' for name in thread_variables(1)),
                f"export {TICKET_VARIABLE} {WORKER_VARIABLE}={worker_index} PYTHONUNBUFFERED=1",
                f"{self.python} -m clusterenv.worker",
                "",
            ]
        )


def _find_ssh() -> str:
    path = shutil.which("ssh")
    if path is None:
        raise LaunchError("SSHLauncher needs the program ssh, and there is none on this machine's PATH.")
    return path
