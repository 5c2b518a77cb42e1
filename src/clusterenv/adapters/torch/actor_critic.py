"""Agents with a method that returns action, log-probability, entropy and value: CleanRL's form, and the paper's.

The policy head, the submodule whose output parametrises the action distribution, is found by trying. The method is run
with all submodules watched, and each output is taken, in turn, for the logits or means of each family. The right one
reproduces the log-probabilities that the method itself returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from clusterenv.adapters.torch.fast_path import Networks, find_networks, is_pure
from clusterenv.adapters.torch.module import (
    Evaluation,
    Prepare,
    Randomness,
    as_array,
    as_arrays,
    as_column,
    as_floats,
    perturbed_copy,
)
from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array, Call, Distribution, Floats
from clusterenv.policy.families import Bernoulli, Categorical, DiagonalGaussian, MultiCategorical
from clusterenv.policy.policy import Decision, State, Tree, draw, map_tree

_MIN_TRIAL_ROWS = 16
_USUAL_HEADS = ("actor", "actor_mean", "policy", "pi")


class ActorCritic:
    """Acts by the agent's own method, or faster if that is provably the same.

    The first batch is used to find out, on a copy of the agent with perturbed weights, (1) where its policy head is, so
    that the action distribution can be read without knowing how the agent is written, and (2) whether the method does
    nothing but call its networks, so that they can be called directly.

    Args:
        module: The agent.
        method: Called as `method(obs)`, or `method(obs, state, done)` if the agent is recurrent.
        prepare: Turns observations into what the method takes.
        is_owned: Whether only this policy changes the module, so that references to its memory may be kept.
    """

    def __init__(self, module: nn.Module, method: str, prepare: Prepare | None, is_owned: bool) -> None:
        self._module = module
        self._method = method
        self._given_prepare = prepare
        self._evaluation = Evaluation(module)
        self._prepare = prepare or self._evaluation.tensors
        self._is_owned = is_owned
        parameters = list(inspect.signature(getattr(module, method)).parameters.values())
        self._memory = _find_memory(module) if len(parameters) >= 3 and parameters[1].name != "action" else None
        further = parameters[1 if self._memory is None else 3 :]
        if required := [p.name for p in further if p.default is p.empty and p.kind is not p.VAR_KEYWORD]:
            raise PolicyError(
                f"{type(module).__name__}.{method}() needs {', '.join(required)} besides the observations. Say how to "
                "get them: TorchPolicy(agent, act=lambda agent, obs: ...)."
            )
        self._call_names = frozenset(p.name for p in further) - {"action"}
        self._is_studied = False
        self._head: PolicyHead | None = None
        self._is_direct = False
        self._networks: Networks | None = None  # Kept only if the module is ours.

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        """Decide with the networks if they are known to suffice, otherwise with the agent's method."""
        if not self._is_studied:
            self._study(obs, state)
        if self._networks is not None and self._head is not None and isinstance(obs, np.ndarray):
            rows, values = self._networks.both(obs)
            return draw(self._head.describe(rows, self._module), randomness.numpy, call, {"value": values})
        own_values = {name: value for name, value in call.items() if name in self._call_names}
        others = {name: value for name, value in call.items() if name not in own_values}
        if others and self._head is None:
            raise PolicyError(f"{type(self._module).__name__}.{self._method}() takes no {', '.join(sorted(others))}.")
        paths = self._head.paths if others and self._head is not None else ()
        with self._evaluation.quiet(), randomness.torch():
            answer, outputs = self._run(obs, state, paths, **own_values)
            action, logprob, value, new_state = self._parse(answer)
            count = logprob.shape[0]
            extras = {"logprob": as_column(logprob, "logprob", count), "value": as_column(value, "value", count)}
            if self._head is None or not others:
                return Decision(as_arrays(action), extras, new_state)
            distribution = self._head.describe_outputs(outputs, self._module)
        return draw(distribution, randomness.numpy, others, {"value": extras["value"]})._replace(state=new_state)

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        """Read the distribution from the policy head; None if none was found."""
        if not self._is_studied:
            self._study(obs, state)
        if self._head is None:
            return None
        # Looked up again if the module is not ours: its owner may give it other memory at any time.
        networks = self._networks or self._find_networks(obs)
        if networks is not None and isinstance(obs, np.ndarray):
            return self._head.describe(networks.policy(obs), self._module)
        with self._evaluation.quiet(), Randomness(0).torch():
            _, outputs = self._run(obs, state, self._head.paths)
            return self._head.describe_outputs(outputs, self._module)

    def initial_state(self, num_envs: int) -> State | None:
        """Return zeros, as CleanRL does, if the agent is recurrent."""
        if self._memory is None:
            return None
        zeros = np.zeros((num_envs, self._memory.num_layers, self._memory.hidden_size), np.float32)
        return {"h": zeros, "c": zeros.copy()} if isinstance(self._memory, nn.LSTM) else {"h": zeros}

    def _run(
        self, obs: Tree, state: State | None, paths: tuple[str, ...], **values: object
    ) -> tuple[object, dict[str, torch.Tensor]]:
        """Call the method, and return its answer with the outputs of the submodules at `paths`."""
        method = getattr(self._module, self._method)
        arguments: list[object] = [self._prepare(obs)]
        if self._memory is not None:
            num_envs = _count_rows(obs)
            arguments += self._recurrent_arguments(state or self.initial_state(num_envs), num_envs)
        return _watch(self._module, paths, lambda: method(*arguments, **values))

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
        """Find the policy head and, if the module is ours alone, the direct way through the networks."""
        twin = perturbed_copy(self._module)
        twin_agent = ActorCritic(twin, self._method, self._given_prepare, is_owned=False)
        if self._memory is None:
            times = -(-_MIN_TRIAL_ROWS // max(1, _count_rows(obs)))  # A single action would prove little.
            obs = map_tree(lambda rows: np.concatenate([rows] * times), obs)
        with twin_agent._evaluation.quiet(), Randomness(0).torch():
            answer, outputs = twin_agent._run(obs, state, tuple(path for path, _ in twin.named_modules() if path))
            action, logprob, value, _ = twin_agent._parse(answer)
            self._head = _find_head(twin, outputs, action, logprob)
        self._is_studied = True
        if self._head is None or self._given_prepare is not None or self._memory is not None or self._call_names:
            return
        networks = frozenset((*self._module._modules, *self._module._parameters))
        if not isinstance(obs, np.ndarray) or not is_pure(self._module, self._method, networks):
            return
        trial = find_networks(twin, self._head.path, is_flat=obs.ndim == 2)
        if trial is None:
            return
        try:
            rows, values = trial.both(obs)
        except Exception:  # noqa: BLE001 - whatever is wrong with the guess: the agent's own method is always right
            return
        same_rows = _is_close(rows, as_array(outputs[self._head.path]))
        self._is_direct = same_rows and _is_close(values, as_array(value).reshape(-1))
        if self._is_owned:
            self._networks = self._find_networks(obs)

    def _find_networks(self, obs: Tree) -> Networks | None:
        if not self._is_direct or self._head is None or not isinstance(obs, np.ndarray):
            return None
        return find_networks(self._module, self._head.path, is_flat=obs.ndim == 2)


@dataclass(frozen=True)
class PolicyHead:
    """Where an agent's action distribution can be read.

    Attributes:
        path: The submodule whose output holds logits or means.
        family: What that output parametrises.
        nvec: The number of actions in each part of a MultiDiscrete action.
        log_std_parameter: The parameter that holds a Gaussian's log standard deviations.
        log_std_path: Or the submodule that returns them.
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

    def describe(self, rows: Floats, module: nn.Module, log_std: Floats | None = None) -> Distribution:
        """Return the distribution, given the output `[n, ...]` of the submodule at `path`."""
        match self.family:
            case "categorical":
                return Categorical(rows)
            case "multi_categorical":
                return MultiCategorical(rows, self.nvec)
            case "bernoulli":
                return Bernoulli(rows)
        if self.log_std_parameter is not None:
            log_std = as_floats(module.get_parameter(self.log_std_parameter)).reshape(-1)
        assert log_std is not None, "a Gaussian's policy head knows where the standard deviations are"
        return DiagonalGaussian(rows, log_std)

    def describe_outputs(self, outputs: dict[str, torch.Tensor], module: nn.Module) -> Distribution:
        """Return the distribution, given the outputs of the watched submodules."""
        log_std = None if self.log_std_path is None else as_floats(outputs[self.log_std_path])
        return self.describe(as_floats(outputs[self.path]), module, log_std)


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
        outputs: Of all its submodules, in the order in which they ran.
        action: What it chose, shape `[n]` or `[n, parts]`.
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
                logprobs = guess.describe_outputs(outputs, module).log_prob(actions)
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


def _is_close(one: Floats, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(one, other.astype(np.float64), rtol=1e-3, atol=1e-4)
