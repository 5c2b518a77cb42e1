"""DQN's run: after every step of all environments some gradient steps from replay, and so a new version."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any

import gymnasium as gym
import torch
from examples.dqn import QNetwork, ReplayBuffer
from torch import nn

from clusterenv import ClusterEnv, Rollout
from clusterenv.policy import SyncRule
from experiments.settings import DqnSettings


def train(settings: DqnSettings, rule: SyncRule, seed: int) -> Generator[tuple[Rollout, Mapping[str, Any]], None, None]:
    """Train a Q-network; yields every rollout (one step), with what the run has cost so far."""
    with ClusterEnv(settings.task, settings.num_envs, num_workers=settings.num_workers, sync=rule) as envs:
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box)
        assert isinstance(action_space, gym.spaces.Discrete)
        torch.manual_seed(seed)
        sizes = math.prod(observation_space.shape), int(action_space.n)
        learner = Learner(QNetwork(*sizes), QNetwork(*sizes), settings)
        buffer = ReplayBuffer(settings.buffer_size, sizes[0], seed)
        envs.reset(seed=1000 * seed)  # Environment i gets this + i: runs must not share environments.
        num_gradients = 0
        for number in range(settings.num_rollouts):
            progress = number / settings.num_rollouts
            rollout = envs.rollout(
                learner.q_network, settings.num_steps, values={"epsilon": anneal_epsilon(settings, progress)}
            )
            yield rollout, envs.stats
            buffer.add(rollout.transitions())
            num_made = (number + 1) * settings.num_steps * settings.num_envs
            while num_gradients < (num_made - settings.learning_starts) / settings.steps_per_gradient:
                learner.update(buffer.sample(settings.batch_size), settings.learning_rate * (1 - progress))
                num_gradients += 1


def anneal_epsilon(settings: DqnSettings, progress: float) -> float:
    """Return the share of random actions after this share of the run."""
    fallen = min(1.0, progress / settings.exploration_fraction)
    return settings.first_epsilon + (settings.last_epsilon - settings.first_epsilon) * fallen


class Learner:
    """Double Q-learning with a target network that follows slowly."""

    def __init__(self, q_network: QNetwork, target_network: QNetwork, settings: DqnSettings) -> None:
        self.q_network = q_network
        self._target_network = target_network
        self._target_network.load_state_dict(q_network.state_dict())
        self._settings = settings
        self._optimizer = torch.optim.Adam(q_network.parameters(), lr=settings.learning_rate, fused=True)

    def update(self, batch: list[torch.Tensor], learning_rate: float) -> None:
        """Make one gradient step."""
        obs, actions, rewards, next_obs, terminated = batch
        with torch.no_grad():
            best = self.q_network(next_obs).argmax(1, keepdim=True)
            following = self._target_network(next_obs).gather(1, best)[:, 0]
            targets = rewards + self._settings.discount * ~terminated * following
        values = self.q_network(obs).gather(1, actions[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(values, targets)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self._optimizer.step()
        with torch.no_grad():
            for old, new in zip(self._target_network.parameters(), self.q_network.parameters(), strict=True):
                old.lerp_(new, self._settings.target_rate)
