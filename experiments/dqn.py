"""DQN's learner, with double Q-learning and a target network that follows slowly."""

from __future__ import annotations

import math

import gymnasium as gym
import torch
from examples.dqn import QNetwork, ReplayBuffer
from torch import nn

from clusterenv import ClusterEnv, Rollout
from experiments.tasks import DqnSettings


class DqnTraining:
    """Learns from replay, after every rollout.

    Args:
        settings: All of them.
        envs: What is learned on.
        seed: Of the network and of what is drawn from replay.
    """

    def __init__(self, settings: DqnSettings, envs: ClusterEnv, seed: int) -> None:
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box)
        assert isinstance(action_space, gym.spaces.Discrete)
        torch.manual_seed(seed)
        sizes = math.prod(observation_space.shape), int(action_space.n)
        self.agent, self._target_network = QNetwork(*sizes), QNetwork(*sizes)
        self._target_network.load_state_dict(self.agent.state_dict())
        self._settings = settings
        self._buffer = ReplayBuffer(settings.buffer_size, sizes[0], seed)
        self._optimizer = torch.optim.Adam(self.agent.parameters(), lr=settings.learning_rate, fused=True)
        self._num_made, self._num_gradients = 0, 0

    def values(self, progress: float) -> dict[str, float]:
        """Return the share of random actions after this share of the run."""
        settings = self._settings
        fallen = min(1.0, progress / settings.exploration_fraction)
        return {"epsilon": settings.first_epsilon + (settings.last_epsilon - settings.first_epsilon) * fallen}

    def learn(self, rollout: Rollout, progress: float) -> None:
        """Take in a rollout, and make the gradient steps that are due."""
        settings = self._settings
        self._optimizer.param_groups[0]["lr"] = settings.learning_rate * (1 - progress)
        self._buffer.add(rollout.transitions())
        self._num_made += rollout.num_steps * rollout.num_envs
        while self._num_gradients < (self._num_made - settings.learning_starts) / settings.steps_per_gradient:
            self._descend(self._buffer.sample(settings.batch_size))
            self._num_gradients += 1

    def _descend(self, batch: list[torch.Tensor]) -> None:
        obs, actions, rewards, next_obs, terminated = batch
        with torch.no_grad():
            best = self.agent(next_obs).argmax(1, keepdim=True)
            following = self._target_network(next_obs).gather(1, best)[:, 0]
            targets = rewards + self._settings.discount * ~terminated * following
        values = self.agent(obs).gather(1, actions[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(values, targets)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self._optimizer.step()
        with torch.no_grad():
            for old, new in zip(self._target_network.parameters(), self.agent.parameters(), strict=True):
                old.lerp_(new, self._settings.target_rate)
