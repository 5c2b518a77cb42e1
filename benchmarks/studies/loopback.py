"""What a check and a version's weights really take on a socket, encryption and headers included (Linux only)."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.agents import Agent
from benchmarks.tasks import make_env
from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, Network, NeverSync

DEVICES = Path("/proc/net/dev")
REPEATS = 4
ENVS_PER_WORKER, NUM_STEPS = 16, 4  # 64 rows: enough for all probes, and few enough not to hide them.

# Checks without pulls, pulls without checks, and neither: the differences are what each costs.
RULES: Mapping[str, Any] = {
    "check": AdaptiveSync(threshold=1e9, plateau=None, max_lag=10**6),
    "weights": EveryUpdate(),
    "neither": NeverSync(),
}


class WireBytes(NamedTuple):
    """Bytes per worker and version: on the loopback device, and by our own count of the arrays."""

    what: str
    on_device: float
    counted: float


class Traffic(NamedTuple):
    """Bytes of one run."""

    on_device: int
    checks: int
    weights: int


def measure_wire(make_agent: Callable[[], Agent], task: str, num_workers: int, updates: int) -> list[WireBytes]:
    """Measure runs that send what checks need only, weights only, and neither, and subtract.

    Rollouts come back over the same device, which is why they are short. Other programs' traffic can only add to ours,
    so the rules take turns and of every rule the smallest of several runs counts.
    """
    runs: dict[str, list[Traffic]] = {name: [] for name in RULES}
    for _ in range(REPEATS):
        for name, rule in RULES.items():
            runs[name].append(run_once(make_agent, task, num_workers, rule, updates))
    least = {name: min(traffics) for name, traffics in runs.items()}
    parts = updates * num_workers
    neither = least["neither"].on_device
    return [
        WireBytes("check", (least["check"].on_device - neither) / parts, least["check"].checks / parts),
        WireBytes("weights", (least["weights"].on_device - neither) / parts, least["weights"].weights / parts),
    ]


def run_once(make_agent: Callable[[], Agent], task: str, num_workers: int, rule: Any, updates: int) -> Traffic:
    """Let the weights change a little before each of some short rollouts."""
    torch.manual_seed(0)
    agent = make_agent()
    factories = [partial(make_env, task) for _ in range(ENVS_PER_WORKER * num_workers)]
    with ClusterEnv(
        factories, num_workers=num_workers, network=Network(transport="zmq", listen="127.0.0.1"), sync=rule
    ) as envs:
        envs.reset(seed=0)
        envs.rollout(agent, NUM_STEPS)
        first, before = envs.stats, read_loopback()
        for _ in range(updates):
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-4)
            envs.rollout(agent, NUM_STEPS)
        time.sleep(0.1)  # Let the last acknowledgements pass.
        after, last = read_loopback(), envs.stats
    return Traffic(
        after - before,
        int(last["bytes_checks"] - first["bytes_checks"]),
        int(last["bytes_weights"] - first["bytes_weights"]),
    )


def read_loopback() -> int:
    """Read how many bytes the loopback device has received so far."""
    for line in DEVICES.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise LookupError("This machine has no loopback device.")
