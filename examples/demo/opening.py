"""Opening: the same seeds and actions in ClusterEnv and in Gymnasium's SyncVectorEnv give the same, bit for bit."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from clusterenv import ClusterEnv


def compare_with_gymnasium(envs: ClusterEnv, env_id: str, seed: int, num_steps: int = 100) -> int:
    """Step both side by side with random actions; returns how many environment steps were compared.

    Raises:
        SystemExit: They differ.
    """
    reference = gym.vector.SyncVectorEnv([lambda: gym.make(env_id)] * envs.num_envs)
    ours, theirs = envs.reset(seed=seed), reference.reset(seed=seed)
    is_equal = np.array_equal(ours[0], theirs[0])
    envs.action_space.seed(seed)
    for _ in range(num_steps):
        actions = envs.action_space.sample()
        for left, right in zip(envs.step(actions)[:4], reference.step(actions)[:4], strict=True):
            is_equal = is_equal and np.array_equal(left, right)
    reference.close()
    if not is_equal:
        raise SystemExit("ClusterEnv and SyncVectorEnv differ. That must not be: please report it as a bug.")
    return num_steps * envs.num_envs
