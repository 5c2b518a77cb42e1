"""The experiment: does a learner do as well when its workers pull weights only when their policy has diverged?

    python -m experiments.aps                             everything, in the order of PREREGISTRATION.md
    python -m experiments.aps --blocks pilot mandatory    what must be there: two hours on two quiet cores
    python -m experiments.aps --report                    train nothing; compare what is on record
    python -m experiments.aps --share 0.02 --seeds 2      a try of the machinery, in minutes; no evidence

Carries out PREREGISTRATION.md: six tasks, and rules that send as many bytes as the adaptive one. Each training has a
process of its own with real workers. A finished training is a file in OUT, and is not repeated: stop with Ctrl-C, and
the same command goes on. Seeds come one after another, so that the rules can be compared whenever it is stopped.

Writes to OUT: TASK/RULE-seedN.csv (a training each: returns, pulls, bytes, divergence over its steps), runs.csv (a row
for each training), comparisons.csv, the figures curves.png and traffic.png, and report.md with every preregistered
comparison and what was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterenv.config import usable_cores
from experiments.figures import draw_figures
from experiments.plan import NUM_SEEDS, SEEDS, Match, match_bytes, plan_blocks, plan_pilots
from experiments.record import read_record
from experiments.report import write_report
from experiments.results import Results, total, write_runs
from experiments.runner import Folder, RunFailed, run_all
from experiments.tasks import TASKS, AnySettings, describe, shorten, write_tasks

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = ("pilot", "mandatory", "trap", "one-for-all", "equal-bytes", "never", "more-seeds")


class SettingsDiffer(Exception):
    """A folder holds runs that cannot be compared with what was asked for; the text says in what they differ."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit status."""
    arguments = parse_arguments(argv)
    # A terminated experiment must still end its runs: let it unwind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Folder(arguments.out)
    all_tasks = shorten(TASKS, arguments.share) if arguments.share < 1 else TASKS
    tasks = {name: all_tasks[name] for name in arguments.tasks}
    try:
        open_folder(folder, all_tasks)
        if not arguments.report:
            carry_out(arguments, folder, tasks)
    except (RunFailed, SettingsDiffer) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Finished runs are kept, and the same command goes on from here.", file=sys.stderr)
        report(folder, tasks, arguments.seeds)
        return 130
    report(folder, tasks, arguments.seeds)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK",
                        help=f"some of {', '.join(TASKS)}; default: all")  # fmt: skip
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=BLOCKS, metavar="BLOCK",
                        help=f"some of {', '.join(BLOCKS)}; default: all")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, metavar="N",
                        help="how many seeds the blocks have; default: %(default)s")  # fmt: skip
    parser.add_argument("--share", type=float, default=1.0, metavar="X",
                        help="do only this share of steps and evaluations: a try, and no evidence")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=usable_cores(), metavar="N",
                        help="trainings at the same time; default: one for each core, here %(default)s")  # fmt: skip
    parser.add_argument("--report", action="store_true", help="train nothing; compare what is on record")
    parser.add_argument("--out", type=Path, help="the folder for results; default: experiments/results/aps, with "
                        "--share .bench/experiments/aps")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error("--jobs is at least 1")
    if not 1 <= arguments.seeds <= len(SEEDS):
        parser.error(f"--seeds is from 1 to {len(SEEDS)}")
    if not 0 < arguments.share <= 1:
        parser.error("--share is above 0 and at most 1")
    if arguments.out is None:
        arguments.out = ROOT / ("experiments/results" if arguments.share == 1 else ".bench/experiments") / "aps"
    return arguments


def carry_out(arguments: argparse.Namespace, folder: Folder, tasks: Mapping[str, AnySettings]) -> None:
    """Run what is asked for, and not on record: the pilots, and then what depends on them.

    Raises:
        RunFailed: Some runs failed, or the pilots are missing.
    """
    if "pilot" in arguments.blocks:
        run_all(plan_pilots(tasks).runs, folder, tasks, arguments.jobs)
    if set(arguments.blocks) == {"pilot"}:
        return
    matches = read_matches(folder, tasks)
    if matches is None:
        raise RunFailed("The pilots, which set the periods and budgets, are not on record. Add --blocks pilot.")
    blocks = plan_blocks(tasks, matches, arguments.seeds)
    runs = [run for block in blocks if block.name in arguments.blocks for run in block.runs]
    run_all(list(dict.fromkeys(runs)), folder, tasks, arguments.jobs)  # Blocks may share runs.


def read_matches(folder: Folder, tasks: Mapping[str, AnySettings]) -> dict[str, Match] | None:
    """Return what the pilots set for each task; None if some are missing."""
    pilots = plan_pilots(tasks).runs
    if not all(folder.record(run).exists() for run in pilots):
        return None
    return {
        task: match_bytes([read_record(folder.record(run)) for run in pilots if run.task == task], settings.num_workers)
        for task, settings in tasks.items()
    }


def open_folder(folder: Folder, tasks: Mapping[str, AnySettings]) -> None:
    """Make the folder, or make sure that what is in it was made with the same settings.

    Raises:
        SettingsDiffer: It was not.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    if folder.settings.exists():
        there, here = json.loads(folder.settings.read_text()), describe(tasks)
        differing = [
            f"{name}: {key} {there.get(name, {}).get(key)} there, {here[name].get(key)} here"
            for name in here
            for key in {**there.get(name, {}), **here[name]}
            if there.get(name, {}).get(key) != here[name].get(key)
        ]
        if differing:
            raise SettingsDiffer(
                f"The runs in {folder.path} were made with other settings: {'; '.join(differing)}. "
                "Give another folder with --out, or remove that one."
            )
        return
    write_tasks(folder.settings, tasks)


def report(folder: Folder, tasks: Mapping[str, AnySettings], num_seeds: int) -> None:
    """Compare the runs that are on record: files, figures, and where they are on standard output."""
    matches = read_matches(folder, tasks)
    if matches is None:
        print("The pilots are not complete yet: there is nothing to compare.")
        return
    blocks = plan_blocks(tasks, matches, num_seeds)
    runs = list(dict.fromkeys(run for block in blocks for run in block.runs))
    curves = {run: read_record(folder.record(run)) for run in runs if folder.record(run).exists()}
    results = Results(tasks, matches, {run: total(curve) for run, curve in curves.items()})
    written = [folder.path / name for name in ("report.md", "comparisons.csv", "runs.csv")]
    write_report(written[0], results, [plan_pilots(tasks), *blocks], folder)
    write_runs(written[2], results)
    if curves:
        written += draw_figures(folder.path, curves, results)
    print("\n".join(f"wrote {os.path.relpath(path)}" for path in written))


if __name__ == "__main__":
    sys.exit(main())
