"""PPO with continuous actions (MuJoCo): the workers sample, the head learns.

    pip install "gymnasium[mujoco]"
    python -m examples.ppo_continuous

It reaches a mean return of 558 over the last 100 episodes (1000 is the maximum) after 100,000 steps, and 1000 in each
of 20 evaluated ones; without its normalisation (`--no-normalise`) 195 and 919. Seed 1, two workers on a two-core
machine. The workers pulled weights 14 times, where every-update sync would have taken 48 pulls. Larger
robots need more steps, for instance `--env-id HalfCheetah-v5 --total-timesteps 1000000`; that was not run here.

Observations are normalised inside the agent, by a mean and a deviation that the head computes from all rollouts and
that travel with the weights: one normalisation for all environments, wherever they run, and an exported agent carries
it along. Rewards are scaled on the head, so the reported returns are the environment's own. The objective, and the
rest, are as in examples/ppo.py.
"""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Normal

from clusterenv import AdaptiveSync, ClusterEnv, LocalLauncher
from clusterenv.adapters.torch import Normaliser, RewardScaler
from examples.launching import Launching
from examples.scalars import Scalars


@dataclass
class Args:
    """PPO with continuous actions."""

    env_id: str = "InvertedPendulum-v5"
    """which environment"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 100_000
    """environment steps"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, from seeds that training has not seen"""
    num_envs: int = 16
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    num_steps: int = 256
    """steps of each environment in a rollout"""
    sync_threshold: float = 0.05
    """how far a worker's policy may drift from the newest (mean KL, nats) before it takes the newest weights"""
    learning_rate: float = 3e-4
    """falls to 0 over the run"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    gae_lambda: float = 0.95
    """how far ahead rewards count before the critic takes over"""
    update_epochs: int = 10
    """passes over each rollout"""
    minibatch_size: int = 256
    """transitions in a gradient step"""
    clip_coef: float = 0.2
    """how far an update may move an action's probability: the ratio counts within 1 plus or minus this"""
    ent_coef: float = 0.0
    """what a nat of the policy's entropy is worth in the loss"""
    vf_coef: float = 0.5
    """what the critic's error weighs in the loss"""
    max_grad_norm: float = 0.5
    """longer gradients are shortened to this"""
    normalise: bool = True
    """observations, by what all workers have seen so far, and rewards"""
    weight_cap: float = 5.0
    """the largest weight of a transition for having been made by an older policy"""
    torch_threads: int = 1
    """of the learner; more only slow networks as small as these"""
    track: bool = True
    """whether to write runs/..., if TensorBoard is installed"""
    wandb_project: str | None = None
    """also log to this project of Weights & Biases"""
    launcher: Launching = field(default_factory=LocalLauncher)


def make_env(env_id: str) -> gym.Env[Any, Any]:
    """Make one environment, on its worker. A Gaussian knows no bounds, so actions are clipped there."""
    return gym.wrappers.ClipAction(gym.make(env_id))


class Agent(nn.Module):
    """An actor and a critic, perceptrons both, over normalised observations."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.normalise = Normaliser(num_inputs)
        self.critic = mlp(num_inputs, 1, 1.0)
        self.actor_mean = mlp(num_inputs, num_actions, 0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(num_actions))

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions (sampled unless given), their log-probabilities, entropies and values."""
        x = self.normalise(x.float())
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.exp().expand_as(mean))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(-1), probs.entropy().sum(-1), self.critic(x)


def mlp(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    """Make two hidden layers of 64 tanh units, orthogonally initialised."""
    layers = [nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes, in the order in which they ended."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    returns: list[float] = []
    recent: deque[float] = deque(maxlen=100)
    run_name = f"{args.env_id}__ppo_continuous__{args.seed}__{int(time.time())}"
    with (
        Scalars(run_name, args, track=args.track, wandb_project=args.wandb_project) as scalars,
        ClusterEnv(
            functools.partial(make_env, args.env_id),
            args.num_envs,
            num_workers=args.num_workers,
            launcher=args.launcher,
            sync=AdaptiveSync(threshold=args.sync_threshold),
        ) as envs,
    ):
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box), "only flat observations are supported"
        assert isinstance(action_space, gym.spaces.Box), "only continuous actions are supported"
        agent = Agent(int(np.prod(observation_space.shape)), int(np.prod(action_space.shape)))
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        scale_rewards = RewardScaler(args.num_envs, args.gamma)
        num_updates = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
        envs.reset(seed=args.seed)
        for update in range(num_updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - update / num_updates)
            rollout = envs.rollout(agent, args.num_steps)
            returns += rollout.episodes.returns.tolist()
            recent.extend(rollout.episodes.returns.tolist())
            ends, done = rollout.terminations, rollout.terminations | rollout.truncations

            scaled = scale_rewards(rollout.rewards, done) if args.normalise else rollout.rewards
            rewards = torch.as_tensor(scaled, dtype=torch.float32)

            # A row more than steps: an episode's last observation is the row after its end, so every action's
            # successor, final observations of truncated episodes included, is simply the next row.
            obs = torch.as_tensor(np.concatenate([rollout.obs, rollout.next_obs[None]]), dtype=torch.float32)
            actions = torch.as_tensor(rollout.actions)
            advantages = torch.zeros(args.num_steps, args.num_envs)
            with torch.no_grad():
                values = agent.critic(agent.normalise(obs))[..., 0]  # By the newest critic: the workers' may be older.
                anchor = agent.get_action_and_value(obs[:-1], actions)[1]
                weights = (anchor - torch.as_tensor(rollout.logprob)).exp().clamp(max=args.weight_cap)
                # A truncated episode has a future: its last observation's value. A terminated one has none.
                errors = rewards + args.gamma * ~torch.as_tensor(ends) * values[1:] - values[:-1]
                ahead = torch.zeros(args.num_envs)
                for t in reversed(range(args.num_steps)):
                    ahead = errors[t] + args.gamma * args.gae_lambda * ~torch.as_tensor(done[t]) * ahead
                    advantages[t] = ahead
            valid = torch.as_tensor(rollout.valid)
            columns = (obs[:-1], actions, anchor, weights, advantages, advantages + values[:-1])
            batch = [column[valid] for column in columns]

            num_rows = len(batch[0])
            for _ in range(args.update_epochs):
                for rows in torch.randperm(num_rows).tensor_split(max(1, num_rows // args.minibatch_size)):
                    x, action, old, weight, advantage, target = (column[rows] for column in batch)
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    _, logprob, entropy, value = agent.get_action_and_value(x, action)
                    ratio = (logprob - old).exp()
                    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    policy_loss = -(weight * torch.min(ratio * advantage, clipped * advantage)).mean()
                    value_loss = 0.5 * (value[:, 0] - target).square().mean()
                    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()

            # After the update, so that ratios compare policies under one normalisation.
            if args.normalise:
                agent.normalise.update(batch[0])
            stats = envs.stats
            scalars.write(
                stats["env_steps"],
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "value_loss": value_loss.item(),
                    "std": agent.actor_logstd.exp().mean().item(),
                    "divergence": stats["divergence"],
                    "pulls": stats["pulls"],
                    "steps_per_second": stats["env_steps_per_second"],
                },
            )
        print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}. {envs.summary()}")
        print(envs.evaluate(agent, args.eval_episodes, seed=args.seed + 1_000_000, deterministic=True))
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
