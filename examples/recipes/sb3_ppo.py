"""Stable-Baselines3: PPO on a ClusterEnv, made by SB3's own `make_vec_env`.

pip install ".[sb3]" tyro
python -m examples.recipes.sb3_ppo    # a return of 196 after 50,000 steps, seed 1
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from clusterenv.adapters.sb3 import ClusterVecEnv


@dataclass
class Args:
    """What can be chosen."""

    env_id: str = "CartPole-v1"
    num_envs: int = 16
    num_workers: int = 2
    total_steps: int = 50_000
    seed: int = 1


def main(args: Args) -> None:
    """Train, and tell how good it is."""
    envs = make_vec_env(
        args.env_id,
        n_envs=args.num_envs,
        seed=args.seed,
        vec_env_cls=ClusterVecEnv,  # type: ignore[arg-type]  # SB3 names only its own two
        vec_env_kwargs={"num_workers": args.num_workers},  # And launcher=SlurmLauncher(...), say.
    )
    model = PPO("MlpPolicy", envs, n_steps=32, batch_size=256, gae_lambda=0.8, seed=args.seed, device="cpu")
    model.learn(args.total_steps)
    mean, spread = evaluate_policy(model, envs, n_eval_episodes=args.num_envs)
    print(f"return {mean:.1f} +- {spread:.1f} after {model.num_timesteps} steps")
    envs.close()


if __name__ == "__main__":
    main(tyro.cli(Args))
