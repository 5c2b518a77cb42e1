"""The environments the benchmark steps, and the actions it steps them with.

Four are real: CartPole, LunarLander, Breakout on its emulator and HalfCheetah on MuJoCo. The others are synthetic. All
come out of `make_env`, so that every contender steps the same stack of wrappers.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

TASKS: Mapping[str, str] = {
    "cartpole": "CartPole-v1",
    "lunarlander": "LunarLander-v3",
    "atari": "ALE/Breakout-v5",
    "mujoco": "HalfCheetah-v5",
    "dict": "BenchDict-v0",
    "image": "BenchImage-v0",
    "wait": "BenchWait-v0",
    "work": "BenchWork-v0",
    "random": "BenchRandom-v0",
}

# What a reader should know about a task whose name does not say it.
REMARKS: Mapping[str, str] = {
    "atari": "84 x 84 x 4 images",
    "mujoco": "continuous actions",
    "dict": "Dict observations",
    "image": "84 x 84 x 4 images at no cost",
    "wait": "a step waits 1 ms",
    "work": "a step works 1 ms",
    "random": "a step works 1 ms on average",
}

SYNTHETIC: Mapping[str, str] = {
    "BenchDict-v0": "DictTask",
    "BenchImage-v0": "ImageTask",
    "BenchWait-v0": "WaitTask",
    "BenchWork-v0": "WorkTask",
    "BenchRandom-v0": "RandomTask",
}

# EnvPool steps only environments of its own, in C++: their names and settings. Breakout is as `make_atari` makes it;
# EnvPool's frames are small, grey and four at a time by themselves.
IN_ENVPOOL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cartpole": ("CartPole-v1", {}),
    "lunarlander": ("LunarLander-v3", {}),
    "atari": ("Breakout-v5", {"frame_skip": 4, "repeat_action_probability": 0.25, "use_fire_reset": False}),
    "mujoco": ("HalfCheetah-v5", {}),
}

# Enough distinct rows that no contender profits from a repeated one, few enough to stay in the cache.
ACTION_ROWS = 128


def make_env(task: str) -> gym.Env[Any, Any]:
    """Make one environment of a task, a key of `TASKS`; safe to call in any process."""
    if task == "atari":
        return make_atari(TASKS[task])
    env_id = TASKS[task]
    if env_id in SYNTHETIC and env_id not in gym.registry:
        gym.register(env_id, entry_point=f"benchmarks.synthetic:{SYNTHETIC[env_id]}", max_episode_steps=100)
    return gym.make(env_id)


def make_atari(env_id: str) -> gym.Env[Any, Any]:
    """Make a game as learners see it: every fourth frame, small and grey, the last four of them at a time."""
    import ale_py

    gym.register_envs(ale_py)
    env = gym.wrappers.AtariPreprocessing(gym.make(env_id, frameskip=1), frame_skip=4)
    return gym.wrappers.FrameStackObservation(env, stack_size=4)


def describe_task(task: str) -> str:
    """Name a task for a heading."""
    return f"{TASKS[task]} ({REMARKS[task]})" if task in REMARKS else TASKS[task]


def precompute_actions(task: str, num_envs: int) -> NDArray[Any]:
    """Draw random actions from the task's action space, so that sampling them is never part of a measurement.

    Returns:
        `ACTION_ROWS` batches, each with one action per environment: shape `(ACTION_ROWS, num_envs, *action_shape)`.
    """
    env = make_env(task)
    actions = batch_space(env.action_space, num_envs)
    env.close()
    actions.seed(0)
    return np.stack([actions.sample() for _ in range(ACTION_ROWS)])
