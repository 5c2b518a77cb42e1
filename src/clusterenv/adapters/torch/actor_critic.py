"""Agents with a method that returns action, log-probability, entropy and value: CleanRL's form, and the paper's.

Of the distributions that the method makes while it runs, the action distribution is the one under which its actions
have the log-probabilities it returned. An agent that makes none (it samples by hand) has a policy head, a submodule
whose output parametrises the distribution. The head is found by trial: each output in turn is taken as the logits or
means of each family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import distributions as td
from torch import nn

from clusterenv.adapters.torch.distributions import captured, describe, read, squash
from clusterenv.adapters.torch.module import (
    Evaluation,
    Prepare,
    Randomness,
    TensorTree,
    as_array,
    as_arrays,
    as_column,
    perturbed_copy,
)
from clusterenv.adapters.torch.trace import NoProgram, Sheet
from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array, Call, Distribution
from clusterenv.policy.policy import Decision, State, Tree, draw, map_tree

_MIN_TRIAL_ROWS = 16
_USUAL_HEADS = ("actor", "actor_mean", "policy", "pi")


class ActorCritic:
    """Acts with the agent's own method.

    Args:
        module: The agent.
        method: Called as `method(obs)`, or `method(obs, state, done)` if the agent is recurrent.
        prepare: Turns observations into what the method takes.
    """

    def __init__(self, module: nn.Module, method: str, prepare: Prepare | None) -> None:
        self._module = module
        self._method = method
        self._given_prepare = prepare
        self.evaluation = Evaluation(module)
        self._prepare = prepare or self.evaluation.tensors
        parameters = list(inspect.signature(getattr(module, method)).parameters.values())
        self._memory = _find_memory(module) if len(parameters) >= 3 and parameters[1].name != "action" else None
        further = parameters[1 if self._memory is None else 3 :]
        required = [p.name for p in further if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        self._needs_mask = "action_mask" in required  # It comes from the environments' infos.
        if required := [name for name in required if name != "action_mask"]:
            raise PolicyError(
                f"{type(module).__name__}.{method}() needs {', '.join(required)} besides the observations. Say how to "
                "get them: TorchPolicy(agent, act=lambda agent, obs: ...)."
            )
        self._call_names = self.takes = frozenset(p.name for p in further) - {"action"}
        self._is_studied = False
        self._reading: Reading | None = None

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        """Decide with the agent's method, or with its distribution if the method does not take the per-call values."""
        if self._needs_mask and "action_mask" not in call:
            raise PolicyError(
                f"{type(self._module).__name__}.{self._method}() needs action_mask, but the environments' infos hold "
                "none: each reset() and step() should return one in info['action_mask']."
            )
        own_values: dict[str, Any] = {name: value for name, value in call.items() if name in self._call_names}
        if "action_mask" in own_values:
            own_values["action_mask"] = torch.as_tensor(own_values["action_mask"] != 0)
        others = {name: value for name, value in call.items() if name not in own_values}
        if others:
            self._study(obs, state)
            if self._reading is None:
                raise PolicyError(
                    f"{type(self._module).__name__}.{self._method}() takes no {', '.join(sorted(others))}."
                )
        with self.evaluation.quiet(), randomness.torch():
            run = self._run(self._prepare(obs), _count_rows(obs), state, self._reading if others else None, own_values)
            action, logprob, value, new_state = self._parse(run.answer)
            count = _count_rows(obs)
            extras = {"logprob": as_column(logprob, "logprob", count), "value": as_column(value, "value", count)}
            if not others or self._reading is None:
                return Decision(as_arrays(action), extras, new_state)
            try:
                distribution = read(self._reading.sheet(run, self._module))
            except NoProgram as error:
                raise PolicyError(f"{', '.join(sorted(others))} cannot be applied: {error}.") from error
        return draw(distribution, randomness.numpy, others, {"value": extras["value"]})._replace(state=new_state)

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        """Read the distribution that the method makes; None if none was found."""
        self._study(obs, state)
        if self._reading is None:
            return None
        with self.evaluation.quiet(), Randomness(0).torch():
            run = self._run(self._prepare(obs), _count_rows(obs), state, self._reading, {})
            try:
                return read(self._reading.sheet(run, self._module))
            except NoProgram:
                return None

    @property
    def is_traceable(self) -> bool:
        """Whether the method's result depends only on observations."""
        return self._given_prepare is None and self._memory is None and not self._call_names

    def study(self, obs: Tree) -> None:
        """Find out how to read the distribution."""
        self._study(obs, None)

    def sheet(self, tensors: TensorTree, num_rows: int) -> Sheet:
        """Run the method and return the tensors it made.

        Raises:
            NoProgram: It is not known how to read the method's distribution.
        """
        if self._reading is None:
            raise NoProgram("no distribution was found")
        run = self._run(tensors, num_rows, None, self._reading, {})
        action, _, value, _ = self._parse(run.answer)
        return replace(self._reading.sheet(run, self._module), extras={"value": value}, action=action)

    def initial_state(self, num_envs: int) -> State | None:
        """Return zeros, as CleanRL does, if the agent is recurrent."""
        if self._memory is None:
            return None
        zeros = np.zeros((num_envs, self._memory.num_layers, self._memory.hidden_size), np.float32)
        return {"h": zeros, "c": zeros.copy()} if isinstance(self._memory, nn.LSTM) else {"h": zeros}

    def _run(
        self, tensors: TensorTree, num_rows: int, state: State | None, reading: Reading | None, values: dict[str, Any]
    ) -> Run:
        """Call the method, and capture what the reading needs."""
        method = getattr(self._module, self._method)
        arguments: list[object] = [tensors]
        if self._memory is not None:
            arguments += self._recurrent_arguments(state or self.initial_state(num_rows), num_rows)
        if reading is None:
            return Run(method(*arguments, **values), [], {})
        with captured() as made:
            answer, outputs = _watch(self._module, reading.paths, lambda: method(*arguments, **values))
        return Run(answer, made, outputs)

    def _recurrent_arguments(self, state: State | None, num_envs: int) -> list[object]:
        assert state is not None, "a recurrent agent has an initial state"
        device = next(self._module.parameters()).device
        # Environments are our first axis, layers are torch's.
        tensors = tuple(torch.from_numpy(part.swapaxes(0, 1).copy()).to(device) for part in state.values())
        # The rows of new episodes are already reset.
        return [tensors if len(tensors) > 1 else tensors[0], torch.zeros(num_envs, device=device)]

    def _parse(self, answer: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, State | None]:
        expected = 4 if self._memory is None else 5
        if not isinstance(answer, tuple) or len(answer) != expected:
            got = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
            raise PolicyError(
                f"{type(self._module).__name__}.{self._method}() should return (action, logprob, entropy, value"
                f"{'' if self._memory is None else ', state'}), got {got}. Say what it returns: "
                "TorchPolicy(agent, output=...) or TorchPolicy(agent, act=...)."
            )
        if self._memory is None:
            return answer[0], answer[1], answer[3], None
        parts = answer[4] if isinstance(answer[4], tuple) else (answer[4],)
        state = {name: as_array(part).swapaxes(0, 1).copy() for name, part in zip("hc", parts, strict=False)}
        return answer[0], answer[1], answer[3], state

    def _study(self, obs: Tree, state: State | None) -> None:
        """Find the distribution; few rows are repeated first, because a single action would prove little."""
        if self._is_studied or self._needs_mask:
            return
        self._is_studied = True
        if self._memory is None:
            times = -(-_MIN_TRIAL_ROWS // max(1, _count_rows(obs)))
            obs = map_tree(lambda rows: np.concatenate([rows] * times), obs)
        count = _count_rows(obs)
        with self.evaluation.quiet(), Randomness(0).torch():
            with captured() as made:
                run = self._run(self._prepare(obs), count, state, None, {})
            action, logprob, _, _ = self._parse(run.answer)
            self._reading = _find_made(replace(run, made=made), self._module, action, logprob)
        if self._reading is None:
            self._reading = self._find_head(obs, state, count)

    def _find_head(self, obs: Tree, state: State | None, count: int) -> PolicyHead | None:
        """Find the policy head, on a copy with perturbed weights: a fresh agent's logits are all near 0."""
        twin = ActorCritic(perturbed_copy(self._module), self._method, self._given_prepare)
        twin.evaluation.keeps_dtype = self.evaluation.keeps_dtype
        everything = _Everything(tuple(path for path, _ in twin._module.named_modules() if path))
        with twin.evaluation.quiet(), Randomness(0).torch():
            run = twin._run(twin._prepare(obs), count, state, everything, {})
            action, logprob, _, _ = twin._parse(run.answer)
            return _find_head(twin._module, run.outputs, action, logprob)


@dataclass(frozen=True)
class Run:
    """One call of an agent's method: its answer, the distributions it made, the outputs of watched submodules."""

    answer: object
    made: Sequence[td.Distribution]
    outputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Everything:
    """Captures the outputs of all submodules; there is nothing to read yet."""

    paths: tuple[str, ...]

    def sheet(self, run: Run, module: nn.Module) -> Sheet:
        raise NotImplementedError


@dataclass(frozen=True)
class Made:
    """An action distribution that the method makes while it runs.

    Attributes:
        indices: Which of the distributions that the method makes; several are the parts of a MultiDiscrete action.
        count: How many distributions it makes in all.
        is_squashed: Whether the method applies tanh, and `action_scale` and `action_bias` if the module has them, to
            its samples by hand.
    """

    indices: tuple[int, ...]
    count: int
    is_squashed: bool = False

    paths: tuple[str, ...] = ()

    def sheet(self, run: Run, module: nn.Module) -> Sheet:
        """Describe the distribution.

        Raises:
            NoProgram: The method has taken a different path this time.
        """
        if len(run.made) != self.count:
            raise NoProgram(f"the agent made {len(run.made)} distributions where it made {self.count} before")
        chosen: Any = [run.made[index] for index in self.indices]
        if self.is_squashed:
            scale, shift = getattr(module, "action_scale", 1.0), getattr(module, "action_bias", 0.0)
            return squash(chosen[0], scale, shift)
        return describe(chosen if len(chosen) > 1 else chosen[0])


@dataclass(frozen=True)
class PolicyHead:
    """Where an agent's action distribution can be read.

    Attributes:
        path: The submodule whose output holds logits or means.
        family: What that output parametrises.
        nvec: The number of actions in each part of a MultiDiscrete action.
        log_std_parameter: The parameter that holds a Gaussian's log standard deviations.
        log_std_path: The submodule that returns them, if they are not a parameter.
    """

    path: str
    family: str
    nvec: tuple[int, ...] = ()
    log_std_parameter: str | None = None
    log_std_path: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The submodules to watch."""
        return (self.path,) if self.log_std_path is None else (self.path, self.log_std_path)

    def sheet(self, run: Run, module: nn.Module) -> Sheet:
        """Describe the distribution by the outputs of the watched submodules."""
        rows = run.outputs[self.path]
        match self.family:
            case "diagonal_gaussian":
                parameter = self.log_std_parameter
                other = None if self.log_std_path is None else run.outputs[self.log_std_path]
                log_std = other if parameter is None else module.get_parameter(parameter)
                assert log_std is not None, "a Gaussian's policy head knows where the standard deviations are"
                return Sheet("diagonal_gaussian", {"mean": rows, "log_std": log_std}, {}, {})
            case "multi_categorical":
                return Sheet("multi_categorical", {"logits": rows}, {}, {}, self.nvec)
            case _:
                return Sheet(self.family, {"logits": rows}, {}, {})


Reading: TypeAlias = Made | PolicyHead | _Everything


def _find_made(run: Run, module: nn.Module, action: torch.Tensor, logprob: torch.Tensor) -> Made | None:
    """Find, among the distributions made, the one under which `action` has the log-probability `logprob`."""
    actions, truth = as_array(action), as_array(logprob).reshape(-1)
    best: tuple[float, Made | None] = (np.inf, None)
    for guess in _guess_made(run.made):
        try:
            with np.errstate(all="ignore"):  # A wrong guess may overflow.
                logprobs = read(guess.sheet(run, module)).log_prob(actions)
        except (PolicyError, NoProgram, ValueError, IndexError, TypeError, AttributeError):
            continue
        if _is_close(logprobs, truth, 2e-2 if logprob.dtype == torch.bfloat16 else 1e-3):
            # A fresh agent's distributions may be nearly the same; only the right one matches exactly.
            error = float(np.abs(logprobs - truth).max())
            if error < best[0] or best[1] is None:
                best = error, guess
    return best[1]


def _guess_made(made: Sequence[td.Distribution]) -> Iterator[Made]:
    for index, distribution in reversed(list(enumerate(made))):
        yield Made((index,), len(made))
        if isinstance(distribution, td.Normal):
            yield Made((index,), len(made), is_squashed=True)
    parts = [index for index, distribution in enumerate(made) if isinstance(distribution, td.Categorical)]
    if len(parts) > 1:
        yield Made(tuple(parts), len(made))


def _watch(
    module: nn.Module, paths: tuple[str, ...], run: Callable[[], object]
) -> tuple[object, dict[str, torch.Tensor]]:
    """Call `run`, and return its result with the last output of each submodule that returned a tensor."""
    outputs: dict[str, torch.Tensor] = {}

    def hook_for(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                outputs.pop(path, None)  # So that the order is that of the last calls.
                outputs[path] = output

        return hook

    handles = [module.get_submodule(path).register_forward_hook(hook_for(path)) for path in paths]
    try:
        return run(), outputs
    finally:
        for handle in handles:
            handle.remove()


def _find_head(
    module: nn.Module, outputs: dict[str, torch.Tensor], action: torch.Tensor, logprob: torch.Tensor
) -> PolicyHead | None:
    """Find the policy head under which `action` has the log-probability `logprob` in every row.

    Args:
        module: The agent that was run.
        outputs: The outputs of all its submodules, in the order in which they ran.
        action: The actions it chose, shape `[n]` or `[n, parts]`.
        logprob: The log-probability it returned, shape `[n]`.
    """
    actions, truth = as_array(action), as_array(logprob).reshape(-1)
    usual = [path for path in _USUAL_HEADS if path in outputs]
    for path in usual + [path for path in reversed(outputs) if path not in usual]:
        rows = outputs[path]
        if rows.ndim != 2 or len(rows) != len(actions) or not rows.is_floating_point():
            continue
        for guess in _guess_heads(path, rows.shape[1], actions, module, outputs):
            with np.errstate(all="ignore"):  # A wrong guess may overflow.
                logprobs = read(guess.sheet(Run(None, (), outputs), module)).log_prob(actions)
            if _is_close(logprobs, truth):
                return guess
    return None


def _guess_heads(
    path: str, width: int, actions: Array, module: nn.Module, outputs: dict[str, torch.Tensor]
) -> Iterator[PolicyHead]:
    numbers = actions.astype(np.float64)
    is_whole = bool((numbers == np.round(numbers)).all() and numbers.min(initial=0) >= 0)
    head = PolicyHead(path, "categorical")
    if actions.ndim == 1 and is_whole and numbers.max(initial=0) < width:
        yield head
    if actions.ndim != 2:
        return
    parts = actions.shape[1]
    if is_whole:
        for nvec in _guess_nvecs(module, parts, width):
            if (numbers.max(axis=0, initial=0) < nvec).all():
                yield replace(head, family="multi_categorical", nvec=nvec)
        if width == parts and numbers.max(initial=0) <= 1:
            yield replace(head, family="bernoulli")
    if width == parts:
        gaussian = replace(head, family="diagonal_gaussian")
        for name, parameter in module.named_parameters():
            if parameter.numel() == width and not name.endswith("bias"):
                yield replace(gaussian, log_std_parameter=name)
        for other, rows in outputs.items():
            if other != path and rows.shape == (len(actions), width):
                yield replace(gaussian, log_std_path=other)


def _guess_nvecs(module: nn.Module, parts: int, width: int) -> Iterator[tuple[int, ...]]:
    """Guess the sizes of a MultiDiscrete action's parts: an attribute that adds up to `width`, or equal parts."""
    for value in vars(module).values():
        if isinstance(value, list | tuple | np.ndarray | torch.Tensor) and len(np.shape(value)) == 1:
            sizes = np.asarray(value)
            if sizes.dtype.kind in "iu" and len(sizes) == parts and sizes.sum() == width and sizes.min() >= 1:
                yield tuple(int(size) for size in sizes)
    if width % parts == 0 and width > parts:
        yield (width // parts,) * parts


def _find_memory(module: nn.Module) -> nn.LSTM | nn.GRU | None:
    memories = [child for child in module.modules() if isinstance(child, nn.LSTM | nn.GRU)]
    if len(memories) > 1:
        raise PolicyError(
            f"{type(module).__name__}.get_action_and_value() takes a recurrent state, but has {len(memories)} LSTM or "
            "GRU layers, so the shape of the state is unknown. Use TorchPolicy(agent, act=..., initial_state=...)."
        )
    return memories[0] if memories else None


def _count_rows(tree: Tree) -> int:
    while not isinstance(tree, np.ndarray):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


def _is_close(one: Array, other: Array, bound: float = 1e-3) -> bool:
    return one.shape == other.shape and np.allclose(one, other.astype(np.float64), rtol=bound, atol=0.1 * bound)
