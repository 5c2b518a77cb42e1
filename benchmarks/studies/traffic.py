"""What keeping the workers' policies new costs in bytes: `python -m benchmarks.studies.traffic`.

Counts the bytes of weights and checks in real training runs with each sync rule, for a small agent and for an Atari
network, against the way of the reference implementation: all weights, as JSON, to every worker, at every step. Then
measures on the loopback device what really crosses a socket. Writes its tables to `benchmarks/results/`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experiments.ppo import Learner, PpoConfig

from benchmarks import machine
from benchmarks.agents import Agent, CnnAgent, MlpAgent
from benchmarks.peers.report import write_csv
from benchmarks.processes import ROOT
from benchmarks.progress import Progress
from benchmarks.studies.loopback import DEVICES, WireBytes, measure_wire
from benchmarks.tasks import make_env
from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, Network

NUM_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """An agent, and a training run that is long enough to count its bytes.

    Args:
        at_most: The largest share of the weights that a check may have.
    """

    name: str
    task: str
    make_agent: Callable[[], Agent]
    num_envs: int
    num_steps: int
    config: PpoConfig
    at_most: float


CASES = (
    Case(
        name="64-64 agent, CartPole-v1",
        task="cartpole",
        make_agent=lambda: MlpAgent(4, 2),
        num_envs=32,
        num_steps=125,
        config=PpoConfig(decoupled=True, learning_rate=1e-3, minibatch_size=500),
        at_most=0.05,
    ),
    Case(
        name="Atari CNN, synthetic 84 x 84 x 4 frames",
        task="image",
        make_agent=lambda: CnnAgent(6),
        num_envs=8,
        num_steps=16,
        config=PpoConfig(decoupled=True, learning_rate=1e-3, epochs=1, minibatch_size=64),
        at_most=0.001,
    ),
)
RULES: tuple[tuple[str, Any], ...] = (("AdaptiveSync", AdaptiveSync()), ("EveryUpdate", EveryUpdate()))


@dataclass(frozen=True, kw_only=True)
class Count:
    """The bytes of one run, all workers together; the first copy of the weights, which all rules need, is left out.

    Args:
        versions: How many the learner made after the first.
        json_bytes: What the reference implementation would have sent in the same steps.
    """

    case: Case
    rule: str
    versions: int
    checks: int
    pulls: int
    weights: int
    check_bytes: int
    json_bytes: int
    version_bytes: int

    @property
    def per_version(self) -> float:
        """Bytes for weights and checks per version and worker."""
        return (self.weights + self.check_bytes) / (self.versions * NUM_WORKERS)

    @property
    def check_share(self) -> float:
        """What a check takes per worker as a share of the weights; 0 if there were none."""
        return self.check_bytes / self.checks / NUM_WORKERS / self.version_bytes if self.checks else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.traffic", description=__doc__.split("\n\n")[0])
    parser.add_argument("--updates", type=int, default=20, help="versions after the first in every run (default: 20)")
    parser.add_argument(
        "--transport", choices=("shm", "zmq"), default="zmq", help="of the training runs (default: zmq)"
    )
    parser.add_argument("--no-wire", action="store_true", help="leave out the measurement on the loopback device")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where results are written")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    progress = Progress()
    counts = []
    for case in CASES:
        for name, rule in RULES:
            progress.say(f"{case.name}: {arguments.updates} updates with {name}")
            counts.append(count_bytes(case, name, rule, arguments.updates, arguments.transport))
    wire: list[tuple[Case, WireBytes]] = []
    if not arguments.no_wire and DEVICES.exists():
        for case in CASES:
            progress.say(f"{case.name}: bytes on the loopback device")
            measured = measure_wire(case.make_agent, case.task, NUM_WORKERS, arguments.updates)
            wire += [(case, each) for each in measured]
    text = to_markdown(counts, wire)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / ("traffic" if arguments.updates >= 20 else "traffic-quick")
    stem.with_suffix(".md").write_text(text)
    write_csv(stem.with_suffix(".csv"), CSV_FIELDS, (csv_row(count) for count in counts))
    print(f"wrote {os.path.relpath(stem)}.md and .csv")
    return 0


def count_bytes(case: Case, name: str, rule: Any, updates: int, transport: str) -> Count:
    """Train for some updates and read what the run says it sent."""
    torch.manual_seed(0)
    agent = case.make_agent()
    learner = Learner(agent, case.config, seed=0)
    with make_envs(case, rule, case.num_envs, transport) as envs:
        envs.reset(seed=0)
        rollout = envs.rollout(agent, case.num_steps)
        first = envs.stats
        for _ in range(updates):
            learner.update(rollout)
            rollout = envs.rollout(agent, case.num_steps)
        last = envs.stats

    def grown(field: str) -> int:
        return int(last[field] - first[field])

    return Count(
        case=case,
        rule=name,
        versions=grown("updates"),
        checks=grown("checks"),
        pulls=grown("pulls"),
        weights=grown("bytes_weights"),
        check_bytes=grown("bytes_checks"),
        json_bytes=len(encode_json(agent)) * NUM_WORKERS * case.num_steps * updates,
        version_bytes=int(first["bytes_weights"]) // NUM_WORKERS,
    )


def encode_json(agent: Agent) -> bytes:
    """Encode an agent's weights as the reference implementation does for every worker at every step."""
    return json.dumps({name: tensor.tolist() for name, tensor in agent.state_dict().items()}).encode()


def make_envs(case: Case, rule: Any, num_envs: int, transport: str) -> ClusterEnv:
    """Make the environments of a case."""
    factories = [partial(make_env, case.task) for _ in range(num_envs)]
    return ClusterEnv(factories, num_workers=NUM_WORKERS, network=Network(transport=transport), sync=rule)


def to_markdown(counts: Sequence[Count], wire: Sequence[tuple[Case, WireBytes]]) -> str:
    """Lay out the tables."""
    lines = [
        "# Traffic for keeping policies new",
        "",
        f"{NUM_WORKERS} workers; counted by `envs.stats` in real PPO runs, without the first copy that all rules need. "
        "The last column is all weights as JSON to every worker at every step, the reference implementation's way. On "
        "the synthetic frames there is nothing to learn, so there the number of pulls means little; the sizes count. "
        "Made by `python -m benchmarks.studies.traffic`.",
        "",
        "| agent | rule | pulls per worker | weights | checks | per version and worker | JSON every step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.case.name} | {each.rule} | {each.pulls / NUM_WORKERS:.1f} of {each.versions} | "
        f"{size(each.weights)} | {size(each.check_bytes)} | {size(each.per_version)} | {size(each.json_bytes)}, "
        f"{each.json_bytes / (each.weights + each.check_bytes):,.0f} times as much |"
        for each in counts
    ]
    lines += ["", "| target | measured | |", "|---|---|---|"]
    lines += [
        f"| {each.case.name}: a check is at most {each.case.at_most:.2%} of the weights | {each.check_share:.3%} of "
        f"{size(each.version_bytes)} | {'met' if each.check_share <= each.case.at_most else 'MISSED'} |"
        for each in counts
        if each.checks
    ]
    if wire:
        lines += [
            "",
            "Over TCP, encrypted, read off the loopback device, with headers, replies and acknowledgements, per worker "
            "and version:",
            "",
            "| agent | what | on the device | by our count |",
            "|---|---|---:|---:|",
            *(f"| {case.name} | {b.what} | {size(b.on_device)} | {size(b.counted)} |" for case, b in wire),
        ]
    versions = machine.list_versions(None, (*machine.PACKAGES, "torch"))
    return "\n".join([*lines, "", f"- {', '.join(versions)}"]) + "\n"


CSV_FIELDS = (
    *("agent", "rule", "num_workers", "num_steps", "versions", "checks", "pulls", "bytes_weights", "bytes_checks"),
    *("bytes_json_every_step", "bytes_of_a_version", "check_share"),
)


def csv_row(count: Count) -> tuple[object, ...]:
    """List one run's numbers, in the order of `CSV_FIELDS`."""
    return (
        *(count.case.name, count.rule, NUM_WORKERS, count.case.num_steps, count.versions, count.checks, count.pulls),
        *(count.weights, count.check_bytes, count.json_bytes, count.version_bytes, f"{count.check_share:.6f}"),
    )


def size(count: float) -> str:
    """Write a number of bytes with three digits."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


if __name__ == "__main__":
    sys.exit(main())
