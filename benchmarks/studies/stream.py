"""What streams gain over synchronous rollouts: `python -m benchmarks.studies.stream`.

Three cases, each measured in interleaved rounds: a learner that works as long as the environments, on the other core; a
learner that only waits, as one does for a GPU, beside two workers; and two workers of which one is three times slower,
with a learner that takes no time. Prints one table and writes it to `benchmarks/results/stream.md`. Run it on an
otherwise idle machine.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.agents import MlpAgent
from benchmarks.page import publish
from benchmarks.processes import ROOT
from clusterenv import ClusterEnv
from clusterenv.rollout import Rollout

NUM_STEPS = 128
ENVS_PER_WORKER = 32
RESULTS = ROOT / "benchmarks" / "results" / "stream.md"


class Slower(gym.Wrapper[Any, Any, Any, Any]):
    """Takes three times as long, by doing what it does to two others as well."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._others = [gym.make("LunarLander-v3") for _ in range(2)]

    def reset(self, **options: Any) -> Any:
        """Reset all three."""
        for other in self._others:
            other.reset()
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        """Step all three."""
        for other in self._others:
            _, _, terminated, truncated, _ = other.step(action)
            if terminated or truncated:
                other.reset()
        return self.env.step(action)


@dataclass(frozen=True)
class Case:
    """One comparison: the same learner on synchronous rollouts, and on a stream."""

    name: str
    num_workers: int
    learn: Callable[[Rollout, float], None]
    goal: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=12, help="rollouts a round (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the table")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    lines = ["| case | ratio | spread | goal |", "|---|---:|---:|---|"]
    for case in (
        Case("a learner that works as long as the one worker: wall-clock, stream / rollout", 1, work, "at most 0.6"),
        Case("a learner that only waits, beside two workers: wall-clock, stream / rollout", 2, rest, "at most 0.6"),
    ):
        lines.append(row(case.name, compare(case, arguments.rounds, arguments.rollouts), case.goal))
    lines.append(
        row(
            "one of two workers three times slower: speed of the stream / sum of both alone",
            uneven(arguments.rounds, arguments.rollouts),
            "at least 0.9",
        )
    )
    notes = [
        f"LunarLander-v3, {ENVS_PER_WORKER} environments a worker, {NUM_STEPS} steps a rollout, 64-64 torch agent",
        f"{arguments.rounds} interleaved rounds of {arguments.rollouts} rollouts; ± is half the interquartile range",
    ]
    publish(["# Streams", "", *lines, "", *(f"- {note}" for note in notes)], load, arguments.out)
    return 0


def work(rollout: Rollout, seconds: float) -> None:
    """Keep a core busy for so long."""
    end = time.perf_counter() + seconds
    numbers = np.ones((64, 64))
    while time.perf_counter() < end:
        numbers = numbers @ numbers * 0.01


def rest(rollout: Rollout, seconds: float) -> None:
    """Wait for so long, as for a GPU."""
    time.sleep(seconds)


def compare(case: Case, rounds: int, rollouts: int) -> NDArray[np.float64]:
    """Return the ratio of wall-clock times, one a round."""
    agent = MlpAgent(8, 4)
    with ClusterEnv("LunarLander-v3", case.num_workers * ENVS_PER_WORKER, num_workers=case.num_workers) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            envs.rollout(agent, NUM_STEPS)
        ratios = []
        for _ in range(rounds):
            simulation_s = timed(lambda: envs.rollout(agent, NUM_STEPS))

            def synchronous(seconds: float = simulation_s) -> None:
                for _ in range(rollouts):
                    case.learn(envs.rollout(agent, NUM_STEPS), seconds)

            def streaming(seconds: float = simulation_s) -> None:
                with envs.stream(agent, NUM_STEPS, min_envs=envs.num_envs) as stream:
                    for _, rollout in zip(range(rollouts), stream, strict=False):
                        case.learn(rollout, seconds)

            ratios.append(timed(streaming) / timed(synchronous))
    return np.array(ratios)


def uneven(rounds: int, rollouts: int) -> NDArray[np.float64]:
    """Return the stream's speed as a fraction of the summed speed of both workers, each measured beside the other."""
    agent = MlpAgent(8, 4)
    makers = [lambda: gym.make("LunarLander-v3")] * ENVS_PER_WORKER
    makers += [lambda: Slower(gym.make("LunarLander-v3"))] * ENVS_PER_WORKER
    with ClusterEnv(makers, num_workers=2) as envs:
        envs.reset(seed=1)
        ratios = []
        for _ in range(rounds):
            with envs.stream(agent, NUM_STEPS) as stream:
                for _ in range(4):
                    next(stream)
                steps, seconds, busy = 0, -time.perf_counter(), dict.fromkeys((0, ENVS_PER_WORKER), 0.0)
                counts = dict.fromkeys(busy, 0)
                for rollout in take(stream, 4 * rollouts):
                    first = int(rollout.env_indices[0])
                    steps += rollout.rewards.size
                    counts[first] += rollout.rewards.size
                    busy[first] += (1.0 - rollout.stats["worker_idle_share"]) * rollout.stats["seconds"]
                seconds += time.perf_counter()
            alone = sum(counts[first] / busy[first] for first in busy if busy[first])
            ratios.append(steps / seconds / alone)
    return np.array(ratios)


def take(stream: Iterator[Rollout], count: int) -> Iterator[Rollout]:
    """Yield so many rollouts."""
    for _ in range(count):
        yield next(stream)


def timed(run: Callable[[], object]) -> float:
    """Return how many seconds it took."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def row(name: str, ratios: NDArray[np.float64], goal: str) -> str:
    """Format a line of the table."""
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return f"| {name} | {median:.2f} | ± {(high - low) / 2:.2f} | {goal} |"


if __name__ == "__main__":
    raise SystemExit(main())
