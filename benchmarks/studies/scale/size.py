"""One size of `benchmarks.studies.scale`: a real head and so many light workers, measured.

Costs are CPU time of the head's process, not wall-clock: the light workers share the cores with it. Run as a program it
measures one size and prints the result as JSON, so that every size has a process, and memory, of its own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.agents import MlpAgent, change
from benchmarks.studies.scale.dictated import Dictated, is_spared
from benchmarks.studies.scale.light_workers import LightLauncher, raise_file_limit
from benchmarks.studies.scale.recording import Recording
from benchmarks.studies.scale.result import Cost, SizeResult, Storm
from benchmarks.studies.scale.vectors import Vectors
from clusterenv import ClusterEnv, Faults, Network
from clusterenv.config import Timeouts
from clusterenv.rollout import Rollout
from clusterenv.wire.assignment import EnvFactory

ENV_ID = "LunarLander-v3"
ENVS_A_WORKER = 16
NUM_STEPS = 128
WIDE = 920  # Hidden units with which the agent has the 7 MB of an Atari network.
STORM_RATE = 256  # Rollouts a second of all workers together, before and during a pull storm.
IDLE_S = 2.0
VERSIONS = 15  # That are judged, one after another.
PAGE_BYTES = 4096

Phases = dict[str, Callable[[], None]]
Round = tuple[float, ...]  # CPU, main thread, wall-clock, checks and pulls.


class Bench:
    """A head, its light workers, and what is done with them."""

    def __init__(self, envs: ClusterEnv, rule: Dictated, rounds: int, rollouts: int) -> None:
        """Measure so many rounds, each of so many workers' rollouts or more."""
        self.idle_cores = measure_idle()
        self.envs = envs
        self.rule = rule
        num_floats: int = envs.single_observation_space.shape[0]  # type: ignore[index]  # a Box
        self.agent = MlpAgent(num_floats, 4)
        self.wide = MlpAgent(num_floats, 4, hidden=WIDE)
        self._rounds = rounds
        self._rollouts = rollouts

    def measure_costs(self) -> dict[str, Cost]:
        """Measure rollouts, streams, checks and pulls; round by round in turn, so that disturbances hit all alike."""
        phases: Phases = {
            **self._plain_phases(),
            "rollout, checked": lambda: self._roll(lambda: change(self.agent)),
            "stream, checked": lambda: self._stream(lambda: change(self.agent)),
            "stream, one by one": lambda: self._stream(num_envs=1),
        }
        taken = self._take_rounds(phases, self.agent)
        self.rule.compares, self.rule.pulls = False, True
        taken |= self._take_rounds(
            {"rollout, pulled": lambda: self._roll(lambda: change(self.wide), self.wide)}, self.wide
        )
        return {name: summarize(rounds) for name, rounds in taken.items()}

    def measure_versions(self) -> dict[str, float]:
        """Return the CPU time from new weights to the rule's verdict on all workers, for a small agent and a wide one.

        It is far less than what a round of rollouts varies by, so it is measured by itself.
        """
        found = {}
        for name, agent in (("64-64", self.agent), ("wide", self.wide)):
            for _ in range(2):  # Until the pool is full.
                self.envs.rollout(agent, NUM_STEPS)
            rollouts = vars(self.envs)["_rollouts"]
            policy = self.envs._policy_of(agent)
            seconds = []
            for _ in range(VERSIONS):
                change(agent)
                started = time.process_time()
                rollouts.versions.prepare(policy, {})
                seconds.append(time.process_time() - started)
            found[name] = float(np.median(seconds))
        return found

    def measure_plain_costs(self) -> dict[str, Cost]:
        """Measure rollouts and streams only."""
        return {name: summarize(r) for name, r in self._take_rounds(self._plain_phases(), self.agent).items()}

    def _plain_phases(self) -> Phases:
        return {"rollout": self._roll, "stream": self._stream}

    def measure_storm(self) -> Storm:
        """Let seven of eight workers pull the wide agent at once, in a stream whose workers take their time."""
        self.rule.compares, self.rule.pulls, self.rule.spares = False, True, True
        num_workers = self.envs.num_workers
        pace_s = num_workers / STORM_RATE
        with self.envs.stream(self.wide, NUM_STEPS, in_flight=2, values={"seconds": pace_s}) as stream:
            for _ in range(2 * num_workers):  # Until they are out of step, as real ones are.
                next(stream)
            before = Arrivals(num_workers)
            for _ in range(max(64, num_workers)):
                before.note(next(stream))
            memory_before = read_memory()
            during = Arrivals(num_workers)
            change(self.wide)
            version = self.envs.stats["updates"] + 1
            behind = {index for index in range(num_workers) if not is_spared(index, num_workers)}
            while behind:
                rollout = next(stream)
                during.note(rollout)
                if rollout.versions[0] >= version:
                    behind.discard(worker_of(rollout))
        return Storm(
            weights_bytes=sum(parameter.nbytes for parameter in self.wide.parameters()),
            pace_s=pace_s,
            seconds=during.all[-1] - during.all[0],
            rollouts=len(during.all) - 1,
            gap_before_s=longest_gap(before.all),
            gap_s=longest_gap(during.all),
            gap_cpu_s=float(np.diff(during.cpu)[np.argmax(np.diff(during.all))]),
            others_gap_before_s=longest_gap(before.others),
            others_gap_s=longest_gap(during.others),
            grown_bytes=during.memory - memory_before,
        )

    def _take_rounds(self, phases: Phases, agent: MlpAgent) -> dict[str, list[Round]]:
        self.envs.rollout(agent, NUM_STEPS)
        taken: dict[str, list[Round]] = {name: [] for name in phases}
        for _ in range(self._rounds):
            for name, run in phases.items():
                taken[name].append(self._clock(run))
        return taken

    def _clock(self, run: Callable[[], None]) -> Round:
        """Return the seconds of CPU, of the main thread and of wall-clock, checks and pulls that a rollout takes.

        Without heartbeats: these cost by the second, and seconds are long where workers share the head's cores.
        """
        before, done = self._read(), self._count_rollouts()
        run()
        count = self._count_rollouts() - done
        cpu_s, main_s, wall_s, *counts = (
            (end - start) / count for start, end in zip(before, self._read(), strict=True)
        )
        return cpu_s - self.idle_cores * wall_s, main_s, wall_s, *counts

    def _read(self) -> Round:
        stats = self.envs.stats
        return time.process_time(), time.thread_time(), time.perf_counter(), stats["checks"], stats["pulls"]

    def _count_rollouts(self) -> float:
        """Count workers' rollouts so far: also those that came when a stream was ended, which cost as much."""
        stats = self.envs.stats
        steps: int = stats["env_steps"] + stats["env_steps_discarded"]
        return steps / (NUM_STEPS * ENVS_A_WORKER)

    def _roll(self, prepare: Callable[[], None] = lambda: None, agent: MlpAgent | None = None) -> None:
        for _ in range(-(-self._rollouts // self.envs.num_workers)):
            prepare()
            self.envs.rollout(agent or self.agent, NUM_STEPS)

    def _stream(self, prepare: Callable[[], None] = lambda: None, num_envs: int | None = None) -> None:
        """Take in as many rollouts, a quarter of the workers' at a time or in groups of this size."""
        wanted = max(self._rollouts, self.envs.num_workers) * ENVS_A_WORKER
        group = num_envs or max(1, self.envs.num_envs // 4)
        with self.envs.stream(self.agent, NUM_STEPS, min_envs=group) as stream:
            while wanted > 0:
                prepare()
                wanted -= next(stream).rewards.shape[1]


def measure_size(num_workers: int, recording: Path, rounds: int, rollouts: int, num_floats: int) -> SizeResult:
    """Start a head and its workers, and measure everything, or with observations of so many floats what they change."""
    recorded = Recording.read(recording)
    started, cpu = time.perf_counter(), time.process_time()
    with make_envs(num_workers, recording, num_floats) as (envs, rule):
        start_s, start_cpu_s = time.perf_counter() - started, time.process_time() - cpu
        envs.reset(seed=1)
        bench = Bench(envs, rule, rounds, rollouts)
        versions = {} if num_floats else bench.measure_versions()
        costs = bench.measure_plain_costs() if num_floats else bench.measure_costs()
        peak_bytes = read_memory()
        storm = None if num_floats else bench.measure_storm()
    return SizeResult(
        num_workers=num_workers,
        num_floats=num_floats,
        rollout_messages=recorded.rollout_messages,
        rollout_bytes=recorded.rollout_bytes,
        start_s=start_s,
        start_cpu_s=start_cpu_s,
        idle_cores=bench.idle_cores,
        versions=versions,
        costs=costs,
        peak_bytes=peak_bytes,
        storm=storm,
    )


def choose_env(num_floats: int) -> str | EnvFactory:
    """Return the environment, or one with observations of so many floats."""
    return partial(Vectors, num_floats) if num_floats else ENV_ID


@contextmanager
def make_envs(
    num_workers: int, recording: Path, num_floats: int = 0, per_machine: int = 1, listen: str | None = None
) -> Iterator[tuple[ClusterEnv, Dictated]]:
    """Start a head with so many light workers, that come in by a socket file unless it listens to an address."""
    rule = Dictated(num_workers)
    with ClusterEnv(
        choose_env(num_floats),
        num_workers * ENVS_A_WORKER,
        num_workers=num_workers,
        launcher=LightLauncher(recording=recording, per_machine=per_machine),
        network=Network(transport="zmq", listen=listen),
        faults=Faults(on_loss="raise"),
        sync=rule,
        timeouts=Timeouts(silence_s=60.0),  # All workers share two cores with the head: they may well be late.
    ) as envs:
        yield envs, rule


def summarize(rounds: list[Round]) -> Cost:
    """Condense the rounds."""
    low, _, high = (float(x) for x in np.percentile([each[0] for each in rounds], [25, 50, 75]))
    cpu_s, main_s, wall_s, checks, pulls = (float(x) for x in np.median(rounds, axis=0))
    return Cost(cpu_s=cpu_s, low_s=low, high_s=high, main_s=main_s, wall_s=wall_s, checks=checks, pulls=pulls)


class Arrivals:
    """When rollouts were delivered.

    Attributes:
        all: The moment it began, and that of each rollout.
        cpu: The CPU time of this process at these moments.
        others: The moments of the rollouts of workers that are spared.
        memory: The most this process had.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.all = [time.perf_counter()]
        self.cpu = [time.process_time()]
        self.others = list(self.all)
        self.memory = 0

    def note(self, rollout: Rollout) -> None:
        """Note that one came."""
        now = time.perf_counter()
        self.all.append(now)
        self.cpu.append(time.process_time())
        if is_spared(worker_of(rollout), self._num_workers):
            self.others.append(now)
        self.memory = max(self.memory, read_memory())


def worker_of(rollout: Rollout) -> int:
    """Return which worker made a rollout."""
    return int(rollout.env_indices[0]) // ENVS_A_WORKER


def longest_gap(moments: list[float]) -> float:
    """Return the longest time between two of them."""
    return float(max(np.diff(moments)))


def measure_idle() -> float:
    """Return the cores that heartbeats keep busy while nothing is asked for."""
    cpu_s = time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - cpu_s) / IDLE_S


def read_memory() -> int:
    """Return the memory of this process that is really there, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> int:
    """Measure one size; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.scale.size")
    parser.add_argument("num_workers", type=int)
    parser.add_argument("recording", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("rollouts", type=int)
    parser.add_argument("num_floats", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    raise_file_limit()
    result = measure_size(**vars(arguments))
    sys.stdout.write(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
