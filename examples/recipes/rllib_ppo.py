"""RLlib: PPO whose env runner steps a ClusterEnv, by a registration with a `vector_entry_point`.

pip install . "ray[rllib]==2.60.0" tyro
python -m examples.recipes.rllib_ppo    # a return of 500 after 50,000 steps, seed 1
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import ray
import tyro
from ray.rllib.algorithms.ppo import PPOConfig

from clusterenv import vector_entry_point


@dataclass
class Args:
    """What can be chosen."""

    env_id: str = "CartPole-v1"
    num_envs: int = 16
    num_workers: int = 2
    total_steps: int = 50_000
    batch_steps: int = 1024
    seed: int = 1


def main(args: Args) -> None:
    """Train, and tell how good it is."""
    name = f"clusterenv/{args.env_id}"
    gym.register(
        name,
        entry_point=gym.spec(args.env_id).entry_point,
        # Every argument of ClusterEnv may be given here: launcher=SlurmLauncher(...), say.
        vector_entry_point=vector_entry_point(args.env_id, num_workers=args.num_workers),
    )
    config = (
        PPOConfig()
        .environment(name)
        # One runner, in this process: its environments are on workers anyway.
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=args.num_envs,
            gym_env_vectorize_mode=gym.VectorizeMode.VECTOR_ENTRY_POINT,
        )
        .training(train_batch_size=args.batch_steps, minibatch_size=256, num_epochs=8, lr=1e-3)
        .debugging(seed=args.seed)
    )
    algorithm = config.build_algo()
    num_steps = 0
    while num_steps < args.total_steps:
        results = algorithm.train()
        num_steps = int(results["num_env_steps_sampled_lifetime"])
        print(f"return {results['env_runners']['episode_return_mean']:.1f} after {num_steps} steps", flush=True)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args))
