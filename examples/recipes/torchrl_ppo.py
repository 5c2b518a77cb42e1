"""TorchRL: PPO with a collector whose environment is a ClusterEnv, through TorchRL's own `GymWrapper`.

pip install . torchrl==0.14.1 tyro
python -m examples.recipes.torchrl_ppo    # a return of about 190 after 50,000 steps, seed 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from gymnasium.spaces import flatdim
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from clusterenv import ClusterEnv


@dataclass
class Args:
    """What can be chosen."""

    env_id: str = "CartPole-v1"
    num_envs: int = 16
    num_workers: int = 2
    total_steps: int = 50_000
    batch_steps: int = 1024
    seed: int = 1


def make_network(num_inputs: int, num_outputs: int) -> nn.Module:
    """Make an actor's or a critic's network."""
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def main(args: Args) -> None:
    """Train, and tell how good it is."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    # TorchRL expects the next episode's first observation in the step that ends the last one.
    envs = ClusterEnv(args.env_id, args.num_envs, num_workers=args.num_workers, autoreset_mode="SameStep")
    env = TransformedEnv(GymWrapper(envs), RewardSum())
    env.set_seed(args.seed)
    num_inputs, num_actions = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    logits = TensorDictModule(make_network(num_inputs, num_actions), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    critic = ValueOperator(make_network(num_inputs, 1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.9, value_network=critic, average_gae=True)
    objective = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-3)
    collector = Collector(
        env,
        actor,
        frames_per_batch=args.batch_steps,
        total_frames=args.total_steps,
        auto_register_policy_transforms=False,
    )
    num_steps = 0
    for batch in collector:
        num_steps += batch.numel()
        for _ in range(8):
            with torch.no_grad():
                advantage(batch)
            flat = batch.reshape(-1)
            for rows in torch.randperm(len(flat)).split(256):
                losses = objective(flat[rows])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(objective.parameters(), 0.5)
                optimizer.step()
        ended = batch["next", "done"]
        if ended.any():
            print(f"return {batch['next', 'episode_reward'][ended].mean():.1f} after {num_steps} steps", flush=True)
    collector.shutdown()  # Closes the environments, too.


if __name__ == "__main__":
    main(tyro.cli(Args))
