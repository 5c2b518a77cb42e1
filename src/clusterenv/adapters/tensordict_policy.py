"""TensorDict modules, such as TorchRL's actors, as policies on workers."""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from clusterenv.adapters.torch import TorchPolicy
from clusterenv.adapters.torch.distributions import describe
from clusterenv.adapters.torch.module import TORCH, as_floats
from clusterenv.errors import PolicyError
from clusterenv.policy.array_kinds import NumpyArrays
from clusterenv.policy.families import QValues

_Q_KEY = "action_value"  # Where TorchRL's QValueActor and its relatives write Q-values.


def tensordict_policy(agent: Any) -> TorchPolicy:
    """Return a policy that acts as a module over TensorDicts does.

    Observations are given under the module's first in-key or, if they are a dict, under their own names. A
    probabilistic actor returns "logprob", and an operator with a value head also "value". One-hot actions become
    indices, as environments take them.

    Raises:
        PolicyError: The module does not return an action.
    """
    if hasattr(agent, "get_policy_operator") and hasattr(agent, "get_value_operator"):
        parts = _ActorAndCritic(agent.get_policy_operator(), agent.get_value_operator())
        if isinstance(parts.actor, ProbabilisticTensorDictSequential) and "state_value" in parts.critic.out_keys:
            return _TensorDictPolicy(parts, distribution=_both_distribution, value=_both_value)
        agent = parts.actor
    if isinstance(agent, ProbabilisticTensorDictSequential):
        if "action" not in agent.out_keys:
            raise PolicyError(_no_action(agent))
        return _TensorDictPolicy(agent, distribution=_distribution)
    if _Q_KEY in agent.out_keys:
        return _TensorDictPolicy(agent, distribution=_q_values)
    if "action" not in agent.out_keys:
        raise PolicyError(_no_action(agent))
    return _TensorDictPolicy(agent, act=_act)


class TensorDictModules(NumpyArrays):
    """Pickles a module over TensorDicts that wraps a function like everything else.

    By itself, such a module would pickle its function separately, with copies of its networks. No array is of this
    kind, so workers need tensordict only if such a module is sent.
    """

    def is_array(self, obj: object) -> bool:
        return False

    def reduce_object(self, obj: object) -> tuple[Any, ...] | None:
        if isinstance(obj, TensorDictModule) and not isinstance(obj.module, nn.Module):
            return copyreg.__newobj__, (type(obj),), vars(obj), None, None, _restore  # type: ignore[attr-defined]  # as pickle itself writes it
        return None


def _restore(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)


class _TensorDictPolicy(TorchPolicy):
    kinds = (TORCH, TensorDictModules())


class _ActorAndCritic(nn.Module):
    """The two operators that an ActorValueOperator is split into; their common part stays shared."""

    def __init__(self, actor: Any, critic: Any) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic


def _both_distribution(parts: _ActorAndCritic, obs: Any) -> Any:
    return _distribution(parts.actor, obs)


def _both_value(parts: _ActorAndCritic, obs: Any) -> torch.Tensor:
    value: torch.Tensor = parts.critic(_as_tensordict(parts.critic, obs))["state_value"]
    return value


def _distribution(actor: Any, obs: Any) -> Any:
    found = actor.get_dist(_as_tensordict(actor, obs))
    try:
        describe(found)
    except PolicyError as error:
        raise PolicyError(
            f"The actor's {type(found).__name__} cannot be described: {error} Or let it act in its own way: "
            "TorchPolicy(actor, act=lambda actor, obs: ...), with the actions, or a dict with 'action', as result."
        ) from error
    return found


def _q_values(actor: Any, obs: Any) -> QValues:
    return QValues(as_floats(actor(_as_tensordict(actor, obs))[_Q_KEY]))


def _act(actor: Any, obs: Any) -> torch.Tensor:
    action: torch.Tensor = actor(_as_tensordict(actor, obs))["action"]
    return action


def _as_tensordict(module: Any, obs: Any) -> TensorDict:
    named = obs if isinstance(obs, dict) else {module.in_keys[0]: obs}
    first = next(iter(named.values()))
    while isinstance(first, dict | tuple):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return TensorDict(named, batch_size=[len(first)], device=first.device)


def _no_action(agent: Any) -> str:
    return (
        f"A {type(agent).__name__} with out_keys {list(agent.out_keys)} is not a policy: it makes no 'action'. "
        "Give the actor, for instance TensorDictModule(network, in_keys=['observation'], out_keys=['action'])."
    )
