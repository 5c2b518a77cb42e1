"""Faults befall workers while a learner works, and every transition is checked: `python -m chaos`. Is all still right?

Ten kinds of fault (kill, freeze, SIGTERM, segfault, partition, slow link, interrupted head, hung environment, odd
exception, full disk) come while a learner works by `step`, `rollout`, `stream` or `send/recv`, on this machine over
shared memory and over TCP, on hosts of a network, under Slurm, on Kubernetes and in a Ray cluster; clusters add faults
of their own. The schedule follows from `--seed`. The exit status
is 0 only if nothing was inconsistent, wedged or left behind.

    python -m chaos --faults 1000 --seed 0 --out benchmarks/results/chaos.md
    python -m chaos --place local --transport shm --faults 40
    python -m chaos --place local --faults 0 --seconds 600     no faults at all: does anything grow?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from chaos.campaign import Case, Order
from chaos.modes import MODES
from chaos.page import Result, to_markdown
from chaos.places import PLACES

ROOT = Path(__file__).resolve().parent.parent
# Of all faults, what happens where: on hosts of a network all ten kinds can, and in clusters each takes long.
SHARES = {
    ("local", "shm"): 0.25,
    ("local", "zmq"): 0.2,
    ("hosts", "zmq"): 0.2,
    ("slurm", "zmq"): 0.15,
    ("kubernetes", "zmq"): 0.1,
    ("ray", "zmq"): 0.1,
}
NAMES = {
    "local": "this machine",
    "hosts": "hosts of a network",
    "slurm": "Slurm",
    "kubernetes": "Kubernetes",
    "ray": "Ray",
}
END_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    # Ctrl-C must end this also in the background, where it would be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = parse_arguments(argv)
    ends_at = time.time() + arguments.seconds
    results = []
    try:
        for order in make_orders(arguments, ends_at):
            results.append(Result(f"{NAMES[order.place]}, {order.transport}"))
            carry_out(order, results[-1])
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        results[-1].problems.append("interrupted")
    command = f"python -m chaos {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
    notes = [
        f"{time.strftime('%Y-%m-%d')}, Linux, Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} usable cores, load average {os.getloadavg()[2]:.1f}",
        f"{arguments.workers} workers; silence_s is {arguments.silence:g}; "
        f"{sum(result.seconds for result in results) / 60:.0f} minutes",
    ]
    page = to_markdown(results, command, notes)
    print(page)
    if arguments.out:
        arguments.out.write_text(page)
    return 0 if all(result.is_well for result in results) else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", choices=list(PLACES), help="default: all")
    parser.add_argument("--transport", choices=["auto", "shm", "zmq"], default="auto",
                        help="on this machine; auto: both, one after the other; elsewhere it is zmq")  # fmt: skip
    parser.add_argument("--faults", type=int, default=100, help="in all places together; default: 100")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no fault later; default: two hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="default: all")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help="of faults; default: all")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--silence", type=float, default=5.0, help="Timeouts(silence_s=...); default: 5")
    parser.add_argument("--out", type=Path, help="a file for the page of results")
    return parser.parse_args(argv)


def make_orders(arguments: argparse.Namespace, ends_at: float) -> Iterator[Order]:
    """Share the faults out over the places that are asked for; what rounding leaves goes to the last."""
    shares = {
        (place, transport): share
        for (place, transport), share in SHARES.items()
        if arguments.place in (None, place) and (place != "local" or arguments.transport in ("auto", transport))
    }
    num_left, share_left = arguments.faults, sum(shares.values())
    for (place, transport), share in shares.items():
        num_faults = round(num_left * share / share_left)
        seconds_left = max(0.0, ends_at - time.time())
        yield Order(
            place=place,
            transport=transport,
            num_faults=num_faults,
            num_workers=arguments.workers,
            silence_s=arguments.silence,
            seed=arguments.seed,
            ends_at=time.time() + seconds_left * share / share_left,
            kinds=arguments.kinds,
            modes=arguments.modes,
        )
        num_left, share_left = num_left - num_faults, share_left - share


def carry_out(order: Order, result: Result) -> None:
    """Have a process of its own carry out an order, and note what it says, fault by fault."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    command = [sys.executable, "-m", "chaos.campaign", json.dumps(asdict(order))]
    # A session of its own: Ctrl-C comes to us alone, and we end it so that it removes its hosts and its Slurm.
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        has_ended = False
        try:
            for text in process.stdout:
                line = json.loads(text)
                if "case" in line:
                    result.cases.append(Case(**line["case"]))
                    show(result, order, time.monotonic() - began)
                else:
                    result.num_steps, result.left, has_ended = line["num_steps"], line["left"], True
                    result.problems += [line["problem"]] if line["problem"] else []
            status = process.wait(END_S)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
    result.seconds = time.monotonic() - began
    if not has_ended or status:
        result.problems.append(f"wedged: it ended with status {status} and without a result")


def show(result: Result, order: Order, seconds: float) -> None:
    """Say how far it is, and what the last fault came to."""
    case = result.cases[-1]
    came = case.problem or f"went on after {case.seconds:.1f} s"
    what = f"{case.kind} {case.variant}".strip()
    said = f"[{result.place}, {len(result.cases)} of {order.num_faults}, {seconds:.0f} s] {what} in {case.mode}: {came}"
    print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
