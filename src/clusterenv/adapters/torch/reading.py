"""Readings: ways to understand a module as a policy. Here those its user spelled out; `method` holds the guessed
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn

from clusterenv.adapters.torch.distributions import from_torch
from clusterenv.adapters.torch.evaluation import (
    Evaluation,
    Randomness,
    TensorTree,
    as_array,
    as_arrays,
    as_column,
    as_state,
    as_tensors,
    perturbed_copy,
)
from clusterenv.adapters.torch.mlp import Mlp, compile_mlp
from clusterenv.adapters.torch.proof import is_plain
from clusterenv.errors import PolicyError
from clusterenv.policy.continuous import Deterministic, DiagonalGaussian, SquashedGaussian
from clusterenv.policy.discrete import Categorical, QValues
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution, Floats
from clusterenv.policy.policy import Decision, State, Tree, Wants, draw

Output: TypeAlias = Literal["logits", "q", "action", "gaussian", "squashed"]
Prepare: TypeAlias = Callable[[Tree], TensorTree]
OUTPUTS: tuple[Output, ...] = ("logits", "q", "action", "gaussian", "squashed")


class Reading(Protocol):
    """One way to act with a module."""

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        """Decide for a batch."""

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        """Return the action distributions on a batch."""

    def initial_state(self, num_envs: int) -> State | None:
        """Return the recurrent state at an episode's start."""


@dataclass(frozen=True)
class Functions:
    """What a user writes for a module nobody can guess; each takes the module and the observations as tensors.

    A further parameter called `state` gets the recurrent state, any other is a per-call value.
    """

    act: Callable[..., object] | None = None
    distribution: Callable[..., object] | None = None
    value: Callable[..., torch.Tensor] | None = None
    initial_state: Callable[[int], dict[str, torch.Tensor]] | None = None


class FunctionReading:
    """Acts by the user's functions."""

    def __init__(self, module: nn.Module, functions: Functions, prepare: Prepare | None) -> None:
        self._module = module
        self._functions = functions
        self._evaluation = Evaluation(module)
        self._prepare = prepare or self._evaluation.tensors
        self._act_wants = None if functions.act is None else Wants(functions.act, 2, ("state",))
        self._distribution_wants = (
            None if functions.distribution is None else Wants(functions.distribution, 2, ("state",))
        )

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        """Call `act`, or sample from `distribution` and ask `value`."""
        functions = self._functions
        if functions.act is None or self._act_wants is None:
            distribution = self.distribution(obs, state)
            assert distribution is not None, "TorchPolicy refuses functions with neither act nor distribution"
            extras: dict[str, Array] = {}
            if functions.value is not None:
                with self._evaluation.quiet():
                    value = functions.value(self._module, self._prepare(obs))
                    extras["value"] = as_column(value, "value", len(distribution))
            return draw(distribution, randomness.numpy, call, extras)
        with self._evaluation.quiet(), randomness.torch():
            wanted = self._act_wants.pick({"state": self._tensor_state(state)}, call)
            return _read_answer(functions.act(self._module, self._prepare(obs), **wanted))

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        """Call `distribution`, if there is one."""
        if self._functions.distribution is None or self._distribution_wants is None:
            return None
        with self._evaluation.quiet():
            wanted = self._distribution_wants.pick({"state": self._tensor_state(state)}, NO_VALUES)
            return from_torch(self._functions.distribution(self._module, self._prepare(obs), **wanted))

    def initial_state(self, num_envs: int) -> State | None:
        """Call `initial_state`, if there is one."""
        if self._functions.initial_state is None:
            return None
        return as_state(self._functions.initial_state(num_envs))

    def _tensor_state(self, state: State | None) -> dict[str, torch.Tensor] | None:
        if state is None:
            return None
        parameter = next(self._module.parameters(), torch.empty(0))
        tensors = {name: as_tensors(array, None, parameter.device) for name, array in state.items()}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


class ForwardReading:
    """Acts by what `forward` returns.

    Args:
        module: The user's.
        output: What that is. "logits", "q" and "action" may come with a value as second result.
        prepare: Turns observations into what `forward` takes.
        is_own: Whether nobody but this policy changes the module, so that its memory may be held on to.
    """

    def __init__(self, module: nn.Module, output: Output, prepare: Prepare | None, is_own: bool) -> None:
        self._module = module
        self._output = output
        self._evaluation = Evaluation(module)
        self._prepare = prepare or self._evaluation.tensors
        self._may_compile = is_own and prepare is None and output in ("logits", "q", "action")
        self._mlp: Mlp | None = None

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        """Sample from the distribution that `forward` describes."""
        distribution, extras = self._run(obs)
        return draw(distribution, randomness.numpy, call, extras)

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        """Return the distribution that `forward` describes."""
        return self._run(obs)[0]

    def initial_state(self, num_envs: int) -> State | None:
        """Have no state."""
        return None

    def _run(self, obs: Tree) -> tuple[Distribution, dict[str, Array]]:
        if self._may_compile:
            self._may_compile = False
            self._mlp = self._compile(obs)
        if self._mlp is not None and isinstance(obs, np.ndarray):
            return self._describe(self._mlp(obs.T.astype(self._mlp.dtype, copy=False)).T, None), {}
        with self._evaluation.quiet():
            answer = self._module(self._prepare(obs))
        first, second = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        if not isinstance(first, torch.Tensor):
            raise PolicyError(
                f"forward() of {type(self._module).__name__} should return {self._output} as a tensor, "
                f"got {type(answer).__name__}."
            )
        rows: Floats = as_array(first).astype(np.float32, copy=False)
        if self._output in ("gaussian", "squashed") or second is None:
            return self._describe(rows, second), {}
        return self._describe(rows, None), {"value": as_column(second, "value", len(rows))}

    def _describe(self, rows: Floats, second: torch.Tensor | None) -> Distribution:
        match self._output:
            case "logits":
                return Categorical(rows)
            case "q":
                return QValues(rows)
            case "action":
                if hasattr(self._module, "action_scale"):
                    scale, shift = self._constants()
                    return Deterministic(rows, scale, shift - scale, shift + scale)
                return Deterministic(rows)
            case "gaussian" | "squashed":
                if second is None:
                    raise PolicyError(f"A {self._output} policy's forward() should return (mean, log_std).")
                log_std: Floats = as_array(second).astype(np.float32, copy=False)
                if self._output == "gaussian":
                    return DiagonalGaussian(rows, log_std)
                return SquashedGaussian(rows, log_std, *self._constants())

    def _constants(self) -> tuple[Floats, Floats]:
        """Return the scale and the shift that CleanRL's continuous agents apply after tanh."""
        scale, shift = getattr(self._module, "action_scale", 1.0), getattr(self._module, "action_bias", 0.0)
        return _read_constant(scale), _read_constant(shift)

    def _compile(self, obs: Tree) -> Mlp | None:
        """Make numpy layers of the network if `forward` does nothing but call it."""
        if not isinstance(obs, np.ndarray) or obs.ndim != 2:
            return None
        children = [name for name, _ in self._module.named_children()]
        if isinstance(self._module, nn.Sequential):
            path = ""
        elif len(children) == 1 and is_plain(self._module, "forward", frozenset(children)):
            path = children[0]
        else:
            return None
        twin = perturbed_copy(self._module)
        guess = compile_mlp(twin.get_submodule(path))
        if guess is None:
            return None
        with self._evaluation.quiet():
            truth = twin(Evaluation(twin).tensors(obs))
        if not isinstance(truth, torch.Tensor) or not np.allclose(
            guess(obs.T.astype(guess.dtype)).T, truth.numpy(), rtol=1e-3, atol=1e-4
        ):
            return None
        return compile_mlp(self._module.get_submodule(path))


def _read_constant(value: torch.Tensor | float) -> Floats:
    if isinstance(value, torch.Tensor):
        return as_array(value).astype(np.float32).reshape(-1)
    return np.asarray(value, np.float32)


def _read_answer(answer: object) -> Decision:
    """Read what a user's `act` returned: a Decision, a dict with "action" in it, or the actions alone."""
    if isinstance(answer, Decision):
        return answer
    if isinstance(answer, torch.Tensor):
        return Decision(as_array(answer), {})
    if isinstance(answer, dict) and "action" in answer:
        extras = {name: as_array(value) for name, value in answer.items() if name not in ("action", "state")}
        state = as_state(answer["state"]) if "state" in answer else None
        return Decision(as_arrays(answer["action"]), extras, state)
    raise PolicyError(
        "act() should return the actions, or a dict with 'action' and what else the learner wants, "
        f"got {type(answer).__name__}."
    )
