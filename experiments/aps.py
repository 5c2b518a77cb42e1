"""The experiment of the APS paper: does a learner do as well when workers pull weights only now and then?

    python -m experiments.aps                          PPO on LunarLander-v3: an hour on one core
    python -m experiments.aps --learner ppo-cartpole   PPO on CartPole-v1: half an hour on one core
    python -m experiments.aps --learner dqn            DQN on CartPole-v1: half an hour on one core
    python -m experiments.aps --quick                  a try, in two minutes

Trains with every rule and every seed: pulling every update, when diverged by more than a threshold, and at fixed
intervals. Each training has a process of its own with four workers. A finished training is a file in OUT/updates, and
is not repeated: stop with Ctrl-C, and the same command goes on. Seeds come one after another, so that the rules can
be compared whenever it is stopped.

Writes to OUT: updates/*.csv (a training each: return, pulls, bytes, divergence over its steps), runs.csv (a row for
each training), summary.csv (a row for each rule), and the figures curves.png, pulls.png and traffic.png. Prints the
summary as a table. What was found is in docs/explanation/experiment.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clusterenv.config import usable_cores
from experiments.figures import draw_figures
from experiments.record import read_record
from experiments.rules import EVERY, Rule
from experiments.runner import Folder, Run, RunFailed, run_all
from experiments.settings import LEARNERS, Settings, describe, read_settings, write_settings
from experiments.summary import match_period, summarize, to_table, write_runs, write_summary

ROOT = Path(__file__).resolve().parent.parent
# Those of docs/explanation/experiment.md, which says how they were chosen.
SEEDS = {"ppo": tuple(range(1, 6)), "ppo-cartpole": tuple(range(21, 26)), "dqn": tuple(range(1, 11))}
THRESHOLDS = {"ppo": (0.05, 0.1, 0.2), "ppo-cartpole": (0.05,), "dqn": (1.0, 3.0)}
PERIODS = {"ppo": (6,), "ppo-cartpole": (4, 5), "dqn": (80,)}
PLAIN: Mapping[str, Sequence[float]] = {"ppo": (), "ppo-cartpole": (0.05,), "dqn": ()}
QUICK_STEPS = {"ppo": 130_000, "ppo-cartpole": 32_000, "dqn": 15_000}


class SettingsDiffer(Exception):
    """A folder holds runs that cannot be compared with what was asked for; the text says in what they differ."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit status."""
    arguments = parse_arguments(argv)
    # A terminated experiment must still end its runs: let it unwind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rules = [EVERY, *(Rule(threshold=value) for value in arguments.thresholds)]
    rules += [Rule(period=value) for value in arguments.periods]
    rules += [Rule(value, is_plain=True, is_protected=each) for value in arguments.plain for each in (True, False)]
    runs = [Run(rule, seed) for seed in arguments.seeds for rule in rules]
    folder = Folder(arguments.out)
    settings = replace(
        LEARNERS[arguments.learner](), task=arguments.task, steps=arguments.steps, num_workers=arguments.workers
    )
    try:
        open_folder(folder, settings)
        if not arguments.report:
            run_all(runs, folder, settings, arguments.jobs)
    except (RunFailed, SettingsDiffer) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Finished runs are kept, and the same command goes on from here.", file=sys.stderr)
        report(runs, folder, settings)
        return 130
    report(runs, folder, settings)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.aps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learner", choices=list(LEARNERS), default="ppo", help="default: ppo")
    parser.add_argument("--task", metavar="ID", help="a Gymnasium environment with vector observations and discrete "
                        "actions; default: LunarLander-v3 for ppo, CartPole-v1 for the others")  # fmt: skip
    parser.add_argument("--thresholds", nargs="*", type=float, metavar="KL",
                        help="of the adaptive rule, in nats per state; default: "
                        + describe_defaults(THRESHOLDS))  # fmt: skip
    parser.add_argument("--periods", nargs="*", type=int, metavar="K",
                        help="of the periodic rule, in updates; the table says which ones would pull as often as the "
                        "adaptive rules did; default: " + describe_defaults(PERIODS))  # fmt: skip
    parser.add_argument("--plain", nargs="*", type=float, metavar="KL",
                        help="thresholds with which plain PPO is trained too, with AdaptiveSync's protections and "
                        "without; default: " + describe_defaults(PLAIN))  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED",
                        help="default: 1 to 5 for ppo, 21 to 25 for ppo-cartpole, 1 to 10 for dqn")  # fmt: skip
    parser.add_argument("--steps", type=int, help="environment steps of a training; default: "
                        + describe_defaults({name: (kind().steps,) for name, kind in LEARNERS.items()}))  # fmt: skip
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="of each training; default: 4")
    parser.add_argument("--jobs", type=int, default=usable_cores(), metavar="N",
                        help="trainings at the same time; default: one for each core, here %(default)s")  # fmt: skip
    parser.add_argument("--quick", action="store_true",
                        help="short trainings, two seeds, one threshold and one period; shows how it works and not "
                        "what is true")  # fmt: skip
    parser.add_argument("--report", action="store_true", help="train nothing; sum up and draw what is on record")
    parser.add_argument("--out", type=Path, help="the folder for results; default: experiments/results/LEARNER, with "
                        "--quick .bench/experiments/LEARNER")  # fmt: skip
    arguments = parser.parse_args(argv)
    fill_defaults(arguments)
    if min(arguments.jobs, arguments.workers, arguments.steps, *arguments.seeds, *arguments.periods) < 1:
        parser.error("--jobs, --workers, --steps, --seeds and --periods are at least 1")
    if min((*arguments.thresholds, *arguments.plain), default=1.0) <= 0:
        parser.error("--thresholds and --plain are above 0")
    if arguments.plain and arguments.learner == "dqn":
        parser.error("--plain is for ppo: DQN clips against no policy")
    return arguments


def fill_defaults(arguments: argparse.Namespace) -> None:
    """Fill in what depends on the learner, and on whether it is to be quick."""
    learner, is_quick = arguments.learner, arguments.quick
    if arguments.task is None:
        arguments.task = LEARNERS[learner]().task
    if arguments.thresholds is None:
        arguments.thresholds = (THRESHOLDS[learner][1:2] or THRESHOLDS[learner]) if is_quick else THRESHOLDS[learner]
    if arguments.periods is None:
        arguments.periods = PERIODS[learner][:1] if is_quick else PERIODS[learner]
    if arguments.plain is None:
        arguments.plain = () if is_quick else PLAIN[learner]
    if arguments.seeds is None:
        arguments.seeds = SEEDS[learner][:2] if is_quick else SEEDS[learner]
    if arguments.steps is None:
        arguments.steps = QUICK_STEPS[learner] if is_quick else LEARNERS[learner]().steps
    if arguments.out is None:
        arguments.out = ROOT / (".bench/experiments" if is_quick else "experiments/results") / learner


def describe_defaults(by_learner: Mapping[str, Sequence[float]]) -> str:
    """Write the values of each learner."""
    written = {name: " ".join(f"{value:g}" for value in values) or "none" for name, values in by_learner.items()}
    return ", ".join(f"{values} for {name}" for name, values in written.items())


def open_folder(folder: Folder, settings: Settings) -> None:
    """Make the folder, or make sure that what is in it was made with the same settings.

    Raises:
        SettingsDiffer: It was not.
    """
    folder.path.joinpath("updates").mkdir(parents=True, exist_ok=True)
    if folder.settings.exists():
        there, wanted = describe(read_settings(folder.settings)), describe(settings)
        differing = [f"{key} {there.get(key)} there, {wanted.get(key)} here" for key in {**there, **wanted}
                     if there.get(key) != wanted.get(key)]  # fmt: skip
        if differing:
            raise SettingsDiffer(
                f"The runs in {folder.path} were made with other settings: {'; '.join(differing)}. "
                "Give another folder with --out, or remove that one."
            )
    write_settings(folder.settings, settings)


def report(runs: Sequence[Run], folder: Folder, settings: Settings) -> None:
    """Sum up the runs that are on record: files, figures, and a table on standard output."""
    curves = {run: read_record(folder.record(run)) for run in runs if folder.record(run).exists()}
    if not curves:
        print("No run is complete yet.")
        return
    summaries = summarize(curves, settings.final_share)
    write_runs(folder.path / "runs.csv", summaries)
    write_summary(folder.path / "summary.csv", summaries)
    learner = str(describe(settings)["learner"]).partition("-")[0].upper()
    figures = draw_figures(folder.path, curves, summaries, f"{learner} on {settings.task}")
    print(f"{learner} on {settings.task}, {settings.steps} environment steps, {settings.num_workers} workers. Mean "
          f"over the seeds and its 95 % interval; the final return is that of the last {settings.final_share:.0%} of a "
          "run; pulls per worker after the first copy.\n")  # fmt: skip
    print(to_table(summaries) + "\n")
    for summary in summaries:
        if summary.rule.kind == "adaptive":
            print(f"As many pulls as {summary.rule.label}: --periods {match_period(summary)}")
    print(
        "\n"
        + "\n".join(
            f"wrote {os.path.relpath(path)}"
            for path in [folder.path / "runs.csv", folder.path / "summary.csv", *figures]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
