"""How the contenders of the rollout benchmark are built, inside their own processes; `builders` lists them.

Torch is imported inside the functions: the contenders of the other benchmarks must not pay for it.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bare import PairLockstep
from benchmarks.tasks import make_env

NUM_STEPS = 128


class RolloutStepper:
    """Collects rollouts, and notes how busy the learner's process is meanwhile.

    Args:
        collect: Collects one rollout.
        env_steps: How many environment steps a rollout has.
        busy_log: Where to append, for every run, a line with its rate and the cores this process took.
        close: Called once at the end.
    """

    def __init__(
        self, collect: Callable[[], object], env_steps: int, busy_log: Path, close: Callable[[], object]
    ) -> None:
        self._collect = collect
        self._env_steps = env_steps
        self._busy_log = busy_log
        self._close = close

    def run(self, seconds: float) -> float:
        """Collect whole rollouts for at least so long; returns environment steps per second."""
        rollouts = 0
        cpu_before = time.process_time()
        began = now = time.perf_counter()
        while now - began < seconds:
            self._collect()
            rollouts += 1
            now = time.perf_counter()
        cores = (time.process_time() - cpu_before) / (now - began)
        rate = rollouts * self._env_steps / (now - began)
        with self._busy_log.open("a") as file:
            file.write(f"{rate:.3f} {cores:.5f}\n")
        return rate

    def close(self) -> None:
        """Close the vector environment."""
        self._close()


class BareRollouts:
    """Two bare loops with an agent in each, which meet once per rollout."""

    def __init__(self, task: str, num_envs: int) -> None:
        from benchmarks.bare_rollout import AgentShard

        self._pair = PairLockstep(task, num_envs, partial(AgentShard, num_steps=NUM_STEPS))

    def run(self, seconds: float) -> float:
        """Collect whole rollouts for at least so long; returns environment steps per second."""
        return self._pair.run(seconds) * NUM_STEPS

    def close(self) -> None:
        """End both processes."""
        self._pair.close()


def build_bare_rollout(task: str, num_envs: int) -> BareRollouts:
    """Build the limit: the agent as users write it, beside environments that nobody collects."""
    return BareRollouts(task, num_envs)


def build_rollout(
    task: str, num_envs: int, *, num_workers: int, transport: str, busy_log: str, changes_weights: bool = False
) -> RolloutStepper:
    """Build ClusterEnv with the agent on its workers.

    Args:
        task: A key of `tasks.TASKS`.
        num_envs: Of all workers together.
        num_workers: How many.
        transport: "shm" or "zmq".
        busy_log: Where to note how busy the head is.
        changes_weights: Whether the agent's weights change a little before every rollout, as a learner's do, so that
            the sync rule has something to decide.
    """
    import torch

    from benchmarks.agents import MlpAgent
    from clusterenv import ClusterEnv

    torch.set_num_threads(1)
    torch.manual_seed(0)
    factories = [partial(make_env, task) for _ in range(num_envs)]
    envs = ClusterEnv(factories, num_workers=num_workers, transport=transport)
    envs.reset(seed=0)
    agent = MlpAgent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))  # type: ignore[index,attr-defined]  # Box and Discrete in these tasks

    def collect() -> Any:
        if changes_weights:
            with torch.no_grad():
                for parameter in agent.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return envs.rollout(agent, NUM_STEPS)

    return RolloutStepper(collect, NUM_STEPS * num_envs, Path(busy_log), envs.close)
