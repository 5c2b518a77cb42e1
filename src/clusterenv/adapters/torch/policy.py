"""A torch module as a policy."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Hashable

import torch
from torch import nn

from clusterenv.adapters.torch.evaluation import Randomness
from clusterenv.adapters.torch.method import MethodReading
from clusterenv.adapters.torch.reading import (
    OUTPUTS,
    ForwardReading,
    FunctionReading,
    Functions,
    Output,
    Prepare,
    Reading,
)
from clusterenv.adapters.torch.structure import Stamper, load_weights, read_weights, strip, unwrap
from clusterenv.errors import ConfigError, PolicyError
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution
from clusterenv.policy.policy import Decision, State, Tree
from clusterenv.policy.weights import Weights

_Q_NETWORK = re.compile(r"^Q(?![a-z])|Q_?Net|DQN")


class TorchPolicy:
    """A torch module that chooses actions on workers.

    Understood as they are: agents with CleanRL's `get_action_and_value` (discrete, continuous, recurrent), agents
    whose `forward` returns `(action, logprob, entropy, value)` and that have an `actor`, CleanRL's SAC actor
    (`get_action`), and modules called Q-something whose `forward` returns Q-values. Anything else says what its
    `forward` returns (`output`), or gives functions; they take the module and the observations as tensors, and, by
    name, `state` and per-call values.

    Observations become tensors of the module's dtype. The module acts in the mode, train or eval, in which it is when
    it is first sent. Pickling leaves the weights out: they travel by themselves.

    Args:
        module: The agent; never written to here, except by `load`.
        output: What `forward` returns: "logits" or "q" `[n, actions]`, "action" (deterministic), or a pair
            `(mean, log_std)` of a "gaussian" or a "squashed" one.
        act: Returns the actions, or a dict with "action", whatever else the learner wants, and "state" if recurrent.
        distribution: Returns a torch distribution, or a list of Categoricals for MultiDiscrete actions. Enough by
            itself.
        value: Returns the value of each state, beside `distribution`.
        initial_state: From the number of environments to a dict of tensors `[n, ...]`.
        prepare: From observations in numpy to what the module takes, if the usual conversion will not do.

    Raises:
        PolicyError: It cannot be told how the module chooses actions.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        output: Output | None = None,
        act: Callable[..., object] | None = None,
        distribution: Callable[..., object] | None = None,
        value: Callable[..., torch.Tensor] | None = None,
        initial_state: Callable[[int], dict[str, torch.Tensor]] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise PolicyError(f"TorchPolicy takes an nn.Module, got a {type(module).__name__}.")
        self.module = unwrap(module)
        self._functions = Functions(act, distribution, value, initial_state)
        self._output = output
        self._prepare = prepare
        self._reading = self._read(is_own=False)
        self._stamper = Stamper(self.module)
        self._randomness = Randomness()

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        """Decide for every environment of a batch."""
        return self._reading.act(obs, state, call, self._randomness)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        """Return the action distributions on a batch; None if they cannot be read off the module."""
        return self._reading.distribution(obs, state)

    def weights(self) -> dict[str, Array]:
        """Return parameters and persistent buffers; on a CPU they are the module's own memory."""
        return read_weights(self.module)

    def load(self, weights: Weights) -> None:
        """Overwrite parameters and persistent buffers in place."""
        load_weights(self.module, weights)

    def stamp(self) -> Hashable:
        """Return a value that changes with the weights, however they are written."""
        return self._stamper.stamp()

    def seed(self, seed: int) -> None:
        """Seed this policy's own generators; torch's global one is left alone."""
        self._randomness = Randomness(seed)

    def initial_state(self, num_envs: int) -> State | None:
        """Return the recurrent state at an episode's start."""
        return self._reading.initial_state(num_envs)

    def __reduce__(self) -> tuple[Callable[[bytes], TorchPolicy], tuple[bytes]]:
        """Pickle the structure without the weights, on the CPU."""
        # Together, so that a function which mentions the module means the same one afterwards.
        return _rebuild, (strip((self.module, self._functions, self._output, self._prepare), self.module),)

    def _read(self, *, is_own: bool) -> Reading:
        module, functions = self.module, self._functions
        if functions.act is not None or functions.distribution is not None:
            return FunctionReading(module, functions, self._prepare)
        if functions.value is not None or functions.initial_state is not None:
            raise ConfigError("TorchPolicy(value=..., initial_state=...) need act=... or distribution=... beside them.")
        if self._output is not None and self._output not in OUTPUTS:
            raise ConfigError(f"TorchPolicy(output=...) must be one of {', '.join(OUTPUTS)}; got {self._output!r}.")
        if self._output is None:
            if callable(getattr(module, "get_action_and_value", None)):
                return MethodReading(module, "get_action_and_value", self._prepare, is_own)
            if isinstance(getattr(module, "actor", None), nn.Module) and _has_forward(module):
                return MethodReading(module, "forward", self._prepare, is_own)
        output = self._output or _guess_output(module)
        if output is None:
            raise PolicyError(_unreadable(module))
        return ForwardReading(module, output, self._prepare, is_own)


def _rebuild(structure: bytes) -> TorchPolicy:
    """Make a worker's policy; its weights are zeros until some are loaded."""
    module, functions, output, prepare = pickle.loads(structure)  # noqa: S301  # called by unpickling
    module.requires_grad_(False)
    policy = TorchPolicy(module, output=output, prepare=prepare, **vars(functions))
    policy._reading = policy._read(is_own=True)
    return policy


def _guess_output(module: nn.Module) -> Output | None:
    has_scale = hasattr(module, "action_scale") and hasattr(module, "action_bias")
    if has_scale and callable(getattr(module, "get_action", None)):
        return "squashed"  # CleanRL's SAC.
    if has_scale and _has_forward(module):
        return "action"  # CleanRL's DDPG and TD3.
    if _Q_NETWORK.search(type(module).__name__) and _has_forward(module):
        return "q"
    return None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _unreadable(module: nn.Module) -> str:
    return f"""Cannot tell how {type(module).__name__} chooses actions: it has no get_action_and_value(), and what its \
forward() returns has no name. Say it in one line,

    from clusterenv.adapters.torch import TorchPolicy
    policy = TorchPolicy(agent, output="logits")  # or: {", ".join(f'"{output}"' for output in OUTPUTS[1:])}

or, for anything else, in three:

    policy = TorchPolicy(agent,
        distribution=lambda agent, obs: torch.distributions.Categorical(logits=agent.policy_head(obs)),
        value=lambda agent, obs: agent.value_head(obs))

and give `policy` to ClusterEnv where you gave the agent."""
