"""Torch agents as users write them: CleanRL's shapes, the paper's, and some that must not be mistaken for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clusterenv.adapters.torch import TorchPolicy
from clusterenv.policy import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical
from clusterenv.policy.distribution import Distribution
from clusterenv.policy.policy import Policy
from clusterenv.policy.program import ProgramPolicy

torch.set_num_threads(1)  # For networks this small more threads only wait for each other.

# torch.distributions has no types.
TorchCategorical: Any = torch.distributions.Categorical
TorchBernoulli: Any = torch.distributions.Bernoulli
Normal: Any = torch.distributions.Normal

Obs = NDArray[np.float32]
Agent = Any  # An nn.Module, whose attributes mypy does not know.


def mlp(inputs: int, outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, outputs))


class Discrete(nn.Module):
    """CleanRL's ppo.py."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp(4, 1)
        self.actor = mlp(4, 3)

    def get_value(self, x: Any) -> Any:
        return self.critic(x)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        logits = self.actor(x)
        probs = TorchCategorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Continuous(nn.Module):
    """CleanRL's ppo_continuous_action.py."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp(4, 1)
        self.actor_mean = mlp(4, 2)
        self.actor_logstd = nn.Parameter(torch.tensor([[-0.5, 0.25]]))

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        action_mean = self.actor_mean(x)
        action_logstd = self.actor_logstd.expand_as(action_mean)
        action_std = torch.exp(action_logstd)
        probs = Normal(action_mean, action_std)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


class SharedTrunk(nn.Module):
    """CleanRL's ppo_atari.py, on vectors: the method divides before it calls the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 32), nn.ReLU())
        self.actor = nn.Linear(32, 3)
        self.critic = nn.Linear(32, 1)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.network(x / 255.0)
        probs = TorchCategorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


class PlainTrunk(SharedTrunk):
    """A trunk the method calls as it is."""

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.network(x)
        probs = TorchCategorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


class Gelu(Discrete):
    """A network that numpy does not compute."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(4, 3, nn.GELU)


class MultiDiscrete(nn.Module):
    """CleanRL's old ppo_multidiscrete.py."""

    def __init__(self) -> None:
        super().__init__()
        self.nvec = np.array([2, 3])
        self.actor = mlp(4, 5)
        self.critic = mlp(4, 1)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        split = torch.split(self.actor(x), self.nvec.tolist(), dim=1)
        parts = [TorchCategorical(logits=logits) for logits in split]
        if action is None:
            action = torch.stack([part.sample() for part in parts], dim=1)
        logprob = torch.stack([part.log_prob(a) for a, part in zip(action.T, parts, strict=True)])
        entropy = torch.stack([part.entropy() for part in parts])
        return action, logprob.sum(0), entropy.sum(0), self.critic(x)


class MultiBinary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(4, 3)
        self.critic = mlp(4, 1)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs = TorchBernoulli(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action.float()).sum(1), probs.entropy().sum(1), self.critic(x)


class Paper(nn.Module):
    """The paper's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(4, 3)
        self.critic = mlp(4, 1)

    def forward(self, x: Any, action: Any = None) -> Any:
        probs = TorchCategorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Masked(Discrete):
    """Forbids an action in states that may not be among the first it sees."""

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        logits = self.actor(x)
        if (x[:, 0] > 100).any():
            logits = logits.masked_fill(x[:, :1] > 100, -1e9)
        probs = TorchCategorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Annealed(Discrete):
    """Depends on an attribute."""

    temperature = 1.0

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs = TorchCategorical(logits=self.actor(x) / self.temperature)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Decorated(Discrete):
    """Says nothing about itself."""

    @torch.no_grad()
    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        return super().get_action_and_value(x * 2.0, action)


class Clipping(Discrete):
    """A network that is not only its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.actor.register_forward_hook(lambda _module, _inputs, output: output.clamp(-0.1, 0.1))


class Recurrent(nn.Module):
    """CleanRL's ppo_atari_lstm.py, on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.lstm = nn.LSTM(16, 8)
        self.actor = nn.Linear(8, 3)
        self.critic = nn.Linear(8, 1)

    def get_states(self, x: Any, lstm_state: Any, done: Any) -> Any:
        hidden = self.network(x)
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                ((1.0 - d).view(1, -1, 1) * lstm_state[0], (1.0 - d).view(1, -1, 1) * lstm_state[1]),
            )
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_action_and_value(self, x: Any, lstm_state: Any, done: Any, action: Any = None) -> Any:
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = TorchCategorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


class QNetwork(nn.Module):
    """CleanRL's dqn.py."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(4, 3, nn.ReLU)

    def forward(self, x: Any) -> Any:
        return self.network(x)


class Actor(nn.Module):
    """CleanRL's td3_continuous_action.py."""

    action_scale: torch.Tensor
    action_bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 32)
        self.fc_mu = nn.Linear(32, 2)
        self.register_buffer("action_scale", torch.tensor([2.0, 0.5]))
        self.register_buffer("action_bias", torch.tensor([0.0, 1.0]))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.fc_mu(torch.relu(self.fc1(x))))
        return x * self.action_scale + self.action_bias


class SacActor(nn.Module):
    """CleanRL's sac_continuous_action.py."""

    action_scale: torch.Tensor
    action_bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 32)
        self.fc_mean = nn.Linear(32, 2)
        self.fc_logstd = nn.Linear(32, 2)
        self.register_buffer("action_scale", torch.tensor([2.0, 0.5]))
        self.register_buffer("action_bias", torch.tensor([0.0, 1.0]))

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.fc1(x))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), -5 + 0.5 * (2 + 5) * (log_std + 1)

    def get_action(self, x: Any) -> Any:
        mean, log_std = self(x)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale + self.action_bias
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return action, log_prob.sum(1, keepdim=True), torch.tanh(mean) * self.action_scale + self.action_bias


AGENTS: dict[str, tuple[Callable[[], Agent], type[Distribution]]] = {
    "discrete": (Discrete, Categorical),
    "continuous": (Continuous, DiagonalGaussian),
    "shared trunk": (SharedTrunk, Categorical),
    "plain trunk": (PlainTrunk, Categorical),
    "gelu": (Gelu, Categorical),
    "multi discrete": (MultiDiscrete, MultiCategorical),
    "multi binary": (MultiBinary, Bernoulli),
    "paper": (Paper, Categorical),
}


def make(name: str) -> Agent:
    torch.manual_seed(0)
    return AGENTS[name][0]()


def on_worker(policy: Policy, seed: int = 0, obs: Any = None) -> Policy:
    """Send a policy the way ClusterEnv does: shown observations, if there are any; structure first, weights after."""
    if obs is not None and isinstance(policy, TorchPolicy):
        policy.stamp()
        policy.look_at(obs)
    twin: Policy = pickle.loads(cloudpickle.dumps(policy))
    twin.load({name: array.copy() for name, array in policy.weights().items()})
    twin.seed(seed)
    return twin


def evaluate(agent: Agent, obs: Obs, action: Any) -> tuple[Any, Any]:
    """Return the agent's own opinion of given actions: log-probabilities and values."""
    method = agent.get_action_and_value if hasattr(agent, "get_action_and_value") else agent
    with torch.no_grad():
        _, logprob, _, value = method(torch.from_numpy(obs), torch.from_numpy(action))
    return logprob.numpy(), value.numpy().reshape(-1)


def is_fast(policy: Policy) -> bool:
    """Say whether a worker's policy needs no torch."""
    return isinstance(policy, ProgramPolicy)
