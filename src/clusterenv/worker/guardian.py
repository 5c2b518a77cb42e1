"""The guardian: a small process around each worker, which ends the worker when the worker cannot do so itself.

`python -m clusterenv.worker` is two processes. The one that a launcher starts becomes the guardian; its child is the
worker. While C code holds the interpreter lock, no thread of the worker runs, so none can notice that the head is
gone; and a worker that has crashed cannot end the helper processes that its environments have started. The guardian

- ends the worker if the head's process ends or, if the head is on another machine, if the worker is stuck and nothing
  listens at the head's address;
- is a subreaper: processes that the worker started become its children when the worker ends, and are then ended, too;
- writes what the worker prints to the log, and to the head's standard error if it was given that (`relay`);
- ends the same way as the worker, so that launchers see what they would see without it.

It has one thread and imports only the standard library and the ticket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket as sockets
import sys
import time
from pathlib import Path
from typing import NoReturn, TextIO

from clusterenv.wire.endpoint import ReachabilityProbe, remove_endpoint
from clusterenv.wire.ticket import Ticket
from clusterenv.worker.echo import Echo
from clusterenv.worker.relay import Relay, Sink

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_BEAT, _HEAD_IS_GONE = b".", b"!"
_SILENT_S = 1.5  # A worker without a heartbeat for this long is stuck.
_PROBE_EVERY_S = 1.0
_STARTING_PROBE_EVERY_S = 5.0  # Before its first heartbeat, a worker may spend minutes on imports.
_WORKER_GRACE_S = 3.0  # After the head has ended. The worker's own watch needs less.
_LAST_GRACE_S = 2.0  # After the worker itself has noticed that the head is gone.
_LOOK_S = 0.5  # Used if the system has no pidfds.
_HELPER_GRACE_S = 0.3  # To tidy up, as multiprocessing's resource tracker does.
_HELPER_DEADLINE_S = 2.0
_LAST_WRITE_S = 2.0


class Guardian:
    """The worker's side: its connection to the process that guards it.

    Attributes:
        log: A stream to the worker's log; unlike printed output, lines written to it are not shown elsewhere.
    """

    def __init__(self, control: sockets.socket, log: TextIO) -> None:
        control.setblocking(False)
        self.log = log
        self._control = control
        self._is_gone = False

    def beat(self) -> None:
        """Send a heartbeat."""
        self._send(_BEAT)

    def tell_head_is_gone(self) -> None:
        """Ask to be killed in a moment, in case this process does not manage to end on its own."""
        self._send(_HEAD_IS_GONE)

    def says_head_is_gone(self) -> bool:
        """Whether the guardian has seen the head's process end."""
        with contextlib.suppress(OSError):
            self._is_gone = self._is_gone or _HEAD_IS_GONE in self._control.recv(16)
        return self._is_gone

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # The guardian is suspended, or has ended, as will this process.
            self._control.send(message)


def guard(ticket: Ticket, worker_index: int, shown: int | None) -> Guardian | None:
    """Split this process in two: the worker, in which this returns, and its guardian, in which it never does.

    Must be called before there are threads. Returns None on systems other than Linux, which have no guardian.

    Args:
        ticket: The worker's ticket.
        worker_index: Which worker it is.
        shown: A descriptor of the head's standard error, on which to show what the worker prints. The worker itself
            does not keep it open.
    """
    if sys.platform != "linux":
        return None
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # Otherwise both processes would write what is buffered.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own, workers = sockets.socketpair()
    pipes = _open_pipes()
    log_reading, log_writing = os.pipe()
    guardian_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid:
        try:
            _Guard(worker_pid, ticket, own, pipes, log_reading, None if shown is None else (shown, worker_index)).run()
        except BaseException:  # noqa: BLE001 - it is shown, and nothing else of this process is of use
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Sent when the parent's thread ends, of which the guardian has one.
    if os.getppid() != guardian_pid:
        os._exit(1)
    os.setpgid(0, 0)
    own.close()
    if shown is not None:
        os.close(shown)
    os.close(log_reading)
    for read_end, write_end, outputs in pipes:
        os.close(read_end)
        for output in outputs:
            os.dup2(write_end, output)
        os.close(write_end)
    return Guardian(workers, open(log_writing, "w", errors="backslashreplace"))  # Open as long as the worker runs.


def name_process(name: str) -> None:
    """Set this process's name in `ps -e`, `top` and `clusterenv chaos`; call it in the main thread."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, name.encode())


def _open_pipes() -> list[tuple[int, int, tuple[int, ...]]]:
    """Make one pipe for standard output and error, or one for each if they lead to different files."""
    for output in (1, 2):
        try:
            os.fstat(output)
        except OSError:  # It was closed.
            null = os.open(os.devnull, os.O_WRONLY)
            if null != output:
                os.dup2(null, output)
                os.close(null)
    groups = [(1, 2)] if os.path.sameopenfile(1, 2) else [(1,), (2,)]
    return [(*os.pipe(), outputs) for outputs in groups]


class _Guard:
    """The guardian's side, from the fork to its end."""

    def __init__(
        self,
        worker_pid: int,
        ticket: Ticket,
        control: sockets.socket,
        pipes: list[tuple[int, int, tuple[int, ...]]],
        log: int,
        shown: tuple[int, int] | None,
    ) -> None:
        name_process("ce-guardian")
        control.setblocking(False)
        self._pid = worker_pid
        self._parent_pid = ticket.parent_pid
        self._endpoint = ticket.endpoint
        self._control: sockets.socket | None = control
        self._signals = _catch_signals()
        self._sinks = [Sink(outputs[0]) for _, _, outputs in pipes]
        echo = None
        # The library's own log comes first, since it may announce the output that follows.
        self._relays = [Relay(log, self._sinks[-1], None)]
        if shown is not None:
            descriptor, worker_index = shown
            echo = Sink(descriptor, is_capped=False), Echo(worker_index)
        for (read_end, _, _), sink in zip(pipes, self._sinks, strict=True):
            self._relays.append(Relay(read_end, sink, echo))
        if echo is not None:
            self._sinks.append(echo[0])
        needed = {sink.descriptor for sink in self._sinks} | {relay.source for relay in self._relays}
        _close_all_but(control.fileno(), *self._signals, *needed)
        self._head = None if self._parent_pid is None else _open_process(self._parent_pid)
        self._kill_at: float | None = None
        self._probe = ReachabilityProbe(ticket.endpoint, ticket.silence_s)
        self._has_beaten = False
        self._probe_at = time.monotonic() + _STARTING_PROBE_EVERY_S

    def run(self) -> NoReturn:
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)  # The worker does so, too; it does not matter which is first.
        while not self._reap():
            ready = self._wait()
            self._take_signals(ready)
            self._listen(ready)
            self._look_for_head(ready)
            for relay in self._relays:
                if relay.source in ready:
                    relay.read()
            for sink in self._sinks:
                sink.write()
        status = self._end_helpers()
        ends_at = time.monotonic() + _LAST_WRITE_S
        for relay in self._relays:
            relay.finish(ends_at)
        for sink in self._sinks:
            sink.finish(ends_at)
        _end_as(status)

    def _wait(self) -> set[int]:
        """Wait for an event or the next due time; returns the descriptors that are ready."""
        now = time.monotonic()
        due = [self._kill_at, *(sink.due_at(now) for sink in self._sinks)]
        poll = select.poll()
        poll.register(self._signals[0], select.POLLIN)
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        if self._parent_pid is None:
            due.append(self._probe_at)
        elif self._head is None:
            due.append(now + _LOOK_S)
        elif self._kill_at is None:
            poll.register(self._head, select.POLLIN)
        for relay in self._relays:
            if relay.is_open:
                poll.register(relay.source, select.POLLIN)
        for sink in self._sinks:
            if sink.is_waited_for(now):
                poll.register(sink.descriptor, select.POLLOUT)
        next_at = min((at for at in due if at is not None), default=None)
        # A millisecond more, because poll rounds down and would return too early over and over.
        timeout_ms = None if next_at is None else max(0.0, next_at - now) * 1000 + 1
        return {descriptor for descriptor, _ in poll.poll(timeout_ms)}

    def _take_signals(self, ready: set[int]) -> None:
        if self._signals[0] in ready:
            for number in os.read(self._signals[0], 64):
                if number == signal.SIGTERM:
                    os.kill(self._pid, signal.SIGTERM)
                elif number in (signal.SIGQUIT, signal.SIGHUP):
                    self._kill_worker()

    def _listen(self, ready: set[int]) -> None:
        if self._control is None or self._control.fileno() not in ready:
            return
        try:
            said = self._control.recv(64)
        except OSError:
            said = b""
        now = time.monotonic()
        if not said:  # The worker is ending, or an environment has closed all descriptors.
            self._control.close()
            self._control = None
        elif _HEAD_IS_GONE in said and self._kill_at is None:
            self._kill_at = now + _LAST_GRACE_S
        self._has_beaten = True
        self._probe.forget()
        self._probe_at = now + _SILENT_S

    def _look_for_head(self, ready: set[int]) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_worker()
        elif self._parent_pid is None:
            if now >= self._probe_at:
                self._probe_at = now + (_PROBE_EVERY_S if self._has_beaten else _STARTING_PROBE_EVERY_S)
                if reason := self._probe.try_once(now):
                    self._relays[0].add(f"this worker is stuck, and is ended: {reason}\n".encode())
                    self._kill_worker()
        elif (os.getppid() != self._parent_pid) if self._head is None else (self._head in ready):
            remove_endpoint(self._endpoint)
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.send(_HEAD_IS_GONE)
            self._kill_at = now + _WORKER_GRACE_S

    def _kill_worker(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        os.kill(self._pid, signal.SIGKILL)  # It may have left its group.

    def _reap(self) -> bool:
        """Reap ended children, except for the worker: until it is reaped, its pid cannot be reused."""
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == self._pid:
                return True
            os.waitpid(ended.si_pid, 0)
        return False

    def _end_helpers(self) -> int:
        """End the processes that the worker has left behind, now children of this one; returns the worker's status."""
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGTERM)
        status = os.waitpid(self._pid, 0)[1]
        began_at = time.monotonic()
        poll = select.poll()
        poll.register(self._signals[0], select.POLLIN)
        for number, deadline in ((signal.SIGTERM, _HELPER_GRACE_S), (signal.SIGKILL, _HELPER_DEADLINE_S)):
            while (wait_s := began_at + deadline - time.monotonic()) > 0:
                try:
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    return status
                for pid in _children():
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
                if poll.poll(wait_s * 1000):  # One has ended, so its children may be this process's now.
                    os.read(self._signals[0], 64)
        return status


def _catch_signals() -> tuple[int, int]:
    """Turn signals into bytes in a pipe; returns both ends of it."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
    for ignored in (signal.SIGINT, signal.SIGTTOU):  # SIGTTOU stops background writes to a terminal.
        signal.signal(ignored, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        # Shells ignore SIGQUIT for background processes, which is overridden; nohup's ignored SIGHUP is respected.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return ends


def _close_all_but(*needed: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, *needed):
            with contextlib.suppress(OSError):  # The descriptor that listed the directory is closed already.
                os.close(int(name))


def _open_process(pid: int) -> int | None:
    """Return a pidfd of this process's parent; None without pidfds, or if `pid` is no longer the parent."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    if os.getppid() != pid:  # The id may have been reused by another process.
        os.close(handle)
        return None
    return handle


def _children() -> list[int]:
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()]
    except FileNotFoundError:  # The kernel was built without this file.
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if _parent_of(pid) == own]


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _end_as(status: int) -> NoReturn:
    """End as another process did, by the same signal or with the same exit status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _prctl(_PR_SET_DUMPABLE, 0)  # The worker's core dump is useful, the guardian's is not.
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # As a shell does: the first process of a container cannot be killed from within.
    os._exit(os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
