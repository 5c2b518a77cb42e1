"""Light workers: real connections to a real head, many in one process, that replay what a real worker said.

Each has a socket and a channel of its own, and goes through handshake, joining, assignment and adoption as any worker
does. Only its environments and its policy are missing: a rollout is the recorded one, at once or after as long as the
head's call says (`envs.rollout(agent, num_steps, values={"seconds": 0.5})`), in the same parts as it was made.

Some of them in a row may say that they share a machine. Then one of these is sent weights, and the others, who could
find them on its board, take them for found.
"""

import argparse
import heapq
import math
import os
import pickle
import random
import resource
import signal
import socket as sockets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zmq

from benchmarks.studies.scale.recording import Recording
from clusterenv.config import split_shards, thread_variables
from clusterenv.errors import LaunchError
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.compatibility import installed_versions
from clusterenv.wire.messages import (
    PROTOCOL,
    Adopt,
    BoardAddress,
    Collect,
    Collected,
    Join,
    Load,
    Part,
    Ping,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    Serve,
    Stop,
)
from clusterenv.wire.ticket import TICKET_VARIABLE, Ticket
from clusterenv.wire.zeromq import Keys, WorkerSocket
from clusterenv.worker.channel import Channel

MODULE = "benchmarks.studies.scale.light_workers"
_LOOK_UP_S = 1.0  # How often to check that the head still lives.
_SOCKETS_A_WORKER = 4  # A connection, its events, and some to spare.
_HANG_S = 300.0  # As Timeouts.call_s is by default.
_SPREAD = 0.25  # Rollouts take this much more or less than asked for: real workers are not in step.


def raise_file_limit() -> None:
    """Allow this process as many open files as it may have: a connection is one, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class LightSocket(WorkerSocket):
    """A worker's socket that can be polled beside others."""

    @property
    def source(self) -> "zmq.Socket[bytes]":
        """What a poller takes."""
        return self._socket


class LightWorker:
    """One worker's end of the conversation.

    Attributes:
        due: When it goes on with the rollout it is making; None if it listens.
        is_done: Whether the head has told it to stop.
    """

    def __init__(self, socket: LightSocket, worker_index: int, recording: Recording, per_machine: int) -> None:
        self.socket = socket
        self._machine = f"machine {worker_index // per_machine}"
        self.due: float | None = None
        self.is_done = False
        self._channel = Channel(socket, _HANG_S)
        self._index = worker_index
        self._keys = Keys.make()
        self._recording = recording
        self._rollout = recording.answer_to(Collect)
        self._pace = 1 + _SPREAD * random.Random(worker_index).uniform(-1, 1)
        self._version = 0
        self._script: list[tuple[float, Any, list[bytes]]] = []

    def join(self) -> None:
        """Register a key of its own; `serve` goes on from there."""
        self._channel.send(Register(PROTOCOL, self._index, self._keys.public))

    def serve(self) -> None:
        """Answer what has come, up to a rollout that takes time: a real worker does not listen meanwhile."""
        while self.due is None and not self.is_done and (request := self._channel.receive(0.0)) is not None:
            self._answer(request)

    def go_on(self, now: float) -> None:
        """Send the parts of the rollout that are made by now."""
        while self._script and self._script[0][0] <= now:
            _, reply, arrays = self._script.pop(0)
            self._channel.send(reply, arrays)  # type: ignore[arg-type]  # bytes of arrays are as good here
        self.due = self._script[0][0] if self._script else None

    def _answer(self, request: Request) -> None:
        self._channel.weights = None  # There is no policy to load them into, and many workers share this memory.
        if isinstance(request, Stop | Refused):
            self.is_done = True
        elif isinstance(request, Registered):
            self.socket.use(self._keys)
            hostname = sockets.gethostname()
            board = BoardAddress(os.getpid(), self._index, bytes(16))
            self._channel.send(
                Join(PROTOCOL, self._index, os.getpid(), hostname, installed_versions(), self._machine, board)
            )
        elif isinstance(request, Collect):
            self._collect(request)
        elif isinstance(request, Load):
            self._version = request.version
        elif not isinstance(request, Ping):
            for reply, arrays in self._recording.answer_to(type(request)):
                own = msgspec.structs.replace(reply, call=request.call)
                if isinstance(request, Serve):
                    own = msgspec.structs.replace(own, has_neighbour=request.neighbour is not None)
                self._channel.send(own, arrays)  # type: ignore[arg-type]  # as above
            if isinstance(request, Adopt):
                self._version = request.version

    def _collect(self, request: Collect) -> None:
        """Plan a rollout: each part when it would be made."""
        if request.version is not None:
            self._version = request.version
        asked = pickle.loads(request.arguments) if request.arguments else {}  # noqa: S301 - from its own head
        seconds = self._pace * asked.get("seconds", 0.0)
        now = time.monotonic()
        for reply, arrays in self._rollout:
            if isinstance(reply, Part):
                share = (reply.first + reply.count) / request.num_steps
                own: Reply = msgspec.structs.replace(reply, call=request.call)
            else:
                assert isinstance(reply, Collected), "the recording is of rollouts"
                share = 1.0
                probes = self._recording.probes(reply, request.num_probes)
                own = msgspec.structs.replace(
                    reply, call=request.call, version=self._version, busy_s=seconds, probes=probes
                )
            self._script.append((now + share * seconds, own, arrays))
        self.go_on(now)


def serve(ticket: Ticket, workers: range, recording: Recording, per_machine: int) -> None:
    """Be these workers until the head has told all of them to stop, or is gone."""
    context = zmq.Context()
    context.max_sockets = _SOCKETS_A_WORKER * len(workers) + 64
    poller = zmq.Poller()
    everyone: dict[Any, LightWorker] = {}
    for worker_index in workers:
        socket = LightSocket(ticket, context)
        worker = LightWorker(socket, worker_index, recording, per_machine)
        everyone[socket.source] = worker
        poller.register(socket.source, zmq.POLLIN)
        worker.join()
    busy: list[tuple[float, int, LightWorker]] = []
    parent = os.getppid()
    num_left = len(everyone)
    while num_left and os.getppid() == parent:
        wait_s = min(_LOOK_UP_S, max(0.0, busy[0][0] - time.monotonic())) if busy else _LOOK_UP_S
        ready = [everyone[source] for source, _ in poller.poll(math.ceil(wait_s * 1000))]
        now = time.monotonic()
        while busy and busy[0][0] <= now:
            worker = heapq.heappop(busy)[2]
            worker.go_on(now)
            ready.append(worker)
        for worker in ready:
            worker.serve()
            if worker.due is not None:
                heapq.heappush(busy, (worker.due, id(worker), worker))
            listens = worker.due is None and not worker.is_done
            poller.register(worker.socket.source, zmq.POLLIN if listens else 0)
            num_left -= worker.is_done
    for worker in everyone.values():
        worker.socket.close()
    context.term()


@dataclass(frozen=True, kw_only=True)
class LightLauncher:
    """Starts light workers, spread over some processes.

    Attributes:
        per_machine: How many in a row say that they share a machine.
    """

    recording: Path
    per_machine: int = 1
    num_processes: int = 2
    suggested_workers: None = None
    queues: bool = False
    route_to: None = None

    def launch(self, ticket: Ticket, num_workers: int) -> "LightFleet":
        """Start the processes and return at once."""
        return LightFleet(self, ticket, num_workers)

    def render(self, num_workers: int) -> str:
        """Show the command lines."""
        return "\n".join(" ".join(self.command(*part)) for part in self.split(num_workers))

    def split(self, num_workers: int) -> list[tuple[int, int]]:
        """Say which workers each process holds."""
        return split_shards(num_workers, min(self.num_processes, num_workers))

    def command(self, first: int, stop: int) -> list[str]:
        """Return what runs some of the workers."""
        return [
            sys.executable,
            "-m",
            MODULE,
            str(first),
            str(stop),
            str(self.recording),
            str(self.per_machine),
        ]


class LightFleet:
    """Processes that hold many workers each."""

    def __init__(self, launcher: LightLauncher, ticket: Ticket, num_workers: int) -> None:
        environment = os.environ | {
            **thread_variables(1),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            TICKET_VARIABLE: ticket.encode(),
        }
        self._parts = launcher.split(num_workers)

        def start(part_index: int, log: BinaryIO) -> "subprocess.Popen[bytes]":
            command = launcher.command(*self._parts[part_index])
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        self._processes = ProcessFleet(start, len(self._parts))

    def exits(self) -> dict[int, str]:
        """Return how workers ended: with their process."""
        ended = self._processes.exits()
        return {index: how for part, how in ended.items() for index in range(*self._parts[part])}

    def status(self) -> str:
        """Say nothing: a process is up as soon as it is started."""
        return ""

    def log_tail(self, worker_index: int) -> str:
        """Return the last lines that a worker's process wrote."""
        part = next(i for i, (first, stop) in enumerate(self._parts) if first <= worker_index < stop)
        return self._processes.log_tail(part)

    def restart(self, worker_index: int) -> None:
        """Refuse: with on_loss="raise" nobody asks."""
        raise LaunchError("Light workers are not replaced.")

    def stop(self, timeout_s: float) -> None:
        """Wait this long for them to end by themselves, then end them."""
        self._processes.stop(timeout_s)


def main() -> int:
    """Be the workers that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n\n")[0])
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int)
    parser.add_argument("recording", type=Path)
    parser.add_argument("per_machine", type=int)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the head.
    raise_file_limit()
    ticket = Ticket.decode(os.environ.pop(TICKET_VARIABLE))
    workers = range(arguments.first, arguments.stop)
    serve(ticket, workers, Recording.read(arguments.recording), arguments.per_machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
