"""Whether a change has made anything slower: two source trees, turn and turn about.

    python -m benchmarks.studies.before_after /path/to/the/old/src [--rounds 25] [--seconds 0.4]

For each case every tree has a process of its own with its environments, and both run by turns, for a moment each: the
machine's speed changes from second to second, so a ratio is taken within a round. Prints the median of the ratios, new
to old, with half the interquartile range. Cases that end in "agent" have a 64-64 torch agent whose weights change
before every call, in "fixed agent" they never do; the others choose actions without a network, so that everything else
is measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import clusterenv

CASES = [
    *(f"step:{task}:{count}:shm" for task in ("CartPole-v1", "LunarLander-v3") for count in (16, 64, 256)),
    *(f"{mode}:CartPole-v1:64:shm" for mode in ("rollout", "stream")),
    *(f"{mode}:CartPole-v1:64:tcp" for mode in ("step", "rollout", "stream")),
    *(
        f"{mode}:CartPole-v1:64:shm:{kind}"
        for mode in ("step", "rollout", "stream")
        for kind in ("agent", "fixed agent")
    ),
]
NUM_STEPS = 128


def main() -> None:
    """Compare, or be one of the two if asked to by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the src folder of the tree to compare with")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each tree in a round")
    parser.add_argument("--only", default="", help="cases that have this in their name")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # Run this one in this process, whenever a line is read.
    arguments = parser.parse_args()
    if arguments.case:
        serve(arguments.case, arguments.seconds)
        return
    trees = [arguments.old, Path(clusterenv.__file__).parent.parent]
    for case in (case for case in CASES if arguments.only in case):
        with start(trees[0], case, arguments.seconds) as old, start(trees[1], case, arguments.seconds) as new:
            ratios = []
            for number in range(arguments.rounds):
                if number % 2:
                    before, after = old(), new()
                else:
                    after, before = new(), old()
                ratios.append(after / before)
        low, median, high = np.percentile(ratios, [25, 50, 75])
        print(f"{case:38s} {median:.3f} +-{(high - low) / 2:.3f}", flush=True)


@contextmanager
def start(tree: Path, case: str, seconds: float) -> Iterator[Callable[[], float]]:
    """Start a process with one of the trees; yields a function that lets it run for a moment and returns its speed."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--case", case, "--seconds", str(seconds)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(root)])}
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        lines, answers = process.stdin, process.stdout

        def run() -> float:
            print(file=lines, flush=True)
            return float(answers.readline())

        run()  # What is done once is no part of the question.
        yield run
        lines.close()


def serve(case: str, seconds: float) -> None:
    """Whenever a line is read, run a case for a moment and print how many environment steps per second it made."""
    from clusterenv import ClusterEnv, EveryUpdate

    mode, task, count, transport, *rest = case.split(":")
    ways: dict[str, Any] = {"transport": "shm"} if transport == "shm" else {"transport": "zmq", "listen": "127.0.0.1"}
    if hasattr(clusterenv, "Network"):  # Trees from before it was one argument have these as arguments of their own.
        ways = {"network": clusterenv.Network(**ways)}
    policy, prepare = make_agent(is_fixed=rest == ["fixed agent"]) if rest else (choose, lambda: None)
    with ClusterEnv(task, int(count), num_workers=2, sync=EveryUpdate(), **ways) as envs:
        envs.reset(seed=1)
        envs.action_space.seed(1)
        actions = [policy] if rest else [envs.action_space.sample() for _ in range(64)]
        stream = envs.stream(policy, NUM_STEPS) if mode == "stream" else None

        def advance() -> int:
            prepare()
            if stream is not None:
                return int(next(stream).rewards.size)
            if mode == "rollout":
                return int(envs.rollout(policy, NUM_STEPS).rewards.size)
            for action in actions:
                envs.step(action)
            return len(actions) * envs.num_envs

        for _ in sys.stdin:
            advance()
            began, done = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                done += advance()
            print(done / (time.perf_counter() - began), flush=True)


def make_agent(*, is_fixed: bool) -> tuple[Any, Callable[[], None]]:
    """Return an agent as CleanRL writes it, and a function that changes its weights; no tree has to know them."""
    import torch
    from torch import nn

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
            self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

        def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
            probs: Any = torch.distributions.Categorical(logits=self.actor(x))
            action = probs.sample() if action is None else action
            return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    def change() -> None:
        if not is_fixed:
            with torch.no_grad():
                next(agent.actor.parameters()).add_(1e-4)

    torch.set_num_threads(1)
    agent = Agent()
    return agent, change


def choose(obs: Any) -> Any:
    """Choose actions without a network."""
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


if __name__ == "__main__":
    main()
