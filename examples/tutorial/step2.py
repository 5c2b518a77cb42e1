"""PPO on LunarLander: one of the four scripts of docs/tutorials/four-steps.md, which explains how they differ."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Categorical

from clusterenv import ClusterEnv


@dataclass
class Args:
    """PPO on LunarLander."""

    seed: int = 1
    total_timesteps: int = 300_000
    """environment steps"""
    num_envs: int = 32
    num_steps: int = 256
    """steps of each environment between two updates"""
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    update_epochs: int = 4
    minibatch_size: int = 512
    reward_scale: float = 0.05
    """what the learner multiplies rewards by"""


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp(1, last_gain=1.0)
        self.actor = mlp(4, last_gain=0.01)

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions (sampled unless given), their log-probabilities, entropies and values."""
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def mlp(num_outputs: int, last_gain: float) -> nn.Sequential:
    """Make two hidden layers of 64 tanh units, orthogonally initialised."""
    layers = [nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    num_updates = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
    returns: list[float] = []

    envs = ClusterEnv("LunarLander-v3", args.num_envs)
    shape = args.num_steps, args.num_envs
    obs = torch.zeros((args.num_steps + 1, args.num_envs, 8))
    actions, logprobs, rewards = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(shape)
    terminated, done, valid = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
    running_returns, was_done = np.zeros(args.num_envs), np.zeros(args.num_envs, np.bool_)
    next_obs, _ = envs.reset(seed=args.seed)
    began = time.perf_counter()
    for _ in range(num_updates):
        for step in range(args.num_steps):
            obs[step] = torch.as_tensor(next_obs)
            with torch.no_grad():
                actions[step], logprobs[step], _, _ = agent.get_action_and_value(obs[step])
            next_obs, reward, terminations, truncations, _ = envs.step(actions[step].numpy())
            is_done = terminations | truncations
            rewards[step] = torch.as_tensor(reward)
            terminated[step], done[step] = torch.as_tensor(terminations), torch.as_tensor(is_done)
            # Gymnasium resets in the step after an episode's last: that step's action is ignored.
            valid[step] = torch.as_tensor(~was_done)
            was_done = is_done
            running_returns += reward
            returns += running_returns[is_done].tolist()
            running_returns[is_done] = 0.0
        # An episode's last observation is the row after its end, so every action's successor is the next row.
        obs[-1] = torch.as_tensor(next_obs)
        learn(agent, optimizer, args, obs, actions, logprobs, rewards, terminated, done, valid)
    seconds = time.perf_counter() - began
    envs.close()

    steps = num_updates * args.num_steps * args.num_envs
    print(f"{steps:,} steps in {seconds:.1f} s: {steps / seconds:,.0f} steps/s, learning included.")
    print(f"Mean return of the last 100 episodes: {np.mean(returns[-100:]):.1f}.")
    return returns


def learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    args: Args,
    obs: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    rewards: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    """Improve the agent by arrays `[T, N]`; `obs` has a row more."""
    advantages = torch.zeros_like(rewards)
    with torch.no_grad():
        values = agent.critic(obs)[..., 0]
        # A truncated episode has a future: its last observation's value. A terminated one has none.
        errors = args.reward_scale * rewards + args.gamma * ~terminated * values[1:] - values[:-1]
        ahead = torch.zeros_like(errors[0])
        for t in reversed(range(len(errors))):
            advantages[t] = ahead = errors[t] + args.gamma * args.gae_lambda * ~done[t] * ahead
    batch = [part[valid] for part in (obs[:-1], actions, logprobs, advantages, advantages + values[:-1])]
    num_rows = len(batch[0])
    for _ in range(args.update_epochs):
        for rows in torch.randperm(num_rows).tensor_split(max(1, num_rows // args.minibatch_size)):
            x, action, old, advantage, target = (part[rows] for part in batch)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            _, logprob, entropy, value = agent.get_action_and_value(x, action)
            ratio = (logprob - old).exp()
            policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = policy_loss + 0.25 * (value[:, 0] - target).square().mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


if __name__ == "__main__":
    train(tyro.cli(Args))
