"""`python -m clusterenv.launchers.ray_driver`: Ray's side of a `RayLauncher`, in a separate process.

A Ray driver has threads, may wait minutes for its cluster, and ends its own process if the cluster is gone. A head must
do none of this, so its fleet starts this program, sends it lines of JSON that say which workers to start, and reads
other lines that report what becomes of them. However this process ends, Ray then ends its actors.

An actor holds one worker: it runs `python -m clusterenv.worker` as its child. Its class belongs to a `__main__` module,
so Ray sends its code along: a node without clusterenv can still report that.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

_FOLLOW_S = 10.0  # How long an actor waits for something to tell.
_GATHER_S = 0.2  # How long it gathers what its worker prints before it tells that.
_LOOK_S = 1.0  # How often to ask what actors wait for that Ray has not started.
_PATIENCE_S = 5.0  # Before anybody hears of that: to start a process takes a while.
_KNOCK_S = 3.0  # For anybody to open at the cluster's address. Ray itself would go on asking for minutes.
_END_S = 10.0  # How long an actor may take to end its worker, before Ray is told to end the actor.
_MAX_UNTOLD_BYTES = 1 << 20

# Makes the kernel kill the guardian when the actor's process ends, however that happens; the guardian kills the worker.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGQUIT)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Holder:
    """A Ray actor: a process that Ray has placed, and its worker; it imports nothing from clusterenv."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._untold = bytearray()
        self._status: int | None = None

    def start(self, variables: dict[str, str], defaults: dict[str, str], more_path: list[str]) -> str:
        """Start the worker; return the name of the host.

        Args:
            variables: Environment variables, including the ticket.
            defaults: Variables that are set only if the environment does not set them.
            more_path: Further directories to look for modules in, if they exist.
        """
        ray_dir = os.path.dirname(os.path.abspath(sys.modules["ray"].__file__ or ""))
        # What this process can import, its worker can, but for the libraries that Ray brings along for itself.
        path = [entry or os.getcwd() for entry in sys.path if not os.path.abspath(entry).startswith(ray_dir)]
        environment = {**defaults, **os.environ, **variables, "PYTHONPATH": os.pathsep.join(path + more_path)}
        # Nobody is attached to Ray's debugger here, and a breakpoint in an environment would wait for it.
        environment.pop("PYTHONBREAKPOINT", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), "-m", "clusterenv.worker"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return socket.gethostname()

    def follow(self) -> tuple[bytes, int | None]:
        """Return the worker's new output, and its status once it has ended; wait a while for either."""
        with self._changed:
            self._changed.wait_for(lambda: self._untold or self._status is not None, _FOLLOW_S)
            self._changed.wait_for(lambda: self._status is not None, _GATHER_S)
            untold, self._untold = bytes(self._untold), bytearray()
            return untold, self._status

    def end(self, patience_s: float) -> None:
        """Wait this long for the worker to exit on its own, then kill it."""
        if self._process is None:
            return
        # SIGQUIT makes a worker's guardian kill it immediately, with all it has started.
        for number, wait_s in ((0, patience_s), (signal.SIGTERM, min(1.0, patience_s)), (signal.SIGQUIT, 3.0)):
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                return
        self._process.kill()

    def leave(self) -> None:
        """End this process immediately, so that it is gone when Ray notices."""
        os._exit(0)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Pass the worker's output on: to Ray's log, which is this process's output, and to `follow`."""
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            with contextlib.suppress(OSError):  # The disk under Ray's logs is full.
                os.write(1, chunk)
            with self._changed:
                self._untold += chunk
                del self._untold[:-_MAX_UNTOLD_BYTES]
                self._changed.notify_all()
        status = process.wait()
        with self._changed:
            self._status = status
            self._changed.notify_all()


class Held:
    """One actor, from the request to Ray until it is gone."""

    def __init__(self, worker_index: int, run: int, actor: Any) -> None:
        self.worker_index = worker_index
        self.run = run  # Of the worker's, as the head counts them.
        self.actor = actor
        self.asked_at = time.monotonic()
        self.host = ""
        self.is_placed = False
        self.is_ending = False
        self.kill_at: float | None = None


class Driver:
    """Has Ray place actors, and reports to the head what becomes of their workers."""

    def __init__(self, settings: dict[str, Any], tell: Callable[..., None]) -> None:
        self._settings = settings
        self._tell = tell
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._held: dict[int, Held] = {}  # The one that counts, for each worker.
        self._all: set[Held] = set()
        self._count = 0
        self._stop_at: float | None = None
        self._logs: list[BinaryIO] = [open(fd, "ab", buffering=0) for fd in settings["log_fds"]]  # noqa: SIM115
        self._said = ""
        self._is_connected = False

    def run(self) -> None:
        """Serve the head's requests until it says stop or is gone."""
        import ray

        threading.Thread(target=self._listen, daemon=True).start()
        try:
            _connect(self._settings)
        except Exception as error:  # noqa: BLE001 - Ray refuses in many ways; it is told
            self._tell(fatal=_explain_connect(error, self._settings["address"]))
            return
        self._is_connected = True
        self._tell(connected=True)
        try:
            self._serve()
        finally:
            ray.shutdown()

    def _serve(self) -> None:
        look_at = 0.0
        while self._stop_at is None or (self._all and time.monotonic() < self._stop_at):
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=_GATHER_S)()
            now = time.monotonic()
            for held in [held for held in self._all if held.kill_at is not None and now > held.kill_at]:
                self._kill(held)
            if now > look_at:
                look_at = now + _LOOK_S
                self._say_what_is_missing()

    def _listen(self) -> None:
        """Pass the head's requests on, in a separate thread; the end of the head's process means stop."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        with contextlib.suppress(OSError):  # Where there are no pidfds, the end of the input has to do.
            poll.register(os.pidfd_open(self._settings["head_pid"]), select.POLLIN)
        lines = b""
        while all(descriptor == 0 for descriptor, _ in poll.poll()) and (chunk := os.read(0, 1 << 16)):
            *whole, lines = (lines + chunk).split(b"\n")
            for line in whole:
                wish = json.loads(line)
                self._events.put(
                    partial(self._stop, wish["stop"])
                    if "stop" in wish
                    else partial(self._start, wish["start"], wish["run"])
                )
        self._events.put(partial(self._stop, 0.0))

    def _start(self, worker_index: int, run: int) -> None:
        """Request an actor from Ray; the worker's previous actor is ended."""
        import ray

        if (before := self._held.get(worker_index)) is not None:
            self._end(before, 0.0)
        self._count += 1
        options = self._settings["options"] | {
            "name": f"worker-{worker_index} ({self._count})",
            "max_concurrency": 3,  # For follow, end and leave at the same time.
            "max_restarts": 0,  # The head decides which workers are restarted.
        }
        try:
            actor = ray.remote(Holder).options(**options).remote()
        except Exception as error:  # noqa: BLE001 - Ray refuses what it does not like in many ways; it is told
            self._tell(worker=worker_index, run=run, ended=f"could not be started: {_explain(error)}")
            return
        held = self._held[worker_index] = Held(worker_index, run, actor)
        self._all.add(held)
        variables = self._settings["variables"] | {self._settings["index_variable"]: str(worker_index)}
        started = actor.start.remote(variables, self._settings["defaults"], self._settings["path"])
        self._await(started, held, self._note_started)

    def _await(self, reference: Any, held: Held, then: Callable[[Held, Any], None]) -> None:
        def note(future: Any) -> None:
            error = future.exception()
            if error is not None:
                self._events.put(lambda: self._note_gone(held, error))
            else:
                self._events.put(lambda: then(held, future.result()))

        reference.future().add_done_callback(note)

    def _note_started(self, held: Held, host: str) -> None:
        held.is_placed, held.host = True, host
        if self._held.get(held.worker_index) is held:
            self._tell(worker=held.worker_index, run=held.run, host=host)
        self._follow(held)

    def _follow(self, held: Held) -> None:
        self._await(held.actor.follow.remote(), held, self._note_followed)

    def _note_followed(self, held: Held, told: tuple[bytes, int | None]) -> None:
        output, status = told
        with contextlib.suppress(OSError):  # The disk is full: the worker goes on.
            self._logs[held.worker_index].write(output)
        if status is None:
            self._follow(held)
            return
        if self._held.get(held.worker_index) is held and not held.is_ending:
            self._tell(worker=held.worker_index, run=held.run, status=status, host=held.host)
        held.is_ending = True
        held.kill_at = time.monotonic() + _END_S
        self._await(held.actor.leave.remote(), held, lambda held, _: None)

    def _note_gone(self, held: Held, error: BaseException) -> None:
        """Note that an actor is gone: it has left, its process or node has died, or it never started."""
        self._all.discard(held)
        if self._held.get(held.worker_index) is held and not held.is_ending:
            if not held.is_placed and "node has died" in str(error) and self._stop_at is None:
                self._start(held.worker_index, held.run)  # Ray had chosen a node that was dead, and did not know yet.
                return
            where = f" on {held.host}" if held.is_placed else ""
            how = "Ray has lost it" if held.is_placed else "could not be started"
            self._tell(worker=held.worker_index, run=held.run, ended=f"{how}{where}: {_explain(error)}")
            held.is_ending = True

    def _end(self, held: Held, patience_s: float) -> None:
        if held not in self._all or held.is_ending:
            return
        held.is_ending = True
        if held.is_placed:
            held.kill_at = time.monotonic() + patience_s + _END_S
            held.actor.end.remote(patience_s)
        else:
            self._kill(held)

    def _kill(self, held: Held) -> None:
        import ray

        self._all.discard(held)
        with contextlib.suppress(Exception):  # It is gone already, or Ray is.
            ray.kill(held.actor)

    def _stop(self, patience_s: float) -> None:
        import ray

        try:
            _knock(ray.get_runtime_context().gcs_address, 0.0)
        except ConnectionError:
            os._exit(0)  # The cluster is gone. Ray would keep trying for another minute.
        if self._stop_at is None:
            self._stop_at = time.monotonic() + patience_s + _END_S + 1.0
            for held in list(self._all):
                self._end(held, patience_s)

    def _say_what_is_missing(self) -> None:
        """Report what the actors that Ray has not started are waiting for."""
        import ray

        since = time.monotonic() - _PATIENCE_S
        waiting = [held for held in self._all if not held.is_placed and not held.is_ending and held.asked_at < since]
        said = ""
        if waiting and self._stop_at is None:
            needs = self._settings["needs"]
            try:
                total, free = ray.cluster_resources(), ray.available_resources()
            except Exception:  # noqa: BLE001 - the cluster does not answer; what it said last stands
                return
            indices = ", ".join(str(held.worker_index) for held in sorted(waiting, key=lambda held: held.worker_index))
            each = ", ".join(f"{count:g} {name}" for name, count in needs.items())
            there = ", ".join(f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}" for name in needs)
            said = f"Ray has not started worker{'s' if len(waiting) > 1 else ''} {indices} yet"
            if each:
                said += f": each needs {each}, and free on its nodes are {there}"
        if said != self._said:
            self._said = said
            self._tell(waits=said)


def main() -> int:
    """Serve one fleet; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Keep Ray's own output away from the head.
    settings = json.loads(_read_line())

    def tell(**event: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            told.write(json.dumps(event) + "\n")

    Driver(settings, tell).run()
    return 0


def _read_line() -> bytes:
    """Read only the first line of the input."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit(0)  # The head has closed the pipe without asking for anything.
        line += byte
    return line


def _connect(settings: dict[str, Any]) -> None:
    import ray

    common = {
        "runtime_env": settings["runtime_env"],
        "namespace": settings["namespace"],
        "log_to_driver": False,
        "job_config": ray.job_config.JobConfig(metadata=settings["labels"]),
    }
    address = settings["address"]
    if address != "local":
        try:
            if address != "auto":
                _knock(address, 0.0 if settings["may_be_local"] else _KNOCK_S)
            ray.init(address=address, **common)
            return
        except ConnectionError:
            if not settings["may_be_local"]:
                raise
    ray.init(address="local", include_dashboard=False, **settings["local"], **common)


def _knock(address: str, patience_s: float) -> None:
    """Check that something listens at an address, or begins to within some time.

    Raises:
        ConnectionError: Nothing does, or there is no such host.
    """
    host, _, port = address.rpartition(":")
    ends_at = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
            return
        except OSError as error:
            if time.monotonic() > ends_at or isinstance(error, socket.gaierror):
                raise ConnectionError(str(error)) from error
        time.sleep(_GATHER_S)


def _explain_connect(error: Exception, address: str) -> str:
    text = _first_lines(str(error))
    if "ersion mismatch" in text:
        return (
            f"the Ray cluster at {address} and this Python differ: {text}. Install the cluster's version of Ray here, "
            "and run the script with the cluster's version of Python"
        )
    if isinstance(error, ConnectionError):
        return (
            f"no Ray cluster answers at {address} ({text}). See `ray status --address={address}`; "
            "RayLauncher(address=...) takes HOST:PORT of the head node, and 'local' starts a cluster here"
        )
    return f"Ray cannot be used at {address}: {type(error).__name__}: {text}"


def _explain(error: BaseException) -> str:
    """Say why an actor did not start or is gone, in Ray's own words, shortened."""
    text = str(error)
    if (found := re.search(r"(?s)The actor (?:is dead|died) because (.*)", text)) is not None:
        text = found[1]
    return _first_lines(text.partition(" Some common causes include")[0])


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:600].rstrip(". ")


if __name__ == "__main__":
    sys.exit(main())
