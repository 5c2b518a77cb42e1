"""All that is compared with peers, one after the other, with charts: `python -m benchmarks`, or `make bench`.

First stepping with given actions (`benchmarks.peers.step`), then rollouts with a policy (`benchmarks.peers.rollout`).
Each prints its table, writes it to `benchmarks/results/`, and has its chart drawn. Run it on an otherwise idle machine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import charts, rollout, step
from benchmarks.processes import ROOT

PARTS = {"step": step.main, "rollout": rollout.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Run both; returns the first exit status that is not zero."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a first look, in about five minutes")
    parser.add_argument("--out", type=Path, default=charts.RESULTS, help="where results are written")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where peers are installed, and logs kept")
    arguments = parser.parse_args(argv)
    passed_on = [f"--out={arguments.out}", f"--cache={arguments.cache}", *(["--quick"] if arguments.quick else [])]
    for number, (name, run) in enumerate(PARTS.items(), start=1):
        print(f"part {number} of {len(PARTS)}: python -m benchmarks.peers.{name}", file=sys.stderr)
        status = run(passed_on)
        if status != 0:
            return status
        charts.main([str(arguments.out / f"{name}{'-quick' if arguments.quick else ''}.csv")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
