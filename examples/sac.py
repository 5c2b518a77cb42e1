"""SAC with continuous actions: the workers keep sampling while the head learns from replay.

    python -m examples.sac

It reaches a mean return of -145 over the last 20 episodes, about the best possible, after 20,000 steps; seed 1, two
workers on a two-core machine that others were using, 6.3 minutes, 70 seconds of the head's CPU time. The workers
pulled weights 241 times, where every-update sync would have taken 596 pulls.

Only the actor is sent to workers; the critics stay on the head. Workers take new weights when their own actor has
drifted (docs/explanation/sync.md). `rollout.transitions()` has true successors, even where a time limit cut an episode
short, so only real ends stop the bootstrap; in Pendulum there are none.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import deque
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import nn
from torch.distributions import Normal

from clusterenv import AdaptiveSync, ClusterEnv, LocalLauncher
from clusterenv.rollout import Transitions
from examples.launching import Launching
from examples.scalars import Scalars


@dataclass
class Args:
    """SAC, with a tuned entropy."""

    env_id: str = "Pendulum-v1"
    """which environment"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 20_000
    """environment steps"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, from seeds that training has not seen"""
    num_envs: int = 8
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    num_steps: int = 8
    """steps of each environment between two rounds of learning"""
    sync_threshold: float = 0.5
    """how far a worker's policy may drift from the newest (mean KL, nats) before it takes the newest weights"""
    hidden: int = 64
    """units of each of the two hidden layers"""
    learning_rate: float = 1e-3
    """step size of Adam"""
    buffer_size: int = 200_000
    """transitions that are kept for replay"""
    learning_starts: int = 1_000
    """environment steps before the first gradient step"""
    steps_per_gradient: float = 2.0
    """environment steps for each gradient step"""
    batch_size: int = 256
    """transitions in a gradient step"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    tau: float = 0.01
    """how far the target critics move towards the newest with each gradient step"""
    torch_threads: int = 1
    """of the learner; more only slow networks as small as these"""
    track: bool = True
    """whether to write runs/..., if TensorBoard is installed"""
    wandb_project: str | None = None
    """also log to this project of Weights & Biases"""
    launcher: Launching = field(default_factory=LocalLauncher)


class Actor(nn.Module):
    """A Gaussian under tanh; workers know it by `get_action`, `action_scale` and `action_bias`, CleanRL's names."""

    action_scale: torch.Tensor
    action_bias: torch.Tensor

    def __init__(self, num_inputs: int, space: gym.spaces.Box, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean, self.log_std = nn.Linear(hidden, space.shape[0]), nn.Linear(hidden, space.shape[0])
        self.register_buffer("action_scale", torch.as_tensor((space.high - space.low) / 2.0, dtype=torch.float32))
        self.register_buffer("action_bias", torch.as_tensor((space.high + space.low) / 2.0, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Gaussian's means and the logarithms of its deviations, these between -5 and 2."""
        hidden = self.body(x.float())
        return self.mean(hidden), -5.0 + 3.5 * (torch.tanh(self.log_std(hidden)) + 1.0)

    def get_action(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample actions that gradients flow through, and return their log-probabilities `[n]`."""
        mean, log_std = self(x)
        normal = Normal(mean, log_std.exp())
        raw = normal.rsample()
        squashed = torch.tanh(raw)
        logprob = normal.log_prob(raw) - torch.log(self.action_scale * (1.0 - squashed**2) + 1e-6)
        return squashed * self.action_scale + self.action_bias, logprob.sum(1)


class Critics(nn.Module):
    """Two estimates of an action's value, of which the smaller is believed."""

    def __init__(self, num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Linear(num_inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Return both values `[2, n]`."""
        both = torch.cat([x, action], 1)
        return torch.stack([net(both)[:, 0] for net in self.nets])


class ReplayBuffer:
    """A ring of the newest transitions."""

    def __init__(self, size: int, num_inputs: int, num_actions: int, seed: int) -> None:
        shapes = ((size, num_inputs), (size, num_actions), (size,), (size, num_inputs), (size,))
        self._arrays: list[NDArray[np.float32]] = [np.zeros(shape, np.float32) for shape in shapes]
        self._rng = np.random.default_rng(seed)
        self._size = size
        self._num_added = 0

    def add(self, new: Transitions) -> None:
        """Put transitions in, over the oldest."""
        places = (self._num_added + np.arange(len(new.rewards))) % self._size
        parts = new.obs, new.actions, new.rewards, new.next_obs, new.terminated
        for array, part in zip(self._arrays, parts, strict=True):
            array[places] = part
        self._num_added += len(new.rewards)

    def sample(self, batch_size: int) -> list[torch.Tensor]:
        """Draw transitions: observations, actions, rewards, next observations, whether that was the end."""
        places = self._rng.integers(min(self._num_added, self._size), size=batch_size)
        return [torch.from_numpy(array[places]) for array in self._arrays]


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes, in the order in which they ended."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    returns: list[float] = []
    recent: deque[float] = deque(maxlen=20)
    run_name = f"{args.env_id}__sac__{args.seed}__{int(time.time())}"
    with (
        Scalars(run_name, args, track=args.track, wandb_project=args.wandb_project) as scalars,
        ClusterEnv(
            args.env_id,
            args.num_envs,
            num_workers=args.num_workers,
            launcher=args.launcher,
            sync=AdaptiveSync.off_policy(args.sync_threshold),
        ) as envs,
    ):
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box), "only flat observations are supported"
        assert isinstance(action_space, gym.spaces.Box), "only continuous actions are supported"
        num_inputs, num_actions = observation_space.shape[0], action_space.shape[0]
        actor = Actor(num_inputs, action_space, args.hidden)
        critics = Critics(num_inputs + num_actions, args.hidden)
        targets = copy.deepcopy(critics)
        log_alpha = torch.zeros((), requires_grad=True)
        optimizers = [
            torch.optim.Adam(parameters, lr=args.learning_rate)
            for parameters in (critics.parameters(), actor.parameters(), [log_alpha])
        ]

        def descend(which: int, loss: torch.Tensor) -> None:
            optimizers[which].zero_grad()
            loss.backward()
            optimizers[which].step()

        buffer = ReplayBuffer(args.buffer_size, num_inputs, num_actions, args.seed)
        num_made, num_gradients = 0, 0
        envs.reset(seed=args.seed)
        # Replay does not mind how old a policy was: whatever comes is learned from.
        for rollout in envs.stream(actor, args.num_steps, min_envs=args.num_envs, max_lag=math.inf):
            buffer.add(rollout.transitions())
            num_made += rollout.num_steps * rollout.num_envs
            returns += rollout.episodes.returns.tolist()
            recent.extend(rollout.episodes.returns.tolist())

            while num_gradients < (num_made - args.learning_starts) / args.steps_per_gradient:
                obs, actions, rewards, next_obs, terminated = buffer.sample(args.batch_size)
                alpha = log_alpha.exp().detach()
                with torch.no_grad():
                    next_actions, next_logprob = actor.get_action(next_obs)
                    following = targets(next_obs, next_actions).min(0).values - alpha * next_logprob
                    wanted = rewards + args.gamma * (1.0 - terminated) * following
                descend(0, (critics(obs, actions) - wanted).square().mean(1).sum())
                new_actions, logprob = actor.get_action(obs)
                descend(1, (alpha * logprob - critics(obs, new_actions).min(0).values).mean())
                descend(2, -(log_alpha.exp() * (logprob.detach() - num_actions)).mean())
                with torch.no_grad():
                    for old, new in zip(targets.parameters(), critics.parameters(), strict=True):
                        old.lerp_(new, args.tau)
                num_gradients += 1

            scalars.write(
                num_made,
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "alpha": log_alpha.exp().item(),
                    "pulls": envs.stats["pulls"],
                    "gradients": num_gradients,
                },
            )
            if num_made >= args.total_timesteps:
                break
        print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}. {envs.summary()}")
        print(envs.evaluate(actor, args.eval_episodes, seed=args.seed + 1_000_000, deterministic=True))
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
