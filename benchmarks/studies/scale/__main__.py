"""What a head costs with 8 to 1,024 workers: `python -m benchmarks.studies.scale`.

A real head, the real protocol over encrypted TCP, and light workers (`light_workers.py`) that replay a real one's
rollout. Measures the head's CPU time per worker's rollout, new version and pull, its memory, and what happens when all
workers pull 7 MB of weights at once. Writes its tables to `benchmarks/results/`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks import machine
from benchmarks.peers.report import write_csv
from benchmarks.processes import ROOT
from benchmarks.progress import Progress
from benchmarks.studies.scale.recorder import record
from benchmarks.studies.scale.result import Cost, SizeResult
from benchmarks.studies.scale.size import ENV_ID, ENVS_A_WORKER, NUM_STEPS, choose_env
from benchmarks.studies.traffic import size

SIZES = (8, 64, 256, 1024)
OBSERVATIONS = (256, 2048)  # Floats of larger observations, measured with the smallest size and fewer rollouts.
FEWER = 8
MAX_GROWTH = 1.2
TRANSITIONS = NUM_STEPS * ENVS_A_WORKER  # Of one worker's rollout.
MAX_VERSION_GROWTH = 2.0
PHASES = ("rollout", "stream", "stream, one by one")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.scale", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers (default: 8 to 1,024)")
    parser.add_argument(
        "--observations", type=int, nargs="*", default=OBSERVATIONS, help="floats of larger observations, if any"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--rollouts", type=int, default=256, help="workers' rollouts a round, at least (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    arguments = parser.parse_args(argv)
    progress = Progress()
    load = os.getloadavg()[0]
    ticks, stolen = machine.read_cpu_times()
    results, larger = [], []
    with tempfile.TemporaryDirectory() as directory:
        recording = Path(directory) / "recording"
        progress.say(f"recording a worker of {ENVS_A_WORKER} {ENV_ID}")
        record(recording, ENV_ID, ENVS_A_WORKER, NUM_STEPS)
        for num_workers in arguments.sizes:
            progress.say(f"{num_workers} workers")
            results.append(run_size(num_workers, recording, arguments.rounds, arguments.rollouts, 0))
        for num_floats in arguments.observations:
            progress.say(f"{arguments.sizes[0]} workers, observations of {size(4 * num_floats)}")
            record(recording, choose_env(num_floats), ENVS_A_WORKER, NUM_STEPS)
            rollouts = arguments.rollouts // FEWER
            larger.append(run_size(arguments.sizes[0], recording, arguments.rounds, rollouts, num_floats))
    ticks_after, stolen_after = machine.read_cpu_times()
    notes = [
        f"{ENV_ID}, {ENVS_A_WORKER} environments a worker, rollouts of {NUM_STEPS} steps; {arguments.rounds} rounds",
        *machine.describe_machine(Path(".bench"), load, (stolen_after - stolen) / (ticks_after - ticks)),
        ", ".join(machine.list_versions(None, ("torch", "pyzmq", "msgspec"))),
    ]
    text = to_markdown(results, larger, notes)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / ("scale" if tuple(arguments.sizes) == SIZES else "scale-quick")
    stem.with_suffix(".md").write_text(text)
    write_csv(stem.with_suffix(".csv"), CSV_FIELDS, csv_rows([*results, *larger]))
    print(f"wrote {os.path.relpath(stem)}.md and .csv")
    return 0


def run_size(num_workers: int, recording: Path, rounds: int, rollouts: int, num_floats: int) -> SizeResult:
    """Measure one size in a process of its own."""
    sizes = map(str, (num_workers, recording, rounds, rollouts, num_floats))
    command = [sys.executable, "-m", "benchmarks.studies.scale.size", *sizes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=SizeResult)


def to_markdown(results: Sequence[SizeResult], larger: Sequence[SizeResult], notes: Sequence[str]) -> str:
    """Lay out the tables.

    Args:
        results: One a number of workers.
        larger: One a size of observations.
        notes: What else to know.
    """
    columns = "|".join(f" {result.num_workers:,} workers " for result in results)
    rule = "|---|" + "---:|" * len(results)
    first = results[0]
    weights = 0 if first.storm is None else first.storm.weights_bytes
    lines = [
        "# One head, many workers",
        "",
        "CPU time of the head's process, all its threads, without heartbeats; median of the rounds, and quartiles. The "
        "workers are light: real connections that replay a real worker's rollout, on the same machine, so only CPU "
        "time is compared. Made by `python -m benchmarks.studies.scale`; see docs/explanation/scaling.md.",
        "",
        f"| us a worker's rollout of {TRANSITIONS:,} transitions |{columns}|",
        rule,
    ]
    for phase in PHASES:
        lines.append(row(phase, [spread(result.costs[phase]) for result in results]))
        main_us = [f"{result.costs[phase].main_s * 1e6:,.0f}" for result in results]
        lines.append(row(f"{phase}: of it in the main thread", main_us))
    lines += ["", f"| |{columns}|", rule]
    for phase in PHASES:
        lines.append(
            row(
                f"{phase}: ns a transition", [f"{each.costs[phase].cpu_s / TRANSITIONS * 1e9:,.0f}" for each in results]
            )
        )
    lines += [
        *(
            row(f"ms a new version is judged, {name} agent", [f"{each.versions[name] * 1e3:,.2f}" for each in results])
            for name in first.versions
        ),
        row(f"ms a pull of {size(weights)}", [f"{each.pull_s * 1e3:,.2f}" for each in results]),
        row("all joined and assigned, s", [f"{each.start_s:.1f}" for each in results]),
        row(
            "of it CPU of the head, ms a worker",
            [f"{each.start_cpu_s / each.num_workers * 1e3:.2f}" for each in results],
        ),
        row("share of a core while nothing happens", [f"{each.idle_cores:.2%}" for each in results]),
        row("memory of the head", [size(each.peak_bytes) for each in results]),
        row("messages/s taken in, beside the workers", [f"{each.messages_a_second:,.0f}" for each in results]),
        row("bytes/s taken in, beside the workers", [size(each.bytes_a_second) for each in results]),
    ]
    lines += ["", *storm_lines(results, columns, rule), "", *verdicts(results), ""]
    lines += [
        f"| bytes a transition, {first.num_workers} workers, stream | us a worker's rollout | in the main thread | "
        "in ZeroMQ's | a thread is full at | that is |",
        "|---:|---:|---:|---:|---:|---:|",
        *(observation_row(each) for each in (first, *larger)),
        "",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def storm_lines(results: Sequence[SizeResult], columns: str, rule: str) -> Iterator[str]:
    """Lay out the table of pull storms."""
    storms = [each.storm for each in results if each.storm is not None]
    weights = storms[0].weights_bytes

    def gaps(name: str) -> list[str]:
        return [f"{getattr(storm, name) * 1e3:,.0f} ms" for storm in storms]

    yield f"| seven of eight workers pull {size(weights)} at once, in a stream |{columns}|"
    yield rule
    yield row("a worker's rollout takes", gaps("pace_s"))
    yield row("weights sent", [size(each.num_workers * 7 / 8 * weights) for each in results])
    yield row("until all have made a rollout with them", [f"{storm.seconds:.1f} s" for storm in storms])
    yield row("rollouts delivered meanwhile", [f"{storm.rollouts:,}" for storm in storms])
    yield row("longest gap between rollouts of the others, before", gaps("others_gap_before_s"))
    yield row("longest gap between rollouts of the others, during", gaps("others_gap_s"))
    yield row("longest gap between any, before", gaps("gap_before_s"))
    yield row("longest gap between any, during", gaps("gap_s"))
    yield row("growth of the head's memory", [size(storm.grown_bytes) for storm in storms])


def observation_row(result: SizeResult) -> str:
    """Say what rollouts with observations of one size cost, and how many a head can take in."""
    cost, rollouts = result.costs["stream"], result.full_at("stream")
    gigabits = rollouts * result.rollout_bytes * 8 / 1e9
    return (
        f"| {result.rollout_bytes / TRANSITIONS:,.0f} | {spread(cost)} | {cost.main_s * 1e6:,.0f} | "
        f"{(cost.cpu_s - cost.main_s) * 1e6:,.0f} | {rollouts * TRANSITIONS / 1e6:,.2f} M transitions/s | "
        f"{gigabits:.1f} Gbit/s |"
    )


def verdicts(results: Sequence[SizeResult]) -> Iterator[str]:
    """Compare the largest size with the smallest."""
    first, last = results[0], results[-1]
    yield f"| cost a transition, {last.num_workers:,} workers / {first.num_workers} | measured | at most {MAX_GROWTH} |"
    yield "|---|---:|---|"
    for phase in PHASES:
        growth = last.costs[phase].cpu_s / first.costs[phase].cpu_s
        yield f"| {phase} | {growth:.2f} | {'met' if growth <= MAX_GROWTH else 'MISSED'} |"
    yield f"| cost a new version, as above | measured | at most {MAX_VERSION_GROWTH} |"
    for name, seconds in first.versions.items():
        growth = last.versions[name] / seconds
        yield f"| {name} agent | {growth:.2f} | {'met' if growth <= MAX_VERSION_GROWTH else 'MISSED'} |"


def row(name: str, entries: Sequence[str]) -> str:
    """Format a line of a table."""
    return f"| {name} | " + " | ".join(entries) + " |"


def spread(cost: Cost) -> str:
    """Write a cost with its quartiles, in microseconds."""
    return f"{cost.cpu_s * 1e6:,.0f} ({cost.low_s * 1e6:,.0f} to {cost.high_s * 1e6:,.0f})"


CSV_FIELDS = (
    *("num_workers", "num_floats", "rollout_bytes", "phase", "cpu_us", "cpu_us_q1", "cpu_us_q3", "main_us", "wall_us"),
    *("checks", "pulls", "start_s", "start_cpu_s", "idle_cores", "peak_bytes"),
    *("storm_gap_before_s", "storm_gap_s", "storm_others_gap_before_s", "storm_others_gap_s", "storm_s"),
    "storm_grown_bytes",
)


def csv_rows(results: Sequence[SizeResult]) -> Iterator[tuple[object, ...]]:
    """List every measurement, in the order of `CSV_FIELDS`; times are those of a worker's rollout."""
    for each in results:
        storm = each.storm
        storm_values: tuple[object, ...] = ("",) * 6
        if storm is not None:
            gaps = storm.gap_before_s, storm.gap_s, storm.others_gap_before_s, storm.others_gap_s
            storm_values = (*gaps, storm.seconds, storm.grown_bytes)
        for phase, cost in each.costs.items():
            times = (cost.cpu_s, cost.low_s, cost.high_s, cost.main_s, cost.wall_s)
            yield (
                *(each.num_workers, each.num_floats, each.rollout_bytes, phase, *(f"{x * 1e6:.1f}" for x in times)),
                *(
                    cost.checks,
                    cost.pulls,
                    each.start_s,
                    each.start_cpu_s,
                    each.idle_cores,
                    each.peak_bytes,
                    *storm_values,
                ),
            )


if __name__ == "__main__":
    sys.exit(main())
