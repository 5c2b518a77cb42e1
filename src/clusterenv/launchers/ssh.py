"""SSHLauncher: workers on machines you can log in to with ssh.

Without a terminal a remote process outlives its ssh client, and sshd passes no signals on to root's processes. So the
shell that becomes the worker first prints its process id, and workers are killed by that id, over another connection.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from clusterenv.config import split_shards, thread_variables
from clusterenv.errors import ConfigError, LaunchError
from clusterenv.launchers.base import Launcher
from clusterenv.launchers.follower import Follower
from clusterenv.launchers.processes import WorkerLog, describe_exit, make_run_dir, uninterrupted, wait_for
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket

log = logging.getLogger(__name__)

# sshd begins to refuse connections when 10 have not finished logging in (MaxStartups).
_LOGGING_IN_AT_ONCE = 8
_SSH_FAILED = 255  # The status of an ssh client that could not connect or lost its connection.
_CONFIG_S = 10.0  # How long ssh may take to read its configuration.
_END_S = 10.0  # How long killing workers over new connections may take.
_LOOK_S = 0.02
_FIRST_WORDS_BYTES = 1 << 16
_SETUP_BYTES = 1 << 15  # A pipe holds this much before anybody reads it, and it is more than enough.

# Kills the process groups of workers: SIGTERM asks a worker to shut down cleanly, SIGQUIT makes its guardian kill it
# immediately. A process that merely reuses the id of one that ended long ago is spared: it is not called clusterenv.
_END = """
ours=
for pid in {pids}; do
  case "$(ps -o args= -p $pid 2>/dev/null)" in *clusterenv* | "") ours="$ours $pid" ;; esac
done
for signal in {signals}; do
  case $signal in QUIT) tries=30 ;; *) tries=10 ;; esac  # A guardian also ends what environments started.
  for pid in $ours; do kill -s $signal -- -$pid 2>/dev/null || kill -s $signal $pid 2>/dev/null; done
  for pid in $ours; do
    while kill -s 0 -- -$pid 2>/dev/null && [ $tries -gt 0 ]; do sleep 0.1; tries=$((tries - 1)); done
  done
done
"""


@dataclass(frozen=True)
class SSHLauncher(Launcher):
    """Starts workers on other machines, through the `ssh` program with your own configuration and keys.

    Each host must be accessible without a password (a key, an ssh agent, a shared connection) and have a Python with
    clusterenv installed.

    Attributes:
        hosts: Names as you would give them to ssh (`host`, `user@host`, an alias from your ssh configuration), each of
            which gets the same number of workers. Or a mapping from names to the maximum number of workers on each.
        cpus: How many threads BLAS, OpenMP and torch use in each worker. By default a host's cores are divided evenly
            among its workers. Variables already set there are left alone.
        python: The command for Python on the host, as you would type it, e.g. `~/venv/bin/python`.
        setup: Shell lines to run on the host first, e.g. `module load cuda` or `cd ~/project`. If one fails, the worker
            is not started.
        ssh_options: More options for ssh, e.g. `-F`, `my_ssh_config`, `-p`, `2222`.
        shell: The shell on the host that reads the commands from its standard input. By default a login shell, so that
            everything is as when you log in.
        connect_timeout_s: How long ssh tries to reach a host.
        log_dir: Where to keep the workers' output: one directory per run, `run-<time>`, with one file per worker. By
            default output is kept only for error messages.
        show_output: Whether to also show the workers' output on this process's standard error, each line prefixed with
            `[worker <index>]`; very large output is shown only in part.
    """

    hosts: Sequence[str] | Mapping[str, int]
    _: KW_ONLY
    cpus: int | None = None
    python: str = "python3"
    setup: Sequence[str] = ()
    ssh_options: Sequence[str] = ()
    shell: str = "bash -l"
    connect_timeout_s: int = 10
    log_dir: str | Path | None = None
    show_output: bool = False

    def __post_init__(self) -> None:
        for name in ("hosts", "setup", "ssh_options"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"SSHLauncher.{name} must be a list, got the text {getattr(self, name)!r}.")
        if not self.hosts:
            raise ConfigError("SSHLauncher.hosts is empty: name at least one host.")
        for host in self.hosts:
            # A name that ssh takes for an option could make it run anything.
            if not host or host.startswith("-") or not host.isprintable() or " " in host:
                raise ConfigError(f"SSHLauncher.hosts holds {host!r}, which is not the name of a host.")
        if repeated := {host for host in self.hosts if list(self.hosts).count(host) > 1}:
            raise ConfigError(
                f"SSHLauncher.hosts names {', '.join(sorted(repeated))} twice; say how many workers a host gets "
                "with a mapping, e.g. hosts={'gpu1': 8}."
            )
        if isinstance(self.hosts, Mapping):
            for host, count in self.hosts.items():
                if not isinstance(count, int) or count < 1:
                    raise ConfigError(f"SSHLauncher.hosts: {host} must get at least 1 worker, got {count!r}.")
        for name in ("cpus", "connect_timeout_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"SSHLauncher.{name} must be an int of at least 1, got {value!r}.")
        if sum(len(line.encode()) for line in self.setup) > _SETUP_BYTES:
            raise ConfigError(f"SSHLauncher.setup is longer than {_SETUP_BYTES} bytes: put it into a file there.")

    @property
    def suggested_workers(self) -> int:
        """One per host, or the total of the hosts' maximum numbers."""
        return sum(self.hosts.values()) if isinstance(self.hosts, Mapping) else len(self.hosts)

    @property
    def route_to(self) -> str:
        """The first host's address, as the ssh configuration gives it.

        Raises:
            LaunchError: There is no ssh here, it cannot read its configuration, or there is no such host.
        """
        host = next(iter(self.hosts))
        command = [_find_ssh(), *self.ssh_options, "-G", "--", host]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_CONFIG_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"`ssh -G {host}` has not answered within {_CONFIG_S:g} s.") from error
        if answer.returncode != 0:
            raise LaunchError(f"ssh cannot read its configuration for {host}: {answer.stderr.strip()}")
        # "hostname gpu1.example.org", one setting per line.
        settings = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
        address = settings.get("hostname", host)
        if all(settings.get(name, "none") == "none" for name in ("proxyjump", "proxycommand")):
            _check_known(host, address)
        return address

    def launch(self, ticket: Ticket, num_workers: int) -> SSHFleet:
        """Start connecting to the hosts and return immediately.

        Raises:
            ConfigError: The hosts have no room for this many workers.
            LaunchError: There is no ssh here, or a log cannot be written.
        """
        seats = self._seats(num_workers)
        _find_ssh()
        return SSHFleet(
            seats,
            lambda host, name: self._command(host, f"exec {self.shell} -s {name}"),
            # A shell variable, exported only when the worker starts: programs run by setup lines must not see the keys.
            lambda worker_index: f"{TICKET_VARIABLE}={ticket.encode()}\n{self._script(worker_index, seats)}",
            self.log_dir,
            shows_output=self.show_output,
        )

    def render(self, num_workers: int) -> str:
        """Show each ssh command and the script that the remote shell reads."""
        seats = self._seats(num_workers)
        parts = []
        for worker_index, host in enumerate(seats):
            command = " ".join(self._command(host, f"'exec {self.shell} -s clusterenv-worker-{worker_index}'"))
            parts.append(f"{command} <<'END'\n# Here the ticket is set.\n{self._script(worker_index, seats)}END")
        return "\n".join(parts)

    def _seats(self, num_workers: int) -> list[str]:
        """Return the host of each worker."""
        if not isinstance(self.hosts, Mapping):
            shares = split_shards(num_workers, len(self.hosts))
            return [host for host, (start, stop) in zip(self.hosts, shares, strict=True) for _ in range(start, stop)]
        if num_workers > self.suggested_workers:
            raise ConfigError(
                f"num_workers={num_workers}, but SSHLauncher.hosts has places for {self.suggested_workers}: "
                f"{dict(self.hosts)}. Name more hosts, let them have more, or give a list to share workers out evenly."
            )
        return [host for host, count in self.hosts.items() for _ in range(count)][:num_workers]

    def _command(self, host: str, remote_command: str) -> list[str]:
        return [
            "ssh",
            *self.ssh_options,
            "-T",
            *("-o", "RemoteCommand=none"),  # The user's may be `tmux attach`, for people who log in.
            *("-o", "BatchMode=yes"),  # Nobody is there to type a password.
            *("-o", f"ConnectTimeout={self.connect_timeout_s}"),
            *("-o", "ServerAliveInterval=10"),
            # An existing shared connection is used, but none is opened that would outlive the run.
            *("-o", "ControlMaster=no"),
            *("-o", "ClearAllForwardings=yes"),
            "--",
            host,
            remote_command,
        ]

    def _script(self, worker_index: int, seats: Sequence[str]) -> str:
        """Return the shell lines that become the worker; the ticket is set before them."""
        if self.cpus is None:
            cores = "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 1)"
            threads = f"$(( {cores} / {seats.count(seats[worker_index])} ))"
        else:
            threads = str(self.cpus)
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


class SSHFleet:
    """One ssh client per worker; its output is the worker's log."""

    def __init__(
        self,
        seats: Sequence[str],
        command: Callable[[str, str], list[str]],
        script: Callable[[int], str],
        log_dir: str | Path | None,
        *,
        shows_output: bool = False,
    ) -> None:
        """Start connecting.

        Args:
            seats: The host of each worker.
            command: Makes an ssh command from a host and a name; a remote shell with that name reads a script from its
                standard input.
            script: Makes the shell lines that become a worker, given its index.
            log_dir: Where to keep the workers' output. None: only for error messages.
            shows_output: Whether to show the output on this process's standard error.

        Raises:
            LaunchError: The ssh program cannot be run, or a log cannot be written.
        """
        self._command = command
        self._script = script
        self._sessions: list[_Session] = []
        self._enders: dict[str, subprocess.Popen[bytes]] = {}
        self._is_stopping = self._is_stopped = False
        self._follower: Follower | None = None
        try:
            run_dir = make_run_dir(log_dir)
            for worker_index, host in enumerate(seats):
                with uninterrupted():
                    self._sessions.append(_Session(host, worker_index, WorkerLog(run_dir, f"worker-{worker_index}")))
            if shows_output:
                self._follower = Follower([session.log for session in self._sessions])
            self._advance()
            if failures := [session for session in self._sessions if session.failure]:
                raise LaunchError(f"Worker {failures[0].worker_index} {failures[0].failure}.")
        except BaseException:
            self.stop(timeout_s=0.0)
            raise

    def exits(self) -> dict[int, str]:
        self._advance()
        return {session.worker_index: session.describe() for session in self._sessions if session.has_ended}

    def status(self) -> str:
        """Say which hosts ssh is still logging in to."""
        self._advance()
        counts = Counter(session.host for session in self._sessions if session.is_vacant or session.is_logging_in)
        return "logging in to " + ", ".join(f"{host} ({count})" for host, count in counts.items()) if counts else ""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines that a worker, or ssh, wrote."""
        return self._sessions[worker_index].log.tail()

    def restart(self, worker_index: int) -> None:
        """Restart a worker; its predecessor is killed first, over the same connection."""
        self._sessions[worker_index].vacate()
        self._advance()

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to exit on their own, then kill them by their process ids."""
        if self._is_stopped:
            return
        self._is_stopping = True
        deadline = time.monotonic() + timeout_s
        for session in self._sessions:
            if session.client is not None:
                wait_for(session.client, deadline)
        self._end_remote(time.monotonic() + _END_S)
        if self._follower is not None:
            self._follower.close()
        for session in self._sessions:
            session.close()
        self._is_stopped = True

    def _advance(self) -> None:
        """Start clients for workers that have none, as many as their hosts accept at once."""
        if self._is_stopping:
            return
        logging_in = Counter(session.host for session in self._sessions if session.is_logging_in)
        for session in self._sessions:
            if session.is_vacant and logging_in[session.host] < _LOGGING_IN_AT_ONCE:
                logging_in[session.host] += 1
                name = f"clusterenv-worker-{session.worker_index}"
                session.start(self._command(session.host, name), self._script(session.worker_index))

    def _end_remote(self, deadline: float) -> None:
        """Kill what may still be running remotely, on all hosts at the same time."""
        pids: dict[str, list[int]] = {}
        for session in self._sessions:
            if left := session.await_left(deadline - _END_S / 2):
                pids.setdefault(session.host, []).extend(left)
        self._drop_enders()
        for host in pids:
            with contextlib.suppress(OSError), uninterrupted():  # The warning below says enough.
                self._enders[host] = _run(
                    self._command(host, "end"), _END.format(pids=_join(pids[host]), signals="TERM QUIT KILL")
                )
        for host in pids:
            ender = self._enders.get(host)
            if ender is None or not wait_for(ender, deadline) or ender.returncode == _SSH_FAILED:
                log.warning(
                    "%s could not be reached to end the workers there (process ids %s); they end on their own when "
                    "they find the head gone",
                    host,
                    _join(pids[host]),
                )
        self._drop_enders()

    def _drop_enders(self) -> None:
        for ender in self._enders.values():
            ender.kill()
            ender.wait()
        self._enders.clear()


class _Session:
    """One worker's ssh client, and what is known about the remote process."""

    def __init__(self, host: str, worker_index: int, log: WorkerLog) -> None:
        self.host = host
        self.worker_index = worker_index
        self.log = log
        self.client: subprocess.Popen[bytes] | None = None
        self.failure = ""
        self._is_wanted = True  # Whether to start a client once the old one is gone.
        self._pid: int | None = None
        self._predecessors: list[int] = []  # The process ids that are not known to have ended.
        self._log_start = 0

    @property
    def is_vacant(self) -> bool:
        return self._is_wanted and (self.client is None or self.client.poll() is not None)

    @property
    def is_logging_in(self) -> bool:
        """Whether the remote shell has not printed its process id yet."""
        return not self._is_wanted and not self.has_ended and self.find_pid() is None

    @property
    def has_ended(self) -> bool:
        """Whether the client has ended: it lives as long as the worker, unless the connection breaks."""
        return bool(self.failure) or (
            not self._is_wanted and self.client is not None and self.client.poll() is not None
        )

    def vacate(self) -> None:
        """Make room for a successor: until the old client is gone, its last output could be taken for the new one's."""
        self.failure = ""
        self._is_wanted = True
        if self.client is not None:
            self.client.kill()

    def start(self, command: list[str], script: str) -> None:
        """Start a client and give it the script; any predecessor is killed first."""
        predecessors = self._find_left()
        first = _END.format(pids=_join(predecessors), signals="QUIT KILL") if predecessors else ""
        mark = f'echo "{self._mark}$$ on $(uname -n)"'
        with uninterrupted():
            self._is_wanted = False
            self._predecessors, self._pid, self._log_start = predecessors, None, self.log.size_bytes
            self.log.start_over()
            try:
                # A shell reads a braced group completely before it runs any of it: no command can consume the rest by
                # reading standard input.
                self.client = _run(command, f"{{\n{first}{mark} || exit\n{script}exit\n}} </dev/null\n", self.log)
            except OSError as error:
                self.failure = f"could not be started: ssh cannot be run: {error}"

    def find_pid(self) -> int | None:
        """Return the process id, also the group id, of the shell that waits for the worker, once it was printed."""
        if self._pid is None and self.client is not None:
            words = self.log.read(self._log_start, _FIRST_WORDS_BYTES).decode(errors="replace")
            if said := re.search(rf"^{re.escape(self._mark)}(\d+) on ", words, re.MULTILINE):
                self._pid = int(said[1])
                self._predecessors.clear()  # The process id is printed only after they were killed.
        return self._pid

    def await_left(self, deadline: float) -> list[int]:
        """Return the ids of all processes that may still be running, once they are known or time is up."""
        while self.is_logging_in and self.client is not None and time.monotonic() < deadline:
            wait_for(self.client, time.monotonic() + _LOOK_S)
        return self._find_left()

    def describe(self) -> str:
        if self.failure:
            return self.failure
        assert self.client is not None, "it has ended"
        status = self.client.returncode
        if status == _SSH_FAILED:
            how = "ssh could not connect" if self.find_pid() is None else "ssh lost the connection"
            return f"{how} to {self.host}, exit status {status}"
        if status < 0:
            return f"the ssh client that held it on {self.host} was {describe_exit(status)}"
        return f"{describe_exit(status)} on {self.host}"

    def close(self) -> None:
        if self.client is not None and self.client.poll() is None:
            self.client.terminate()
            if not wait_for(self.client, time.monotonic() + 1.0):
                self.client.kill()
                self.client.wait()
        self.log.close()

    def _find_left(self) -> list[int]:
        pid, status = self.find_pid(), None if self.client is None else self.client.poll()
        # A client that returned the worker's own exit status has seen it end.
        has_ended = status is not None and 0 <= status != _SSH_FAILED
        return self._predecessors + ([] if pid is None or has_ended else [pid])

    @property
    def _mark(self) -> str:
        return f"clusterenv worker {self.worker_index}: process "


def _run(command: list[str], script: str, log: WorkerLog | None = None) -> subprocess.Popen[bytes]:
    output = subprocess.DEVNULL if log is None else log.file
    # Ctrl-C in the terminal is for the head, which then stops its workers in order.
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, process_group=0)
    assert client.stdin is not None
    with contextlib.suppress(BrokenPipeError), client.stdin:  # If the client has ended, its exit status says why.
        client.stdin.write(script.encode())
    return client


def _check_known(host: str, address: str) -> None:
    """Raise LaunchError if the host's name cannot be resolved here."""
    try:
        socket.getaddrinfo(address, None)
    except (socket.gaierror, UnicodeError) as error:  # A malformed name cannot even be looked up.
        known_as = "" if address == host else f" (HostName {address} in your ssh configuration)"
        raise LaunchError(
            f"SSHLauncher.hosts names {host}{known_as}, and no such host is known here: {error}. Look for a typing "
            "error; it must be a name that `ssh` accepts, of DNS or of your ssh configuration."
        ) from error


def _find_ssh() -> str:
    path = shutil.which("ssh")
    if path is None:
        raise LaunchError("SSHLauncher needs the program ssh, and there is none on this machine's PATH.")
    return path


def _join(pids: Sequence[int]) -> str:
    return " ".join(map(str, pids))
