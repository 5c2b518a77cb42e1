"""How each contender is built: one function per library, run inside the contender's own process and interpreter.

Every contender becomes a `Stepper`. Libraries are imported inside the functions, because no interpreter has them all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from benchmarks.bare import BareLoops, PairLockstep, ParentLockstep
from benchmarks.rollers import ROLLERS
from benchmarks.tasks import TASKS, make_env, precompute_actions


class Stepper(Protocol):
    """Something that can step environments for a while and say how fast it went."""

    def run(self, seconds: float) -> float:
        """Step for so long; returns environment steps per second."""

    def close(self) -> None:
        """Release processes and memory."""


class VectorStepper:
    """Steps a vector environment with precomputed actions, as a learner's loop would.

    Args:
        step: Steps once with one row of actions.
        actions: The rows, used round and round.
        steps_per_call: How many environments one call steps.
        close: Called once at the end.
    """

    def __init__(
        self, step: Callable[[Any], object], actions: Sequence[Any], steps_per_call: int, close: Callable[[], object]
    ) -> None:
        self._step = step
        self._actions = actions
        self._steps_per_call = steps_per_call
        self._close = close
        self._row = 0

    def run(self, seconds: float) -> float:
        """Step for so long; returns environment steps per second."""
        step, actions, row = self._step, self._actions, self._row
        calls = 0
        began = now = time.perf_counter()
        while now - began < seconds:
            step(actions[row])
            row = (row + 1) % len(actions)
            calls += 1
            now = time.perf_counter()
        self._row = row
        return calls * self._steps_per_call / (now - began)

    def close(self) -> None:
        """Close the vector environment."""
        self._close()


def build_bare(task: str, num_envs: int) -> Stepper:
    """Build the free-running bare loops."""
    return BareLoops(task, num_envs)


def build_lockstep(task: str, num_envs: int, *, barrier: str) -> Stepper:
    """Build the lockstep limit: the processes meet as a "pair", or a "parent" coordinates them."""
    return PairLockstep(task, num_envs) if barrier == "pair" else ParentLockstep(task, num_envs)


def build_sync(task: str, num_envs: int, *, copy: bool) -> Stepper:
    """Build Gymnasium's SyncVectorEnv."""
    from gymnasium.vector import SyncVectorEnv

    envs = SyncVectorEnv(factories(task, num_envs), copy=copy)
    envs.reset(seed=0)
    return VectorStepper(envs.step, list(precompute_actions(task, num_envs)), num_envs, envs.close)


def build_async(task: str, num_envs: int, *, copy: bool) -> Stepper:
    """Build Gymnasium's AsyncVectorEnv with shared memory: one process per environment, it knows no other way."""
    from gymnasium.vector import AsyncVectorEnv

    envs = AsyncVectorEnv(factories(task, num_envs), shared_memory=True, copy=copy, context="fork")
    envs.reset(seed=0)
    return VectorStepper(
        envs.step, list(precompute_actions(task, num_envs)), num_envs, partial(envs.close, terminate=True)
    )


def build_sb3(task: str, num_envs: int) -> Stepper:
    """Build Stable-Baselines3's SubprocVecEnv: one process per environment, forked, which only its start-up notices."""
    import torch
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # Torch's threads would be inherited by every forked environment, and would serve none.
    torch.set_num_threads(1)
    envs = SubprocVecEnv(factories(task, num_envs), start_method="fork")
    envs.seed(0)
    envs.reset()
    return VectorStepper(envs.step, list(precompute_actions(task, num_envs)), num_envs, envs.close)


def build_puffer(
    task: str, num_envs: int, *, backend: str, num_workers: int | None = None, half_batches: bool = False
) -> Stepper:
    """Build PufferLib's `Serial` or `Multiprocessing`, which hand out views and never copy.

    With `half_batches` a call steps one worker's half while the other half is being stepped, EnvPool's way.
    """
    import pufferlib.vector
    from pufferlib.emulation import GymnasiumPufferEnv

    def creator(buf: Any = None, seed: int = 0) -> Any:
        return GymnasiumPufferEnv(env_creator=make_env, env_args=[task], buf=buf, seed=seed)

    rows = num_envs // 2 if half_batches else num_envs
    settings: dict[str, Any] = {}
    if num_workers is not None:
        # `overwork`: it counts physical cores, of which a virtual machine may show fewer than it has.
        settings = {"num_workers": num_workers, "batch_size": rows, "zero_copy": True, "overwork": True}
    envs = pufferlib.vector.make(creator, backend=getattr(pufferlib.vector, backend), num_envs=num_envs, **settings)
    envs.async_reset(seed=0)
    envs.recv()

    def step(actions: Any) -> Any:
        envs.send(actions)
        return envs.recv()

    actions = precompute_actions(task, rows).astype(np.int32)
    return VectorStepper(step, list(actions), rows, envs.close)


def build_clusterenv(
    task: str, num_envs: int, *, num_workers: int, transport: str = "auto", copy: bool = True
) -> Stepper:
    """Build ClusterEnv over plain environments."""
    from clusterenv import ClusterEnv

    envs = ClusterEnv(factories(task, num_envs), num_workers=num_workers, transport=transport, copy=copy)
    envs.reset(seed=0)
    return VectorStepper(envs.step, list(precompute_actions(task, num_envs)), num_envs, envs.close)


def build_envpool(task: str, num_envs: int, *, num_threads: int) -> Stepper:
    """Build EnvPool's own (C++) environments in this process."""
    import envpool

    envs = envpool.make(TASKS[task], env_type="gymnasium", num_envs=num_envs, num_threads=num_threads, seed=0)
    envs.reset()
    # Its actions are int32; converting them is the caller's business, so it is done beforehand.
    actions = precompute_actions(task, num_envs).astype(np.int32)
    return VectorStepper(envs.step, list(actions), num_envs, envs.close)


def build_clusterenv_envpool(task: str, num_envs: int, *, num_workers: int, num_threads: int) -> Stepper:
    """Build EnvPool hosted on ClusterEnv's workers."""
    from clusterenv import ClusterEnv
    from clusterenv.adapters.envpool import EnvPool

    envs = ClusterEnv(EnvPool(TASKS[task], num_threads=num_threads), num_envs=num_envs, num_workers=num_workers)
    envs.reset(seed=0)
    return VectorStepper(envs.step, list(precompute_actions(task, num_envs)), num_envs, envs.close)


BUILDERS: Mapping[str, Callable[..., Stepper]] = {
    "bare": build_bare,
    "lockstep": build_lockstep,
    "sync": build_sync,
    "async": build_async,
    "sb3": build_sb3,
    "puffer": build_puffer,
    "clusterenv": build_clusterenv,
    "envpool": build_envpool,
    "clusterenv-envpool": build_clusterenv_envpool,
    **ROLLERS,
}


def factories(task: str, num_envs: int) -> list[Callable[[], Any]]:
    """List one factory per environment, the same for every library."""
    return [partial(make_env, task) for _ in range(num_envs)]
