"""Agents with a method that returns action, log-probability, entropy and value: CleanRL's shape, and the paper's."""

from __future__ import annotations

import inspect

import numpy as np
import torch
from torch import nn

from clusterenv.adapters.torch.evaluation import (
    Evaluation,
    Randomness,
    as_array,
    as_arrays,
    as_column,
    perturbed_copy,
)
from clusterenv.adapters.torch.networks import Networks, find_networks
from clusterenv.adapters.torch.proof import is_plain
from clusterenv.adapters.torch.reading import Prepare
from clusterenv.adapters.torch.readout import Readout, capture, find_readout
from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array, Call, Distribution, Floats
from clusterenv.policy.policy import Decision, State, Tree, draw

_FEW_ROWS = 16


class MethodReading:
    """Acts by the agent's own method, or faster where that is provably the same.

    The first batch is used to find out, on a copy of the agent with shaken weights, (1) which submodule's output
    parametrises the action distribution, so that it can be read without knowing how the agent is written, and (2)
    whether the method does nothing but call its networks, so that they can be called directly.

    Args:
        module: The agent.
        method: Called as `method(obs)`, or `method(obs, state, done)` if the agent is recurrent.
        prepare: Turns observations into what the method takes.
        is_own: Whether nobody but this policy changes the module, so that its memory may be held on to.
    """

    def __init__(self, module: nn.Module, method: str, prepare: Prepare | None, is_own: bool) -> None:
        self._module = module
        self._method = method
        self._given_prepare = prepare
        self._evaluation = Evaluation(module)
        self._prepare = prepare or self._evaluation.tensors
        self._is_own = is_own
        parameters = list(inspect.signature(getattr(module, method)).parameters.values())
        self._memory = _find_memory(module) if len(parameters) >= 3 and parameters[1].name != "action" else None
        further = parameters[1 if self._memory is None else 3 :]
        if required := [p.name for p in further if p.default is p.empty and p.kind is not p.VAR_KEYWORD]:
            raise PolicyError(
                f"{type(module).__name__}.{method}() needs {', '.join(required)} beside the observations. Say how to "
                "get them: TorchPolicy(agent, act=lambda agent, obs: ...)."
            )
        self._call_names = frozenset(p.name for p in further) - {"action"}
        self._is_studied = False
        self._readout: Readout | None = None
        self._is_direct = False
        self._networks: Networks | None = None  # Kept only if the module is ours.

    def act(self, obs: Tree, state: State | None, call: Call, randomness: Randomness) -> Decision:
        """Decide by the networks, if they are known to be all there is, else by the agent's method."""
        if not self._is_studied:
            self._study(obs, state)
        if self._networks is not None and self._readout is not None and isinstance(obs, np.ndarray):
            rows, values = self._networks.both(obs)
            return draw(self._readout.describe(rows, self._module), randomness.numpy, call, {"value": values})
        own_values = {name: value for name, value in call.items() if name in self._call_names}
        others = {name: value for name, value in call.items() if name not in own_values}
        if others and self._readout is None:
            raise PolicyError(f"{type(self._module).__name__}.{self._method}() takes no {', '.join(sorted(others))}.")
        paths = self._readout.paths if others and self._readout is not None else ()
        with self._evaluation.quiet(), randomness.torch():
            answer, outputs = self._run(obs, state, paths, **own_values)
            action, logprob, value, new_state = self._parse(answer)
            count = logprob.shape[0]
            extras = {"logprob": as_column(logprob, "logprob", count), "value": as_column(value, "value", count)}
            if self._readout is None or not others:
                return Decision(as_arrays(action), extras, new_state)
            distribution = self._readout.describe_outputs(outputs, self._module)
        return draw(distribution, randomness.numpy, others, {"value": extras["value"]})._replace(state=new_state)

    def distribution(self, obs: Tree, state: State | None) -> Distribution | None:
        """Read the distribution off the submodule that parametrises it; None if none was found."""
        if not self._is_studied:
            self._study(obs, state)
        if self._readout is None:
            return None
        # Found anew if the module is not ours: its owner may give it other memory at any time.
        networks = self._networks or self._find_networks(obs)
        if networks is not None and isinstance(obs, np.ndarray):
            return self._readout.describe(networks.policy(obs), self._module)
        with self._evaluation.quiet(), Randomness(0).torch():
            _, outputs = self._run(obs, state, self._readout.paths)
            return self._readout.describe_outputs(outputs, self._module)

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
        return capture(self._module, paths, lambda: method(*arguments, **values))

    def _recurrent_arguments(self, state: State | None, num_envs: int) -> list[object]:
        assert state is not None, "a recurrent agent has an initial state"
        device = next(self._module.parameters()).device
        # Ours counts environments first, torch's layers first.
        tensors = tuple(torch.from_numpy(part.swapaxes(0, 1).copy()).to(device) for part in state.values())
        # The rows of new episodes are already reset.
        return [tensors if len(tensors) > 1 else tensors[0], torch.zeros(num_envs, device=device)]

    def _parse(self, answer: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, State | None]:
        expected = 4 if self._memory is None else 5
        if not isinstance(answer, tuple) or len(answer) != expected:
            got = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
            raise PolicyError(
                f"{type(self._module).__name__}.{self._method}() should return (action, logprob, entropy, value"
                f"{'' if self._memory is None else ', state'}), got {got}. Say what it means: "
                "TorchPolicy(agent, output=...) or TorchPolicy(agent, act=...)."
            )
        if self._memory is None:
            return answer[0], answer[1], answer[3], None
        parts = answer[4] if isinstance(answer[4], tuple) else (answer[4],)
        state = {name: as_array(part).swapaxes(0, 1).copy() for name, part in zip("hc", parts, strict=False)}
        return answer[0], answer[1], answer[3], state

    def _study(self, obs: Tree, state: State | None) -> None:
        """Find the readout and, if the module is ours alone, the direct way through the networks."""
        twin = perturbed_copy(self._module)
        twin_reading = MethodReading(twin, self._method, self._given_prepare, is_own=False)
        if self._memory is None:
            obs = _repeat_rows(obs, _FEW_ROWS)  # One environment's single action would prove little.
        with twin_reading._evaluation.quiet(), Randomness(0).torch():
            answer, outputs = twin_reading._run(obs, state, tuple(path for path, _ in twin.named_modules() if path))
            action, logprob, value, _ = twin_reading._parse(answer)
            self._readout = find_readout(twin, outputs, action, logprob)
        self._is_studied = True
        if self._readout is None or self._given_prepare is not None or self._memory is not None or self._call_names:
            return
        if not isinstance(obs, np.ndarray) or not is_plain(self._module, self._method, _network_names(self._module)):
            return
        trial = find_networks(twin, self._readout.path, is_flat=obs.ndim == 2)
        if trial is None:
            return
        rows, values = trial.both(obs)
        same_rows = _is_close(rows, as_array(outputs[self._readout.path]))
        self._is_direct = same_rows and _is_close(values, as_array(value).reshape(-1))
        if self._is_own:
            self._networks = self._find_networks(obs)

    def _find_networks(self, obs: Tree) -> Networks | None:
        """Return the module's networks, if they may be called directly."""
        if not self._is_direct or self._readout is None or not isinstance(obs, np.ndarray):
            return None
        return find_networks(self._module, self._readout.path, is_flat=obs.ndim == 2)


def _network_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name in (*module._modules, *module._parameters))


def _find_memory(module: nn.Module) -> nn.LSTM | nn.GRU | None:
    memories = [child for child in module.modules() if isinstance(child, nn.LSTM | nn.GRU)]
    if len(memories) > 1:
        raise PolicyError(
            f"{type(module).__name__}.get_action_and_value() takes a recurrent state, but has {len(memories)} LSTM or "
            "GRU layers, so the state's shape is unknown. Use TorchPolicy(agent, act=..., initial_state=...)."
        )
    return memories[0] if memories else None


def _count_rows(tree: Tree) -> int:
    while not isinstance(tree, np.ndarray):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return len(tree)


def _repeat_rows(tree: Tree, at_least: int) -> Tree:
    if isinstance(tree, dict):
        return {name: _repeat_rows(part, at_least) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_repeat_rows(part, at_least) for part in tree)
    return np.concatenate([tree] * -(-at_least // max(1, len(tree))))


def _is_close(one: Floats, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(one, other.astype(np.float64), rtol=1e-3, atol=1e-4)
