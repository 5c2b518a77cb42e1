"""How fast rollouts are collected with a policy on the workers, against bare loops: `python -m benchmarks.rollout`.

Two workers of 64 environments each run a 64-64 torch agent for 128 steps a rollout. The limit they are held against is
two processes that run the same agent as users write it, store what a learner needs, and meet once per rollout. Prints
one table and writes it to `benchmarks/results/`. Run it on an otherwise idle machine; elsewhere only ratios count.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import machine
from benchmarks.arena import ROOT
from benchmarks.cells import Cell, Contender, Entry
from benchmarks.report import SUMMARY_FIELDS, describe, describe_ratio, scrub, summary_row, write_csv
from benchmarks.rollers import NUM_STEPS
from benchmarks.rounds import CellResult, Schedule, Standing
from benchmarks.step import Progress, measure, prepare_cache
from benchmarks.targets import Target, Verdict
from benchmarks.tasks import TASKS, make_env

NUM_ENVS = 128
NUM_WORKERS = 2
BARE = "bare-rollout"
AT_LEAST = 0.95
HEAD_AT_MOST = 0.10  # Of one core.
ROLLOUT_TASKS = ("cartpole", "lunarlander")
FULL = Schedule(rounds=15, seconds=2.0, warmup_s=0.3)
QUICK = Schedule(rounds=5, seconds=0.7, warmup_s=0.1)
LEGEND = (
    "Each entry: environment steps per second (median over the rounds), then the ratio to the bare loops of the same "
    "round (median over the rounds); ± is half the interquartile range. Head: the cores that the learner's process "
    "takes while it waits for rollouts (`time.process_time` by the clock on the wall, median over the rounds)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(argv)
    if not sys.platform.startswith("linux"):
        print("This benchmark needs Linux: it freezes idle contenders with the help of /proc.", file=sys.stderr)
        return 2
    # A terminated run must still thaw and end its contenders: let it unwind as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache: Path = arguments.cache.resolve()
    cells = [plan_cell(task, cache) for task in arguments.tasks]
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a first look")
    parser.add_argument(
        "--tasks", nargs="+", choices=ROLLOUT_TASKS, default=ROLLOUT_TASKS, help="only these tasks (default: all)"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds that count (default: {FULL.rounds}, quick {QUICK.rounds})")
    parser.add_argument(
        "--seconds", type=float, help=f"least length of a round (default: {FULL.seconds}, quick {QUICK.seconds})"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="where logs are kept")
    arguments = parser.parse_args(argv)
    preset = QUICK if arguments.quick else FULL
    arguments.schedule = Schedule(
        rounds=arguments.rounds or preset.rounds,
        seconds=arguments.seconds or preset.seconds,
        warmup_s=preset.warmup_s,
    )
    return arguments


def name_results(arguments: argparse.Namespace) -> str:
    """Name the result files, so that a partial or hasty run never replaces the results of a whole one."""
    if tuple(arguments.tasks) != ROLLOUT_TASKS:
        return "rollout-partial"
    return "rollout" if arguments.schedule == FULL else "rollout-quick"


def plan_cell(task: str, cache: Path) -> Cell:
    """Lay out one task: the limit between the transports, because neighbours are compared most."""

    def clusterenv(name: str, label: str, transport: str, *, changes_weights: bool = False) -> Contender:
        settings = {
            "num_workers": NUM_WORKERS,
            "transport": transport,
            "changes_weights": changes_weights,
            "busy_log": str(busy_log_of(cache, name, task)),
        }
        return Contender(name=name, label=label, builder="clusterenv-rollout", settings=(settings,))

    contenders = (
        clusterenv("rollout-shm", "ClusterEnv, shm", "shm"),
        Contender(name=BARE, label="bare loops, 2 processes", builder="bare-rollout"),
        clusterenv("rollout-zmq", "ClusterEnv, zmq (TCP)", "zmq"),
        clusterenv("rollout-shm-updates", "ClusterEnv, shm, new weights each time", "shm", changes_weights=True),
    )
    entries = [Entry(contender=contender, num_envs=NUM_ENVS) for contender in contenders]
    name = f"{TASKS[task]}, {NUM_WORKERS} x {NUM_ENVS // NUM_WORKERS} envs"
    return Cell(name=name, task=task, entries=entries, base=entries[1])


def busy_log_of(cache: Path, name: str, task: str) -> Path:
    """Say where a contender notes how busy its head is."""
    return cache / "logs" / f"{name}-{task}.busy"


def read_head_cores(result: CellResult, cache: Path) -> dict[str, list[float]]:
    """Read the cores each contender's head took in the rounds that count, by the contender's name."""
    found: dict[str, list[float]] = {}
    for standing in result.standings:
        path = busy_log_of(cache, standing.entry.contender.name, result.cell.task)
        if path.exists():
            # The log has the warm-ups too; a round is recognised by its rate, which came to us in the same digits.
            noted = dict(line.split() for line in path.read_text().splitlines())
            found[standing.entry.contender.name] = [float(noted[f"{rate:.3f}"]) for rate in standing.rates]
    return found


@dataclass(frozen=True)
class RolloutReport:
    """Everything a run has to say.

    Args:
        results: One cell a task.
        head_cores: For each of them, what `read_head_cores` found.
        notes: Lines about where and how it ran.
    """

    results: Sequence[CellResult]
    head_cores: Sequence[dict[str, list[float]]]
    notes: Sequence[str]

    def to_markdown(self) -> str:
        """Lay out the table, and hold the results against the targets."""
        lines = ["# Rollout speed", "", LEGEND, "", f"Rollouts of {NUM_STEPS} steps, made by "]
        lines[-1] += "`python -m benchmarks.rollout`."
        for result, head in zip(self.results, self.head_cores, strict=True):
            lines += ["", f"| {result.cell.name} | env steps/s, ratio to bare | head |", "|---|---:|---:|"]
            lines += [
                f"| {each.entry.contender.label} | {describe(each, result.base)} | {describe_head(each, head)} |"
                for each in result.standings
            ]
        lines += ["", "| target | measured | |", "|---|---|---|", *self._verdicts(), ""]
        lines += [f"- {note}" for note in self.notes]
        lines += [
            f"- {each.entry.contender.label}: {scrub(each.problem)}" for each in self._standings() if each.problem
        ]
        return "\n".join(lines) + "\n"

    def write(self, directory: Path, stem: str) -> list[Path]:
        """Write the markdown, the summary and every single round; returns the files."""
        directory.mkdir(parents=True, exist_ok=True)
        markdown, summary, rounds = (directory / f"{stem}{end}" for end in (".md", ".csv", "-rounds.csv"))
        markdown.write_text(self.to_markdown())
        pairs = [(r, h, s) for r, h in zip(self.results, self.head_cores, strict=True) for s in r.standings]
        write_csv(
            summary,
            (*SUMMARY_FIELDS, "head_cores"),
            ((*without_paths(summary_row(r, s)), head_median(s, h)) for r, h, s in pairs),
        )
        write_csv(
            rounds,
            ("task", "contender", "round", "env_steps_per_s", "cores_of_others", "head_cores"),
            (
                (r.cell.task, s.entry.contender.name, number, f"{rate:.1f}", f"{others:.2f}", cores)
                for r, h, s in pairs
                for number, (rate, others, cores) in enumerate(
                    zip(s.rates, s.cores_of_others, h.get(s.entry.contender.name, [""] * len(s.rates)), strict=True), 1
                )
            ),
        )
        return [markdown, summary, rounds]

    def _standings(self) -> Iterator[Standing]:
        for result in self.results:
            yield from result.standings

    def _verdicts(self) -> Iterator[str]:
        for result, head in zip(self.results, self.head_cores, strict=True):
            for standing in result.standings:
                contender, ratio = standing.entry.contender, standing.compare(result.base)
                if contender.name == BARE or ratio is None:
                    continue
                target = Target(name=contender.name, envs=NUM_ENVS, rival=BARE, rival_envs=NUM_ENVS, at_least=AT_LEAST)
                word = Verdict(cell=result.cell.name, target=target, ratio=ratio).word
                claim = f"{TASKS[result.cell.task]}: {contender.label}"
                yield f"| {claim} >= {AT_LEAST:g} x bare | {describe_ratio(ratio)} | {word} |"
                cores = float(np.median(head[contender.name]))
                word = "met" if cores < HEAD_AT_MOST else "MISSED"
                yield f"| {claim}: head under {HEAD_AT_MOST:.0%} of a core | {cores:.1%} | {word} |"


def describe_head(standing: Standing, head: dict[str, list[float]]) -> str:
    """Put into words how busy the head was; nothing for the bare loops, which have none."""
    cores = head.get(standing.entry.contender.name)
    return f"{np.median(cores):.1%}" if cores else ""


def head_median(standing: Standing, head: dict[str, list[float]]) -> str:
    """Write how busy the head was as a number."""
    cores = head.get(standing.entry.contender.name)
    return f"{np.median(cores):.5f}" if cores else ""


def without_paths(row: tuple[object, ...]) -> tuple[object, ...]:
    """Take the paths out of a row: results are published."""
    return tuple(scrub(field) if isinstance(field, str) else field for field in row)


if __name__ == "__main__":
    sys.exit(main())
