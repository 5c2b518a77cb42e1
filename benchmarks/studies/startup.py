"""How long it takes to start and to close: `python -m benchmarks.studies.startup`.

From the first import, in a fresh interpreter, to two local workers with 64 CartPoles that are reset; then `close()`.
Beside it the same with Gymnasium's AsyncVectorEnv. Interleaved runs; prints one table and writes it to
`benchmarks/results/startup.md`. Run it on an otherwise idle machine.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.page import publish
from benchmarks.peers.report import half_range
from benchmarks.peers.rounds import Spread, spread
from benchmarks.processes import ROOT, child_environment
from benchmarks.studies.startup_probe import NUM_ENVS, NUM_WORKERS

START_AT_MOST_S = 1.5
CLOSE_AT_MOST_S = 0.5
TIMEOUT_S = 120.0
LABELS = {
    "shm": f"ClusterEnv, {NUM_WORKERS} workers, shm",
    "zmq": f"ClusterEnv, {NUM_WORKERS} workers, zmq",
    "async": "Gymnasium AsyncVectorEnv",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.startup", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="interleaved runs of each (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=LABELS, default=list(LABELS), help="only these (default: all)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "startup.md", help="where to write"
    )
    arguments = parser.parse_args(argv)
    load = os.getloadavg()[0]
    for way in arguments.ways:
        probe(way)  # The first run reads files that the others find in the cache.
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in arguments.ways}
    for _ in range(arguments.rounds):
        for way, measured in times.items():
            measured.append(probe(way))
    lines = [
        "# Starting and closing",
        "",
        f"Seconds from the first import in a fresh interpreter to {NUM_ENVS} CartPoles being ready and reset, and how "
        "many `close()` takes. Medians; ± is half the interquartile range. Made by "
        "`python -m benchmarks.studies.startup`.",
        "",
        f"| | start | goal: {START_AT_MOST_S:g} s | close | goal: {CLOSE_AT_MOST_S:g} s |",
        "|---|---:|---|---:|---|",
        *(row(way, np.array(measured)) for way, measured in times.items()),
        "",
        f"- {arguments.rounds} interleaved runs of each, after one that does not count",
    ]
    publish(lines, load, arguments.out)
    return 0


def probe(way: str) -> tuple[float, float]:
    """Start and close once; returns the seconds of both."""
    command = [sys.executable, "-m", "benchmarks.studies.startup_probe", way]
    done = subprocess.run(
        command, env=child_environment(), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    start_s, close_s = map(float, done.stdout.split())
    return start_s, close_s


def row(way: str, times: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> str:
    """Format a line of the table; the goals are ClusterEnv's only."""
    cells = []
    for seconds, at_most in ((spread(times[:, 0]), START_AT_MOST_S), (spread(times[:, 1]), CLOSE_AT_MOST_S)):
        word = "" if way == "async" else "met" if seconds.median <= at_most else "MISSED"
        cells += [describe(seconds), word]
    return f"| {LABELS[way]} | " + " | ".join(cells) + " |"


def describe(seconds: Spread) -> str:
    """Put a time into words, with its spread."""
    return f"{seconds.median:.2f} ±{half_range(seconds):.2f}"


if __name__ == "__main__":
    sys.exit(main())
