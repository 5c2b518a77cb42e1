"""Adapters: turn what users have (a framework's agent, a function) into a policy.

A framework's adapter is imported only when an agent of that framework is given.
"""

from __future__ import annotations

import sys

from clusterenv.errors import PolicyError
from clusterenv.policy.array_kinds import ArrayKind
from clusterenv.policy.policy import FunctionPolicy, Policy, Selected, TrackedPolicy

__all__ = ["as_policy", "as_separate_policy", "as_travelling_policy"]


def as_policy(agent: object) -> Policy:
    """Return the agent if it is a policy already, otherwise wrap it: a torch module, a TorchRL actor, ..., a function.

    Raises:
        PolicyError: The agent is none of these, or it is unclear how it chooses actions.
    """
    if isinstance(agent, type):
        raise PolicyError(f"{agent.__name__} is a class; give an instance of it: {agent.__name__}(...).")
    if isinstance(agent, Policy):
        return agent
    owner = getattr(agent, "__self__", None)
    if getattr(agent, "__name__", "") == "predict" and "stable_baselines3" in _origins(owner):
        raise PolicyError(
            f"The predict of a {type(owner).__name__} returns (actions, state), not actions. Give the model itself: "
            "envs.rollout(model, ...); or lambda obs: model.predict(obs)[0]."
        )
    if owner is not None and getattr(agent, "__name__", "") == "get_action_and_value":
        raise PolicyError(
            f"The get_action_and_value of a {type(owner).__name__} returns (action, logprob, entropy, value), not "
            "actions. Give the agent itself: envs.rollout(agent, ...)."
        )
    origins = _origins(agent)
    if "stable_baselines3" in origins:
        from clusterenv.adapters.sb3_policy import sb3_policy

        return sb3_policy(agent)  # type: ignore[arg-type]  # it refuses what it does not know
    if origins & {"tensordict", "torchrl"}:
        from clusterenv.adapters.tensordict_policy import tensordict_policy

        return tensordict_policy(agent)
    if "torch" in origins:
        from clusterenv.adapters.torch import TorchPolicy

        return TorchPolicy(agent)  # type: ignore[arg-type]  # TorchPolicy refuses what is not an nn.Module
    if origins & {"flax", "equinox"}:
        params = ", params" if "flax.linen.module" in {base.__module__ for base in type(agent).__mro__} else ""
        raise PolicyError(
            f"Cannot tell what a {type(agent).__name__} returns. Say so in one line:\n\n"
            f"    from clusterenv.adapters.jax import JaxPolicy\n"
            f'    policy = JaxPolicy(agent{params}, output="logits")  # or "q", "action", "gaussian", "squashed"\n\n'
            "and give `policy` to ClusterEnv in place of the agent."
        )
    if callable(agent):
        return FunctionPolicy(agent, _array_kinds())
    if callable(getattr(agent, "get_action_and_value", None)):
        raise PolicyError(
            f"A {type(agent).__name__} has get_action_and_value(), but is not a torch.nn.Module. Make its class one, "
            "so that the method is called with tensors; or give a function over numpy, such as lambda obs: "
            "agent.get_action_and_value(obs)[0]."
        )
    raise PolicyError(
        f"An object of type {type(agent).__name__} is not a policy. Give {_instead_of(agent)}a torch module, a "
        "function from observations to actions, or an object with the methods of clusterenv.policy.Policy (BasePolicy "
        "has all but one of them)."
    )


def as_travelling_policy(agent: object, extras: tuple[str, ...] | None = None) -> Policy:
    """Return the agent as a policy whose every change reaches the workers.

    Args:
        agent: As for `as_policy`.
        extras: The policy's outputs, besides actions, that rollouts should hold; None: all of them.

    Raises:
        PolicyError: The agent cannot be read as a policy.
    """
    policy = as_policy(agent)
    if policy is agent and not hasattr(policy, "contents"):
        policy = TrackedPolicy(policy, _array_kinds())
    return policy if extras is None else Selected(policy, extras)


def as_separate_policy(agent: object) -> Policy:
    """Return the agent as a travelling policy that nobody else uses, even if the agent itself is a policy.

    Raises:
        PolicyError: The agent cannot be read as a policy.
    """
    policy = as_travelling_policy(agent)
    beside = getattr(policy, "beside", None)
    return policy if policy is not agent or beside is None else beside()


def _instead_of(agent: object) -> str:
    """Return the beginning of a sentence that names one of the agent's methods to give instead, if it has one."""
    if callable(getattr(agent, "act", None)):
        return "its method (agent.act, from a batch of observations to the actions), "
    if callable(getattr(agent, "predict", None)):
        return "what its method returns as actions (lambda obs: agent.predict(obs)[0], if that is the first), "
    return ""


def _origins(agent: object) -> set[str]:
    """Return the packages of an object's class and its base classes."""
    return {base.__module__.partition(".")[0] for base in type(agent).__mro__}


def _array_kinds() -> list[ArrayKind]:
    """Return the kinds of arrays that an agent of this process may hold."""
    kinds: list[ArrayKind] = []
    if "torch" in sys.modules:
        from clusterenv.adapters.torch.module import TORCH

        kinds.append(TORCH)
    if "tensordict.nn" in sys.modules:
        from clusterenv.adapters.tensordict_policy import TensorDictModules

        kinds.append(TensorDictModules())
    if "stable_baselines3" in sys.modules:
        from clusterenv.adapters.sb3_policy import Sb3Models

        kinds.append(Sb3Models())
    return kinds
