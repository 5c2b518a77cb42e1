"""Workers die, freeze and stumble while a learner works: `python -m benchmarks.chaos`. Does everything stay right?

Three workloads. `numbered` mixes all calls over an environment that numbers its own steps, and checks every transition.
`stream` does so with streams.
`ppo` trains CartPole, and must reach a return. The schedule of faults follows from `--seed`. The exit status is 0 only
if nothing was inconsistent, everything lost was replaced, and neither memory nor descriptors nor processes were left.

To add a kind of fault, see `benchmarks/incidents.py`. To add a workload, write a class like `Numbering` and name it in
`WORKLOADS`; workers elsewhere (in namespaces, under Slurm) are a launcher in its `make`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.agents import MlpAgent
from benchmarks.incidents import STRIKES, Agitator, Struck, make_schedule
from benchmarks.numbered import NUM_ACTIONS, Checker, Inconsistent, expect, make_numbered
from benchmarks.ppo import Learner, PpoConfig
from clusterenv import ClusterEnv, Timeouts

MAX_GROWTH_BYTES = 32e6


class Workload(Protocol):
    """What a learner does while its workers suffer.

    Attributes:
        rounds_apart: How many rounds a worker must serve to have been of use, so that the next fault is no crash loop.
    """

    rounds_apart: int

    def make(self, arguments: argparse.Namespace) -> ClusterEnv:
        """Make the environments, and reset them."""

    def advance(self, envs: ClusterEnv) -> int:
        """Do one round; returns how many steps of an environment are thrown away if its worker is lost over it."""

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        """Return what was reached; raise `Inconsistent` if something cannot be."""


class Numbering:
    """All calls in a random order, over environments that number their own steps."""

    rounds_apart = 9

    def make(self, arguments: argparse.Namespace) -> ClusterEnv:
        self._rng = np.random.default_rng(arguments.seed)
        num_envs = 4 * arguments.workers
        envs = ClusterEnv(
            make_numbered(num_envs),
            num_workers=arguments.workers,
            transport=arguments.transport,
            timeouts=Timeouts(silence_s=arguments.silence),
        )
        self._checker = Checker(num_envs)
        self._checker.reset(envs.reset(seed=arguments.seed)[0])
        self._checker.rollout(envs.rollout(choose, 32))  # Its memory is made once, and kept.
        return envs

    def advance(self, envs: ClusterEnv) -> int:
        match self._rng.integers(8):
            case 0:
                self._checker.rollout(envs.rollout(choose, 32))
                return 32
            case 1:
                expect([index for index, _ in envs.call("method")] == list(range(envs.num_envs)), "calls are mixed up")
                return 0
            case 2:
                for _ in range(8):
                    answer = envs.step(choose)
                    self._checker.step(answer[4]["action"], answer)
            case _:
                for _ in range(8):
                    actions = self._rng.integers(NUM_ACTIONS, size=envs.num_envs)
                    self._checker.step(actions, envs.step(actions))
        return 1

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        self._checker.step(actions := np.zeros(envs.num_envs, np.int64), envs.step(actions))
        self._checker.finish(envs.losses)
        return {"transitions checked": self._checker.num_steps}


class Streaming(Numbering):
    """Streams of rollouts over the same environments, left and taken up again."""

    rounds_apart = 1

    def advance(self, envs: ClusterEnv) -> int:
        with envs.stream(choose, 32) as stream:
            for _, rollout in zip(range(50), stream, strict=False):
                self._checker.rollout(rollout)
        self._checker.reset(envs.reset()[0], may_skip=True)  # What was made ahead is thrown away: begin anew.
        return 64  # One on the way, and one ahead.


class Ppo:
    """Trains CartPole."""

    NUM_STEPS = 125
    rounds_apart = 1

    def make(self, arguments: argparse.Namespace) -> ClusterEnv:
        torch.set_num_threads(1)
        torch.manual_seed(arguments.seed)
        self._agent = MlpAgent(4, 2)
        self._learner = Learner(self._agent, PpoConfig(decoupled=True), arguments.seed)
        self._returns: list[float] = []
        envs = ClusterEnv(
            "CartPole-v1",
            16 * arguments.workers,
            num_workers=arguments.workers,
            transport=arguments.transport,
            timeouts=Timeouts(silence_s=arguments.silence),
        )
        envs.reset(seed=arguments.seed)
        return envs

    def advance(self, envs: ClusterEnv) -> int:
        rollout = envs.rollout(self._agent, self.NUM_STEPS)
        self._check(rollout)
        self._returns += rollout.episodes.returns.tolist()
        self._learner.update(rollout)
        return self.NUM_STEPS

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        recent = self._returns[-100:]
        stats = envs.stats
        return {
            "updates": stats["updates"],
            "env steps": stats["env_steps"],
            "episodes": len(self._returns),
            "return": float(np.mean(recent)) if recent else 0.0,
        }

    def _check(self, rollout: Any) -> None:
        """CartPole rewards every step with 1: the returns must equal the lengths, and nothing may be missing."""
        expect((rollout.rewards[rollout.valid] == 1.0).all(), "a transition without its reward")
        expect((rollout.episodes.returns == rollout.episodes.lengths).all(), "a return that is not its length")
        expect(np.isfinite(rollout.obs).all() and np.isfinite(rollout.logprob).all(), "numbers that are none")
        expect((rollout.ages >= 0).all(), "a version of the future")


WORKLOADS: Mapping[str, type[Workload]] = {"numbered": Numbering, "stream": Streaming, "ppo": Ppo}


def choose(observations: Any) -> Any:
    """A policy whose actions follow from the numbers."""
    return np.asarray(observations).sum(axis=1) % NUM_ACTIONS


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="numbered")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for how long faults happen; longer if workers need longer"
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--kinds", nargs="+", choices=list(STRIKES), default=list(STRIKES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--transport", choices=["auto", "shm", "zmq"], default="auto")
    parser.add_argument("--silence", type=float, default=2.0, help="Timeouts(silence_s=...)")
    parser.add_argument("--target", type=float, default=0.0, help="the return that ppo must reach")
    parser.add_argument("--out", type=Path, help="a JSON file for the report")
    arguments = parser.parse_args(argv)
    report = run(arguments)
    for name, value in report.items():
        print(f"{name:24} {value}")
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let a workload and a schedule run against each other; returns what there is to say."""
    workload = WORKLOADS[arguments.workload]()
    schedule = make_schedule(arguments.seed, arguments.faults, arguments.seconds, arguments.workers, arguments.kinds)
    problems: list[str] = []
    reached: dict[str, Any] = {}
    thrown_away = 0
    with workload.make(arguments) as envs:
        workload.advance(envs)
        descriptors, size = measure_head()
        agitator = Agitator(envs, schedule, arguments.silence, workload.rounds_apart)
        try:
            with agitator:
                last_look = time.monotonic()
                while not agitator.is_done or time.monotonic() - last_look < arguments.silence + 2:
                    if not agitator.is_done:
                        last_look = time.monotonic()
                    before = len(envs.losses)
                    at_stake = workload.advance(envs)
                    agitator.rounds += 1
                    thrown_away += sum(at_stake * len(loss.env_indices) for loss in envs.losses[before:])
            reached = workload.finish(envs)
        except Inconsistent as error:
            problems.append(f"inconsistent: {error}")
        descriptors_after, size_after = measure_head()
        losses, pids = envs.losses, envs.worker_pids
    problems += judge(agitator.struck, len(losses), arguments.silence)
    if descriptors_after > descriptors:
        problems.append(f"{descriptors} descriptors became {descriptors_after}")
    if size_after - size > MAX_GROWTH_BYTES:
        problems.append(f"memory grew by {(size_after - size) / 1e6:.0f} MB")
    if left := [pid for pid in {*pids, *(s.pid for s in agitator.struck)} if os.path.exists(f"/proc/{pid}")]:
        problems.append(f"processes left: {left}")
    if reached.get("return", np.inf) < arguments.target:
        problems.append(f"return {reached['return']:.0f} is below {arguments.target:.0f}")
    return {
        "faults": dict(Counter(s.incident.kind for s in agitator.struck)),
        "losses": len(losses),
        **describe_times(agitator.struck),
        "steps thrown away": f"at most {thrown_away}",
        **reached,
        "descriptors": f"{descriptors} before, {descriptors_after} after",
        "memory of the head": f"{size / 1e6:.0f} MB before, {size_after / 1e6:.0f} MB after",
        "problems": problems,
    }


def judge(struck: Sequence[Struck], num_losses: int, silence_s: float) -> list[str]:
    """Find what should have been noticed and was not, or the reverse."""
    problems = []
    fatal = [s for s in struck if s.incident.kind != "pause"]
    problems += [f"never replaced: {s.incident}" for s in fatal if s.replaced_at is None]
    if num_losses > len(fatal):
        problems.append(f"{num_losses} losses of {len(fatal)} fatal faults: a worker was given up that lived")
    return problems


def describe_times(struck: Sequence[Struck]) -> dict[str, str]:
    """Say how long it took to notice each kind, and from then on to replace the worker."""
    described = {}
    for kind in dict.fromkeys(s.incident.kind for s in struck if s.replaced_at is not None):
        noticed = [s.noticed_at - s.at for s in struck if s.incident.kind == kind and s.noticed_at is not None]
        replaced = [
            s.replaced_at - s.noticed_at
            for s in struck
            if s.incident.kind == kind and s.replaced_at is not None and s.noticed_at is not None
        ]
        described[f"{kind}: noticed after"] = spread(noticed)
        described[f"{kind}: replaced in"] = spread(replaced)
    return described


def spread(seconds: Sequence[float]) -> str:
    """Give median and maximum."""
    return f"{np.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)" if seconds else "never"


def measure_head() -> tuple[int, int]:
    """Return the descriptors and the resident bytes of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir("/proc/self/fd")), resident


if __name__ == "__main__":
    sys.exit(main())
