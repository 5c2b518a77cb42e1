"""A torch module as a policy: understood as it is, by what its `forward` returns, or through the user's functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from torch import nn

from clusterenv.adapters.torch.actor_critic import ActorCritic
from clusterenv.adapters.torch.discrete_actions import DiscreteActions
from clusterenv.adapters.torch.distributions import describe, from_torch, read
from clusterenv.adapters.torch.module import (
    TORCH,
    Evaluation,
    Prepare,
    Randomness,
    TensorTree,
    as_array,
    as_arrays,
    as_column,
    as_state,
    as_tensors,
    unwrap,
)
from clusterenv.adapters.torch.numpy_program import NumpyProgram
from clusterenv.adapters.torch.trace import Sheet
from clusterenv.errors import ConfigError, PolicyError
from clusterenv.policy.array_kinds import ArrayKind
from clusterenv.policy.contents import Contents, Delivered
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution
from clusterenv.policy.policy import Decision, Signature, State, Tree, draw
from clusterenv.policy.weights import Weights, can_round

Output: TypeAlias = Literal["logits", "q", "action", "gaussian", "squashed"]

_Inference: TypeAlias = (
    "ActorCritic | _FunctionInference | _ForwardInference | _RecurrentInference"  # The ways to act with a module.
)
_Result = TypeVar("_Result")
_OUTPUTS: tuple[Output, ...] = get_args(Output)
_RESULTS: dict[Output, tuple[str, ...]] = {  # What `forward` returns first; a value may follow.
    "logits": ("logits",),
    "q": ("q",),
    "action": ("action",),
    "gaussian": ("mean", "log_std"),
    "squashed": ("mean", "log_std"),
}
_Q_NETWORK = re.compile(r"^Q(?![a-z])|Q_?Net|DQN")


class TorchPolicy:
    """A torch module that chooses actions on workers.

    The following are understood as they are: agents with CleanRL's `get_action_and_value` (discrete, continuous,
    recurrent), agents with an `actor` whose `forward` returns `(action, logprob, entropy, value)`, CleanRL's SAC actor
    (`get_action`), and modules named like a Q-network whose `forward` returns Q-values. For any other module, say what
    its `forward` returns (`output`), or give functions. Functions take the module and the observations as tensors and,
    by name, `state` and per-call values.

    Observations become tensors of the module's dtype. They keep their own dtype if the module has parameters of several
    dtypes or narrow ones (bfloat16), or does not run otherwise: an `nn.Embedding` takes integers. On workers the module
    keeps its mode, train or eval. Pickling leaves out the weights, which are sent separately.

    Args:
        module: The agent; only `load` writes to it.
        output: What `forward` returns: "logits" or "q" `[n, actions]` (for MultiDiscrete actions, the logits of all
            choices side by side), "action" (deterministic), or a pair `(mean, log_std)`, with the logarithm of the
            standard deviation, of a "gaussian" or "squashed" Gaussian. The value of each state may follow.
        act: Returns the actions, or a dict with "action", whatever else the learner wants, and "state" if recurrent.
        distribution: Returns a torch distribution, or a list of Categoricals for MultiDiscrete actions. Sufficient on
            its own: actions are drawn from it. With `act`, it is used only to compare versions of the policy.
        value: Returns the value of each state, in addition to `distribution`.
        initial_state: Maps the number of environments to a dict of tensors or numpy arrays `[n, ...]`. With `output`,
            this is the state that `forward(obs, state)` takes, as one tensor or, if there are several, as a tuple. Not
            needed for a module with one GRU or LSTM.
        prepare: Maps numpy observations to what the module takes, if the usual conversion will not do.
        wire_dtype: "bfloat16" halves what is sent: parameters are rounded to it for sending, and workers compute with
            the rounded values at the original width. Log-probabilities and values are those of the rounded parameters.
            Buffers, such as the statistics of a normaliser, are sent unrounded.

    Raises:
        PolicyError: It is unclear how the module chooses actions.
        ConfigError: The arguments contradict each other.
    """

    can_remember = True  # Unlike a numpy program.
    kinds: tuple[ArrayKind, ...] = (TORCH,)

    def __init__(
        self,
        module: nn.Module,
        *,
        output: Output | None = None,
        act: Callable[..., object] | None = None,
        distribution: Callable[..., object] | None = None,
        value: Callable[..., torch.Tensor] | None = None,
        initial_state: Callable[[int], Mapping[str, torch.Tensor | Array]] | None = None,
        prepare: Prepare | None = None,
        wire_dtype: Literal["bfloat16"] | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise PolicyError(f"TorchPolicy takes an nn.Module, got a {type(module).__name__}.")
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise PolicyError(
                "TorchScript modules (torch.jit.script, torch.jit.trace) cannot be sent to workers part by part. Give "
                "the module that it was made of: workers run the usual layers in numpy anyway."
            )
        if wire_dtype not in (None, "bfloat16"):
            raise ConfigError(f'TorchPolicy(wire_dtype=...) must be "bfloat16" or None; got {wire_dtype!r}.')
        if output is not None and (act is not None or distribution is not None):
            other = "distribution" if act is None else "act"
            raise ConfigError(
                f"TorchPolicy(output={output!r}, {other}=...) says twice how the module chooses actions: give one of "
                f"output=... and {other}=...."
            )
        self.module = unwrap(module)
        self._functions = _Functions(act, distribution, value, initial_state)
        self._output = output
        self._prepare = prepare
        self._wire_dtype = wire_dtype
        self._actions: DiscreteActions | None = None  # Of the environments, as soon as they are known.
        self._inference = self._choose_inference()
        self._has_run = False
        self._contents: Contents | None = None
        self.delivered: Delivered | None = None
        self._read_generation = 0  # The generation that the inference was chosen for.
        self._program: NumpyProgram | None = None
        self._num_programs = 0
        self.wanted: tuple[str, ...] | None = None  # The extras; None: all.
        self._randomness = Randomness()

    @property
    def contents(self) -> Contents:
        """What is sent to the workers."""
        if self._contents is None:
            # Together, so that a function that refers to the module still refers to the same one on a worker.
            others = {"functions": self._functions, "output": self._output, "prepare": self._prepare}
            self._contents = Contents({"": self.module, **others}, self.kinds)
        return self._contents

    @property
    def generation(self) -> int:
        """How often what is sent to workers, other than weights, has changed."""
        return self.contents.generation + self._num_programs

    @property
    def inference(self) -> _Inference:
        """How the module is run."""
        return self._inference

    @property
    def takes(self) -> frozenset[str]:
        """The per-call values that the agent's own code has parameters for."""
        return self._inference.takes

    @property
    def rounded(self) -> frozenset[str]:
        """The names of the weights that are sent as bfloat16: all wider parameters."""
        if self._wire_dtype is None:
            return frozenset()
        return frozenset(name for name, array in self.contents.parameters().items() if can_round(array.dtype))

    @property
    def is_traceable(self) -> bool:
        """Whether the module's output depends only on observations and weights."""
        return self._inference.is_traceable and self.delivered is None

    def beside(self) -> TorchPolicy:
        """Return another policy for the same module, which may be given other observations than this one."""
        return type(self)(
            self.module,
            output=self._output,
            prepare=self._prepare,
            wire_dtype=self._wire_dtype,
            **vars(self._functions),
        )

    def copy_here(self) -> TorchPolicy:
        """Make a copy like a worker's, which can be run without affecting the learner's own module."""
        return _rebuild(self.contents.pack(), self._actions)

    def named_arrays(self) -> dict[str, torch.Tensor]:
        """Return a copy's tensors by the names of its weights."""
        assert self.delivered is not None, "this is a copy"
        arrays = self.delivered.named_arrays()
        return {name: array for name, array in arrays.items() if isinstance(array, torch.Tensor)}

    @property
    def is_fast(self) -> bool:
        """Whether workers evaluate this policy in numpy, without torch."""
        return self._program is not None

    def announce(self) -> None:
        """Treat whatever cannot be compared as changed."""
        self.contents.announce()

    def look_at(self, obs: Tree, action_space: object = None) -> None:
        """Find out on real observations whether numpy can compute what the module does, with its current weights."""
        found = self._program
        before = None if found is None else found.program
        actions = DiscreteActions.of(action_space)
        if actions != self._actions:
            found = None
        if actions != self._actions or self.contents.generation != self._read_generation:
            self._actions, self._read_generation = actions, self.contents.generation
            self._inference = self._choose_inference()
            self._has_run = False
        self._program = NumpyProgram.find(self, obs) if found is None else found.renew(self, obs)
        self._num_programs += before != (None if self._program is None else self._program.program)

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        try:
            if not self._has_run:
                return self._run_first(lambda: self._inference.act(obs, state, call, self._randomness))
            return self._inference.act(obs, state, call, self._randomness)
        except Exception as error:
            arrays = self.weights() if self.delivered is not None else {}
            if lost := [name for name, array in arrays.items() if array.dtype.kind == "f" and np.isnan(array).any()]:
                raise PolicyError(f"The agent's {lost[0]} holds NaN. Has training diverged?") from error
            if "does not require grad" in str(error):
                error.add_note(
                    "Agents act without gradients (torch.inference_mode): compute what needs them elsewhere."
                )
            raise

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution | None:
        """Return the action distributions for a batch; None if they cannot be read from the module."""
        if self._program is not None and (found := self._program.distribution(self, obs)) is not None:
            return found
        return self._run_first(lambda: self._inference.distribution(obs, state))

    def weights(self) -> dict[str, Array]:
        """Return parameters, buffers and plain values; on a CPU the arrays are the module's own memory."""
        if self.delivered is not None:
            return self.delivered.weights()
        return self.contents.weights() if self._program is None else self._program.weights(self)

    def load(self, weights: Weights) -> None:
        if self.delivered is None:
            raise PolicyError("Only a worker's copy of a policy is loaded: write to the learner's own agent directly.")
        if self.delivered.load(weights):
            keeps_dtype = self._inference.evaluation.keeps_dtype
            self._inference = self._choose_inference()  # What was found out may no longer hold, except for the dtype.
            self._inference.evaluation.keeps_dtype = keeps_dtype

    def take_over(self, tried: TorchPolicy) -> None:
        """Adopt what another copy has found out about dtypes, so that this one need not run the module twice."""
        self._inference.evaluation.keeps_dtype = tried.inference.evaluation.keeps_dtype
        self._has_run = True

    def stamp(self) -> Hashable:
        """Return a value that changes with the weights, however they are written to, and the module's attributes."""
        return self.contents.stamp()

    def seed(self, seed: int) -> None:
        """Seed this policy's own generators; torch's global one is left alone."""
        self._randomness = Randomness(seed)

    def use_generator(self, rng: np.random.Generator) -> None:
        """Draw from this generator whenever the policy, rather than the agent's own code, draws."""
        self._randomness.numpy = rng

    @property
    def chance(self) -> torch.Tensor:
        """The state of the random source that the agent's own code uses; changes with every draw."""
        return self._randomness.state

    def initial_state(self, num_envs: int) -> State | None:
        return self._inference.initial_state(num_envs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the structure without the weights, for the CPU; for numpy only, if that is known to suffice."""
        return (
            (_rebuild, (self.contents.pack(), self._actions)) if self._program is None else self._program.reduce(self)
        )

    def _run_first(self, run: Callable[[], _Result]) -> _Result:
        """Run the module; if the first run fails, try again with observations in the other dtype."""
        if self._has_run:
            return run()
        try:
            result = run()
        except PolicyError:
            raise  # Not because of a dtype.
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            keeps_dtype = self._inference.evaluation.keeps_dtype
            self._inference = self._choose_inference()
            self._inference.evaluation.keeps_dtype = not keeps_dtype
            try:
                result = run()
            except Exception:  # noqa: BLE001 - whatever it is, the first error is what the user should see
                self._inference = self._choose_inference()
                raise error from None
        self._has_run = True
        return result

    def _choose_inference(self) -> _Inference:
        module, functions = self.module, self._functions
        if functions.act is not None or functions.distribution is not None:
            return _FunctionInference(module, functions, self._prepare)
        if functions.value is not None or (functions.initial_state is not None and self._output is None):
            raise ConfigError(
                "TorchPolicy(value=...) also needs act=... or distribution=..., and initial_state=... needs one of "
                "these or output=.... With output=..., forward() may return the value as one more result."
            )
        if self._output is not None and self._output not in _OUTPUTS:
            raise ConfigError(f"TorchPolicy(output=...) must be one of {', '.join(_OUTPUTS)}; got {self._output!r}.")
        if self._output is None:
            if callable(getattr(module, "get_action_and_value", None)):
                return ActorCritic(module, "get_action_and_value", self._prepare)
            if isinstance(getattr(module, "actor", None), nn.Module) and _has_forward(module):
                return ActorCritic(module, "forward", self._prepare)
        output = self._output or _guess_output(module)
        if output is None:
            raise PolicyError(_unreadable(module))
        if functions.initial_state is not None or _takes_state(module):
            return _RecurrentInference(module, output, self._prepare, self._actions, functions.initial_state)
        return _ForwardInference(module, output, self._prepare, self._actions)


def _rebuild(packed: bytes, actions: DiscreteActions | None) -> TorchPolicy:
    """Make the policy on a worker; its weights are zeros until some are loaded."""
    delivered = Delivered(packed)
    module, functions, output, prepare = delivered.payload.values()
    module.requires_grad_(False)
    policy = TorchPolicy(module, output=output, prepare=prepare, **vars(functions))
    policy.delivered = delivered
    policy._actions = actions
    policy._inference = policy._choose_inference()
    return policy


@dataclass(frozen=True)
class _Functions:
    """The user's functions for a module that is not understood as it is."""

    act: Callable[..., object] | None = None
    distribution: Callable[..., object] | None = None
    value: Callable[..., torch.Tensor] | None = None
    initial_state: Callable[[int], Mapping[str, torch.Tensor | Array]] | None = None


class _FunctionInference:
    """Acts with the user's functions."""

    def __init__(self, module: nn.Module, functions: _Functions, prepare: Prepare | None) -> None:
        self._module = module
        self._functions = functions
        self.evaluation = Evaluation(module)
        self._prepare = prepare or self.evaluation.tensors
        self._act = None if functions.act is None else Signature(functions.act, 2, "state")
        self._distribution = None if functions.distribution is None else Signature(functions.distribution, 2, "state")
        self.takes = frozenset[str]() if self._act is None else self._act.values

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        functions = self._functions
        if functions.act is None or self._act is None:
            distribution = self.distribution(obs, state)
            assert distribution is not None, "TorchPolicy refuses functions with neither act nor distribution"
            extras: dict[str, Array] = {}
            if functions.value is not None:
                with self.evaluation.quiet():
                    value = functions.value(self._module, self._prepare(obs))
                    extras["value"] = as_column(value, "value", len(distribution))
            return draw(distribution, randomness.numpy, call, extras)
        with self.evaluation.quiet(), randomness.torch():
            arguments = self._act.bind(self._tensor_state(state), _with_tensor_mask(call))
            return _read_answer(functions.act(self._module, self._prepare(obs), **arguments))

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        if self._functions.distribution is None or self._distribution is None:
            return None
        with self.evaluation.quiet(), Randomness(0).torch():  # It must not draw from the learner's generator.
            arguments = self._distribution.bind(self._tensor_state(state), NO_VALUES)
            return from_torch(self._functions.distribution(self._module, self._prepare(obs), **arguments))

    @property
    def is_traceable(self) -> bool:
        functions = self._functions
        has_state = functions.initial_state is not None or functions.act is not None
        return not has_state and self._prepare == self.evaluation.tensors

    def study(self, obs: Tree) -> None:
        """Do nothing: the user has said how to read the distribution."""

    def sheet(self, tensors: TensorTree, num_rows: int) -> Sheet:
        """Run the functions and return the tensors they made."""
        assert self._functions.distribution is not None, "it is traceable"
        assert self._distribution is not None, "as above"
        found = describe(self._functions.distribution(self._module, tensors, **self._distribution.bind(None, {})))
        value = self._functions.value
        return found if value is None else replace(found, extras={"value": value(self._module, tensors)})

    def initial_state(self, num_envs: int) -> State | None:
        make = self._functions.initial_state
        return None if make is None else as_state(make(num_envs))

    def _tensor_state(self, state: State | None) -> dict[str, torch.Tensor] | None:
        if state is None:
            return None
        parameter = next(self._module.parameters(), torch.empty(0))
        tensors = {name: as_tensors(array, None, parameter.device) for name, array in state.items()}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


class _ForwardInference:
    """Acts by what `forward` returns; a value may follow as its last result."""

    def __init__(
        self, module: nn.Module, output: Output, prepare: Prepare | None, actions: DiscreteActions | None
    ) -> None:
        self._module = module
        self._output = output
        self._actions = actions if output in ("logits", "q") else None
        self.evaluation = Evaluation(module)
        self._prepare = prepare or self.evaluation.tensors
        # A program counts actions from 0.
        self.is_traceable = prepare is None and (self._actions is None or not self._actions.is_shifted)
        self.takes: frozenset[str] = frozenset()

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        with self.evaluation.quiet(), randomness.torch():
            sheet = self.sheet(self._prepare(obs), 0)
            distribution = read(sheet)
            count = len(distribution)
            extras = {name: as_column(tensor, name, count) for name, tensor in sheet.extras.items()}
        return self._shift(draw(distribution, randomness.numpy, call, extras))

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        with self.evaluation.quiet(), Randomness(0).torch():
            return read(self.sheet(self._prepare(obs), 0))

    def initial_state(self, num_envs: int) -> State | None:
        return None

    def study(self, obs: Tree) -> None:
        """Do nothing: the output is known."""

    def sheet(self, tensors: TensorTree, num_rows: int) -> Sheet:
        """Run the module and return the tensors it made."""
        return self._describe(self._module(tensors))

    def _shift(self, decision: Decision) -> Decision:
        return decision if self._actions is None else self._actions.shift(decision)

    def _describe(self, answer: object) -> Sheet:
        names = _RESULTS[self._output]
        results: list[Any] = list(answer) if isinstance(answer, tuple) else [answer]
        if len(names) > 1 and isinstance(results[0], tuple):  # As in ((mean, log_std), value).
            results[:1] = results[0]
        if len(results) > len(names) and results[-1] is None:
            results.pop()
        is_known = all(isinstance(result, torch.Tensor) for result in results)
        if not is_known or not len(names) <= len(results) <= len(names) + 1:
            got = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
            alone = names[0] if len(names) == 1 else f"({', '.join(names)})"
            raise PolicyError(
                f"forward() of {type(self._module).__name__}, read as {self._output!r}, should return {alone} or "
                f"({', '.join(names)}, value), as tensors; got {got}."
            )
        extras = {"value": results[-1]} if len(results) > len(names) else {}
        if self._actions is not None:
            self._actions.check(results[0].shape, f"forward() of {type(self._module).__name__}")
        parameters = dict(zip(names, results, strict=False))
        match self._output:
            case "logits" if self._actions is not None and self._actions.is_multi:
                return Sheet("multi_categorical", parameters, {}, extras, self._actions.sizes)
            case "logits":
                return Sheet("categorical", parameters, {}, extras)
            case "q":
                return Sheet("q_values", parameters, {}, extras)
            case "gaussian":
                return Sheet("diagonal_gaussian", parameters, {}, extras)
            case "squashed":
                return Sheet("squashed_gaussian", parameters, self._constants(), extras)
            case _:
                return Sheet("deterministic", parameters, self._bounds(), extras)

    def _constants(self) -> dict[str, object]:
        """Return the scale and the shift that CleanRL's continuous agents apply after tanh."""
        scale, shift = getattr(self._module, "action_scale", 1.0), getattr(self._module, "action_bias", 0.0)
        return {"scale": _flat(scale), "shift": _flat(shift)}

    def _bounds(self) -> dict[str, object]:
        if not hasattr(self._module, "action_scale"):
            return {}
        scale, shift = self._constants().values()
        return {"scale": scale, "low": shift - scale, "high": shift + scale}  # type: ignore[operator]  # numbers or tensors


def _takes_state(module: nn.Module) -> bool:
    """Return whether `forward` takes a recurrent state besides the observations, and the module has a layer for it."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(named) == 2 and any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in module.modules())


class _RecurrentInference(_ForwardInference):
    """Acts by what `forward(obs, state)` returns: as without a state, plus the next state as last result."""

    def __init__(
        self,
        module: nn.Module,
        output: Output,
        prepare: Prepare | None,
        actions: DiscreteActions | None,
        initial_state: Callable[[int], Mapping[str, torch.Tensor | Array]] | None,
    ) -> None:
        super().__init__(module, output, prepare, actions)
        self.is_traceable = False
        self._make = initial_state
        self._layer = _find_layer(module) if initial_state is None else None

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        with self.evaluation.quiet(), randomness.torch():
            sheet, new_state = self._step(obs, state)
            distribution = read(sheet)
            count = len(distribution)
            extras = {name: as_column(tensor, name, count) for name, tensor in sheet.extras.items()}
        return self._shift(draw(distribution, randomness.numpy, call, extras))._replace(state=new_state)

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        with self.evaluation.quiet(), Randomness(0).torch():
            return read(self._step(obs, state)[0])

    def initial_state(self, num_envs: int) -> State | None:
        if self._make is not None:
            return as_state(self._make(num_envs))
        layer = self._layer
        assert layer is not None, "either is known"
        layers = (layer.num_layers,) if isinstance(layer, nn.RNNBase) else ()
        zeros = np.zeros((num_envs, *layers, layer.hidden_size), np.float32)
        return {"h": zeros, "c": zeros.copy()} if isinstance(layer, nn.LSTM | nn.LSTMCell) else {"h": zeros}

    def _step(self, obs: Tree, state: State | None) -> tuple[Sheet, State]:
        tensors = self._prepare(obs)
        before = state or self.initial_state(_count_rows(obs))
        assert before is not None, "it is recurrent"
        swaps = isinstance(self._layer, nn.RNNBase)  # Environments are our first axis, layers are torch's.
        device = next(self._module.parameters(), torch.empty(0)).device
        parts = [
            torch.from_numpy(part.swapaxes(0, 1).copy() if swaps else part.copy()).to(device)
            for part in before.values()
        ]
        answer = self._module(tensors, parts[0] if len(parts) == 1 else tuple(parts))
        if not isinstance(answer, tuple) or len(answer) < 2:
            raise PolicyError(
                f"forward(obs, state) of {type(self._module).__name__} should return a tuple whose last item is the "
                f"next state, got {type(answer).__name__}."
            )
        after = answer[-1] if isinstance(answer[-1], tuple) else (answer[-1],)
        returned = [as_array(part).swapaxes(0, 1) if swaps else as_array(part) for part in after]
        new_state = {name: array.copy() for name, array in zip(before, returned, strict=True)}
        return self._describe(answer[0] if len(answer) == 2 else answer[:-1]), new_state


def _find_layer(module: nn.Module) -> nn.RNNBase | nn.RNNCellBase:
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase | nn.RNNCellBase)]
    if len(layers) != 1:
        raise PolicyError(
            f"{type(module).__name__}.forward() takes a recurrent state, but the module has {len(layers)} recurrent "
            "layers, so the shape of the state is unknown. Say it: TorchPolicy(agent, output=..., initial_state=...)."
        )
    return layers[0]


def _count_rows(tree: Tree) -> int:
    while not isinstance(tree, np.ndarray):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


def _flat(value: object) -> object:
    return value.reshape(-1) if isinstance(value, torch.Tensor) and value.ndim != 1 else value


def _with_tensor_mask(call: Call) -> dict[str, Any]:
    """Return the per-call values, with the action mask, if any, as a boolean tensor."""
    return {name: torch.as_tensor(value != 0) if name == "action_mask" else value for name, value in call.items()}


def _read_answer(answer: object) -> Decision:
    """Read what a user's `act` returned: a Decision, a dict with "action" in it, or just the actions."""
    if isinstance(answer, Decision):
        return answer
    if isinstance(answer, torch.Tensor):
        return Decision(as_array(answer), {})
    if isinstance(answer, dict) and "action" in answer:
        extras = {name: as_array(value) for name, value in answer.items() if name not in ("action", "state")}
        state = as_state(answer["state"]) if "state" in answer else None
        return Decision(as_arrays(answer["action"]), extras, state)
    raise PolicyError(
        "act() should return the actions, or a dict with 'action' and whatever else the learner wants, "
        f"got {type(answer).__name__}."
    )


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
    if isinstance(inner := getattr(module, "module", None), nn.Module):  # As in torch's AveragedModel.
        return (
            f"Cannot tell how a {type(module).__name__} around a {type(inner).__name__} chooses actions. Give the "
            "module inside it: its .module."
        )
    return f"""Cannot tell how {type(module).__name__} chooses actions: it has no get_action_and_value(), and what its \
forward() returns is not known. Say so in one line,

    from clusterenv.adapters.torch import TorchPolicy
    policy = TorchPolicy(agent, output="logits")  # or: {", ".join(f'"{output}"' for output in _OUTPUTS[1:])}

or, for anything else, in three:

    policy = TorchPolicy(agent,
        distribution=lambda agent, obs: torch.distributions.Categorical(logits=agent.policy_head(obs)),
        value=lambda agent, obs: agent.value_head(obs))

and give `policy` to ClusterEnv in place of the agent."""
