"""PPO with an LSTM: a pole is balanced from positions alone, so speeds must be remembered.

    python -m examples.ppo_lstm

It reaches a mean return of 309 over the last 100 episodes after 150,000 steps, and 309 in 20 evaluated ones, still
rising; seed 1, two workers on a two-core machine that others were using, 1.9 minutes. The workers share the head's
memory and pull every version: with weights of 136 kB, a pull takes less time there than a check
(docs/explanation/sync.md).

The workers carry the recurrent state from step to step and reset it to zero where an episode starts. `rollout.states`
has the state before each step; the learner starts every sequence from the first of them. The objective, and the rest,
are as in examples/ppo.py.
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
from torch.distributions import Categorical

from clusterenv import AdaptiveSync, ClusterEnv, LocalLauncher
from examples.launching import Launching
from examples.scalars import Scalars

State = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Args:
    """PPO with an LSTM."""

    env_id: str = "CartPole-v1"
    """which environment"""
    hidden_inputs: tuple[int, ...] = (1, 3)
    """observations that the agent does not see: in CartPole the two speeds"""
    seed: int = 1
    """of the environments, the weights and the order of learning"""
    total_timesteps: int = 150_000
    """environment steps"""
    eval_episodes: int = 20
    """episodes of the evaluation at the end, from seeds that training has not seen"""
    num_envs: int = 32
    """environments, shared out evenly over the workers"""
    num_workers: int | None = None
    """worker processes; by default one per core"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    sync_threshold: float = 0.05
    """how far a worker's policy may drift from the newest (mean KL, nats) before it takes the newest weights"""
    learning_rate: float = 2e-3
    """falls to 0 over the run"""
    gamma: float = 0.99
    """how much a reward counts one step earlier"""
    gae_lambda: float = 0.95
    """how far ahead rewards count before the critic takes over"""
    reward_scale: float = 0.05
    """what the learner multiplies rewards by, so that values are of the size that networks learn easily"""
    update_epochs: int = 4
    """passes over each rollout"""
    num_minibatches: int = 4
    """sequences of different environments are the minibatches"""
    clip_coef: float = 0.2
    """how far an update may move an action's probability: the ratio counts within 1 plus or minus this"""
    ent_coef: float = 0.01
    """what a nat of the policy's entropy is worth in the loss"""
    vf_coef: float = 0.5
    """what the critic's error weighs in the loss"""
    max_grad_norm: float = 0.5
    """longer gradients are shortened to this"""
    weight_cap: float = 5.0
    """the largest weight of a transition for having been made by an older policy"""
    torch_threads: int = 1
    """of the learner; more only slow networks as small as these"""
    track: bool = True
    """whether to write runs/..., if TensorBoard is installed"""
    wandb_project: str | None = None
    """also log to this project of Weights & Biases"""
    launcher: Launching = field(default_factory=LocalLauncher)


def make_env(env_id: str, hidden_inputs: tuple[int, ...]) -> gym.Env[Any, Any]:
    """Make one environment, on its worker, and hide a part of its observations."""
    env = gym.make(env_id)
    space = env.observation_space
    assert isinstance(space, gym.spaces.Box), "only flat observations are supported"
    seen = [index for index in range(space.shape[0]) if index not in hidden_inputs]
    part = gym.spaces.Box(space.low[seen], space.high[seen], dtype=np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[seen], part)


class Agent(nn.Module):
    """An actor and a critic over an LSTM; workers understand CleanRL's signature as it is."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh())
        self.lstm = nn.LSTM(64, 64)
        self.actor, self.critic = nn.Linear(64, num_actions), nn.Linear(64, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def get_states(self, x: torch.Tensor, state: State, done: torch.Tensor) -> tuple[torch.Tensor, State]:
        """Run over sequences `[T * n, ...]` of n environments, from zero wherever `done` says that a row starts one."""
        num_envs = state[0].shape[1]
        hidden = self.network(x).reshape(-1, num_envs, 64)
        keeps = 1.0 - done.reshape(-1, num_envs)
        outputs = []
        for row, keep in zip(hidden, keeps, strict=True):
            kept = keep.view(1, -1, 1)
            output, state = self.lstm(row.unsqueeze(0), (kept * state[0], kept * state[1]))
            outputs.append(output)
        return torch.cat(outputs).flatten(0, 1), state

    def get_action_and_value(
        self, x: torch.Tensor, state: State, done: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, State]:
        """Return actions (sampled unless given), their log-probabilities, entropies, values, and the next state."""
        hidden, state = self.get_states(x, state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), state


def train(args: Args) -> list[float]:
    """Train; returns the returns of all episodes, in the order in which they ended."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.torch_threads)
    returns: list[float] = []
    recent: deque[float] = deque(maxlen=100)
    run_name = f"{args.env_id}__ppo_lstm__{args.seed}__{int(time.time())}"
    with (
        Scalars(run_name, args, track=args.track, wandb_project=args.wandb_project) as scalars,
        ClusterEnv(
            functools.partial(make_env, args.env_id, args.hidden_inputs),
            args.num_envs,
            num_workers=args.num_workers,
            launcher=args.launcher,
            sync=AdaptiveSync(threshold=args.sync_threshold),
        ) as envs,
    ):
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box), "only flat observations are supported"
        assert isinstance(action_space, gym.spaces.Discrete), "only discrete actions are supported"
        agent = Agent(observation_space.shape[0], int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        num_updates = max(1, args.total_timesteps // (args.num_envs * args.num_steps))
        envs.reset(seed=args.seed)
        for update in range(num_updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - update / num_updates)
            rollout = envs.rollout(agent, args.num_steps)
            returns += rollout.episodes.returns.tolist()
            recent.extend(rollout.episodes.returns.tolist())

            # A row more than steps: an episode's last observation is the row after its end, so every action's
            # successor, final observations of truncated episodes included, is simply the next row. The row after that
            # starts the next episode; where the first row does, its state is the initial one already.
            obs = torch.as_tensor(np.concatenate([rollout.obs, rollout.next_obs[None]]), dtype=torch.float32)
            valid = torch.as_tensor(rollout.valid)
            starts = torch.cat([torch.zeros(1, args.num_envs), (~valid).float()])
            actions = torch.as_tensor(rollout.actions)
            done = torch.as_tensor(rollout.terminations | rollout.truncations)
            first = tuple(torch.as_tensor(rollout.states[name][0]).transpose(0, 1).contiguous() for name in ("h", "c"))
            advantages = torch.zeros(args.num_steps, args.num_envs)
            with torch.no_grad():
                hidden, _ = agent.get_states(obs.flatten(0, 1), (first[0], first[1]), starts)
                hidden = hidden.reshape(args.num_steps + 1, args.num_envs, -1)
                values = agent.critic(hidden)[..., 0]  # By the newest critic: the workers' may be older.
                anchor = Categorical(logits=agent.actor(hidden[:-1])).log_prob(actions)
                weights = (anchor - torch.as_tensor(rollout.logprob)).exp().clamp(max=args.weight_cap)
                # A truncated episode has a future: its last observation's value. A terminated one has none.
                rewards = args.reward_scale * torch.as_tensor(rollout.rewards, dtype=torch.float32)
                errors = rewards + args.gamma * ~torch.as_tensor(rollout.terminations) * values[1:] - values[:-1]
                ahead = torch.zeros(args.num_envs)
                for t in reversed(range(args.num_steps)):
                    advantages[t] = ahead = errors[t] + args.gamma * args.gae_lambda * ~done[t] * ahead
            targets = advantages + values[:-1]

            for _ in range(args.update_epochs):
                for chosen in torch.randperm(args.num_envs).chunk(args.num_minibatches):
                    keep = valid[:, chosen].flatten()
                    columns = (anchor, weights, advantages, targets)
                    old, weight, advantage, target = (column[:, chosen].flatten()[keep] for column in columns)
                    _, logprob, entropy, value, _ = agent.get_action_and_value(
                        obs[:-1, chosen].flatten(0, 1),
                        (first[0][:, chosen], first[1][:, chosen]),
                        starts[:-1, chosen],
                        actions[:, chosen].flatten(),
                    )
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    ratio = (logprob[keep] - old).exp()
                    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                    policy_loss = -(weight * torch.min(ratio * advantage, clipped * advantage)).mean()
                    value_loss = 0.5 * (value[keep, 0] - target).square().mean()
                    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy[keep].mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()

            stats = envs.stats
            scalars.write(
                stats["env_steps"],
                {
                    "return": float(np.mean(recent)) if recent else float("nan"),
                    "value_loss": value_loss.item(),
                    "entropy": entropy.mean().item(),
                    "divergence": stats["divergence"],
                    "pulls": stats["pulls"],
                },
            )
        print(f"Mean return of the last {len(recent)} episodes: {np.mean(recent):.1f}. {envs.summary()}")
        print(envs.evaluate(agent, args.eval_episodes, seed=args.seed + 1_000_000))
    return returns


if __name__ == "__main__":
    train(tyro.cli(Args))
