"""Records a real worker: `record` has a head lead one through a reset, a policy, rollouts and a stream.

Run as a program, this is a worker like any other that also writes down what it says.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from numpy.typing import NDArray

from benchmarks.agents import MlpAgent, change
from benchmarks.studies.scale.recording import Recording, Said
from clusterenv import AdaptiveSync, ClusterEnv, Network
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire import messages
from clusterenv.wire.assignment import EnvFactory
from clusterenv.wire.messages import Join, Register, Reply, Request
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from clusterenv.worker import __main__, loop
from clusterenv.worker.channel import Channel

FILE_VARIABLE = "BENCHMARK_RECORDING"


@dataclass(frozen=True)
class RecordingLauncher:
    """Starts this program as a worker."""

    path: Path
    suggested_workers: int = 1
    queues: bool = False
    route_to: None = None

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        """Start the worker and return at once."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            TICKET_VARIABLE: ticket.encode(),
            FILE_VARIABLE: str(self.path),
        }

        def start(worker_index: int, log: BinaryIO) -> "subprocess.Popen[bytes]":
            command = [sys.executable, "-m", "benchmarks.studies.scale.recorder"]
            variables = environment | {WORKER_VARIABLE: str(worker_index)}
            return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        return ProcessFleet(start, num_workers)

    def render(self, num_workers: int) -> str:
        """Show the command line."""
        return f"{sys.executable} -m benchmarks.studies.scale.recorder"


class RecordingChannel(Channel):
    """Keeps what is sent, by the request that it answers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers: dict[str, list[Said]] = {}
        self._asked = ""

    def receive(self, timeout_s: float) -> Request | None:
        """Note what is asked; when asked to stop, write it all down."""
        request = super().receive(timeout_s)
        if request is not None:
            self._asked = type(request).__name__
            self._answers[self._asked] = []
            if isinstance(request, messages.Stop):
                Path(os.environ[FILE_VARIABLE]).write_bytes(msgspec.msgpack.encode(Recording(self._answers)))
        return request

    def send(self, reply: Reply, arrays: Iterable[NDArray[Any]] = ()) -> None:
        """Send it, and keep a copy."""
        sent = list(arrays)
        if not isinstance(reply, Register | Join):
            self._answers[self._asked].append((messages.encode(reply), [array.tobytes() for array in sent]))
        super().send(reply, sent)


def record(path: Path, env: str | EnvFactory, num_envs: int, num_steps: int) -> Recording:
    """Let a real worker make rollouts, compare policies and stream, and write down what it says."""
    with ClusterEnv(
        env,
        num_envs,
        launcher=RecordingLauncher(path),
        network=Network(transport="zmq"),
        sync=AdaptiveSync(threshold=1e-9),
    ) as envs:
        spaces: Any = envs.single_observation_space, envs.single_action_space
        agent = MlpAgent(spaces[0].shape[0], int(spaces[1].n))
        envs.reset(seed=1)
        for _ in range(3):
            envs.rollout(agent, num_steps)
            change(agent)
        with envs.stream(agent, num_steps) as stream:
            next(stream)
    return Recording.read(path)


if __name__ == "__main__":
    vars(loop)["Channel"] = RecordingChannel  # Of this process only: the worker's own code does the rest.
    sys.exit(__main__.main())
