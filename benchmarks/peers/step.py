"""How fast environments are stepped, by ClusterEnv, its peers and the bare limits: `python -m benchmarks.peers.step`.

Prints one table and writes it, with every single measurement, to `benchmarks/results/`. Peers that need an interpreter
of their own are installed once, into `.bench/`. Run it on an otherwise idle machine; elsewhere only ratios count.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.peers import interpreters
from benchmarks.peers.cells import CONTENDERS, SCALING, Cell, plan_cells
from benchmarks.peers.report import Report
from benchmarks.peers.rounds import CellResult, Schedule, measure_cell
from benchmarks.peers.targets import judge
from benchmarks.processes import ROOT
from benchmarks.progress import Forecast, Progress
from benchmarks.tasks import TASKS, make_env

FULL = Schedule(rounds=9, seconds=0.4, warmup_s=0.1, trials=3)
QUICK = Schedule(rounds=3, seconds=0.2, warmup_s=0.05, trials=0, measures_idle=False)
NOT_IN_QUICK = ("image", "work")  # Others show much the same.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    if not sys.platform.startswith("linux"):
        print("This benchmark needs Linux: it freezes idle contenders with the help of /proc.", file=sys.stderr)
        return 2
    # A terminated run must still thaw and end its contenders: let it unwind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells = plan_cells(
        arguments.tasks, arguments.envs, arguments.only, scaling=arguments.scaling, is_quick=arguments.quick
    )
    for task in {cell.task for cell in cells}:
        make_env(task).close()  # Fails here, with Gymnasium's own advice, rather than in every contender.
    cache: Path = arguments.cache.resolve()
    progress = Progress()
    prepare_cache(cache, cells, progress)
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        progress.say(f"warning: the load average is {load_before:.2f}; other programs will disturb the measurements")
    try:
        results, stolen = measure(cells, arguments.schedule, cache, progress)
    except KeyboardInterrupt:
        progress.say("interrupted; nothing was written")
        return 130
    report = Report(
        results=results,
        verdicts=judge(results),
        machine=[
            *machine.describe_machine(cache, load_before, stolen),
            f"{arguments.schedule.rounds} rounds of {arguments.schedule.seconds:g} s per contender and cell",
        ],
    )
    print(report.to_text())
    for path in report.write(arguments.out, name_results(arguments)):
        print(f"wrote {os.path.relpath(path)}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; adds `schedule` and `scaling` to what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.step", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="few short rounds and one size a task, for a first look in a few minutes"
    )
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, SCALING], help="only these tasks (default: all)")
    parser.add_argument(
        "--envs", nargs="+", type=int, metavar="N", help="these numbers of environments, for every task"
    )
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), metavar="NAME", help=only_help())
    parser.add_argument("--rounds", type=int, help=f"rounds that count (default: {FULL.rounds}, quick {QUICK.rounds})")
    parser.add_argument(
        "--seconds", type=float, help=f"length of a round (default: {FULL.seconds}, quick {QUICK.seconds})"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where peers are installed, and logs kept")
    arguments = parser.parse_args(argv)
    preset = QUICK if arguments.quick else FULL
    arguments.schedule = Schedule(
        rounds=arguments.rounds or preset.rounds,
        seconds=arguments.seconds or preset.seconds,
        warmup_s=preset.warmup_s,
        trials=preset.trials,
        measures_idle=preset.measures_idle,
    )
    is_whole = arguments.tasks is None and arguments.envs is None and arguments.only is None
    arguments.scaling = (is_whole and not arguments.quick) or SCALING in (arguments.tasks or ())
    arguments.is_whole = is_whole
    arguments.tasks = arguments.tasks or [task for task in TASKS if not (arguments.quick and task in NOT_IN_QUICK)]
    return arguments


def only_help() -> str:
    """List the contenders for the help text."""
    return "only these contenders and the lockstep limit: " + ", ".join(CONTENDERS)


def name_results(arguments: argparse.Namespace) -> str:
    """Name the result files, so that a partial or hasty run never replaces the results of a whole one."""
    if not arguments.is_whole:
        return "step-partial"
    is_hasty = arguments.quick or arguments.schedule.rounds < FULL.rounds or arguments.schedule.seconds < FULL.seconds
    return "step-quick" if is_hasty else "step"


def prepare_cache(cache: Path, cells: Sequence[Cell], progress: Progress) -> None:
    """Make the cache directory, unknown to git, and install the peers that will be needed."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    for name in sorted({entry.contender.peer for cell in cells for entry in cell.entries if entry.contender.peer}):
        progress.say(f"installing {name}, unless it is there (once; this can take minutes)")
        interpreters.install_peer(name, cache)


def measure(
    cells: Sequence[Cell], schedule: Schedule, cache: Path, progress: Progress
) -> tuple[list[CellResult], float]:
    """Measure every cell; returns the results and the share of CPU time stolen meanwhile."""
    total_before, stolen_before = machine.read_cpu_times()
    idle_known: set[str] = set()
    results: list[CellResult] = []
    forecast = Forecast([schedule.expect_s(cell) for cell in cells])
    began = time.monotonic()
    for number, cell in enumerate(cells, start=1):

        def say(what: str, number: int = number, cell: Cell = cell) -> None:
            elapsed_s = time.monotonic() - began
            left = f"{elapsed_s / 60:.1f} min, about {forecast.remaining_s(elapsed_s) / 60:.1f} left"
            progress.update(f"[{number}/{len(cells)}, {left}] {cell.name}: {what}")

        results.append(measure_cell(cell, schedule, cache, idle_known, say))
        forecast.finish_part(time.monotonic() - began)
    total, stolen = machine.read_cpu_times()
    return results, (stolen - stolen_before) / max(1, total - total_before)


if __name__ == "__main__":
    sys.exit(main())
