"""The small agents that PPO trains, written as CleanRL's users write theirs.

They have a module of their own so that a worker, which gets an agent's class by its name, imports little but torch.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn
from torch.distributions import Categorical, Normal

from clusterenv.adapters.torch import Normaliser

Evaluated = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class MlpAgent(nn.Module):
    """A policy and a critic of two hidden layers each, for vector observations and discrete actions."""

    def __init__(self, observation_size: int, num_actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.critic = make_mlp(observation_size, 1, hidden, last_gain=1.0)
        self.actor = make_mlp(observation_size, num_actions, hidden, last_gain=0.01)

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values, shape `[n, 1]`."""
        value: torch.Tensor = self.critic(x)
        return value

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Evaluated:
        """Return actions (sampled unless given), their log-probabilities, the entropies, and the values `[n, 1]`."""
        logits = self.actor(x)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class GaussianAgent(nn.Module):
    """A policy and a critic of two hidden layers each, for vector observations and continuous actions.

    Observations are normalised by what the learner has seen so far; that travels with the weights.
    """

    def __init__(self, observation_size: int, num_actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.normalise = Normaliser(observation_size)
        self.critic = make_mlp(observation_size, 1, hidden, last_gain=1.0)
        self.actor_mean = make_mlp(observation_size, num_actions, hidden, last_gain=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(num_actions))

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values, shape `[n, 1]`."""
        value: torch.Tensor = self.critic(self.normalise(x.float()))
        return value

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Evaluated:
        """Return actions (sampled unless given), their log-probabilities, the entropies, and the values `[n, 1]`."""
        x = self.normalise(x.float())
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.exp().expand_as(mean))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(-1), probs.entropy().sum(-1), self.critic(x)


def make_mlp(inputs: int, outputs: int, hidden: int, *, last_gain: float) -> nn.Sequential:
    """Make a network of two hidden tanh layers."""
    return nn.Sequential(
        initialize(nn.Linear(inputs, hidden)),
        nn.Tanh(),
        initialize(nn.Linear(hidden, hidden)),
        nn.Tanh(),
        initialize(nn.Linear(hidden, outputs), gain=last_gain),
    )


def initialize(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Initialize a layer as CleanRL does: orthogonal weights, no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, 0.0)
    return layer
