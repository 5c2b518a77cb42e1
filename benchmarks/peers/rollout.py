"""How fast environments are stepped with a policy, by all alike: `python -m benchmarks.peers.rollout`.

Two workers of 32 environments each run a 64-64 torch agent for 128 steps a rollout. The limit they are held against is
two processes that run the same agent as users write it, store what a learner needs, and meet once per rollout. Beside
them: the policy in the main process with every vector environment, TorchRL's collectors, RLlib's EnvRunners, and
weights pushed as JSON. Prints one table and writes it to `benchmarks/results/`. Run it on an otherwise idle machine;
elsewhere only ratios count.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.peers.rollout_cells import READING_ORDER, ROLLOUT_TASKS, busy_log_of, plan_cell
from benchmarks.peers.rollout_report import RolloutReport, read_head_cores
from benchmarks.peers.rounds import Schedule
from benchmarks.peers.step import measure, prepare_cache
from benchmarks.processes import ROOT
from benchmarks.progress import Progress
from benchmarks.tasks import make_env

FULL = Schedule(rounds=7, seconds=1.5, warmup_s=0.3, trials=5, measures_idle=False)
QUICK = Schedule(rounds=3, seconds=0.4, warmup_s=0.1, trials=0, measures_idle=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    if not sys.platform.startswith("linux"):
        print("This benchmark needs Linux: it freezes idle contenders with the help of /proc.", file=sys.stderr)
        return 2
    # A terminated run must still thaw and end its contenders: let it unwind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache: Path = arguments.cache.resolve()
    cells = [plan_cell(task, cache, arguments.only) for task in arguments.tasks]
    for cell in cells:
        make_env(cell.task).close()  # Fails here, with Gymnasium's own advice, rather than in every contender.
    progress = Progress()
    prepare_cache(cache, cells, progress)
    for cell in cells:
        for entry in cell.entries:
            busy_log_of(cache, entry.contender.name, cell.task).unlink(missing_ok=True)
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        progress.say(f"warning: the load average is {load_before:.2f}; other programs will disturb the measurements")
    try:
        results, stolen = measure(cells, arguments.schedule, cache, progress)
    except KeyboardInterrupt:
        progress.say("interrupted; nothing was written")
        return 130
    notes = [
        *machine.describe_machine(cache, load_before, stolen),
        *machine.list_versions(None, ("torch",)),
        f"{arguments.schedule.rounds} rounds of at least {arguments.schedule.seconds:g} s per contender and task",
    ]
    report = RolloutReport(results, [read_head_cores(result, cache) for result in results], notes)
    print(report.to_markdown())
    for path in report.write(arguments.out, name_results(arguments)):
        print(f"wrote {os.path.relpath(path)}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; adds `schedule` to what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.rollout", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="CartPole only, fewer and shorter rounds, each peer with the settings known to be fast: two minutes",
    )
    parser.add_argument("--tasks", nargs="+", choices=ROLLOUT_TASKS, help="only these tasks (default: all)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=READING_ORDER,
        metavar="NAME",
        help="only these contenders and the bare loops: " + ", ".join(READING_ORDER),
    )
    parser.add_argument("--rounds", type=int, help=f"rounds that count (default: {FULL.rounds}, quick {QUICK.rounds})")
    parser.add_argument(
        "--seconds", type=float, help=f"least length of a round (default: {FULL.seconds}, quick {QUICK.seconds})"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where peers are installed, and logs kept")
    arguments = parser.parse_args(argv)
    preset = QUICK if arguments.quick else FULL
    arguments.is_whole = arguments.tasks is None and arguments.only is None
    arguments.tasks = arguments.tasks or (ROLLOUT_TASKS[:1] if arguments.quick else ROLLOUT_TASKS)
    arguments.schedule = Schedule(
        rounds=arguments.rounds or preset.rounds,
        seconds=arguments.seconds or preset.seconds,
        warmup_s=preset.warmup_s,
        trials=preset.trials,
        measures_idle=preset.measures_idle,
    )
    return arguments


def name_results(arguments: argparse.Namespace) -> str:
    """Name the result files, so that a partial or hasty run never replaces the results of a whole one."""
    if not arguments.is_whole:
        return "rollout-partial"
    return "rollout" if arguments.schedule == FULL else "rollout-quick"


if __name__ == "__main__":
    sys.exit(main())
