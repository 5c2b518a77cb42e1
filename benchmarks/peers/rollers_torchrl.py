"""TorchRL's collectors as a contender: two processes with half of the environments each, or one with all.

The policy is the same agent, as one module that returns action, log-probability and value: less work than TorchRL's own
actor and critic, which would be modules of their own and exchange what they compute through its dictionaries.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.peers.roller import NUM_STEPS, Roller
from benchmarks.tasks import TASKS, make_env

NUM_PROCESSES = 2


def build_torchrl(task: str, num_envs: int, *, collector: str, envs: str) -> Roller:
    """Build one of TorchRL's collectors.

    Args:
        task: A key of `tasks.TASKS`.
        num_envs: Of all processes together.
        collector: Where the policy is. In two processes: "sync" delivers their batches together, "async" as they come.
            Or in one, "one", with two others that only step (`ParallelEnv`): "parallel".
        envs: "serial" for its own `SerialEnv`, "vector" for its wrapper around Gymnasium's `SyncVectorEnv`.
    """
    import torch
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from torchrl.envs import ParallelEnv

    from benchmarks.agents import Chooser, MlpAgent

    torch.set_num_threads(1)
    torch.manual_seed(0)
    env = make_env(task)
    agent = MlpAgent(env.observation_space.shape[0], int(env.action_space.n))  # type: ignore[index,attr-defined]  # Box and Discrete in these tasks
    env.close()
    policy = TensorDictModule(Chooser(agent), in_keys=["observation"], out_keys=["action", "logprob", "value"])
    # A rollout of all environments; what comes asynchronously is one process's half of it.
    frames = num_envs * NUM_STEPS
    settings: dict[str, Any] = {"total_frames": -1, "num_threads": 1, "num_sub_threads": 1}
    make_half = partial(make_envs, task, num_envs // NUM_PROCESSES, envs)
    if collector == "sync":
        running = MultiSyncCollector(
            [make_half] * NUM_PROCESSES, policy, frames_per_batch=frames, cat_results="stack", **settings
        )
    elif collector == "async":
        running = MultiAsyncCollector(
            [make_half] * NUM_PROCESSES, policy, frames_per_batch=frames // NUM_PROCESSES, **settings
        )
    elif collector == "parallel":
        running = Collector(
            partial(ParallelEnv, NUM_PROCESSES, make_half), policy, frames_per_batch=frames, total_frames=-1
        )
    else:
        make_all = partial(make_envs, task, num_envs, envs)
        running = Collector(make_all, policy, frames_per_batch=frames, total_frames=-1)
    batches: Iterator[Any] = iter(running)
    return Roller(lambda: int(next(batches).numel()), running.shutdown)


def make_envs(task: str, num_envs: int, envs: str) -> Any:
    """Make the environments of one process, in a way that TorchRL knows."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from torchrl.envs import GymEnv, GymWrapper, SerialEnv

    if envs == "vector":
        # The mode that it prefers; with NEXT_STEP it does not work.
        vector = SyncVectorEnv([partial(make_env, task)] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
        return GymWrapper(vector, categorical_action_encoding=True)
    return SerialEnv(num_envs, partial(GymEnv, TASKS[task], categorical_action_encoding=True))
