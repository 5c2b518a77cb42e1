"""PPO on a stream: the workers keep sampling while the head learns, and V-trace corrects for their older policies.

    python -m examples.ppo_async

It reaches a mean return of 198 over the last 100 episodes (200 counts as solved) after 1 million steps; seed 1, two
workers on a two-core machine that others were using heavily, 42 minutes at `nice -n 12`, 2.8 minutes of CPU time. The
workers pulled weights 89 times, where every-update sync would have taken 490 pulls.

The policy that made a stream's rollout may be several updates old (`rollout.ages`). Two things make up for that, both
computed with the newest agent. Values and advantages are V-trace's (Espeholt et al., 2018), which tells from the
behaviour policy's log-probabilities how likely the newest policy would have been to act in the same way. And the ratio
is clipped against the learner's own policy from just before the update, as in examples/ppo.py.
"""

from __future__ import annotations

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

from clusterenv import AdaptiveSync, ClusterEnv, LocalLauncher
from examples.launching import Launching
from examples.scalars import Scalars


@dataclass
class Args:
    """PPO on a stream of rollouts, with V-trace."""

    env_id: str = "LunarLander-v3"
    """which environment"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 1_000_000
    """environment steps"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, from seeds that training has not seen"""
    num_envs: int = 32
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    batch_envs: int | None = None
    """learn from rollouts of so many environments at a time, whichever were ready first; by default num_envs"""
    in_flight: int = 1
    """how many rollouts a worker may make ahead of the learner; more keep it busier and make them older"""
    sync_threshold: float = 0.05
    """how far a worker's policy may drift from the newest (mean KL, nats) before it takes the newest weights"""
    learning_rate: float = 1e-3
    """falls to 0 over the run"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    trace_lambda: float = 0.95
    """how far ahead rewards count before the critic takes over; GAE's lambda"""
    rho_cap: float = 1.0
    """V-trace's bound of a transition's importance weight; larger ones have more variance and less bias"""
    trace_cap: float = 1.0
    """V-trace's bound of what a transition passes on to those before it"""
    reward_scale: float = 0.05
    """what the learner multiplies rewards by, so that values are of the size that networks learn easily"""
    update_epochs: int = 6
    """passes over each batch"""
    minibatch_size: int = 256
    """transitions in a gradient step"""
    clip_coef: float = 0.2
    """how far an action's probability may move in an update: the ratio stays within 1 plus or minus this"""
    ent_coef: float = 0.01
    """what a nat of the policy's entropy is worth in the loss"""
    vf_coef: float = 0.5
    """what the critic's squared error weighs in the loss"""
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
    """An actor and a critic, perceptrons both; workers understand `get_action_and_value` as it is."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.critic = mlp(num_inputs, 1, 1.0)
        self.actor = mlp(num_inputs, num_actions, 0.01)

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions (sampled unless given), their log-probabilities, entropies and values."""
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def mlp(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    """Make two hidden layers of 64 tanh units, orthogonally initialised."""
    layers = [nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes, in the order in which they were delivered."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    returns: list[float] = []
    recent: deque[float] = deque(maxlen=100)
    run_name = f"{args.env_id}__ppo_async__{args.seed}__{int(time.time())}"
    with (
        Scalars(run_name, args, track=args.track, wandb_project=args.wandb_project) as scalars,
        ClusterEnv(
            args.env_id,
            args.num_envs,
            num_workers=args.num_workers,
            launcher=args.launcher,
            sync=AdaptiveSync(threshold=args.sync_threshold),
        ) as envs,
    ):
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box), "only flat observations are supported"
        assert isinstance(action_space, gym.spaces.Discrete), "only discrete actions are supported"
        agent = Agent(int(np.prod(observation_space.shape)), int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        num_made = 0
        envs.reset(seed=args.seed)
        batch_envs = args.batch_envs or args.num_envs
        for rollout in envs.stream(agent, args.num_steps, min_envs=batch_envs, in_flight=args.in_flight):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - num_made / args.total_timesteps)
            num_made += rollout.num_steps * rollout.num_envs
            returns += rollout.episodes.returns.tolist()
            recent.extend(rollout.episodes.returns.tolist())

            # A row more than steps: an episode's last observation is the row after its end, so every action's
            # successor, final observations of truncated episodes included, is simply the next row.
            obs = torch.as_tensor(np.concatenate([rollout.obs, rollout.next_obs[None]]), dtype=torch.float32).flatten(2)
            actions = torch.as_tensor(rollout.actions)
            with torch.no_grad():
                values = agent.critic(obs)[..., 0]
                anchor = agent.get_action_and_value(obs[:-1], actions)[1]
                weights = (anchor - torch.as_tensor(rollout.logprob)).exp()
            advantages, targets = trace(
                args.reward_scale * torch.as_tensor(rollout.rewards, dtype=torch.float32),
                values,
                torch.as_tensor(rollout.terminations),
                torch.as_tensor(rollout.terminations | rollout.truncations),
                weights,
                args,
            )
            valid = torch.as_tensor(rollout.valid)
            columns = (obs[:-1], actions, anchor, weights.clamp(max=args.rho_cap), advantages, targets)
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

            stats = envs.stats
            scalars.write(
                num_made,
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "value_loss": value_loss.item(),
                    "entropy": entropy.mean().item(),
                    "age": float(rollout.ages.mean()),
                    "weight": batch[3].mean().item(),
                    "divergence": stats["divergence"],
                    "pulls": stats["pulls"],
                    "idle_share": stats["worker_idle_share"],
                },
            )
            if num_made >= args.total_timesteps:
                break
        print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}. {envs.summary()}")
        print(envs.evaluate(agent, args.eval_episodes, seed=args.seed + 1_000_000))
    return returns


def trace(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    weights: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate V-trace's advantages and value targets, `[T, N]` each, from values `[T + 1, N]`.

    `weights` are the newest policy's probability of each action over that of the policy that took it. Where all are 1
    this is generalized advantage estimation. A terminated episode has no future; a truncated one has, of which the
    value of its last observation is the best guess. The trace ends with the episode in both cases.
    """
    errors = rewards + args.gamma * ~terminated * values[1:] - values[:-1]
    steps = weights.clamp(max=args.rho_cap) * errors
    carries = args.gamma * args.trace_lambda * ~done * weights.clamp(max=args.trace_cap)
    advantages, corrections, running = torch.zeros_like(errors), torch.zeros_like(errors), torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        # The action's own weight is left to the policy's loss; what follows it has been corrected already.
        advantages[t] = errors[t] + args.gamma * args.trace_lambda * ~done[t] * running
        corrections[t] = running = steps[t] + carries[t] * running
    return advantages, values[:-1] + corrections


if __name__ == "__main__":
    train(tyro.cli(Args))
