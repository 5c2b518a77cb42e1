"""Whether agents learn as well when workers pull weights only now and then: `python -m benchmarks.learning`.

CartPole-v1, or another task, with each sync rule and several seeds; see `training` for one run. Every run has a process
of its own. Runs that are already in the results are not repeated, so an interrupted benchmark goes on where it stopped.
Writes tables, a CSV file and a figure to `benchmarks/results/`.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import machine
from benchmarks.arena import ROOT, child_environment
from benchmarks.learning_results import Key, Results, Summary, to_markdown
from benchmarks.ppo import PpoConfig
from benchmarks.step import Progress
from benchmarks.training import RULES, TASKS, describe_settings

STEPS = 200_000
SEEDS = (21, 22, 23, 24, 25)  # The rule and what to report were chosen on seeds 1 to 4: these are fresh.


class RunFailed(Exception):
    """A training run ended with an error; the text says which, and where its output is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    # A terminated benchmark must still end its runs: let it unwind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = Progress()
    cache: Path = arguments.cache.resolve()
    (cache / "logs").mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    results = Results(
        arguments.out, name_results(arguments), describe_settings(arguments.task, arguments.learning_rate)
    )
    if not arguments.fresh:
        results.read()
    load_before = os.getloadavg()[0]
    total_before, stolen_before = machine.read_cpu_times()
    try:
        for phase in plan_phases(arguments, results):
            run_all(phase, arguments, results, cache, progress)
    except KeyboardInterrupt:
        progress.say("interrupted; finished runs are kept, and the same command goes on from here")
        return 130
    except RunFailed as error:
        progress.say(str(error))
        return 1
    total, stolen = machine.read_cpu_times()
    notes = [
        *machine.describe_machine(cache, load_before, (stolen - stolen_before) / max(1, total - total_before)),
        *machine.list_versions(None, ("torch",)),
        describe_settings(arguments.task, arguments.learning_rate),
    ]
    summaries = results.summarize(arguments.rules, arguments.seeds, arguments.steps)
    text = to_markdown(summaries, arguments.task, arguments.steps, notes)
    print(text)
    for path in [*results.write_report(text), draw_figure(results, summaries, arguments.task)]:
        print(f"wrote {os.path.relpath(path)}")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--rules", nargs="+", choices=list(RULES), default=list(RULES), help="only these (default: all)"
    )
    parser.add_argument("--task", choices=TASKS, default=TASKS[0], help="others in files of their own")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED", help="default: 21 to 25")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"environment steps of a run (default: {STEPS})")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time (default: 2)")
    parser.add_argument(
        "--period",
        type=int,
        help="of the periodic rules; by default the two whose numbers of pulls enclose that of the adaptive runs",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=PpoConfig.learning_rate,
        help=f"of PPO, to see how much depends on it; in files of its own (default: {PpoConfig.learning_rate})",
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results; use it when the code has changed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where logs are kept")
    arguments = parser.parse_args(argv)
    is_periodic = any(RULES[rule].needs_period for rule in arguments.rules)
    if is_periodic and arguments.period is None and "adaptive" not in arguments.rules:
        parser.error("periodic rules take their period from the adaptive one: name it too, or give --period")
    return arguments


def name_results(arguments: argparse.Namespace) -> str:
    """Name the result files, so that a run with other settings never touches the results of the usual one."""
    task = "" if arguments.task == TASKS[0] else f"-{arguments.task.split('-')[0].lower()}"
    steps = "" if arguments.steps == STEPS else f"-{arguments.steps}"
    rate = "" if arguments.learning_rate == PpoConfig.learning_rate else f"-lr{arguments.learning_rate:g}"
    return f"learning{task}{steps}{rate}"


def plan_phases(arguments: argparse.Namespace, results: Results) -> Iterator[list[Key]]:
    """List the runs that are missing: first those that need no period, then those that do."""
    free = [rule for rule in arguments.rules if not RULES[rule].needs_period]
    yield [Key(rule, seed, arguments.steps) for seed in arguments.seeds for rule in free]
    for rule in arguments.rules:
        if RULES[rule].needs_period:
            adaptive = results.summarize(["adaptive"], arguments.seeds, arguments.steps)
            period = arguments.period or choose_period(rule, adaptive[0])
            yield [Key(rule, seed, arguments.steps, period) for seed in arguments.seeds]


def choose_period(rule: str, adaptive: Summary) -> int:
    """Choose the longest period that pulls at least as often as the adaptive rule did, or the one after it."""
    periods = range(1, int(adaptive.updates) + 1)
    longest = max((each for each in periods if adaptive.updates // each >= adaptive.pulls), default=1)
    return longest if rule == "periodic" else longest + 1


@dataclass
class Process:
    """A training run under way."""

    key: Key
    popen: "subprocess.Popen[bytes]"
    out: Path
    log: Path


def run_all(
    keys: Sequence[Key], arguments: argparse.Namespace, results: Results, cache: Path, progress: Progress
) -> None:
    """Run what is missing, some at a time, keeping each result as soon as it is there.

    Raises:
        RunFailed: A run ended with an error; the others are ended too.
    """
    waiting = [key for key in keys if key not in results]
    if len(waiting) < len(keys):
        progress.say(f"{len(keys) - len(waiting)} of {len(keys)} runs are already in the results")
    total, began = len(waiting), time.monotonic()
    running: list[Process] = []
    try:
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                running.append(start(waiting.pop(0), arguments.task, arguments.learning_rate, cache))
            time.sleep(0.2)
            for process in [each for each in running if each.popen.poll() is not None]:
                running.remove(process)
                results.add(process.key, finish(process))
                done = total - len(waiting) - len(running)
                left_s = (time.monotonic() - began) / done * (total - done)
                progress.update(f"[{done}/{total}, {left_s / 60:.1f} min left] finished {process.key.name}")
    finally:
        for process in running:
            end(process)
    if total:
        progress.say(f"{total} runs took {(time.monotonic() - began) / 60:.1f} min")


def start(key: Key, task: str, learning_rate: float, cache: Path) -> Process:
    """Start a run."""
    out, log = (cache / "logs" / f"learning-{task}-{key.name}{ending}" for ending in (".json", ".log"))
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.training", key.rule, f"--seed={key.seed}", f"--steps={key.steps}"]
    command += [
        f"--out={out}",
        f"--task={task}",
        f"--learning-rate={learning_rate}",
        *([] if key.period is None else [f"--period={key.period}"]),
    ]
    with log.open("w") as file:
        popen = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=child_environment())
    return Process(key, popen, out, log)


def finish(process: Process) -> dict[str, object]:
    """Read what a run that has ended left behind."""
    if process.popen.returncode != 0 or not process.out.exists():
        raise RunFailed(f"run {process.key.name} failed with status {process.popen.returncode}; see {process.log}")
    result: dict[str, object] = json.loads(process.out.read_text())
    return result


def end(process: Process) -> None:
    """End a run early: as Ctrl-C does, so that it closes its workers, and if need be by force."""
    process.popen.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.popen.wait(15.0)
    process.popen.kill()
    process.popen.wait()


def draw_figure(results: Results, summaries: Sequence[Summary], task: str) -> Path:
    """Draw the learning curves: mean over the seeds, with a band of one standard error."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (returns, pulls) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for summary in summaries:
        env_steps, curves = results.curves(summary.keys, "return")
        mean = np.nanmean(curves, axis=0)
        error = np.nanstd(curves, axis=0, ddof=1 if len(curves) > 1 else 0) / math.sqrt(len(curves))
        (line,) = returns.plot(env_steps, mean, label=summary.label)
        returns.fill_between(env_steps, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
        pulls.plot(env_steps, results.curves(summary.keys, "pulls")[1].mean(axis=0), color=line.get_color())
    returns.set(xlabel="environment steps", ylabel="return of finished episodes", title=task)
    pulls.set(xlabel="environment steps", ylabel="pulls per worker", title="Weights pulled")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path = results.path(".png")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
