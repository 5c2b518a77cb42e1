"""Whether a streaming worker keeps its speed while the learner works: `python -m benchmarks.studies.overlap`.

One worker streams rollouts. In one half of every round the learner only takes them; in the other half it learns from
each, for most of the time that making one takes. On two cores the worker should not notice. Cores share caches, memory
and more, though: as a control, the same learner works beside a process that only steps environments, and nobody speaks
to anybody. Prints one table and writes it to `benchmarks/results/overlap.md`. Run it on an otherwise idle machine.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.agents import MlpAgent
from benchmarks.page import publish
from benchmarks.peers.bare import FORK, end, run_freely
from benchmarks.peers.bare import start as start_process
from benchmarks.peers.report import describe_ratio, shorten
from benchmarks.peers.rollers_clusterenv import factories, start
from benchmarks.peers.rounds import spread
from benchmarks.processes import ROOT
from benchmarks.tasks import TASKS
from clusterenv import EveryUpdate
from clusterenv.rollout import Rollout

NUM_ENVS = 32
AT_LEAST = 0.95
# Of the time that a rollout takes to be made; taking it from the stream, which is the learner's work as well, comes on
# top. All of it would be too much: a learner that falls behind holds the worker up, and that is not the question here.
LEARNING_SHARE = 0.8
# Enough that the worker never waits for the learner to take what it made.
IN_FLIGHT = 8
# Rollouts of about 50 ms, so that there are many of them and one more or less does not matter.
NUM_STEPS = {"cartpole": 128, "lunarlander": 32}
TIMED_ROLLOUTS = 5
CONTROL_S = 0.05
MINIBATCH = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.overlap", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of half a round (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=NUM_STEPS, default=list(NUM_STEPS), help="only these tasks")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "overlap.md", help="where to write"
    )
    arguments = parser.parse_args(argv)
    load = os.getloadavg()[0]
    rows = []
    for task in arguments.tasks:
        control = measure_control(task, arguments.rounds, arguments.seconds)
        rows.append(row(f"{TASKS[task]}, control: a bare loop", *control))
        for transport in ("shm", "zmq"):
            rates = measure(task, transport, arguments.rounds, arguments.seconds)
            rows.append(row(f"{TASKS[task]}, {transport}", *rates, control=control))
    lines = [
        "# A streaming worker beside a learner that works",
        "",
        "Environment steps per second of one worker's stream, while the learner only takes rollouts, and while it "
        f"learns from each for {LEARNING_SHARE:.0%} of the time that making one takes; the ratio of both in a "
        "round. Medians over the rounds; ± is half the interquartile range. The control is a process that steps the "
        "environments in a plain loop and speaks to nobody: what it loses, the machine takes. The last column is the "
        "ratio over the control's. Made by `python -m benchmarks.studies.overlap`.",
        "",
        f"| | idle learner | working learner | ratio | goal: {AT_LEAST:g} | of the control's |",
        "|---|---:|---:|---:|---|---:|",
        *rows,
        "",
        f"- {NUM_ENVS} environments, 64-64 torch agent, new weights with every rollout",
        f"- {arguments.rounds} rounds of twice {arguments.seconds:g} s",
    ]
    publish(lines, load, arguments.out)
    return 0


def measure(task: str, transport: str, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """Measure one worker's rates with an idle and with a working learner, one of each a round."""
    envs, agent = start(factories(task, NUM_ENVS), num_workers=1, transport=transport, sync=EveryUpdate())
    learner = Learner(agent)
    rates: dict[bool, list[float]] = {False: [], True: []}
    with envs:
        stream = envs.stream(agent, NUM_STEPS[task], in_flight=IN_FLIGHT, max_lag=math.inf)
        for number in range(rounds):
            # In changing order: a machine that becomes slower must not look like a learner that is in the way.
            for is_working in (False, True) if number % 2 else (True, False):
                learning_s = LEARNING_SHARE * time_rollout(stream) if is_working else 0.0
                rates[is_working].append(run(stream, learner, learning_s, seconds))
    return rates[False], rates[True]


def measure_control(task: str, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """Measure a bare loop's rates beside an idle and a working learner, which has nothing to do with it."""
    envs, agent = start(factories(task, NUM_ENVS), num_workers=0)
    with envs:
        rollout = envs.rollout(agent, NUM_STEPS[task])
    learner = Learner(agent)
    ours, theirs = FORK.Pipe()
    process = start_process(run_freely, task, 0, NUM_ENVS, theirs)
    rates: dict[bool, list[float]] = {False: [], True: []}
    try:
        for number in range(rounds):
            for is_working in (False, True) if number % 2 else (True, False):
                ours.send(seconds)
                while is_working and not ours.poll(0.0):
                    learner.learn(rollout, LEARNING_SHARE * CONTROL_S)
                    ours.poll((1 - LEARNING_SHARE) * CONTROL_S)
                rates[is_working].append(ours.recv())
    finally:
        end([process])
    return rates[False], rates[True]


def time_rollout(stream: Iterator[Rollout]) -> float:
    """Return how many seconds a rollout takes now, with an idle learner."""
    for _ in range(IN_FLIGHT):
        next(stream)  # What was made ahead would seem to take no time.
    began = time.perf_counter()
    for _ in range(TIMED_ROLLOUTS):
        next(stream)
    return (time.perf_counter() - began) / TIMED_ROLLOUTS


def run(stream: Iterator[Rollout], learner: "Learner", learning_s: float, seconds: float) -> float:
    """Take rollouts for at least so long, and learn from each; returns environment steps per second."""
    for _ in range(IN_FLIGHT):
        next(stream)  # What was made before, perhaps beside another learner, must not count.
    env_steps = 0
    began = now = time.perf_counter()
    while now - began < seconds:
        rollout = next(stream)
        env_steps += rollout.rewards.size
        now = time.perf_counter()
        learner.learn(rollout, learning_s)
    return env_steps / (now - began)


class Learner:
    """Takes gradient steps as PPO does, so small that the episodes stay as they are."""

    def __init__(self, agent: MlpAgent) -> None:
        self._agent = agent
        self._optimizer = torch.optim.SGD(agent.parameters(), lr=1e-6)

    def learn(self, rollout: Rollout, seconds: float) -> None:
        """Learn from minibatches of a rollout for so long."""
        end = time.perf_counter() + seconds
        obs = torch.as_tensor(rollout.obs).flatten(0, 1)
        actions, rewards = (torch.as_tensor(each).flatten() for each in (rollout.actions, rollout.rewards))
        while time.perf_counter() < end:
            rows = torch.randint(len(obs), (MINIBATCH,))
            _, logprobs, entropies, values = self._agent.get_action_and_value(obs[rows], actions[rows])
            surprise = rewards[rows] - values[:, 0]
            loss = surprise.square().mean() - (logprobs * surprise.detach()).mean() - 0.01 * entropies.mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            self._optimizer.step()


def row(
    label: str,
    idle: Sequence[float],
    working: Sequence[float],
    control: tuple[Sequence[float], Sequence[float]] | None = None,
) -> str:
    """Format a line of the table."""
    ratio = spread(np.array(working) / np.array(idle))
    rates = " | ".join(shorten(float(np.median(each))) for each in (idle, working))
    if control is None:
        return f"| {label} | {rates} | {describe_ratio(ratio)} | | |"
    word = "met" if ratio.median >= AT_LEAST else "missed"
    expected = float(np.median(np.array(control[1]) / np.array(control[0])))
    return f"| {label} | {rates} | {describe_ratio(ratio)} | {word} | {ratio.median / expected:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
