"""tianshou: DQN whose collector steps a ClusterEnv.

pip install . tianshou==2.0.1 tyro
python -m examples.recipes.tianshou_dqn    # a return of 316 after 25,000 steps, seed 1
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import torch
import tyro
from gymnasium.spaces import flatdim
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from clusterenv.adapters.tianshou import ClusterVectorEnv


@dataclass
class Args:
    """What can be chosen."""

    env_id: str = "CartPole-v1"
    num_envs: int = 16
    num_workers: int = 2
    epochs: int = 5
    epoch_steps: int = 5_000
    seed: int = 1


def main(args: Args) -> None:
    """Train, and tell how good it is."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    envs = ClusterVectorEnv([lambda: gym.make(args.env_id)] * args.num_envs, num_workers=args.num_workers)
    envs.seed(args.seed)
    space = envs.action_space[0]
    network = Net(state_shape=envs.observation_space[0].shape, action_shape=flatdim(space), hidden_sizes=[64, 64])
    policy = DiscreteQLearningPolicy(model=network, action_space=space, eps_training=0.1, eps_inference=0.0)
    learner = DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        gamma=0.99,
        n_step_return_horizon=3,
        target_update_freq=200,
    )
    training = Collector(learner, envs, VectorReplayBuffer(20_000, args.num_envs), exploration_noise=True)
    result = learner.run_training(
        OffPolicyTrainerParams(
            training_collector=training,
            test_collector=Collector(learner, envs),
            max_epochs=args.epochs,
            epoch_num_steps=args.epoch_steps,
            collection_step_num_env_steps=2 * args.num_envs,
            update_step_num_gradient_steps_per_sample=0.125,
            test_step_num_episodes=args.num_envs,
            verbose=False,
            show_progress=False,
        )
    )
    print(f"return {result.best_score:.1f} after {args.epochs * args.epoch_steps} steps")
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
