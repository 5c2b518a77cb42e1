"""The one-line change: a plain Gymnasium loop, with the environments on workers and the actions from the head.

    python -m examples.actions

It reaches a mean return of 500, the maximum, over the last 100 episodes after 150,000 steps; seed 1, two workers on a
two-core machine that others were using, 1.8 minutes at `nice -n 19`, 24 seconds of CPU time.

This is PPO as you would write it for `gym.make_vec` or `SyncVectorEnv`; only the line that makes `envs` belongs to
ClusterEnv. `--gymnasium` puts Gymnasium's own line back, and learns exactly the same. Every step is a round trip to the
workers. That suits slow environments, and agents that need the head's GPU; examples/ppo.py has the agent on the workers
instead.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Categorical

from clusterenv import ClusterEnv, LocalLauncher
from examples.launching import Launching
from examples.scalars import Scalars


@dataclass
class Args:
    """PPO in a plain Gymnasium loop."""

    env_id: str = "CartPole-v1"
    """which environment"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 150_000
    """environment steps"""
    num_envs: int = 16
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    gymnasium: bool = False
    """use Gymnasium's SyncVectorEnv instead, to compare"""
    num_steps: int = 128
    """steps of each environment between two updates"""
    learning_rate: float = 2e-3
    """step size of Adam"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    gae_lambda: float = 0.95
    """how far ahead rewards count before the critic takes over"""
    update_epochs: int = 4
    """passes over each rollout"""
    minibatch_size: int = 256
    """transitions in a gradient step"""
    clip_coef: float = 0.2
    """how far an update may move an action's probability: the ratio counts within 1 plus or minus this"""
    ent_coef: float = 0.01
    """what a nat of the policy's entropy is worth in the loss"""
    vf_coef: float = 0.5
    """what the critic's error weighs in the loss"""
    max_grad_norm: float = 0.5
    """longer gradients are shortened to this"""
    torch_threads: int = 1
    """of the learner; more only slow networks as small as these"""
    track: bool = True
    """whether to write runs/..., if TensorBoard is installed"""
    wandb_project: str | None = None
    """also log to this project of Weights & Biases"""
    launcher: Launching = field(default_factory=LocalLauncher)


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.actor = nn.Sequential(
            nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_actions)
        )

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions (sampled unless given), their log-probabilities, entropies and values."""
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)[..., 0]


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes, in the order in which they ended."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)

    run_name = f"{args.env_id}__actions__{args.seed}__{int(time.time())}"
    scalars = Scalars(run_name, args, track=args.track, wandb_project=args.wandb_project)
    envs: gym.vector.VectorEnv
    if args.gymnasium:
        envs = gym.vector.SyncVectorEnv([lambda: gym.make(args.env_id)] * args.num_envs)
    else:
        envs = ClusterEnv(args.env_id, args.num_envs, num_workers=args.num_workers, launcher=args.launcher)

    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    assert isinstance(observation_space, gym.spaces.Box), "only flat observations are supported"
    assert isinstance(action_space, gym.spaces.Discrete), "only discrete actions are supported"
    agent = Agent(int(np.prod(observation_space.shape)), int(action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = args.num_steps, args.num_envs
    obs = torch.zeros((args.num_steps + 1, args.num_envs, int(np.prod(observation_space.shape))))
    actions, logprobs, rewards = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(shape)
    terminated, done, valid = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))

    returns: list[float] = []
    recent: deque[float] = deque(maxlen=100)
    running_returns = np.zeros(args.num_envs)
    was_done = np.zeros(args.num_envs, np.bool_)
    num_updates = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
    next_obs, _ = envs.reset(seed=args.seed)
    with scalars, contextlib.closing(envs):
        for update in range(num_updates):
            for step in range(args.num_steps):
                obs[step] = torch.as_tensor(next_obs).flatten(1)
                with torch.no_grad():
                    actions[step], logprobs[step], _, _ = agent.get_action_and_value(obs[step])
                next_obs, reward, terminations, truncations, _ = envs.step(actions[step].numpy())
                is_done = terminations | truncations
                rewards[step] = torch.as_tensor(reward)
                terminated[step], done[step] = torch.as_tensor(terminations), torch.as_tensor(is_done)
                # Gymnasium resets in the step after an episode's last: the action of that step is ignored.
                valid[step] = torch.as_tensor(~was_done)
                was_done = is_done
                running_returns += reward
                for index in np.flatnonzero(is_done):
                    returns.append(float(running_returns[index]))
                    recent.append(returns[-1])
                    running_returns[index] = 0.0

            # An episode's last observation is the row after its end, so every action's successor is the next row.
            obs[-1] = torch.as_tensor(next_obs).flatten(1)
            advantages = torch.zeros(shape)
            with torch.no_grad():
                values = agent.critic(obs)[..., 0]
                # A truncated episode has a future: its last observation's value. A terminated one has none.
                errors = rewards + args.gamma * ~terminated * values[1:] - values[:-1]
                ahead = torch.zeros(args.num_envs)
                for t in reversed(range(args.num_steps)):
                    advantages[t] = ahead = errors[t] + args.gamma * args.gae_lambda * ~done[t] * ahead
            columns = (obs[:-1], actions, logprobs, advantages, advantages + values[:-1])
            batch = [column[valid] for column in columns]

            num_rows = len(batch[0])
            for _ in range(args.update_epochs):
                for rows in torch.randperm(num_rows).tensor_split(max(1, num_rows // args.minibatch_size)):
                    x, action, old, advantage, target = (column[rows] for column in batch)
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    _, logprob, entropy, value = agent.get_action_and_value(x, action)
                    ratio = (logprob - old).exp()
                    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
                    value_loss = 0.5 * (value - target).square().mean()
                    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
            scalars.write(
                (update + 1) * args.num_envs * args.num_steps,
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "value_loss": value_loss.item(),
                    "entropy": entropy.mean().item(),
                },
            )
    print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}.")
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
