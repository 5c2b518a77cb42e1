"""A regression of a third is seen: `python -m benchmarks.guard`, half a minute, in CI after the tests.

Only ratios within one run are checked, never times: bounds are two thirds or less of what a quiet machine gives. What
misses its bound is measured once more, for longer: a busy neighbour can spoil half a minute. Twice is a failure.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import cells, rollout_cells
from benchmarks.peers.cells import LOCKSTEP, Cell
from benchmarks.peers.report import describe_ratio
from benchmarks.peers.rounds import Schedule, Spread
from benchmarks.peers.step import measure, prepare_cache
from benchmarks.processes import ROOT
from benchmarks.progress import Progress

FIRST = Schedule(rounds=7, seconds=0.2, warmup_s=0.05)
SECOND = Schedule(rounds=15, seconds=0.4, warmup_s=0.1)
NUM_ENVS = 64


@dataclass(frozen=True)
class Bound:
    """One contender must be at least so many times as fast as another."""

    name: str
    rival: str
    at_least: float
    usually: float


STEPS = (
    Bound("clusterenv-shm", LOCKSTEP, 0.6, usually=0.9),
    Bound("clusterenv-shm", "async", 5.0, usually=16.0),
    Bound("clusterenv-zmq", LOCKSTEP, 0.2, usually=0.32),
    Bound("clusterenv-0", "sync", 0.7, usually=1.1),
)
ROLLOUTS = (
    Bound("rollout-shm", rollout_cells.BARE, 0.9, usually=1.6),
    Bound("rollout-zmq", rollout_cells.BARE, 0.8, usually=1.3),
    Bound("rollout-shm-updates", rollout_cells.BARE, 0.9, usually=1.5),
)


def main() -> int:
    """Check everything; returns the exit status."""
    cache = ROOT / ".bench"
    progress = Progress()
    names = {name for bound in STEPS for name in (bound.name, bound.rival)}
    steps = cells.plan_cell("cartpole", NUM_ENVS, names)
    rollouts = rollout_cells.plan_cell("cartpole", cache, {bound.name for bound in ROLLOUTS})
    prepare_cache(cache, [steps, rollouts], progress)
    is_well = True
    for cell, bounds in ((steps, STEPS), (rollouts, ROLLOUTS)):
        missed = check(cell, bounds, FIRST, cache, progress)
        if missed:
            progress.say("once more, for longer, what was missed:")
            missed = check(cell, missed, SECOND, cache, progress)
        is_well = is_well and not missed
    print("All bounds are kept." if is_well else "A bound was missed twice: something has become slower.")
    return 0 if is_well else 1


def check(cell: Cell, bounds: Sequence[Bound], schedule: Schedule, cache: Path, progress: Progress) -> list[Bound]:
    """Measure a cell; returns the bounds that were missed."""
    (result,), _ = measure([cell], schedule, cache, progress)
    num_envs = cell.base.num_envs
    missed = []
    for bound in bounds:
        own, rival = result.find(bound.name, num_envs), result.find(bound.rival, num_envs)
        assert own is not None, f"{bound.name} is in the cell"
        assert rival is not None, f"{bound.rival} is in the cell"
        ratio = own.compare(rival)
        is_kept = ratio is not None and ratio.median >= bound.at_least
        if not is_kept:
            missed.append(bound)
        found = own.problem or rival.problem or describe(ratio)
        word = "ok" if is_kept else "MISSED"
        print(
            f"{word:6}  {bound.name} / {bound.rival}: {found}, at least {bound.at_least:g}, usually {bound.usually:g}"
        )
    return missed


def describe(ratio: Spread | None) -> str:
    """Put a ratio into words."""
    return "not measured" if ratio is None else describe_ratio(ratio)


if __name__ == "__main__":
    sys.exit(main())
