"""Stable-Baselines3's models and policies as policies on workers, with their own distributions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.policies import BasePolicy as SB3Policy
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.sac.policies import SACPolicy
from stable_baselines3.td3.policies import TD3Policy
from torch import distributions as td

from clusterenv.adapters.torch import TorchPolicy
from clusterenv.adapters.torch.module import as_floats
from clusterenv.errors import PolicyError
from clusterenv.policy.array_kinds import NumpyArrays
from clusterenv.policy.families import Deterministic

log = logging.getLogger(__name__)


def sb3_policy(agent: BaseAlgorithm | SB3Policy) -> TorchPolicy:
    """Return a policy that acts as a model, or its `policy`, does.

    PPO and A2C return "logprob" and "value", SAC "logprob". Actions of Gaussian policies are not clipped: give the
    environment a `ClipAction` wrapper. A DQN is greedy unless `values={"epsilon": ...}` is given, and a TD3 is
    deterministic unless "noise" is.

    Raises:
        PolicyError: The model is of another kind.
    """
    policy: Any = agent.policy if isinstance(agent, BaseAlgorithm) else agent
    normalizer = agent.get_vec_normalize_env() if isinstance(agent, BaseAlgorithm) else None
    if normalizer is not None and normalizer.norm_obs:
        log.warning(
            "The model was trained behind a VecNormalize, which stays on the head: workers give it raw observations. "
            "Normalise them on the workers: docs/how-to/normalise.md."
        )
    if type(policy).__module__.startswith("sb3_contrib") or not isinstance(policy, _KNOWN):
        raise PolicyError(
            f"A {type(policy).__name__} of Stable-Baselines3 is not understood: only PPO's, A2C's, DQN's, SAC's, TD3's "
            "and DDPG's policies are. Say how it acts: TorchPolicy(model.policy, act=lambda policy, obs: ...)."
        )
    if getattr(policy, "use_sde", False):
        raise PolicyError("Policies with use_sde=True are not understood: their noise outlasts a step.")
    if isinstance(policy, ActorCriticPolicy):
        return TorchPolicy(policy, distribution=_actor_distribution, value=_value)
    if isinstance(policy, DQNPolicy):
        return TorchPolicy(policy.q_net, output="q")
    if isinstance(policy, SACPolicy):
        return TorchPolicy(policy.actor, distribution=_squashed)
    return TorchPolicy(policy.actor, distribution=_deterministic)


_KNOWN = (ActorCriticPolicy, DQNPolicy, SACPolicy, TD3Policy)


def _actor_distribution(policy: Any, obs: Any) -> Any:
    return policy.get_distribution(obs).distribution


def _value(policy: Any, obs: Any) -> torch.Tensor:
    values: torch.Tensor = policy.predict_values(obs)
    return values


def _squashed(actor: Any, obs: Any) -> td.Distribution:
    mean, log_std, _ = actor.get_action_dist_params(obs)
    low, high = _bounds(actor)
    transforms = [td.TanhTransform(), td.AffineTransform((low + high) / 2, (high - low) / 2)]
    return td.TransformedDistribution(td.Normal(mean, log_std.exp()), transforms)


def _deterministic(actor: Any, obs: Any) -> Deterministic:
    low, high = _bounds(actor)
    action = low + 0.5 * (actor(obs) + 1.0) * (high - low)
    return Deterministic(as_floats(action), as_floats((high - low) / 2), as_floats(low), as_floats(high))


def _bounds(actor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    space = actor.action_space
    return torch.as_tensor(space.low), torch.as_tensor(space.high)


class Sb3Models(NumpyArrays):
    """Replaces a model that a function refers to, as in `lambda obs: model.predict(obs)[0]`, with its policy only.

    A model also holds its environments, its buffers and its logger.
    """

    def __init__(self) -> None:
        self._stand_ins: dict[int, tuple[BaseAlgorithm, Predictor]] = {}

    def is_array(self, obj: object) -> bool:
        return False

    def replace(self, obj: object) -> object:
        if not isinstance(obj, BaseAlgorithm):
            return obj
        known = self._stand_ins.get(id(obj))
        if known is None or known[1].policy is not obj.policy:
            known = self._stand_ins[id(obj)] = obj, Predictor(obj.policy)
        return known[1]


class Predictor:
    """Stands in for a model on workers.

    Attributes:
        policy: The model's policy.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @property
    def predict(self) -> Callable[..., Any]:
        """The policy's `predict`, which does what the model's does."""
        found: Callable[..., Any] = self.policy.predict
        return found
