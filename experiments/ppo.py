"""PPO's learner, plain and decoupled.

Plain PPO clips the probability ratio against the policy that *made* the data. Where workers may lag behind, that policy
is old, and clipping holds the learner close to it. Decoupled PPO (Hilton, Cobbe, Schulman: "Batch size-invariance for
policy optimization", 2021) separates the two roles of the old policy: it clips against the learner's own policy from
just before the update, and corrects for who made the data with the weight recent/behaviour probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clusterenv import ClusterEnv, Rollout
from clusterenv.adapters.torch import RewardScaler
from experiments.agents import Evaluated, GaussianAgent, MlpAgent
from experiments.tasks import PpoSettings

Evaluate: TypeAlias = Callable[[Any], NDArray[np.float32]]


class PpoTraining:
    """Learns from each rollout, once.

    Args:
        settings: All of them.
        envs: What is learned on.
        seed: Of the network, and of the order in which transitions are learned from.
        is_decoupled: Whether to clip against the learner's recent policy rather than the one that made the data.
    """

    def __init__(self, settings: PpoSettings, envs: ClusterEnv, seed: int, *, is_decoupled: bool) -> None:
        observation_space, action_space = envs.single_observation_space, envs.single_action_space
        assert isinstance(observation_space, gym.spaces.Box)
        num_inputs = math.prod(observation_space.shape)
        torch.manual_seed(seed)
        self.agent: MlpAgent | GaussianAgent
        if isinstance(action_space, gym.spaces.Discrete):
            self.agent = MlpAgent(num_inputs, int(action_space.n))
        else:
            assert isinstance(action_space, gym.spaces.Box)
            self.agent = GaussianAgent(num_inputs, math.prod(action_space.shape))
        self._settings = settings
        self._scale_rewards = RewardScaler(settings.num_envs, settings.discount)
        config = PpoConfig(
            decoupled=is_decoupled,
            learning_rate=settings.learning_rate,
            epochs=settings.epochs,
            minibatch_size=settings.minibatch_size,
            discount=settings.discount,
            entropy_weight=settings.entropy_weight,
        )
        self._learner = Learner(self.agent, config, seed)

    def values(self, progress: float) -> None:
        """Return nothing: the agent explores by itself."""

    def learn(self, rollout: Rollout, progress: float) -> None:
        """Learn from a rollout."""
        self._learner.update(
            replace(rollout, rewards=self._scaled_rewards(rollout)), self._settings.learning_rate * (1 - progress)
        )
        # After the update, so that ratios compare policies under one normalisation.
        if isinstance(self.agent, GaussianAgent) and self._settings.is_normalised:
            self.agent.normalise.update(rollout.obs[rollout.valid])

    def _scaled_rewards(self, rollout: Rollout) -> NDArray[Any]:
        """Return rewards of a size that critics learn easily."""
        if self._settings.reward_scale is None:
            return self._scale_rewards(rollout.rewards, rollout.terminations | rollout.truncations)
        return self._settings.reward_scale * rollout.rewards


class Agent(Protocol):
    """What the learner improves: a torch module with CleanRL's two methods."""

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values, shape `[n, 1]`."""

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Evaluated:
        """Return actions (sampled unless given), their log-probabilities, the entropies, and the values `[n, 1]`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return what is learned."""


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """The usual settings of PPO.

    They are those of CleanRL's `ppo.py`, the size of a minibatch (128 there) included, without its annealing and its
    clipped value loss. With rollouts as large as here, keeping its number of minibatches instead would leave a learner
    that takes a sixteenth of the steps.

    Args:
        decoupled: Whether to clip against the learner's recent policy rather than the one that made the data.
        weight_cap: The largest recent/behaviour weight a transition may have, so that a few improbable actions of a
            very old policy do not drown the rest. Decoupled PPO only.
    """

    decoupled: bool
    learning_rate: float = 2.5e-4
    epochs: int = 4
    minibatch_size: int = 125
    discount: float = 0.99
    trace: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    max_gradient_norm: float = 0.5
    weight_cap: float = 5.0


@dataclass(frozen=True)
class Batch:
    """The valid transitions of a rollout, each `[M, ...]`.

    Args:
        anchor: Log-probability of the action under the policy that the ratio is clipped against.
        weights: What each transition's policy loss is multiplied by.
    """

    obs: torch.Tensor
    actions: torch.Tensor
    anchor: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    targets: torch.Tensor


class Learner:
    """Improves an agent, rollout by rollout.

    Both objectives take values and advantages from the learner's own critic, as it is before the update, so that they
    differ in nothing but the policy loss.

    Args:
        agent: Changed in place; ClusterEnv notices automatically.
        config: How.
        seed: Of the order in which transitions are learned from.
    """

    def __init__(self, agent: Agent, config: PpoConfig, seed: int) -> None:
        self._agent = agent
        self._config = config
        self._optimizer = torch.optim.Adam(agent.parameters(), lr=config.learning_rate, eps=1e-5)
        self._rng = np.random.default_rng(seed)

    def update(self, rollout: Rollout, learning_rate: float | None = None) -> None:
        """Learn from a rollout, whatever mix of versions made it.

        Args:
            rollout: What to learn from.
            learning_rate: From now on, for those that anneal it.
        """
        if learning_rate is not None:
            self._optimizer.param_groups[0]["lr"] = learning_rate
        batch = self._prepare(rollout)
        size = len(batch.actions)
        for _ in range(self._config.epochs):
            order = torch.from_numpy(self._rng.permutation(size))
            # Equal parts: a remainder of a single row would have no standard deviation.
            for rows in order.tensor_split(max(1, size // self._config.minibatch_size)):
                loss = self._loss(batch, rows)
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                nn.utils.clip_grad_norm_(self._agent.parameters(), self._config.max_gradient_norm)
                self._optimizer.step()

    @torch.no_grad()
    def _prepare(self, rollout: Rollout) -> Batch:
        num_steps, num_envs = rollout.rewards.shape
        flat = torch.as_tensor(rollout.obs).flatten(0, 1).float()
        actions = torch.as_tensor(rollout.actions).flatten(0, 1)
        _, logprobs, _, value = self._agent.get_action_and_value(flat, actions)
        values = value.reshape(num_steps, num_envs).numpy()
        advantages = estimate_advantages(
            rollout,
            values,
            follow_values(
                rollout, values, lambda obs: self._agent.get_value(torch.as_tensor(obs).float()).numpy()[:, 0]
            ),
            self._config.discount,
            self._config.trace,
        )
        # The rows that reset an environment are not transitions: their action was never taken.
        rows = torch.from_numpy(rollout.valid).flatten()
        behaviour = torch.as_tensor(rollout.logprob).flatten()
        is_decoupled = self._config.decoupled
        weights = (logprobs - behaviour).exp().clamp(max=self._config.weight_cap)
        return Batch(
            obs=flat[rows],
            actions=actions[rows],
            anchor=(logprobs if is_decoupled else behaviour)[rows],
            weights=(weights if is_decoupled else torch.ones_like(weights))[rows],
            advantages=torch.from_numpy(advantages).flatten()[rows],
            targets=torch.from_numpy(advantages + values).flatten()[rows],
        )

    def _loss(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        config = self._config
        _, logprobs, entropy, value = self._agent.get_action_and_value(batch.obs[rows], batch.actions[rows])
        advantages = batch.advantages[rows]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (logprobs - batch.anchor[rows]).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(1 - config.clip, 1 + config.clip) * advantages)
        policy_loss = -(batch.weights[rows] * gain).mean()
        value_loss = 0.5 * (value.flatten() - batch.targets[rows]).square().mean()
        return policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy.mean()


def follow_values(rollout: Rollout, values: NDArray[np.float32], evaluate: Evaluate) -> NDArray[np.float32]:
    """Return the value of the state that each action really led to, shape `[T, N]`.

    Where an episode ended, that is its final observation, in every autoreset mode.

    Args:
        rollout: T steps of N environments.
        values: Of its observations.
        evaluate: From observations `[n, ...]` to values `[n]`.
    """
    following = np.concatenate([values[1:], evaluate(rollout.next_obs)[None]])
    finals = rollout.finals
    if len(finals.steps):
        following[finals.steps, finals.columns] = evaluate(finals.obs)
    return following


def estimate_advantages(
    rollout: Rollout,
    values: NDArray[np.float32],
    following: NDArray[np.float32],
    discount: float,
    trace: float,
) -> NDArray[np.float32]:
    """Estimate generalized advantages, shape `[T, N]`; those of invalid rows mean nothing.

    A terminated episode has no future. A truncated one has, of which the value of its final observation is the best
    guess. The trace ends with the episode in both cases, so that nothing flows back out of a reset row or the next
    episode.
    """
    is_done = rollout.terminations | rollout.truncations
    errors = rollout.rewards + discount * following * ~rollout.terminations - values
    advantages = np.zeros_like(values)
    running = np.zeros(values.shape[1], np.float64)
    for step in reversed(range(len(values))):
        running = errors[step] + discount * trace * ~is_done[step] * running
        advantages[step] = running
    return advantages
