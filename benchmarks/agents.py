"""The agents that the benchmarks run: CleanRL's small one, and its Atari network with 1.7 million parameters.

They are written exactly as CleanRL's users write them; nothing here knows of ClusterEnv.
"""

import torch
from experiments.agents import Evaluated, MlpAgent, initialize
from torch import nn
from torch.distributions import Categorical

__all__ = ["Agent", "Chooser", "CnnAgent", "MlpAgent", "change"]


class CnnAgent(nn.Module):
    """The network of the DQN papers with a policy and a value head, for stacks of four 84 x 84 frames."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            initialize(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            initialize(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            initialize(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            initialize(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = initialize(nn.Linear(512, num_actions), gain=0.01)
        self.critic = initialize(nn.Linear(512, 1), gain=1.0)

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values, shape `[n, 1]`."""
        value: torch.Tensor = self.critic(self.network(x.permute(0, 3, 1, 2) / 255.0))
        return value

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Evaluated:
        """Return actions (sampled unless given), their log-probabilities, the entropies, and the values `[n, 1]`."""
        hidden = self.network(x.permute(0, 3, 1, 2) / 255.0)
        logits = self.actor(hidden)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


class Chooser(nn.Module):
    """An agent for those who want a module whose `forward` returns actions, log-probabilities and values `[n, 1]`."""

    def __init__(self, agent: MlpAgent) -> None:
        super().__init__()
        self.agent = agent

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose, as the agent does."""
        action, logprob, _, value = self.agent.get_action_and_value(x)
        return action, logprob, value


Agent = MlpAgent | CnnAgent


def change(agent: Agent) -> None:
    """Change the weights a little, as learning does."""
    with torch.no_grad():
        next(agent.actor.parameters()).add_(1e-3)
