"""What a slow network costs: `python -m benchmarks.studies.links` (Linux, as root: hosts are network namespaces).

A learner on one host collects rollouts from two workers on its own host, and from pairs of workers on others: over
perfect links, over delayed and narrow ones, and over such that lose packets as well. All take turns in short rounds, so
that what else goes on in the machine hits all of them. Prints one table and writes it to `benchmarks/results/links.md`.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tests.host_launcher import HostLauncher
from tests.hosts import Host, connected_hosts
from tests.switch import Line, Switch, slow_network

from benchmarks import machine
from benchmarks.agents import MlpAgent
from benchmarks.processes import ROOT
from benchmarks.tasks import make_env
from clusterenv import ClusterEnv, Network, Rollout

NUM_STEPS, ENVS_PER_WORKER, NUM_WORKERS = 128, 64, 2
NUM_ENVS = ENVS_PER_WORKER * NUM_WORKERS
TASK = "lunarlander"
GOAL = 0.85
LOOPBACK = "loopback"
LINKS = {
    "undelayed": Line(),
    "10 ms, 100 Mbit/s": Line(delay_s=0.01, bits_per_s=1e8),
    "10 ms, 100 Mbit/s, 1 % loss": Line(delay_s=0.01, bits_per_s=1e8, loss=0.01),
}
GOAL_LINK = "10 ms, 100 Mbit/s"
WAYS = {
    "rollout": "`rollout(agent, 128)`",
    "learning": "`rollout(agent, 128)`, the agent changed before each",
    "stream": "`stream(agent, 128, num_envs=128)`",
}
WARM_UP = 2
LEGEND = (
    "Each entry: environment steps per second (median over the rounds), then the ratio to loopback in the same round "
    "(median, and quartiles in brackets). Delay is each way; it and the rate are those of each worker's link. Loss is "
    "of every packet, each way. All connections are TCP, encrypted, also those over loopback."
)


@dataclass(frozen=True)
class Round:
    """What one round over one link came to.

    Args:
        rate: Environment steps per second.
        wire_bytes: What the workers sent for a transition.
        idle_s: How long the workers waited for the link and the learner, by rollout.
    """

    rate: float
    wire_bytes: float
    idle_s: float


Standings = dict[tuple[str, str], list[Round]]


@dataclass(frozen=True)
class Place:
    """Workers behind one kind of link, and what learns from them."""

    envs: ClusterEnv
    agent: MlpAgent
    hosts: Sequence[Host]
    switch: Switch

    def measure(self, way: str, seconds: float) -> Round:
        """Collect for a while."""
        with collecting(self.envs, self.agent, way) as rollouts:
            for _ in range(WARM_UP):
                next(rollouts)
            bytes_before, started = self._count_bytes(), time.perf_counter()
            num_steps, idles = 0, []
            while time.perf_counter() - started < seconds:
                rollout = next(rollouts)
                num_steps += rollout.num_steps * rollout.num_envs
                idles.append(rollout.stats["seconds"] * rollout.stats["worker_idle_share"])
            elapsed = time.perf_counter() - started
            num_bytes = self._count_bytes() - bytes_before
            return Round(num_steps / elapsed, num_bytes / num_steps, statistics.median(idles))

    def _count_bytes(self) -> int:
        return sum(self.switch.count_bytes(host) for host in self.hosts)


@contextlib.contextmanager
def collecting(envs: ClusterEnv, agent: MlpAgent, way: str) -> Iterator[Iterator[Rollout]]:
    """Collect rollouts in one of the `WAYS`."""
    if way == "stream":
        with envs.stream(agent, NUM_STEPS, min_envs=NUM_ENVS) as stream:
            yield stream
    else:
        yield (collect(envs, agent, is_learning=way == "learning") for _ in itertools.count())


def collect(envs: ClusterEnv, agent: MlpAgent, *, is_learning: bool) -> Rollout:
    """Collect one rollout, after a change of the weights if asked for."""
    if is_learning:
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
    return envs.rollout(agent, NUM_STEPS)


@contextlib.contextmanager
def set_up(congestion: str) -> Iterator[dict[str, Place]]:
    """Make the hosts and start the workers; the calling thread is on the head's host meanwhile."""
    names = ["head", *(f"host{number}" for number in range(NUM_WORKERS * len(LINKS)))]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        head, *others = hosts = stack.enter_context(connected_hosts(names, directory))
        switch = stack.enter_context(slow_network(hosts))
        for host in hosts:
            # By the route: a namespace may not choose any other for all its connections.
            route = ["route", "change", "10.89.0.0/24", "dev", "net0", "congctl", congestion]
            subprocess.run(["ip", "-n", host.namespace, *route], check=True)
        stack.enter_context(head.entered())
        places = {LOOPBACK: start(stack, switch, [])}
        for number, (link, line) in enumerate(LINKS.items()):
            workers = others[number * NUM_WORKERS : (number + 1) * NUM_WORKERS]
            switch.set(line, *workers)
            places[link] = start(stack, switch, workers)
        yield places


def start(stack: contextlib.ExitStack, switch: Switch, hosts: Sequence[Host]) -> Place:
    """Start workers on these hosts, or on the head's own."""
    launcher = HostLauncher(hosts, switch.address(hosts[0])) if hosts else None
    factories = [partial(make_env, TASK)] * NUM_ENVS
    envs = ClusterEnv(factories, num_workers=NUM_WORKERS, network=Network(transport="zmq"), launcher=launcher)
    stack.enter_context(envs)
    envs.reset(seed=0)
    torch.manual_seed(0)  # What a lander's step costs depends on how it is flown: everywhere the same way.
    return Place(envs, MlpAgent(8, 4), hosts, switch)


def array_bytes(rollout: Rollout) -> float:
    """Return the size of a rollout's arrays, by transition."""
    columns = [rollout.obs, rollout.next_obs, rollout.actions, rollout.rewards, rollout.terminations]
    columns += [rollout.truncations, rollout.valid, *rollout.extras.values()]
    return float(sum(np.asarray(column).nbytes for column in columns) / rollout.rewards.size)


def run(rounds: int, seconds: float, ways: Sequence[str], congestion: str) -> tuple[Standings, float]:
    """Measure everything in turns; returns the results, and the size of a transition's arrays."""
    links = [LOOPBACK, *LINKS]
    standings: Standings = {(way, link): [] for way in ways for link in links}
    with set_up(congestion) as places:
        size = array_bytes(places[LOOPBACK].envs.rollout(places[LOOPBACK].agent, NUM_STEPS))
        for number in range(rounds):
            for way in ways:
                for link in links[number % len(links) :] + links[: number % len(links)]:
                    standings[way, link].append(found := places[link].measure(way, seconds))
                    print(f"round {number + 1}, {way}, {link}: {found.rate:.0f} steps/s", file=sys.stderr)
    return standings, size


def ratios(standings: Standings, way: str, link: str) -> list[float]:
    """Return a link's speed by that of loopback, round by round."""
    pairs = zip(standings[way, link], standings[way, LOOPBACK], strict=True)
    return [found.rate / base.rate for found, base in pairs]


def describe(standings: Standings, way: str, link: str) -> str:
    """Put one entry of the table into words."""
    rate = statistics.median(found.rate for found in standings[way, link])
    if link == LOOPBACK:
        return f"{rate:,.0f}"
    low, middle, high = np.quantile(ratios(standings, way, link), [0.25, 0.5, 0.75])
    return f"{rate:,.0f}  **{middle:.2f}** ({low:.2f} to {high:.2f})"


def to_markdown(standings: Standings, array_size: float, notes: Sequence[str]) -> str:
    """Lay out the results."""
    ways = list(dict.fromkeys(way for way, _ in standings))
    lines = ["# Rollouts over slow links", "", LEGEND, "", "Made by `python -m benchmarks.studies.links`.", ""]
    lines += ["| | " + " | ".join([LOOPBACK, *LINKS]) + " |", "|---|" + "---:|" * (1 + len(LINKS))]
    lines += [
        f"| {WAYS[way]} | " + " | ".join(describe(standings, way, link) for link in (LOOPBACK, *LINKS)) + " |"
        for way in ways
    ]
    in_turns = [way for way in ways if way != "stream"]  # A stream has parts of the next rollouts under way.
    lines += ["", "| ms in which workers wait, a rollout | " + " | ".join([LOOPBACK, *LINKS]) + " |"]
    lines += ["|---|" + "---:|" * (1 + len(LINKS))]
    for way in in_turns:
        idles = [statistics.median(found.idle_s for found in standings[way, link]) for link in (LOOPBACK, *LINKS)]
        lines.append(f"| {WAYS[way]} | " + " | ".join(f"{1000 * idle_s:.0f}" for idle_s in idles) + " |")
    lines += ["", "| bytes a transition, sent by the workers | " + " | ".join(LINKS) + " |"]
    lines += ["|---|" + "---:|" * len(LINKS)]
    for way in in_turns:
        sizes = [statistics.median(found.wire_bytes for found in standings[way, link]) for link in LINKS]
        lines.append(f"| {WAYS[way]} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |")
    lines += [
        "",
        f"The arrays themselves have {array_size:.1f} bytes a transition. The switch counts whole IP packets.",
    ]
    if "rollout" in ways:
        kept = statistics.median(ratios(standings, "rollout", GOAL_LINK))
        word = "met" if kept >= GOAL else "missed"
        lines += ["", f"Goal: `rollout` over {GOAL_LINK} keeps {GOAL:g} of its loopback speed: {kept:.2f}, {word}."]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.links", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a round")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--congestion", default="cubic", help="TCP's way to find its speed; Linux's default is cubic")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("This benchmark makes network namespaces, and needs root for that.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    load_before, (total, stolen) = os.getloadavg()[0], machine.read_cpu_times()
    standings, size = run(arguments.rounds, arguments.seconds, arguments.ways, arguments.congestion)
    total_after, stolen_after = machine.read_cpu_times()
    notes = [
        *machine.describe_machine(Path(), load_before, (stolen_after - stolen) / max(1, total_after - total)),
        *machine.list_versions(None, ("torch", "pyzmq")),
        f"LunarLander-v3, {NUM_WORKERS} workers of {ENVS_PER_WORKER} environments, a 64-64 torch agent on each",
        f"{arguments.rounds} rounds of at least {arguments.seconds:g} s; workers, learner and switch share the cores",
        f"TCP congestion control: {arguments.congestion}; else as the kernel has it",
    ]
    markdown = to_markdown(standings, size, notes)
    print(markdown)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "links.md").write_text(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
