"""The limit for rollouts: one process's environments and an agent, in the loop that a user writes without a library."""

import os

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.agents import MlpAgent
from benchmarks.tasks import make_env


class AgentShard:
    """The environments of one process, with an agent that chooses their actions.

    As in NEXT_STEP mode, a finished environment is reset in the place of its next step. All that a learner needs is
    stored in arrays that are made once.

    Args:
        task: A key of `tasks.TASKS`.
        size: How many environments.
        num_steps: How many steps a rollout has.
    """

    def __init__(self, task: str, size: int, *, num_steps: int) -> None:
        # Linux shares a busy machine's cores out by session (autogroup), and ClusterEnv's workers have one each.
        # Without one of its own this process would get half of what they get as soon as anything else runs.
        os.setsid()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._envs = [make_env(task) for _ in range(size)]
        self._is_finished = [False] * size
        first = [env.reset(seed=seed)[0] for seed, env in enumerate(self._envs)]
        self._next_obs = np.array(first, np.float32)
        self._agent = MlpAgent(self._next_obs.shape[1], int(self._envs[0].action_space.n))  # type: ignore[attr-defined]  # Discrete in these tasks
        self._obs = np.zeros((num_steps, *self._next_obs.shape), np.float32)
        self._actions = np.zeros((num_steps, size), np.int64)
        self._logprobs = np.zeros((num_steps, size), np.float32)
        self._values = np.zeros((num_steps, size), np.float32)
        self._rewards = np.zeros((num_steps, size), np.float64)
        self._dones = np.zeros((num_steps, size), np.bool_)

    def step(self) -> None:
        """Collect one rollout: what happens between two meetings."""
        for step in range(len(self._rewards)):
            self._obs[step] = self._next_obs
            with torch.no_grad():
                chosen, logprobs, _, values = self._agent.get_action_and_value(torch.as_tensor(self._next_obs))
            actions = chosen.numpy()
            self._actions[step] = actions
            self._logprobs[step] = logprobs.numpy()
            self._values[step] = values.numpy()[:, 0]
            self._step_environments(actions, step)

    def _step_environments(self, actions: NDArray[np.int64], step: int) -> None:
        is_finished, next_obs = self._is_finished, self._next_obs
        rewards, dones = self._rewards[step], self._dones[step]
        for index, env in enumerate(self._envs):
            if is_finished[index]:
                next_obs[index], _ = env.reset()
                rewards[index], is_finished[index] = 0.0, False
            else:
                next_obs[index], rewards[index], terminated, truncated, _ = env.step(actions[index])
                is_finished[index] = terminated or truncated
            dones[index] = is_finished[index]
