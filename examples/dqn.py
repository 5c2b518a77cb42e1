"""DQN: the workers explore with a Q-network as new as they need, and the head learns from replay.

    python -m examples.dqn

It reaches a mean return of 179 over the last 100 episodes (exploring 5 % of the time) after 50,000 steps; seed 1, two
workers on a two-core machine that others were using, 5.5 minutes at `nice -n 10`, 56 seconds of CPU time. The workers
pulled weights 336 times, where every-update sync would have taken 752 pulls, and 24,000 gradient steps were made.

The exploration rate travels with the call, so it changes without any weights being sent. The weights change with every
gradient step; workers take them only when their own Q-values have drifted (docs/explanation/sync.md).
`rollout.transitions()` has true successors, even where an episode was cut short, so only real ends stop the bootstrap.
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
from numpy.typing import NDArray
from torch import nn

from clusterenv import AdaptiveSync, ClusterEnv, LocalLauncher
from clusterenv.rollout import Transitions
from examples.launching import Launching
from examples.scalars import Scalars


@dataclass
class Args:
    """DQN, with double Q-learning."""

    env_id: str = "CartPole-v1"
    """which environment"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 50_000
    """environment steps"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, from seeds that training has not seen"""
    num_envs: int = 16
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    num_steps: int = 8
    """steps of each environment between two rounds of learning"""
    sync_threshold: float = 0.5
    """how far a worker's policy may drift from the newest (mean KL, nats) before it takes the newest weights"""
    learning_rate: float = 5e-4
    """falls to 0 over the run: Q-learning that goes on at full speed unlearns again"""
    buffer_size: int = 50_000
    """transitions that are kept for replay"""
    learning_starts: int = 2_000
    """environment steps before the first gradient step"""
    steps_per_gradient: float = 2.0
    """environment steps for each gradient step"""
    batch_size: int = 128
    """transitions in a gradient step"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    tau: float = 0.005
    """how far the target network moves towards the newest with each gradient step"""
    start_e: float = 1.0
    """epsilon, the share of random actions, at the start"""
    end_e: float = 0.05
    """epsilon at the end"""
    exploration_fraction: float = 0.3
    """the share of the run in which epsilon falls from start_e to end_e"""
    torch_threads: int = 1
    """of the learner; more only slow networks as small as these"""
    track: bool = True
    """whether to write runs/..., if TensorBoard is installed"""
    wandb_project: str | None = None
    """also log to this project of Weights & Biases"""
    launcher: Launching = field(default_factory=LocalLauncher)


class QNetwork(nn.Module):
    """A value for each action; its name tells the workers that these are Q-values."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(num_inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_actions)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values `[n, actions]`."""
        values: torch.Tensor = self.network(x)
        return values


class ReplayBuffer:
    """A ring of the newest transitions."""

    def __init__(self, size: int, num_inputs: int, seed: int) -> None:
        self._arrays: tuple[NDArray[np.generic], ...] = (
            np.zeros((size, num_inputs), np.float32),
            np.zeros(size, np.int64),
            np.zeros(size, np.float32),
            np.zeros((size, num_inputs), np.float32),
            np.zeros(size, np.bool_),
        )
        self._rng = np.random.default_rng(seed)
        self._size = size
        self._num_added = 0

    def add(self, new: Transitions) -> None:
        """Put transitions in, over the oldest."""
        num_new = len(new.rewards)
        places = (self._num_added + np.arange(num_new)) % self._size
        parts = (
            new.obs.reshape(num_new, -1),
            new.actions,
            new.rewards,
            new.next_obs.reshape(num_new, -1),
            new.terminated,
        )
        for array, part in zip(self._arrays, parts, strict=True):
            array[places] = part
        self._num_added += num_new

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
    recent: deque[float] = deque(maxlen=100)
    run_name = f"{args.env_id}__dqn__{args.seed}__{int(time.time())}"
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
        assert isinstance(action_space, gym.spaces.Discrete), "only discrete actions are supported"
        num_inputs, num_actions = int(np.prod(observation_space.shape)), int(action_space.n)
        q_network, target_network = QNetwork(num_inputs, num_actions), QNetwork(num_inputs, num_actions)
        target_network.load_state_dict(q_network.state_dict())
        optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
        buffer = ReplayBuffer(args.buffer_size, num_inputs, args.seed)
        num_made, num_gradients, loss = 0, 0, torch.tensor(float("nan"))
        envs.reset(seed=args.seed)
        while num_made < args.total_timesteps:
            progress = num_made / (args.exploration_fraction * args.total_timesteps)
            epsilon = max(args.end_e, args.start_e + (args.end_e - args.start_e) * progress)
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - num_made / args.total_timesteps)
            rollout = envs.rollout(q_network, args.num_steps, values={"epsilon": epsilon})
            buffer.add(rollout.transitions())
            num_made += rollout.num_steps * rollout.num_envs
            returns += rollout.episodes.returns.tolist()
            recent.extend(rollout.episodes.returns.tolist())

            while num_gradients < (num_made - args.learning_starts) / args.steps_per_gradient:
                obs, actions, rewards, next_obs, terminated = buffer.sample(args.batch_size)
                with torch.no_grad():
                    best = q_network(next_obs).argmax(1, keepdim=True)
                    following = target_network(next_obs).gather(1, best)[:, 0]
                    targets = rewards + args.gamma * ~terminated * following
                values = q_network(obs).gather(1, actions[:, None])[:, 0]
                loss = nn.functional.smooth_l1_loss(values, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for old, new in zip(target_network.parameters(), q_network.parameters(), strict=True):
                        old.lerp_(new, args.tau)
                num_gradients += 1

            stats = envs.stats
            scalars.write(
                num_made,
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "epsilon": epsilon,
                    "loss": loss.item(),
                    "pulls": stats["pulls"],
                    "gradients": num_gradients,
                },
            )
        print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}. {envs.summary()}")
        print(envs.evaluate(q_network, args.eval_episodes, seed=args.seed + 1_000_000))
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
