"""What recording costs a run: `python -m benchmarks.studies.recording`.

Two workers make rollouts. In one half of every round they are recorded, in the other half they are not; the rounds are
short and their order changes, so that what the machine does otherwise falls on both. Then the dataset is made, which is
timed as well. Prints one table and writes it to `benchmarks/results/recording.md`. Run it on an otherwise idle machine,
with room for a few gigabytes in the temporary directory.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.agents import MlpAgent
from benchmarks.page import publish
from benchmarks.peers.report import describe_ratio, shorten
from benchmarks.peers.rollers_clusterenv import factories
from benchmarks.peers.rounds import spread
from benchmarks.processes import ROOT
from benchmarks.tasks import REMARKS, TASKS
from clusterenv import ClusterEnv, Recorder

AT_LEAST = 0.95
NUM_ENVS = {"cartpole": 32, "lunarlander": 32, "atari": 16}
NUM_STEPS = 128
NUM_WORKERS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.recording", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of half a round (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=NUM_ENVS, default=list(NUM_ENVS), help="only these tasks")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "recording.md", help="where to write"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = os.getloadavg()[0]
    rows = [measure(task, arguments.rounds, arguments.seconds) for task in arguments.tasks]
    lines = [
        "# What recording costs",
        "",
        "Environment steps per second of `envs.rollout`, without and with `recorder.add(rollout)` after each; the "
        "ratio of both in a round. Medians over the rounds; ± is half the interquartile range. Then what was recorded, "
        "and how long `recorder.close()` took to make the Minari dataset of it. Made by "
        "`python -m benchmarks.studies.recording`.",
        "",
        f"| | not recorded | recorded | ratio | goal: {AT_LEAST:g} | one `add` | recorded | `close` |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
        *rows,
        "",
        f"- {NUM_WORKERS} workers, rollouts of {NUM_STEPS} steps of "
        + ", ".join(f"{count} ({TASKS[task]})" for task, count in NUM_ENVS.items() if task in arguments.tasks)
        + " environments",
        "- a 64-64 torch agent; for images a policy that costs nothing, so that recording weighs as much as it can",
        f"- {arguments.rounds} rounds of twice {arguments.seconds:g} s",
    ]
    publish(lines, load, arguments.out)
    return 0


def measure(task: str, rounds: int, seconds: float) -> str:
    """Measure a task, and return its line of the table."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    adding: list[float] = []
    with tempfile.TemporaryDirectory(prefix="recording") as scratch:
        with ClusterEnv(factories(task, NUM_ENVS[task]), num_workers=NUM_WORKERS) as envs:
            envs.reset(seed=0)
            agent = make_agent(envs)
            recorder = Recorder(envs, Path(scratch) / "study-v0")
            run(envs, agent, seconds, None)
            for number in range(rounds):
                # In changing order: a machine that becomes slower must not look like a recorder that is in the way.
                for is_recorded in (False, True) if number % 2 else (True, False):
                    rate, cost_s = run(envs, agent, seconds, recorder if is_recorded else None)
                    rates[is_recorded].append(rate)
                    adding += cost_s
        began = time.perf_counter()
        made = recorder.close()
        assert made is not None, "it was recorded here"
        close_s = time.perf_counter() - began
        size_bytes = sum(file.stat().st_size for file in Path(scratch).rglob("*") if file.is_file())
    ratio = spread(np.array(rates[True]) / np.array(rates[False]))
    cells = [
        TASKS[task] + (f" ({REMARKS[task]})" if task in REMARKS else ""),
        *(shorten(float(np.median(rates[is_recorded]))) for is_recorded in (False, True)),
        describe_ratio(ratio),
        "met" if ratio.median >= AT_LEAST else "missed",
        f"{1e3 * float(np.median(adding)):.2f} ms",
        f"{made.num_episodes:,} episodes, {made.num_steps:,} steps, {size_bytes / 1e6:.0f} MB",
        f"{close_s:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def make_agent(envs: ClusterEnv) -> Any:
    """Make a small agent for vectors; for images a function that chooses without looking."""
    shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)  # type: ignore[attr-defined]  # Discrete in these tasks
    assert shape is not None
    if len(shape) == 1:
        return MlpAgent(shape[0], num_actions)

    def choose(obs: Any) -> NDArray[np.int64]:
        return np.full(len(obs), 1, np.int64)

    return choose


def run(
    envs: ClusterEnv, agent: Callable[..., Any], seconds: float, recorder: Recorder | None
) -> tuple[float, list[float]]:
    """Make rollouts for at least so long; returns environment steps per second, and how long each `add` took."""
    env_steps = 0
    adding: list[float] = []
    began = now = time.perf_counter()
    while now - began < seconds:
        rollout = envs.rollout(agent, NUM_STEPS)
        env_steps += rollout.rewards.size
        if recorder is not None:
            before = time.perf_counter()
            recorder.add(rollout)
            adding.append(time.perf_counter() - before)
        now = time.perf_counter()
    return env_steps / (now - began), adding


if __name__ == "__main__":
    sys.exit(main())
