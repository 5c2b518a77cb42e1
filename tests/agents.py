"""A torch agent in CleanRL's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributions, nn


class Agent(nn.Module):
    """A small agent as CleanRL writes it."""

    def __init__(self, num_inputs: int = 4, num_actions: int = 2) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(num_inputs, 16), nn.Tanh(), nn.Linear(16, num_actions))
        self.critic = nn.Sequential(nn.Linear(num_inputs, 16), nn.Tanh(), nn.Linear(16, 1))

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.critic(x)
        return value

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        # torch's distributions are untyped
        probs: Any = distributions.Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        assert action is not None
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)
