"""The small agent that is trained, written as CleanRL's users write theirs; nothing here knows of ClusterEnv.

It has a module of its own so that a worker, which gets an agent's class by its name, imports nothing but torch.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn
from torch.distributions import Categorical

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
