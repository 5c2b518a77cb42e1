"""Weights pushed as JSON at every step, as the reference implementation of the paper has it: the way not to do it.

The head sends each worker the agent's whole state as JSON. The worker rebuilds the state, lets the agent act, steps its
environments once, and answers with JSON. Two things that the reference does besides are left out, in its favour: it
copies the agent's old state at every step, to put it back if the new one is much the same, and it prints.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks.agents import MlpAgent
from benchmarks.peers.bare_rollout import AgentShard

# What a worker answers with, by the names that `AgentLoop` has for it.
COLUMNS = ("obs", "actions", "logprobs", "values", "rewards", "dones")
TIMEOUT_MS = 60_000
MODULE = "benchmarks.peers.json_push"


class JsonPush:
    """A head with two workers, to whom it sends all weights for every step.

    Args:
        task: A key of `tasks.TASKS`.
        num_envs: Of both workers together.
        num_steps: How many steps are kept.
    """

    def __init__(self, task: str, num_envs: int, num_steps: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._sizes = (num_envs - num_envs // 2, num_envs // 2)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._processes = [
            subprocess.Popen([sys.executable, "-m", MODULE, str(port), str(rank), task, str(size)])
            for rank, size in enumerate(self._sizes)
        ]
        greetings = dict(self._receive() for _ in self._processes)
        observation_size, num_actions = greetings[0]["observation_size"], greetings[0]["num_actions"]
        self.agent = MlpAgent(observation_size, num_actions)
        shape = (num_steps, num_envs)
        self.columns: dict[str, np.ndarray[Any, Any]] = {
            "obs": np.zeros((*shape, observation_size), np.float32),
            "actions": np.zeros(shape, np.int64),
            "logprobs": np.zeros(shape, np.float32),
            "values": np.zeros(shape, np.float32),
            "rewards": np.zeros(shape, np.float64),
            "dones": np.zeros(shape, np.bool_),
        }
        self._row = 0

    def step(self) -> int:
        """Step every environment once; returns how many there are."""
        weights = {name: value.tolist() for name, value in self.agent.state_dict().items()}
        for rank in range(len(self._processes)):
            self._socket.send_multipart([str(rank).encode(), json.dumps({"weights": weights}).encode()])
        for _ in self._processes:
            rank, answer = self._receive()
            start = sum(self._sizes[:rank])
            for name, values in answer.items():
                self.columns[name][self._row, start : start + self._sizes[rank]] = values
        self._row = (self._row + 1) % len(self.columns["rewards"])
        return sum(self._sizes)

    def close(self) -> None:
        """End the workers."""
        for rank in range(len(self._processes)):
            self._socket.send_multipart([str(rank).encode(), b"{}"])
        for process in self._processes:
            process.wait()
        self._context.destroy(linger=0)

    def _receive(self) -> tuple[int, dict[str, Any]]:
        identity, message = self._socket.recv_multipart()
        return int(identity), json.loads(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Be a worker."""
    parser = argparse.ArgumentParser(description="A worker of the JSON push; started by the benchmark itself.")
    parser.add_argument("port", type=int)
    parser.add_argument("rank")
    parser.add_argument("task")
    parser.add_argument("size", type=int)
    arguments = parser.parse_args(argv)
    shard = AgentShard(arguments.task, arguments.size, num_steps=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, arguments.rank.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{arguments.port}")
        num_actions = shard.agent.actor[-1].out_features
        socket.send_json({"observation_size": shard.next_obs.shape[1], "num_actions": num_actions})
        while weights := json.loads(socket.recv()).get("weights"):
            shard.agent.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
            shard.step()
            socket.send(json.dumps({name: getattr(shard, name)[0].tolist() for name in COLUMNS}).encode())
    shard.close()


if __name__ == "__main__":
    main()
