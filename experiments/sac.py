"""SAC's learner, with two critics and a tuned entropy; only the actor goes to workers."""

from __future__ import annotations

import copy

import gymnasium as gym
import torch
from examples.sac import Actor, Critics, ReplayBuffer

from clusterenv import ClusterEnv, Rollout
from experiments.tasks import SacSettings


class SacTraining:
    """Learns from replay, after every rollout.

    Args:
        settings: All of them.
        envs: What is learned on.
        seed: Of the networks, of what is drawn from replay, and of the learner's own actions.
    """

    def __init__(self, settings: SacSettings, envs: ClusterEnv, seed: int) -> None:
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box)
        assert isinstance(action_space, gym.spaces.Box)
        torch.manual_seed(seed)
        num_inputs, self._num_actions = observation_space.shape[0], action_space.shape[0]
        self.agent = Actor(num_inputs, action_space, settings.hidden)
        self._critics = Critics(num_inputs + self._num_actions, settings.hidden)
        self._targets = copy.deepcopy(self._critics)
        self._log_alpha = torch.zeros((), requires_grad=True)
        self._settings = settings
        self._buffer = ReplayBuffer(settings.buffer_size, num_inputs, self._num_actions, seed)
        learned = self._critics.parameters(), self.agent.parameters(), [self._log_alpha]
        self._optimizers = [torch.optim.Adam(each, lr=settings.learning_rate, fused=True) for each in learned]
        self._num_made, self._num_gradients = 0, 0

    def values(self, progress: float) -> None:
        """Return nothing: the actor explores by itself."""

    def learn(self, rollout: Rollout, progress: float) -> None:
        """Take in a rollout, and make the gradient steps that are due."""
        settings = self._settings
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = settings.learning_rate * (1 - progress)
        self._buffer.add(rollout.transitions())
        self._num_made += rollout.num_steps * rollout.num_envs
        while self._num_gradients < (self._num_made - settings.learning_starts) / settings.steps_per_gradient:
            self._descend(self._buffer.sample(settings.batch_size))
            self._num_gradients += 1

    def _descend(self, batch: list[torch.Tensor]) -> None:
        obs, actions, rewards, next_obs, terminated = batch
        alpha = self._log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, next_logprob = self.agent.get_action(next_obs)
            following = self._targets(next_obs, next_actions).min(0).values - alpha * next_logprob
            wanted = rewards + self._settings.discount * (1.0 - terminated) * following
        self._step(0, (self._critics(obs, actions) - wanted).square().mean(1).sum())
        new_actions, logprob = self.agent.get_action(obs)
        self._step(1, (alpha * logprob - self._critics(obs, new_actions).min(0).values).mean())
        self._step(2, -(self._log_alpha.exp() * (logprob.detach() - self._num_actions)).mean())
        with torch.no_grad():
            for old, new in zip(self._targets.parameters(), self._critics.parameters(), strict=True):
                old.lerp_(new, self._settings.target_rate)

    def _step(self, which: int, loss: torch.Tensor) -> None:
        self._optimizers[which].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self._optimizers[which].step()
