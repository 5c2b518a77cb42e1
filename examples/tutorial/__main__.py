"""`python -m examples.tutorial`: measure the four scripts in turns, and print docs/tutorials/four-steps.md's table."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from dataclasses import dataclass

import tyro

STEPS = {
    "step1": "`SyncVectorEnv`, one process",
    "step2": "`ClusterEnv.step(actions)`",
    "step3": "`ClusterEnv.rollout(agent)`",
    "step4": "`ClusterEnv.stream(agent)`",
}


@dataclass
class Args:
    """Measure the scripts of the tutorial."""

    rounds: int = 3
    """how often each script runs; they take turns, so that what else this machine does harms all alike"""
    total_timesteps: int = 300_000
    """environment steps of each run"""


def measure(name: str, total_timesteps: int) -> tuple[float, float]:
    """Run a script; returns its steps per second and the return it reached, as it prints them."""
    command = [sys.executable, "-m", f"examples.tutorial.{name}", "--total-timesteps", str(total_timesteps)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = re.search(r": ([\d,]+) steps/s.*\n.*episodes: (-?[\d.]+)\.", out)
    assert found is not None, out
    return float(found[1].replace(",", "")), float(found[2])


def main(args: Args) -> None:
    """Print a table, the median of the rounds in each row."""
    speeds: dict[str, list[float]] = {name: [] for name in STEPS}
    returns = dict.fromkeys(STEPS, 0.0)
    for number in range(args.rounds):
        for name in STEPS:
            speed, returns[name] = measure(name, args.total_timesteps)
            speeds[name].append(speed)
            print(f"round {number + 1}, {name}: {speed:,.0f} steps/s", file=sys.stderr, flush=True)
    first = statistics.median(speeds["step1"])
    print("| script | | steps/s | | mean return at the end |\n|---|---|---:|---:|---:|")
    for name, what in STEPS.items():
        speed = statistics.median(speeds[name])
        link = f"[{name}.py](../examples/tutorial/{name}.py)"
        print(f"| {link} | {what} | {speed:,.0f} | {speed / first:.2f} | {returns[name]:.0f} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
