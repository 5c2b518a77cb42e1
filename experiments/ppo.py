"""PPO's run: rollouts of the workers' policies, and after each an update of the learner's."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from benchmarks.agents import MlpAgent
from benchmarks.ppo import Learner, PpoConfig

from clusterenv import ClusterEnv, Rollout
from clusterenv.policy import SyncRule
from experiments.settings import PpoSettings


def train(settings: PpoSettings, rule: SyncRule, seed: int) -> Generator[tuple[Rollout, Mapping[str, Any]], None, None]:
    """Train an agent; yields every rollout, with what the run has cost so far."""
    config = PpoConfig(
        decoupled=True,
        learning_rate=settings.learning_rate,
        epochs=settings.epochs,
        minibatch_size=settings.minibatch_size,
        discount=settings.discount,
    )
    with ClusterEnv(settings.task, settings.num_envs, num_workers=settings.num_workers, sync=rule) as envs:
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box)
        assert isinstance(action_space, gym.spaces.Discrete)
        torch.manual_seed(seed)
        agent = MlpAgent(math.prod(observation_space.shape), int(action_space.n))
        learner = Learner(agent, config, seed)
        envs.reset(seed=1000 * seed)  # Environment i gets this + i: runs must not share environments.
        for number in range(settings.num_rollouts):
            rollout = envs.rollout(agent, settings.num_steps)
            yield rollout, envs.stats
            # Rewards of a size that networks learn easily; those of the rollout that was yielded stay as they are.
            scaled = replace(rollout, rewards=settings.reward_scale * rollout.rewards)
            learner.update(scaled, settings.learning_rate * (1 - number / settings.num_rollouts))
