"""Workers die, freeze, stumble and are cut off while a learner works: `python -m benchmarks.chaos`. Is all still right?

Workloads (`benchmarks/workloads.py`): `numbered` mixes all calls over an environment that numbers its own steps, and
checks every transition; `stream` does so with streams; `ppo` trains CartPole, and must reach a return; `soak` does
everything in turn, best without faults and for long. Places (`benchmarks/places.py`): this machine, hosts on a network,
a Slurm. The schedule of faults follows from `--seed`. The exit status is 0 only if nothing was inconsistent, everything
lost was replaced, nobody was given up who lived, and neither memory nor descriptors nor processes were left.

    python -m benchmarks.chaos --place hosts --workload ppo --faults 100 --seconds 600 --target 400
    python -m benchmarks.chaos --workload soak --faults 0 --seconds 600
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.chaos_results import Outcome
from benchmarks.footprint import Course
from benchmarks.incidents import Agitator, Life, Struck, make_schedule
from benchmarks.numbered import Inconsistent
from benchmarks.places import PLACES, Place
from benchmarks.trainee import Ppo
from benchmarks.workloads import Numbering, Soaking, Streaming, Workload
from clusterenv import ClusterEnv, Loss
from clusterenv.errors import ClusterEnvError

WORKLOADS: Mapping[str, type[Workload]] = {"numbered": Numbering, "stream": Streaming, "soak": Soaking, "ppo": Ppo}
NUM_LOOKS = 60
RETURN_S = 30.0  # How long a worker that comes back has to learn that its place is taken.


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--place", choices=list(PLACES), default="here")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="numbered")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for how long faults happen; longer if workers need longer"
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", help="of faults; by default all there are in the place")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--transport", choices=["auto", "shm", "zmq"], default="auto", help="here; elsewhere it is zmq")
    parser.add_argument("--silence", type=float, default=2.0, help="Timeouts(silence_s=...)")
    parser.add_argument("--target", type=float, default=0.0, help="the return that ppo must reach")
    parser.add_argument("--out", type=Path, help="a file for the page of results")
    arguments = parser.parse_args(argv)
    load_before, (total, stolen) = os.getloadavg()[0], machine.read_cpu_times()
    with PLACES[arguments.place](arguments) as place:
        if unknown := set(arguments.kinds or ()) - place.strikes.keys():
            parser.error(f"no {', '.join(unknown)} in this place, only {', '.join(place.strikes)}")
        outcome = run(arguments, place)
    total_after, stolen_after = machine.read_cpu_times()
    command = f"python -m benchmarks.chaos {shlex.join(sys.argv[1:] if argv is None else argv)}"
    notes = [
        *machine.describe_machine(Path(), load_before, (stolen_after - stolen) / max(1, total_after - total)),
        *machine.list_versions(None, ("pyzmq",)),
        f"{arguments.workers} workers; silence_s is {arguments.silence:g}",
    ]
    page = outcome.to_markdown(f"{arguments.workload}, {place.name}", command, notes)
    print(page)
    if arguments.out:
        arguments.out.write_text(page)
    return 1 if outcome.problems else 0


def run(arguments: argparse.Namespace, place: Place) -> Outcome:
    """Let a workload and a schedule run against each other; returns what there is to say."""
    workload = WORKLOADS[arguments.workload]()
    strikes = {kind: strike for kind, strike in place.strikes.items() if kind in (arguments.kinds or place.strikes)}
    schedule = make_schedule(arguments.seed, arguments.faults, arguments.seconds, arguments.workers, strikes)
    problems: list[str] = []
    reached: dict[str, Any] = {}
    thrown_away = 0
    began = time.monotonic()
    with workload.make(arguments, place.options) as envs:
        workload.advance(envs)
        course = Course(arguments.seconds / NUM_LOOKS)
        agitator = Agitator(envs, schedule, strikes, arguments.silence, workload.rounds_apart)
        try:
            with agitator:
                ends_at = done_at = time.monotonic() + arguments.seconds
                while time.monotonic() < ends_at:
                    course.look(envs.worker_pids)
                    before = len(envs.losses)
                    at_stake = workload.advance(envs)
                    agitator.rounds += 1
                    thrown_away += sum(at_stake * len(loss.env_indices) for loss in envs.losses[before:])
                    now = time.monotonic()
                    if not agitator.is_done:
                        done_at = now
                        ends_at = max(ends_at, now + arguments.silence + 2)
                    elif find_returning(agitator.struck, envs) and now < done_at + RETURN_S:
                        ends_at = max(
                            ends_at, now + 1
                        )  # Whoever comes back must be told to go: the head has no thread.
                problems += [f"came back, and is still there: {s}" for s in find_returning(agitator.struck, envs)]
            reached = workload.finish(envs)
        except Inconsistent as error:
            problems.append(f"inconsistent: {error}")
        except ClusterEnvError as error:
            problems.append(f"the run ended with {type(error).__name__}: {error}")
        course.note(envs.worker_pids)
        losses, last = envs.losses, [Life.of(pid) for pid in envs.worker_pids]
    problems += agitator.find_mishaps()
    problems += judge(agitator.struck, losses)
    problems += course.find_growth(workload.max_growth_bytes, of_workers=not losses)
    if left := [life for life in (*last, *(s.life for s in agitator.struck)) if life.goes_on]:
        problems.append(f"processes left: {left}")
    if reached.get("return", np.inf) < arguments.target:
        problems.append(f"return {reached['return']:.0f} is below {arguments.target:.0f}")
    return Outcome(
        seconds=time.monotonic() - began,
        struck=agitator.struck,
        num_losses=len(losses),
        thrown_away=thrown_away,
        reached=reached,
        moments=course.moments,
        problems=problems,
    )


def find_returning(struck: Sequence[Struck], envs: ClusterEnv) -> list[Struck]:
    """Return which workers were replaced, and still live."""
    serving = envs.worker_pids
    return [s for s in struck if s.is_fatal and s.life.pid not in serving and s.life.goes_on]


def judge(struck: Sequence[Struck], losses: Sequence[Loss]) -> list[str]:
    """Find what should have been noticed and was not, or the reverse."""
    fatal = [s for s in struck if s.is_fatal]
    problems = [f"never replaced: {s}" for s in fatal if s.replaced_at is None]
    lost = Counter(loss.worker_index for loss in losses)
    lost.subtract(s.worker_index for s in fatal)
    for worker_index, surplus in lost.items():
        if surplus > 0:
            reasons = [loss.reason for loss in losses if loss.worker_index == worker_index]
            problems.append(f"worker {worker_index} was given up {surplus} times though it lived, one of: {reasons}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
