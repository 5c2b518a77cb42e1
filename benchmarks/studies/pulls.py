"""What pulls cost a head whose workers share machines: `python -m benchmarks.studies.pulls`.

A real head and light workers (`benchmarks.studies.scale`), once as if each had a machine of its own and once in groups
that share one. All pull 7 MB of weights: what is sent, by the run's own count and on the loopback device, what that
costs the head's CPU, and how long the learner of a stream waits for any rollout meanwhile. Writes its table to
`benchmarks/results/`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks import machine
from benchmarks.agents import MlpAgent, change
from benchmarks.peers.report import write_csv
from benchmarks.processes import ROOT
from benchmarks.progress import Progress
from benchmarks.studies.loopback import DEVICES
from benchmarks.studies.scale.light_workers import raise_file_limit
from benchmarks.studies.scale.recorder import record
from benchmarks.studies.scale.result import Storm
from benchmarks.studies.scale.size import ENV_ID, ENVS_A_WORKER, NUM_STEPS, WIDE, Bench, make_envs
from benchmarks.studies.traffic import size

NUM_FLOATS = 8  # Of an observation of LunarLander.
MAX_SENT = 1 / 20  # Of what is sent where nobody shares a machine.
MAX_GAP_GROWTH = 2.0


class Pulls(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured with workers in groups of one size; bytes and seconds are those of one pull by all.

    Args:
        per_machine: How many share a machine.
        counted_bytes: Of weights, as the run counts them.
        device_bytes: On the loopback device, more than without a pull.
        cpu_s: Of the head, more than without a pull.
        storms: What happened in streams when seven of eight pulled at once.
    """

    num_workers: int
    per_machine: int
    counted_bytes: float
    device_bytes: float
    cpu_s: float
    storms: list[Storm]

    @property
    def gap_growth(self) -> float:
        """The longest wait for any rollout in a storm, by the longest before: the median of the storms."""
        return float(np.median([storm.gap_s / storm.gap_before_s for storm in self.storms]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.pulls", description=__doc__.split("\n\n")[0])
    parser.add_argument("--machines", type=int, default=32, help="how many there are (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=32, help="on each of them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    parser.add_argument("--one", nargs=2, metavar=("PER_MACHINE", "RECORDING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    num_workers = arguments.machines * arguments.workers
    if arguments.one is not None:
        torch.set_num_threads(1)
        raise_file_limit()
        result = measure(num_workers, int(arguments.one[0]), Path(arguments.one[1]), arguments.rounds)
        sys.stdout.write(msgspec.json.encode(result).decode())
        return 0
    progress = Progress()
    load = os.getloadavg()[0]
    results = []
    with tempfile.TemporaryDirectory() as directory:
        recording = Path(directory) / "recording"
        record(recording, ENV_ID, ENVS_A_WORKER, NUM_STEPS)
        for per_machine in (1, arguments.workers):
            progress.say(f"{num_workers} workers, {per_machine} per machine")
            command = [sys.executable, "-m", "benchmarks.studies.pulls", "--machines", str(arguments.machines)]
            command += ["--workers", str(arguments.workers), "--rounds", str(arguments.rounds)]
            command += ["--one", str(per_machine), str(recording)]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            results.append(msgspec.json.decode(done.stdout, type=Pulls))
    notes = [
        f"{ENV_ID}, {ENVS_A_WORKER} environments a worker, rollouts of {NUM_STEPS} steps; {arguments.rounds} rounds",
        *machine.describe_machine(Path(".bench"), load, 0.0),
    ]
    text = to_markdown(results, notes)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    is_whole = (arguments.machines, arguments.workers) == (32, 32)
    stem = arguments.out / ("pulls" if is_whole else "pulls-quick")
    stem.with_suffix(".md").write_text(text)
    write_csv(stem.with_suffix(".csv"), CSV_FIELDS, (csv_row(each) for each in results))
    print(f"wrote {os.path.relpath(stem)}.md and .csv")
    return 0


def measure(num_workers: int, per_machine: int, recording: Path, rounds: int) -> Pulls:
    """Start a head and its workers, and let all pull again and again."""
    with make_envs(num_workers, recording, per_machine=per_machine, listen="127.0.0.1") as (envs, rule):
        envs.reset(seed=1)
        bench = Bench(envs, rule, rounds, num_workers)
        rule.compares = False
        envs.rollout(bench.wide, NUM_STEPS)
        found = []
        for _ in range(rounds):
            costs = []
            for rule.pulls in (False, True):
                change(bench.wide)
                before = read_device(), envs.stats["bytes_weights"], time.process_time()
                envs.rollout(bench.wide, NUM_STEPS)
                after = read_device(), envs.stats["bytes_weights"], time.process_time()
                costs.append(np.subtract(after, before))
            found.append(costs[1] - costs[0])
        device_bytes, counted_bytes, cpu_s = np.median(found, axis=0).tolist()
        storms = []
        for _ in range(rounds):
            bench.wide = MlpAgent(NUM_FLOATS, 4, hidden=WIDE)  # Another one: all begin alike again.
            storms.append(bench.measure_storm())
    return Pulls(
        num_workers=num_workers,
        per_machine=per_machine,
        counted_bytes=counted_bytes,
        device_bytes=device_bytes,
        cpu_s=cpu_s,
        storms=storms,
    )


def read_device() -> int:
    """Return the bytes that the loopback device has carried."""
    lines = DEVICES.read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def to_markdown(results: Sequence[Pulls], notes: Sequence[str]) -> str:
    """Lay out the table."""
    alone, shared = results
    lines = [
        "# Pulls of workers that share machines",
        "",
        f"{alone.num_workers:,} light workers pull {size(alone.storms[0].weights_bytes)} of weights: CPU time of the "
        "head's process, all its threads, and what it sends. Made by `python -m benchmarks.studies.pulls`.",
        "",
        f"| all pull | each has a machine of its own | {shared.per_machine} share one | of it |",
        "|---|---:|---:|---:|",
    ]
    for name, field, text in (
        ("weights sent", "counted_bytes", size),
        ("bytes on the wire", "device_bytes", size),
        ("CPU of the head", "cpu_s", "{:.2f} s".format),
    ):
        values = [getattr(each, field) for each in results]
        ratio = f"1/{values[0] / values[1]:.1f}" if values[1] > values[0] / 100 else "too little to be measured"
        lines.append(f"| {name} | {text(values[0])} | {text(max(values[1], 0.0))} | {ratio} |")
    lines += ["", "| a storm in a stream, median | before | during | grown by | CPU time of the head within it |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for each in results:
        before, during, cpu = (
            float(np.median([getattr(storm, name) for storm in each.storms])) * 1e3
            for name in ("gap_before_s", "gap_s", "gap_cpu_s")
        )
        name = f"longest wait for any rollout, {each.per_machine} per machine"
        lines.append(f"| {name} | {before:.0f} ms | {during:.0f} ms | {each.gap_growth:.1f} | {cpu:.0f} ms |")
    share = shared.counted_bytes / alone.counted_bytes
    lines += ["", "| target | measured | |", "|---|---:|---|"]
    lines.append(f"| sent, at most {MAX_SENT} of before | {share:.3f} | {'met' if share <= MAX_SENT else 'MISSED'} |")
    for each in results:
        verdict = "met" if each.gap_growth <= MAX_GAP_GROWTH else "MISSED"
        lines.append(
            f"| gap in a storm, at most {MAX_GAP_GROWTH:g} times that before, {each.per_machine} per machine | "
            f"{each.gap_growth:.1f} | {verdict} |"
        )
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


CSV_FIELDS = ("num_workers", "per_machine", "counted_bytes", "device_bytes", "cpu_s", "gap_before_s", "gap_s")


def csv_row(each: Pulls) -> tuple[object, ...]:
    """Write a measurement in the order of `CSV_FIELDS`."""
    gaps = [np.median([getattr(storm, name) for storm in each.storms]) for name in ("gap_before_s", "gap_s")]
    return (each.num_workers, each.per_machine, each.counted_bytes, each.device_bytes, each.cpu_s, *gaps)


if __name__ == "__main__":
    sys.exit(main())
