"""Contenders with the policy in the main process: one agent for all environments, whoever steps them.

Libraries are imported inside the functions, because no interpreter has them all.
"""

from functools import partial
from typing import Any

import numpy as np

from benchmarks.peers.roller import NUM_STEPS, Roller
from benchmarks.peers.rollers_clusterenv import factories
from benchmarks.tasks import TASKS, make_env


def build_central_sync(task: str, num_envs: int) -> Roller:
    """Build Gymnasium's SyncVectorEnv, which need not copy: the loop stores what it shows."""
    from gymnasium.vector import SyncVectorEnv

    return roll_gymnasium(SyncVectorEnv(factories(task, num_envs), copy=False))


def build_central_async(task: str, num_envs: int) -> Roller:
    """Build Gymnasium's AsyncVectorEnv, with shared memory and without copies."""
    from gymnasium.vector import AsyncVectorEnv

    envs = AsyncVectorEnv(factories(task, num_envs), shared_memory=True, copy=False, context="fork")
    return roll_gymnasium(envs, terminate=True)


def build_central_clusterenv(task: str, num_envs: int, *, num_workers: int, transport: str, busy_log: str) -> Roller:
    """Build ClusterEnv in actions mode: its workers only step."""
    from clusterenv import ClusterEnv, Network

    envs = ClusterEnv(
        factories(task, num_envs), num_workers=num_workers, network=Network(transport=transport), copy=False
    )
    return roll_gymnasium(envs, busy_log=busy_log)


def build_central_sb3(task: str, num_envs: int) -> Roller:
    """Build Stable-Baselines3's SubprocVecEnv."""
    import torch
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from benchmarks.peers.agent_loop import VectorLoop

    # Torch's threads would be inherited by every forked environment, and would serve none.
    torch.set_num_threads(1)
    envs: Any = SubprocVecEnv(factories(task, num_envs), start_method="fork")
    envs.seed(0)
    loop = VectorLoop(envs.reset(), int(envs.action_space.n), lambda actions: envs.step(actions)[:3], NUM_STEPS)
    return Roller(loop.collect, envs.close)


def build_central_puffer(
    task: str, num_envs: int, *, backend: str, num_workers: int | None = None, half_batches: bool = False
) -> Roller:
    """Build PufferLib's `Serial` or `Multiprocessing`.

    With `half_batches` the agent chooses for one worker's half while the other half is being stepped.
    """
    import pufferlib.vector
    from pufferlib.emulation import GymnasiumPufferEnv

    from benchmarks.peers.agent_loop import VectorLoop

    def creator(buf: Any = None, seed: int = 0) -> Any:
        return GymnasiumPufferEnv(env_creator=make_env, env_args=[task], buf=buf, seed=seed)

    calls = 2 if half_batches else 1
    settings: dict[str, Any] = {}
    if num_workers is not None:
        # `overwork`: it counts physical cores, of which a virtual machine may show fewer than it has.
        settings = {"num_workers": num_workers, "batch_size": num_envs // calls, "zero_copy": True, "overwork": True}
    envs = pufferlib.vector.make(creator, backend=getattr(pufferlib.vector, backend), num_envs=num_envs, **settings)
    envs.async_reset(seed=0)
    first_obs = envs.recv()[0]

    def step(actions: Any) -> Any:
        envs.send(actions.astype(np.int32))
        obs, rewards, terminations, truncations, *_ = envs.recv()
        return obs, rewards, terminations | truncations

    loop = VectorLoop(first_obs, int(envs.single_action_space.n), step, NUM_STEPS * calls)
    return Roller(loop.collect, envs.close)


def build_central_envpool(task: str, num_envs: int, *, num_threads: int, half_batches: bool = False) -> Roller:
    """Build EnvPool's own (C++) environments in this process.

    With `half_batches` the agent chooses for the half that is ready while the other half is being stepped.
    """
    import envpool

    from benchmarks.peers.agent_loop import VectorLoop

    calls = 2 if half_batches else 1
    settings = {"num_envs": num_envs, "batch_size": num_envs // calls, "num_threads": num_threads, "seed": 0}
    envs = envpool.make(TASKS[task], env_type="gymnasium", **settings)
    envs.async_reset()
    first_obs, *_, info = envs.recv()
    env_ids = info["env_id"]

    def step(actions: Any) -> Any:
        nonlocal env_ids
        envs.send(actions.astype(np.int32), env_ids)
        obs, rewards, terminations, truncations, info = envs.recv()
        env_ids = info["env_id"]
        return obs, rewards, terminations | truncations

    loop = VectorLoop(first_obs, int(envs.action_space.n), step, NUM_STEPS * calls)
    return Roller(loop.collect, envs.close)


def roll_gymnasium(envs: Any, busy_log: str | None = None, **close_options: bool) -> Roller:
    """Wrap the loop around a Gymnasium vector environment."""
    from benchmarks.peers.agent_loop import VectorLoop

    first_obs, _ = envs.reset(seed=0)

    def step(actions: Any) -> Any:
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        return obs, rewards, terminations | truncations

    loop = VectorLoop(first_obs, int(envs.single_action_space.n), step, NUM_STEPS)
    return Roller(loop.collect, partial(envs.close, **close_options), busy_log)
