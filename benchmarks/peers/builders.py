"""How each contender is built: one function per library, run inside the contender's own process and interpreter.

Every contender becomes a `Stepper`. Libraries are imported inside the functions, because no interpreter has them all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.bare import BareLoops, PairLockstep, ParentLockstep
from benchmarks.peers.rollers import ROLLERS
from benchmarks.tasks import IN_ENVPOOL, make_env, precompute_actions


class CannotDo(Exception):
    """A library has no way to step a task; the text says why, for the table."""


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


class ExchangeStepper:
    """Steps a ClusterEnv by `send` and `recv`: a worker has new actions as soon as its results are here.

    Args:
        envs: A ClusterEnv that was reset.
        actions: Rows of actions for all environments, used round and round.
    """

    def __init__(self, envs: Any, actions: Sequence[Any]) -> None:
        self._envs = envs
        self._actions = actions

    def run(self, seconds: float) -> float:
        """Step for so long, and until nothing is under way any more; returns environment steps per second."""
        envs, actions = self._envs, self._actions
        steps = row = 0
        under_way = envs.num_envs
        began = now = time.perf_counter()
        envs.send(actions[row], np.arange(under_way))
        while under_way:
            env_ids = envs.recv()[4]["env_id"]
            steps += len(env_ids)
            now = time.perf_counter()
            if now - began < seconds:
                row = (row + 1) % len(actions)
                envs.send(actions[row][env_ids], env_ids)
            else:
                under_way -= len(env_ids)
        return steps / (now - began)

    def close(self) -> None:
        """Close the ClusterEnv."""
        self._envs.close()


def build_bare(task: str, num_envs: int, *, num_processes: int = 2) -> Stepper:
    """Build the free-running bare loops."""
    return BareLoops(task, num_envs, num_processes)


def build_lockstep(task: str, num_envs: int, *, barrier: str, num_processes: int = 2) -> Stepper:
    """Build the lockstep limit: two processes meet as a "pair", or a "parent" coordinates them or more."""
    return PairLockstep(task, num_envs) if barrier == "pair" else ParentLockstep(task, num_envs, num_processes)


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
    task: str,
    num_envs: int,
    *,
    backend: str,
    num_workers: int | None = None,
    half_batches: bool = False,
    any_order: bool = False,
) -> Stepper:
    """Build PufferLib's `Serial` or `Multiprocessing`.

    Args:
        task: A key of `tasks.TASKS`.
        num_envs: How many environments.
        backend: Its name.
        num_workers: Of `Multiprocessing`.
        half_batches: A call steps one half while the other half is being stepped, EnvPool's way.
        any_order: A half is whoever is ready, instead of the same workers by turns. Otherwise it hands out views.
    """
    import pufferlib.vector
    from pufferlib.emulation import GymnasiumPufferEnv

    def creator(buf: Any = None, seed: int = 0) -> Any:
        return GymnasiumPufferEnv(env_creator=make_env, env_args=[task], buf=buf, seed=seed)

    rows = num_envs // 2 if half_batches else num_envs
    settings: dict[str, Any] = {}
    if num_workers is not None:
        # `overwork`: it counts physical cores, of which a virtual machine may show fewer than it has.
        settings = {"num_workers": num_workers, "batch_size": rows, "overwork": True}
        settings["zero_copy"] = not any_order
    envs = pufferlib.vector.make(creator, backend=getattr(pufferlib.vector, backend), num_envs=num_envs, **settings)
    # The constructor has an argument for it, which `make` refuses.
    envs.sync_traj = not any_order
    envs.async_reset(seed=0)
    envs.recv()

    def step(actions: Any) -> Any:
        envs.send(actions)
        return envs.recv()

    return VectorStepper(step, list(with_small_integers(precompute_actions(task, rows))), rows, envs.close)


def build_clusterenv(
    task: str, num_envs: int, *, num_workers: int, transport: str = "auto", copy: bool = True
) -> Stepper:
    """Build ClusterEnv over plain environments."""
    from clusterenv import ClusterEnv, Network

    envs = ClusterEnv(
        factories(task, num_envs), num_workers=num_workers, network=Network(transport=transport), copy=copy
    )
    envs.reset(seed=0)
    return VectorStepper(envs.step, list(precompute_actions(task, num_envs)), num_envs, envs.close)


def build_clusterenv_exchange(task: str, num_envs: int, *, num_workers: int) -> Stepper:
    """Build ClusterEnv over plain environments, whose workers do not wait for one another."""
    from clusterenv import ClusterEnv

    envs = ClusterEnv(factories(task, num_envs), num_workers=num_workers)
    envs.reset(seed=0)
    return ExchangeStepper(envs, list(precompute_actions(task, num_envs)))


def build_envpool(task: str, num_envs: int, *, num_threads: int) -> Stepper:
    """Build EnvPool's own (C++) environments in this process."""
    if task not in IN_ENVPOOL:
        raise CannotDo("EnvPool steps only environments of its own, written in C++")
    import envpool

    env_id, settings = IN_ENVPOOL[task]
    envs = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, num_threads=num_threads, seed=0, **settings)
    envs.reset()
    # Converting actions is the caller's business, so it is done beforehand.
    actions = with_small_integers(precompute_actions(task, num_envs))
    if actions.dtype != np.int32:
        actions = actions.astype(envs.action_space.dtype)
    return VectorStepper(envs.step, list(actions), num_envs, envs.close)


def build_clusterenv_envpool(task: str, num_envs: int, *, num_workers: int, num_threads: int) -> Stepper:
    """Build EnvPool hosted on ClusterEnv's workers."""
    from clusterenv import ClusterEnv
    from clusterenv.adapters.envpool import EnvPool

    env_id, settings = IN_ENVPOOL[task]
    envs = ClusterEnv(EnvPool(env_id, num_threads=num_threads, **settings), num_envs=num_envs, num_workers=num_workers)
    envs.reset(seed=0)
    actions = precompute_actions(task, num_envs).astype(envs.action_space.dtype, copy=False)
    return VectorStepper(envs.step, list(actions), num_envs, envs.close)


def with_small_integers(actions: NDArray[Any]) -> NDArray[Any]:
    """Turn whole numbers into the 32 bits that libraries written in C or C++ expect."""
    return actions.astype(np.int32) if np.issubdtype(actions.dtype, np.integer) else actions


BUILDERS: Mapping[str, Callable[..., Stepper]] = {
    "bare": build_bare,
    "lockstep": build_lockstep,
    "sync": build_sync,
    "async": build_async,
    "sb3": build_sb3,
    "puffer": build_puffer,
    "clusterenv": build_clusterenv,
    "clusterenv-exchange": build_clusterenv_exchange,
    "envpool": build_envpool,
    "clusterenv-envpool": build_clusterenv_envpool,
    **ROLLERS,
}


def factories(task: str, num_envs: int) -> list[Callable[[], Any]]:
    """List one factory per environment, the same for every library."""
    return [partial(make_env, task) for _ in range(num_envs)]
