"""Networks: an agent's policy head and critic, called without the agent's own method."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import nn

from clusterenv.adapters.torch.evaluation import Evaluation, as_array
from clusterenv.adapters.torch.mlp import Mlp, compile_mlp
from clusterenv.policy.distribution import Array, Floats


class Networks(Protocol):
    """From observations `[n, ...]` to what the agent makes of them."""

    def policy(self, obs: Array) -> Floats:
        """Return the policy head's output `[n, outputs]`."""

    def both(self, obs: Array) -> tuple[Floats, Floats]:
        """Return the policy head's output, and the values `[n]`."""


def find_networks(module: nn.Module, head: str, *, is_flat: bool) -> Networks | None:
    """Chain `network`, if there is one, with the policy head and the critic.

    Args:
        module: The agent.
        head: The submodule that is the policy head.
        is_flat: Whether an observation is a vector; then plain networks are evaluated by numpy.

    Returns:
        None if the agent's networks have other names.
    """
    trunk = getattr(module, "network", nn.Identity())
    policy, critic = getattr(module, head, None), getattr(module, "critic", None)
    if not (isinstance(trunk, nn.Module) and isinstance(policy, nn.Module) and isinstance(critic, nn.Module)):
        return None
    fast_policy, fast_critic = compile_mlp(policy), compile_mlp(critic)
    if is_flat and fast_policy is not None and fast_critic is not None:
        if isinstance(trunk, nn.Identity):
            return _NumpyNetworks(None, fast_policy, fast_critic)
        if (fast_trunk := compile_mlp(trunk)) is not None:
            return _NumpyNetworks(fast_trunk, fast_policy, fast_critic)
    return _TorchNetworks(module, trunk, policy, critic)


class _NumpyNetworks:
    def __init__(self, trunk: Mlp | None, policy: Mlp, critic: Mlp) -> None:
        self._trunk = trunk
        self._policy = policy
        self._critic = critic

    def policy(self, obs: Array) -> Floats:
        """Evaluate trunk and policy head."""
        return self._policy(self._columns(obs)).T

    def both(self, obs: Array) -> tuple[Floats, Floats]:
        """Evaluate all of it."""
        columns = self._columns(obs)
        return self._policy(columns).T, self._critic(columns)[0]

    def _columns(self, obs: Array) -> Floats:
        columns: Floats = obs.T.astype(self._policy.dtype, copy=False)
        return columns if self._trunk is None else self._trunk(columns)


class _TorchNetworks:
    def __init__(self, module: nn.Module, trunk: nn.Module, policy: nn.Module, critic: nn.Module) -> None:
        self._evaluation = Evaluation(module)
        self._trunk = trunk
        self._policy = policy
        self._critic = critic

    def policy(self, obs: Array) -> Floats:
        """Call trunk and policy head."""
        with self._evaluation.quiet():
            return _floats(self._policy(self._trunk(self._evaluation.tensors(obs))))

    def both(self, obs: Array) -> tuple[Floats, Floats]:
        """Call all of it."""
        with self._evaluation.quiet():
            hidden = self._trunk(self._evaluation.tensors(obs))
            rows = _floats(self._policy(hidden))
            return rows, _floats(self._critic(hidden)).reshape(len(rows), -1)[:, 0]


def _floats(output: object) -> Floats:
    floats: Floats = as_array(output).astype(np.float32, copy=False)  # type: ignore[arg-type]  # as seen on a twin
    return floats
