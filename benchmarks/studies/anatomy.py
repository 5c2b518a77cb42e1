"""Where the microseconds of one `step()` and of one transition go: `python -m benchmarks.studies.anatomy`.

A step's time is split at the moment the head begins to wait for the workers and the moment it has heard of the last. A
rollout's is split by doing the same without the library: environments in a bare loop, the policy on the same batch. The
head's share of a rollout is its CPU time. Everything is repeated in interleaved rounds; the tables have medians over
the rounds. Writes `benchmarks/results/anatomy.md`. Run it on an otherwise idle machine.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.agents import MlpAgent
from benchmarks.page import publish
from benchmarks.processes import ROOT
from benchmarks.tasks import TASKS, make_env, precompute_actions
from clusterenv import ClusterEnv, Network
from clusterenv.adapters import as_policy
from clusterenv.wire.semaphore import Semaphore

RESULTS = ROOT / "benchmarks" / "results" / "anatomy.md"
NUM_STEPS = 128
ROLLOUT_ENVS = 32  # A worker's.
STEPS_A_ROUND = 500
SIZES = (16, 64)

Times = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.anatomy", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the tables")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    steps = [f"{TASKS['cartpole']}, {size} envs" for size in SIZES]
    rollouts = [TASKS["cartpole"], TASKS["lunarlander"]]
    lines = [
        "# Where the time goes",
        "",
        *table("One `step()`, two workers, shared memory: us", steps, [step_times(n, arguments.rounds) for n in SIZES]),
        "",
        *table(
            f"One transition of a rollout, {ROLLOUT_ENVS} envs a worker, 64-64 agent: us",
            rollouts,
            [transition_times(task, arguments.rounds) for task in ("cartpole", "lunarlander")],
        ),
        "",
        f"- medians over {arguments.rounds} interleaved rounds; made by `python -m benchmarks.studies.anatomy`",
    ]
    publish(lines, load, arguments.out)
    return 0


def step_times(num_envs: int, rounds: int) -> Times:
    """Split the time of a step with actions from the head."""
    waits: list[tuple[float, float]] = []
    actions = precompute_actions("cartpole", num_envs)
    bare = BareLoop("cartpole", num_envs // 2)
    with clocked_waits(waits), make_cluster("cartpole", num_envs, num_workers=2, transport="shm") as envs:
        envs.reset(seed=0)

        def split() -> Times:
            parts = []
            for number in range(STEPS_A_ROUND):
                row = actions[number % len(actions)]
                waits.clear()
                began = time.perf_counter()
                envs.step(row)
                ended = time.perf_counter()
                parts.append((waits[0][0] - began, waits[-1][1] - waits[0][0], ended - waits[-1][1], ended - began))
            before, wait, after, whole = np.median(parts, axis=0) * 1e6
            loop = bare.time(actions[:, : num_envs // 2], STEPS_A_ROUND)
            return {
                "head, before the workers are woken": before,
                "a worker's environments, in a bare loop": loop,
                "waking up, our loop around them, their answer": wait - loop,
                "head, after the last answer": after,
                "**the whole step**": whole,
            }

        split()
        return medians([split() for _ in range(rounds)])


def transition_times(task: str, rounds: int) -> Times:
    """Split the time of a transition whose action was chosen beside the environment."""
    bare = BareLoop(task, ROLLOUT_ENVS)
    actions = precompute_actions(task, ROLLOUT_ENVS)
    with (
        make_cluster(task, ROLLOUT_ENVS, num_workers=0) as alone,
        make_cluster(task, 2 * ROLLOUT_ENVS, num_workers=2, transport="shm") as near,
        make_cluster(task, 2 * ROLLOUT_ENVS, num_workers=2, transport="zmq") as far,
    ):
        obs, _ = alone.reset(seed=0)
        agent = MlpAgent(obs.shape[1], int(alone.single_action_space.n))  # type: ignore[attr-defined]  # Discrete
        policy = copy.deepcopy(as_policy(agent))  # As a worker has it: its own, so that its networks may be compiled.
        policy.load(as_policy(agent).weights())
        tensor = torch.as_tensor(obs)

        def as_users_write_it() -> None:
            with torch.no_grad():
                agent.get_action_and_value(tensor)

        def split() -> Times:
            whole = each(lambda: alone.rollout(agent, NUM_STEPS), 4) / (NUM_STEPS * ROLLOUT_ENVS)
            loop = bare.time(actions, STEPS_A_ROUND) / ROLLOUT_ENVS
            act = each(lambda: policy.act(obs), STEPS_A_ROUND) / ROLLOUT_ENVS
            theirs = each(as_users_write_it, STEPS_A_ROUND) / ROLLOUT_ENVS
            return {
                "worker: the environment, in a bare loop": loop,
                "worker: the policy, as a worker evaluates it": act,
                "worker: storing, episodes, the rest": whole - loop - act,
                "**worker, the whole transition**": whole,
                "for comparison: the policy, as users write it": theirs,
                "head's CPU, shared memory": head_cpu(near, agent),
                "head's CPU, ZeroMQ": head_cpu(far, agent),
            }

        split()
        return medians([split() for _ in range(rounds)])


class BareLoop:
    """Environments stepped by nothing but a loop."""

    def __init__(self, task: str, size: int) -> None:
        self._envs = [make_env(task) for _ in range(size)]
        self._is_finished = [False] * size
        for seed, env in enumerate(self._envs):
            env.reset(seed=seed)

    def time(self, actions: Any, count: int) -> float:
        """Step all of them so often; returns the microseconds of one step of all (median)."""
        spent = []
        for number in range(count):
            row = actions[number % len(actions)]
            began = time.perf_counter()
            self._step(row)
            spent.append(time.perf_counter() - began)
        return float(np.median(spent)) * 1e6

    def _step(self, actions: Any) -> None:
        finished = self._is_finished
        for index, env in enumerate(self._envs):
            if finished[index]:
                env.reset()
                finished[index] = False
            else:
                _, _, terminated, truncated, _ = env.step(actions[index])
                finished[index] = terminated or truncated


@contextmanager
def clocked_waits(waits: list[tuple[float, float]]) -> Iterator[None]:
    """Note when this process begins and ends to wait at a semaphore; workers are processes of their own."""
    wait = Semaphore.wait

    def clocked(self: Semaphore, timeout_s: float) -> bool:
        began = time.perf_counter()
        is_through = wait(self, timeout_s)
        waits.append((began, time.perf_counter()))
        return is_through

    Semaphore.wait = clocked  # type: ignore[method-assign]  # the one place where the head's part of a step divides
    try:
        yield
    finally:
        Semaphore.wait = wait  # type: ignore[method-assign]


def make_cluster(task: str, num_envs: int, *, num_workers: int, transport: str = "auto") -> ClusterEnv:
    """Make a vector environment of a task."""
    factories = [partial(make_env, task) for _ in range(num_envs)]
    return ClusterEnv(factories, num_workers=num_workers, network=Network(transport=transport))


def each(run: Callable[[], object], count: int) -> float:
    """Return how many microseconds a call takes (median)."""
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        spent.append(time.perf_counter() - began)
    return float(np.median(spent)) * 1e6


def head_cpu(envs: ClusterEnv, agent: MlpAgent) -> float:
    """Return how many microseconds of CPU the head takes for a transition."""
    rollouts = 4
    began = time.process_time()
    for _ in range(rollouts):
        envs.rollout(agent, NUM_STEPS)
    return (time.process_time() - began) * 1e6 / (rollouts * NUM_STEPS * envs.num_envs)


def medians(rounds: Sequence[Times]) -> Times:
    """Take the median over the rounds of each part."""
    return {name: float(np.median([times[name] for times in rounds])) for name in rounds[0]}


def table(title: str, columns: Sequence[str], times: Sequence[Times]) -> list[str]:
    """Lay out one table, parts as rows."""
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in times[0]:
        cells = [f"{each[name]:.1f}" if each[name] >= 1 else f"{each[name]:.2f}" for each in times]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
