"""Whether a change has made anything slower: two source trees, turn and turn about.

    python -m benchmarks.studies.before_after /path/to/the/old/src [--rounds 5] [--seconds 1]

Each case runs in a process of its own with one tree or the other on its path; ratios are taken within a round, because
the machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import clusterenv

CASES = [
    *(f"step:{task}:{count}:shm" for task in ("CartPole-v1", "LunarLander-v3") for count in (16, 64, 256)),
    *(f"{mode}:CartPole-v1:64:shm" for mode in ("rollout", "stream")),
    *(f"{mode}:CartPole-v1:64:tcp" for mode in ("step", "rollout", "stream")),
]
NUM_STEPS = 128


def main() -> None:
    """Compare, or run one case if asked to by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the src folder of the tree to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--only", default="", help="cases that have this in their name")
    parser.add_argument("--case", help="run this one in this process, and print its speed")
    arguments = parser.parse_args()
    if arguments.case:
        print(measure(arguments.case, arguments.seconds))
        return
    trees = [arguments.old, Path(clusterenv.__file__).parent.parent]
    for case in (case for case in CASES if arguments.only in case):
        ratios = []
        for number in range(arguments.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            speeds = {index: run(trees[index], case, arguments.seconds) for index in order}
            ratios.append(speeds[1] / speeds[0])
        print(f"{case:28s} {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def run(tree: Path, case: str, seconds: float) -> float:
    """Measure a case with one of the trees."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), "--case", case, "--seconds", str(seconds)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(root)])}
    return float(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)


def measure(case: str, seconds: float) -> float:
    """Return how many environment steps per second a case makes."""
    from clusterenv import ClusterEnv, NeverSync

    mode, task, count, transport = case.split(":")
    ways: dict[str, Any] = {"transport": "shm"} if transport == "shm" else {"transport": "zmq", "listen": "127.0.0.1"}
    if hasattr(clusterenv, "Network"):  # Trees from before it was one argument have these as arguments of their own.
        ways = {"network": clusterenv.Network(**ways)}
    with ClusterEnv(task, int(count), num_workers=2, sync=NeverSync(), **ways) as envs:
        envs.reset(seed=1)
        envs.action_space.seed(1)
        actions = [envs.action_space.sample() for _ in range(64)]
        stream = envs.stream(choose, NUM_STEPS) if mode == "stream" else None

        def advance() -> int:
            if stream is not None:
                return int(next(stream).rewards.size)
            if mode == "rollout":
                return int(envs.rollout(choose, NUM_STEPS).rewards.size)
            for action in actions:
                envs.step(action)
            return len(actions) * envs.num_envs

        advance()
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            done += advance()
        return done / (time.perf_counter() - began)


def choose(obs: Any) -> Any:
    """Choose actions without a network: what is measured is everything else."""
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


if __name__ == "__main__":
    main()
