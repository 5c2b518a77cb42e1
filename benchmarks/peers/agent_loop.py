"""The loop that users write around their agent: act, step, store. Who steps the environments is what differs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.agents import MlpAgent

StepFunction = Callable[[NDArray[Any]], tuple[NDArray[np.float32], NDArray[Any], NDArray[np.bool_]]]


class AgentLoop(ABC):
    """An agent, and arrays for everything of a rollout that a learner needs, made once.

    Args:
        first_obs: What the environments showed at their reset, shape `(rows, observation size)`.
        num_actions: How many actions there are.
        num_steps: How many steps a rollout has.
    """

    def __init__(self, first_obs: NDArray[np.float32], num_actions: int, num_steps: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.agent = MlpAgent(first_obs.shape[1], num_actions)
        self.next_obs = first_obs
        shape = (num_steps, len(first_obs))
        self.obs = np.zeros((*shape, first_obs.shape[1]), np.float32)
        self.actions = np.zeros(shape, np.int64)
        self.logprobs = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)
        self.rewards = np.zeros(shape, np.float64)
        self.dones = np.zeros(shape, np.bool_)

    def collect(self) -> int:
        """Collect one rollout; returns how many environment steps that were."""
        for step in range(len(self.rewards)):
            self.obs[step] = self.next_obs
            with torch.no_grad():
                chosen, logprobs, _, values = self.agent.get_action_and_value(torch.as_tensor(self.next_obs))
            actions = chosen.numpy()
            self.actions[step] = actions
            self.logprobs[step] = logprobs.numpy()
            self.values[step] = values.numpy()[:, 0]
            self._step_environments(actions, step)
        return self.rewards.size

    @abstractmethod
    def _step_environments(self, actions: NDArray[np.int64], step: int) -> None:
        """Step all environments, leaving their `next_obs`, and row `step` of `rewards` and `dones`."""


class VectorLoop(AgentLoop):
    """The loop around somebody's vector environment.

    Args:
        first_obs: As for `AgentLoop`.
        num_actions: As for `AgentLoop`.
        step: Takes a row of actions; returns observations, rewards and whether episodes ended. They may be views that
            change with the next step: all is stored before.
        num_steps: As for `AgentLoop`.
    """

    def __init__(self, first_obs: NDArray[np.float32], num_actions: int, step: StepFunction, num_steps: int) -> None:
        super().__init__(first_obs, num_actions, num_steps)
        self._step = step

    def _step_environments(self, actions: NDArray[np.int64], step: int) -> None:
        self.next_obs, self.rewards[step], self.dones[step] = self._step(actions)
