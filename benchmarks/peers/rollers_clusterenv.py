"""ClusterEnv's contenders with the policy on its workers: rollouts, streams, and EnvPool beside the policy.

Torch is imported inside the functions: the contenders of the other benchmarks must not pay for it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.peers.roller import NUM_STEPS, Roller
from benchmarks.tasks import TASKS, make_env


def build_rollout(
    task: str, num_envs: int, *, num_workers: int, transport: str, busy_log: str, changes_weights: bool = False
) -> Roller:
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
    envs, agent = start(factories(task, num_envs), num_workers=num_workers, transport=transport)
    learn = make_learner(agent) if changes_weights else lambda: None

    def collect() -> int:
        learn()
        return int(envs.rollout(agent, NUM_STEPS).rewards.size)

    return Roller(collect, envs.close, busy_log)


def build_stream(task: str, num_envs: int, *, num_workers: int, transport: str, busy_log: str) -> Roller:
    """Build a stream of rollouts, of one worker each; the weights change before each one is taken."""
    envs, agent = start(factories(task, num_envs), num_workers=num_workers, transport=transport)
    learn = make_learner(agent)
    # Nothing is thrown away: what a contender made before it was frozen is not its fault.
    stream = envs.stream(agent, NUM_STEPS, max_lag=math.inf)

    def collect() -> int:
        learn()
        return int(next(stream).rewards.size)

    return Roller(collect, envs.close, busy_log)


def build_envpool_rollout(task: str, num_envs: int, *, num_workers: int, num_threads: int, busy_log: str) -> Roller:
    """Build EnvPool on the workers, with the agent beside it."""
    from clusterenv.adapters.envpool import EnvPool

    envs, agent = start(EnvPool(TASKS[task], num_threads=num_threads), num_envs, num_workers=num_workers)
    return Roller(lambda: int(envs.rollout(agent, NUM_STEPS).rewards.size), envs.close, busy_log)


def start(env: Any, num_envs: int | None = None, *, transport: str = "auto", **settings: Any) -> tuple[Any, Any]:
    """Start a ClusterEnv and reset it, and make an agent for it."""
    import torch

    from benchmarks.agents import MlpAgent
    from clusterenv import ClusterEnv, Network

    torch.set_num_threads(1)
    torch.manual_seed(0)
    envs = ClusterEnv(env, num_envs, network=Network(transport=transport), **settings)
    envs.reset(seed=0)
    return envs, MlpAgent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))  # type: ignore[index,attr-defined]  # Box and Discrete in these tasks


def make_learner(agent: Any) -> Callable[[], None]:
    """Return what changes all weights a little, as a learner's step does."""
    import torch

    def learn() -> None:
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)

    return learn


def factories(task: str, num_envs: int) -> list[Callable[[], Any]]:
    """List one factory per environment, the same for every library."""
    return [partial(make_env, task) for _ in range(num_envs)]
