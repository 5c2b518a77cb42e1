"""JAX: PPO with a flax network; workers choose the actions, and need JAX but not flax.

pip install '.[jax]' flax optax tyro
python -m examples.recipes.jax_ppo
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen as nn

from clusterenv import ClusterEnv
from clusterenv.adapters.jax import JaxPolicy


@dataclass
class Args:
    """What can be chosen."""

    env_id: str = "CartPole-v1"
    num_envs: int = 16
    num_workers: int = 2
    num_steps: int = 128
    total_steps: int = 100_000
    seed: int = 1


class ActorCritic(nn.Module):
    """Logits and values from two networks."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `[n, actions]` and `[n]`."""
        actor, critic = (nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))) for _ in range(2))
        small = nn.initializers.orthogonal(0.01)
        return nn.Dense(self.num_actions, kernel_init=small)(actor), nn.Dense(1)(critic)[:, 0]


def advantages(rollout: Any, last: np.ndarray, gamma: float = 0.99, lam: float = 0.95) -> np.ndarray:
    """Estimate how much better each action was than expected (GAE)."""
    values = np.concatenate([rollout.value, last[None]])
    deltas = rollout.rewards + gamma * ~rollout.terminations * values[1:] - values[:-1]
    goes_on, ahead = ~(rollout.terminations | rollout.truncations), np.zeros_like(deltas)
    for t in reversed(range(len(deltas))):
        ahead[t] = deltas[t] + (gamma * lam * goes_on[t] * ahead[t + 1] if t + 1 < len(deltas) else 0.0)
    return ahead


def main(args: Args) -> None:
    """Train, and tell how good it is."""
    rng = np.random.default_rng(args.seed)
    with ClusterEnv(args.env_id, args.num_envs, num_workers=args.num_workers) as envs:
        network = ActorCritic(int(envs.single_action_space.n))
        obs, _ = envs.reset(seed=args.seed)
        params = network.init(jax.random.key(args.seed), obs)
        policy = JaxPolicy(network, params, output="logits")
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
        moments = optimizer.init(params)

        def loss(params: Any, obs: Any, action: Any, old: Any, advantage: Any, target: Any, valid: Any) -> jax.Array:
            logits, value = network.apply(params, obs)
            logprobs = jax.nn.log_softmax(logits)
            ratio = jnp.exp(logprobs[jnp.arange(len(action)), action] - old)
            gain = jnp.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
            entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
            return ((0.5 * (value - target) ** 2 - gain - 0.01 * entropy) * valid).sum() / valid.sum()

        @jax.jit
        def update(params: Any, moments: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
            steps, moments = optimizer.update(jax.grad(loss)(params, *batch), moments)
            return optax.apply_updates(params, steps), moments

        size, returns = args.num_steps * args.num_envs, []
        for done in range(size, args.total_steps + 1, size):
            rollout = envs.rollout(policy, args.num_steps)
            last = np.asarray(network.apply(params, rollout.next_obs)[1])
            ahead = advantages(rollout, last)
            scaled = (ahead - ahead[rollout.valid].mean()) / (ahead[rollout.valid].std() + 1e-8)
            rows = (rollout.obs, rollout.actions, rollout.logprob, scaled, ahead + rollout.value, rollout.valid)
            flat = [part.reshape(size, *part.shape[2:]).astype(part.dtype) for part in rows]
            for chosen in (part for _ in range(4) for part in np.split(rng.permutation(size), 4)):
                params, moments = update(params, moments, tuple(part[chosen] for part in flat))
            policy.params = params  # The next rollout acts by these.
            returns = [*returns, *rollout.episodes.returns][-100:]
            print(f"return {np.mean(returns) if returns else 0.0:.1f} after {done} steps", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
