r"""PPO from pixels (Atari): a convolutional network on the workers; images travel to the head as bytes.

    pip install "clusterenv-rl[torch,atari,examples]"
    python -m examples.ppo_atari
    python -m examples.ppo_atari --env-id ALE/CrazyClimber-v5 --max-episode-steps 256 --screen-size 42 --num-envs 16 \
        --num-steps 64 --learning-rate 1e-3 --clip-coef 0.2 --torch-threads 1 --total-timesteps 21504

The first command is Pong with CleanRL's hyper-parameters. It takes hours on a few cores and was not run here; CleanRL
reports 20.4 for Pong and 415 for Breakout after 10 million steps, with each life an episode and no sticky actions. The
second is small enough to watch: the climber's score in 256 steps rises from 550 in the first 16 episodes to 1,156 in
the last 16 (with seed 2 from 538 to 1,281); two workers on a two-core machine that others were using heavily,
13 minutes at `nice -n 5`, 47 seconds of CPU time. It shows that the agent learns, not how far it gets.

Observations stay bytes until they are inside the network, so a stack of four frames travels as 28,224 bytes and not as
four times that. Rewards are clipped to -1, 0 or 1 on the head, for the learner only: the reported returns are the
game's own scores. The objective, and the rest, are as in examples/ppo.py.
"""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ale_py
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
    """PPO from pixels, with discrete actions."""

    env_id: str = "ALE/Pong-v5"
    """which environment"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 10_000_000
    """environment steps, each of `frame_skip` frames"""
    eval_episodes: int = 5
    """episodes of the evaluation at the end, from seeds that training has not seen"""
    num_envs: int = 8
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    frame_skip: int = 4
    """frames that an action is repeated for; the last two are merged, since sprites flicker"""
    frame_stack: int = 4
    """how many observations the agent sees at once, to tell speeds"""
    screen_size: int = 84
    """rows and columns that the screen is scaled to; with 42 the network costs a seventh"""
    max_episode_steps: int | None = None
    """cut episodes off after so many steps; by default only the game itself ends them"""
    sync_threshold: float = 0.05
    """how far a worker's policy may drift from the newest (mean KL, nats) before it takes the newest weights"""
    learning_rate: float = 2.5e-4
    """falls to 0 over the run"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    gae_lambda: float = 0.95
    """how far ahead rewards count before the critic takes over"""
    update_epochs: int = 4
    """passes over each rollout"""
    minibatch_size: int = 256
    """transitions in a gradient step"""
    clip_coef: float = 0.1
    """how far an update may move an action's probability: the ratio counts within 1 plus or minus this"""
    ent_coef: float = 0.01
    """what a nat of the policy's entropy is worth in the loss"""
    vf_coef: float = 0.5
    """what the critic's error weighs in the loss"""
    max_grad_norm: float = 0.5
    """longer gradients are shortened to this"""
    weight_cap: float = 5.0
    """the largest weight of a transition for having been made by an older policy"""
    torch_threads: int | None = None
    """of the learner; by default torch's own choice, one per core: workers wait while the head learns"""
    track: bool = True
    """whether to write runs/..., if TensorBoard is installed"""
    wandb_project: str | None = None
    """also log to this project of Weights & Biases"""
    launcher: Launching = field(default_factory=LocalLauncher)


def make_env(
    env_id: str, frame_skip: int, frame_stack: int, screen_size: int, max_episode_steps: int | None
) -> gym.Env[Any, Any]:
    """Make one environment, on its worker: grey frames `[frame_stack, screen_size, screen_size]`, as bytes."""
    gym.register_envs(ale_py)
    env: gym.Env[Any, Any] = gym.make(env_id, frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=frame_skip, screen_size=screen_size)
    env = gym.wrappers.FrameStackObservation(env, frame_stack)
    return env if max_episode_steps is None else gym.wrappers.TimeLimit(env, max_episode_steps)


class Agent(nn.Module):
    """An actor and a critic over one convolutional network, that of Mnih et al. (2015)."""

    def __init__(self, frame_stack: int, screen_size: int, num_actions: int) -> None:
        super().__init__()
        convolutions = nn.Sequential(
            scaled(nn.Conv2d(frame_stack, 32, 8, stride=4)),
            nn.ReLU(),
            scaled(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            scaled(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
        )
        num_features = convolutions(torch.zeros(1, frame_stack, screen_size, screen_size)).shape[1]
        self.network = nn.Sequential(convolutions, scaled(nn.Linear(num_features, 512)), nn.ReLU())
        self.actor = scaled(nn.Linear(512, num_actions), 0.01)
        self.critic = scaled(nn.Linear(512, 1), 1.0)

    def get_action_and_value(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return actions (sampled unless given), their log-probabilities, entropies and values, for bytes `x`."""
        hidden = self.network(x / 255.0)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)


def scaled(layer: nn.Conv2d | nn.Linear, gain: float = 2**0.5) -> nn.Module:
    """Initialise a layer orthogonally."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes, in the order in which they ended."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    if args.torch_threads is not None:
        torch.set_num_threads(args.torch_threads)
    returns: list[float] = []
    recent: deque[float] = deque(maxlen=100)
    run_name = f"{args.env_id.replace('/', '-')}__ppo_atari__{args.seed}__{int(time.time())}"
    with (
        Scalars(run_name, args, track=args.track, wandb_project=args.wandb_project) as scalars,
        ClusterEnv(
            functools.partial(
                make_env, args.env_id, args.frame_skip, args.frame_stack, args.screen_size, args.max_episode_steps
            ),
            args.num_envs,
            num_workers=args.num_workers,
            launcher=args.launcher,
            sync=AdaptiveSync(threshold=args.sync_threshold),
        ) as envs,
    ):
        action_space = envs.single_action_space
        assert isinstance(action_space, gym.spaces.Discrete), "only discrete actions are supported"
        agent = Agent(args.frame_stack, args.screen_size, int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        num_updates = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
        envs.reset(seed=args.seed)
        for update in range(num_updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - update / num_updates)
            rollout = envs.rollout(agent, args.num_steps)
            returns += rollout.episodes.returns.tolist()
            recent.extend(rollout.episodes.returns.tolist())

            obs, actions = torch.as_tensor(rollout.obs), torch.as_tensor(rollout.actions)
            rewards = torch.as_tensor(np.sign(rollout.rewards), dtype=torch.float32)
            terminated, done = rollout.terminations, rollout.terminations | rollout.truncations
            values = torch.zeros(args.num_steps + 1, args.num_envs)
            anchor, advantages = torch.zeros_like(rewards), torch.zeros_like(rewards)
            with torch.no_grad():
                # Row by row: all images at once would be gigabytes as floats. By the newest agent: the workers' may be
                # older. An episode's last observation is the row after its end, so every action's successor, final
                # observations of truncated episodes included, is simply the next row.
                for t in range(args.num_steps):
                    _, anchor[t], _, value = agent.get_action_and_value(obs[t], actions[t])
                    values[t] = value[:, 0]
                values[-1] = agent.get_action_and_value(torch.as_tensor(rollout.next_obs))[3][:, 0]
                weights = (anchor - torch.as_tensor(rollout.logprob)).exp().clamp(max=args.weight_cap)
                # A truncated episode has a future: its last observation's value. A terminated one has none.
                errors = rewards + args.gamma * ~torch.as_tensor(terminated) * values[1:] - values[:-1]
                ahead = torch.zeros(args.num_envs)
                for t in reversed(range(args.num_steps)):
                    ahead = errors[t] + args.gamma * args.gae_lambda * ~torch.as_tensor(done[t]) * ahead
                    advantages[t] = ahead
            valid = torch.as_tensor(rollout.valid)
            columns = (obs, actions, anchor, weights, advantages, advantages + values[:-1])
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
                stats["env_steps"],
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "reward": float(rewards.mean()),
                    "value_loss": value_loss.item(),
                    "entropy": entropy.mean().item(),
                    "divergence": stats["divergence"],
                    "pulls": stats["pulls"],
                    "steps_per_second": stats["env_steps_per_second"],
                },
            )
        print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}. {envs.summary()}")
        print(envs.evaluate(agent, args.eval_episodes, seed=args.seed + 1_000_000))
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
