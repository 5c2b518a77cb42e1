"""SSHFleet: workers on other machines, each held by an ssh client here.

Without a terminal a remote process outlives its ssh client, and sshd passes on no signals to root's processes. So the
shell that becomes the worker first says its process id, and workers are ended by that id, over another connection.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from clusterenv.errors import LaunchError
from clusterenv.launchers.processes import describe_exit, wait_for
from clusterenv.launchers.worker_log import WorkerLog

log = logging.getLogger(__name__)

# sshd begins to turn away connections when 10 are not through with logging in (MaxStartups).
_LOGGING_IN_AT_ONCE = 8
_SSH_FAILED = 255  # The status of an ssh client that could not connect or lost its connection.
_END_S = 6.0  # How long ending workers over new connections may take.
_LOOK_S = 0.02
_FIRST_WORDS_BYTES = 1 << 16

# Ends the process groups of workers, in order if they can. A process that only took over the id of one that ended long
# ago is left alone: it is not called clusterenv.
_END = """
ours= tries=0
for pid in {pids}; do
  case "$(ps -o args= -p $pid 2>/dev/null)" in *clusterenv* | "") ours="$ours $pid" ;; esac
done
for pid in $ours; do kill -s TERM -- -$pid 2>/dev/null || kill -s TERM $pid 2>/dev/null; done
for pid in $ours; do
  while kill -s 0 -- -$pid 2>/dev/null && [ $tries -lt 10 ]; do sleep 0.1; tries=$((tries + 1)); done
  kill -s KILL -- -$pid 2>/dev/null || kill -s KILL $pid 2>/dev/null
done
"""

MakeCommand = Callable[[str, str], list[str]]


class SSHFleet:
    """One ssh client a worker; its output is the worker's log."""

    def __init__(
        self, seats: Sequence[str], command: MakeCommand, script: Callable[[int], str], log_dir: str | Path | None
    ) -> None:
        """Start connecting.

        Args:
            seats: The host of each worker.
            command: Makes an ssh command from a host and a name; a shell there reads what to do from its
                standard input, and goes by that name.
            script: The shell lines that become a worker, given its index.
            log_dir: Where to keep what workers print, a file each. None: only for error messages.

        Raises:
            LaunchError: The ssh program cannot be run, or a log cannot be written.
        """
        self._command = command
        self._script = script
        self._sessions: list[_Session] = []
        self._is_stopped = False
        try:
            self._sessions += [_Session(host, index, WorkerLog(log_dir, index)) for index, host in enumerate(seats)]
            self._connect()
        except OSError as error:
            self.stop(timeout_s=0.0)
            raise LaunchError(f"Could not open a log: {error}.") from error
        except BaseException:
            self.stop(timeout_s=0.0)
            raise

    def exits(self) -> dict[int, str]:
        """Return how each worker that has ended, ended, and on which host."""
        self._connect()
        return {session.worker_index: session.describe() for session in self._sessions if session.has_ended}

    def status(self) -> str:
        """Say which hosts are still being logged in to."""
        self._connect()
        counts = Counter(session.host for session in self._sessions if session.is_starting)
        return "logging in to " + ", ".join(f"{host} ({count})" for host, count in counts.items()) if counts else ""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines that a worker, or ssh, wrote."""
        return self._sessions[worker_index].log.tail()

    def restart(self, worker_index: int) -> None:
        """Start a worker once more; over the same connection its predecessor is ended first."""
        session = self._sessions[worker_index]
        session.end_client()
        self._start(session)

    def stop(self, timeout_s: float) -> None:
        """Wait this long for the workers to end by themselves, then end them by their process ids."""
        if self._is_stopped:
            return
        self._is_stopped = True
        deadline = time.monotonic() + timeout_s
        for session in self._sessions:
            if session.client is not None:
                wait_for(session.client, deadline)
        self._end_remote(time.monotonic() + _END_S)
        for session in self._sessions:
            session.end_client()
            session.log.close()

    def _connect(self) -> None:
        """Start clients for workers that have none yet, as many as their hosts let in at once."""
        if self._is_stopped:
            return
        logging_in = Counter(session.host for session in self._sessions if session.client and session.is_starting)
        for session in self._sessions:
            if session.client is None and logging_in[session.host] < _LOGGING_IN_AT_ONCE:
                logging_in[session.host] += 1
                self._start(session)

    def _start(self, session: _Session) -> None:
        command = self._command(session.host, f"clusterenv-worker-{session.worker_index}")
        try:
            session.start(command, self._script(session.worker_index))
        except OSError as error:
            raise LaunchError(f"Could not run ssh for worker {session.worker_index}: {error}.") from error

    def _end_remote(self, deadline: float) -> None:
        """End what may still run elsewhere, on all hosts at the same time."""
        pids: dict[str, list[int]] = {}
        for session in self._sessions:
            if left := session.await_left(deadline - _END_S / 2):
                pids.setdefault(session.host, []).extend(left)
        clients = {host: _run(self._command(host, "end"), _END.format(pids=_join(pids[host]))) for host in pids}
        for host, client in clients.items():
            if not wait_for(client, deadline) or client.returncode == _SSH_FAILED:
                log.warning(
                    "%s could not be reached to end the workers there (process ids %s); they end by themselves when "
                    "they find the head gone",
                    host,
                    _join(pids[host]),
                )
            if client.poll() is None:
                client.kill()
                client.wait()


class _Session:
    """One worker's ssh client, and what it has told of the process at the other end."""

    def __init__(self, host: str, worker_index: int, log: WorkerLog) -> None:
        self.host = host
        self.worker_index = worker_index
        self.log = log
        self.client: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._predecessors: list[int] = []  # Those of which nobody has told that they were ended.
        self._log_start = 0

    @property
    def has_ended(self) -> bool:
        """Whether the client has: it stays as long as the worker does, unless the connection breaks."""
        return self.client is not None and self.client.poll() is not None

    @property
    def is_starting(self) -> bool:
        """Whether the shell at the other end has not spoken yet."""
        return not self.has_ended and self.find_pid() is None

    def start(self, command: list[str], script: str) -> None:
        """Start a client and give it the script; whoever held this seat before is ended first."""
        if (pid := self.find_pid()) is not None:
            self._predecessors.append(pid)
        self._log_start = self.log.size_bytes
        self._pid = None
        first = _END.format(pids=_join(self._predecessors)) if self._predecessors else ""
        mark = f'echo "{self._mark}$$ on $(uname -n)"'
        # In braces all of it is read before any of it runs: nothing can eat the rest by reading its standard input.
        self.client = _run(command, f"{{\n{first}{mark} || exit\n{script}exit\n}} </dev/null\n", self.log)

    def find_pid(self) -> int | None:
        """Return the process id of the shell that waits for the worker, once it has said it: also its group's."""
        if self._pid is None and self.client is not None and not self.log.file.closed:
            said = re.search(
                rf"^{re.escape(self._mark)}(\d+) on ", self.log.read(self._log_start, _FIRST_WORDS_BYTES), re.MULTILINE
            )
            if said:
                self._pid = int(said[1])
                self._predecessors.clear()  # It speaks when they have been ended.
        return self._pid

    def await_left(self, deadline: float) -> list[int]:
        """Return the process ids of all that may still run, once they are known or time is up."""
        while self.is_starting and self.client is not None and time.monotonic() < deadline:
            wait_for(self.client, time.monotonic() + _LOOK_S)
        pid, status = self.find_pid(), None if self.client is None else self.client.poll()
        # A client that brought the worker's own status has seen its end.
        has_ended = status is not None and 0 <= status != _SSH_FAILED
        return self._predecessors + ([] if pid is None or has_ended else [pid])

    def end_client(self) -> None:
        if self.client is not None and self.client.poll() is None:
            self.client.terminate()
            if not wait_for(self.client, time.monotonic() + 1.0):
                self.client.kill()
                self.client.wait()

    def describe(self) -> str:
        assert self.client is not None
        status = self.client.returncode
        if status == _SSH_FAILED:
            how = "ssh could not connect" if self.find_pid() is None else "ssh lost the connection"
            return f"{how} to {self.host}, exit status {status}"
        if status < 0:
            return f"the ssh client that held it on {self.host} was {describe_exit(status)}"
        # A shell's way of saying that a signal ended what it ran.
        return f"{describe_exit(128 - status if 128 < status < 128 + signal.NSIG else status)} on {self.host}"

    @property
    def _mark(self) -> str:
        return f"clusterenv worker {self.worker_index}: process "


def _run(command: list[str], script: str, log: WorkerLog | None = None) -> subprocess.Popen[bytes]:
    output = subprocess.DEVNULL if log is None else log.file
    # Ctrl-C in the terminal is for the head, which then ends its workers in order.
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, process_group=0)
    assert client.stdin is not None
    with suppress(BrokenPipeError), client.stdin:  # A client that has ended already says why by its status.
        client.stdin.write(script.encode())
    return client


def _join(pids: Sequence[int]) -> str:
    return " ".join(map(str, pids))
