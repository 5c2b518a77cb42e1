"""Readouts: which submodule of an agent parametrises its action distribution.

Found by trying: an agent's method is run with all submodules watched, and each output is taken, in turn, for the
logits or means of each family. The right one reproduces the log-probabilities that the method itself returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from clusterenv.adapters.torch.evaluation import as_array
from clusterenv.policy.continuous import DiagonalGaussian
from clusterenv.policy.discrete import Bernoulli, Categorical, MultiCategorical
from clusterenv.policy.distribution import Array, Distribution, Floats

_USUAL_NAMES = ("actor", "actor_mean", "policy", "pi")


@dataclass(frozen=True)
class Readout:
    """How to read an agent's action distribution.

    Attributes:
        path: The submodule whose output holds logits or means.
        family: What that output parametrises.
        nvec: The sizes of a MultiDiscrete action's parts.
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
        """Read the distribution off the output `[n, ...]` of the submodule at `path`."""
        match self.family:
            case "categorical":
                return Categorical(rows)
            case "multi_categorical":
                return MultiCategorical(rows, self.nvec)
            case "bernoulli":
                return Bernoulli(rows)
        if self.log_std_parameter is not None:
            log_std = _floats(module.get_parameter(self.log_std_parameter)).reshape(-1)
        assert log_std is not None, "a Gaussian's readout knows where the standard deviations are"
        return DiagonalGaussian(rows, log_std)

    def describe_outputs(self, outputs: dict[str, torch.Tensor], module: nn.Module) -> Distribution:
        """Read the distribution off the watched submodules' outputs."""
        log_std = None if self.log_std_path is None else _floats(outputs[self.log_std_path])
        return self.describe(_floats(outputs[self.path]), module, log_std)


def capture(
    module: nn.Module, paths: tuple[str, ...], run: Callable[[], object]
) -> tuple[object, dict[str, torch.Tensor]]:
    """Run something, and return its result with the last output of each submodule that returned a tensor."""
    outputs: dict[str, torch.Tensor] = {}

    def watch(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                outputs.pop(path, None)  # So that the order is that of the last calls.
                outputs[path] = output

        return hook

    handles = [module.get_submodule(path).register_forward_hook(watch(path)) for path in paths]
    try:
        return run(), outputs
    finally:
        for handle in handles:
            handle.remove()


def find_readout(
    module: nn.Module, outputs: dict[str, torch.Tensor], action: torch.Tensor, logprob: torch.Tensor
) -> Readout | None:
    """Find the readout under which `action` has the log-probability `logprob` in every row.

    Args:
        module: The agent that was run.
        outputs: Of all its submodules, in the order they ran.
        action: What it chose, shape `[n]` or `[n, parts]`.
        logprob: What it says about that, shape `[n]`.
    """
    actions, truth = as_array(action), as_array(logprob).reshape(-1)
    usual = [path for path in _USUAL_NAMES if path in outputs]
    for path in usual + [path for path in reversed(outputs) if path not in usual]:
        rows = outputs[path]
        if rows.ndim != 2 or len(rows) != len(actions) or not rows.is_floating_point():
            continue
        for guess in _guesses(path, rows.shape[1], actions, module, outputs):
            # An unlikely guess may overflow on its way to being wrong.
            with np.errstate(all="ignore"):
                logprobs = guess.describe_outputs(outputs, module).log_prob(actions)
            if logprobs.shape == truth.shape and np.allclose(logprobs, truth, rtol=1e-3, atol=1e-4):
                return guess
    return None


def _guesses(
    path: str, width: int, actions: Array, module: nn.Module, outputs: dict[str, torch.Tensor]
) -> Iterator[Readout]:
    numbers = actions.astype(np.float64)
    is_whole = bool((numbers == np.round(numbers)).all() and numbers.min(initial=0) >= 0)
    readout = Readout(path, "categorical")
    if actions.ndim == 1 and is_whole and numbers.max(initial=0) < width:
        yield readout
    if actions.ndim != 2:
        return
    parts = actions.shape[1]
    if is_whole:
        for nvec in _candidate_nvecs(module, parts, width):
            if (numbers.max(axis=0, initial=0) < nvec).all():
                yield replace(readout, family="multi_categorical", nvec=nvec)
        if width == parts and numbers.max(initial=0) <= 1:
            yield replace(readout, family="bernoulli")
    if width == parts:
        gaussian = replace(readout, family="diagonal_gaussian")
        for name, parameter in module.named_parameters():
            if parameter.numel() == width and not name.endswith("bias"):
                yield replace(gaussian, log_std_parameter=name)
        for other, rows in outputs.items():
            if other != path and rows.shape == (len(actions), width):
                yield replace(gaussian, log_std_path=other)


def _candidate_nvecs(module: nn.Module, parts: int, width: int) -> Iterator[tuple[int, ...]]:
    """Guess the sizes of a MultiDiscrete action's parts: an attribute that adds up, else equal parts."""
    for value in vars(module).values():
        if isinstance(value, list | tuple | np.ndarray | torch.Tensor) and len(np.shape(value)) == 1:
            sizes = np.asarray(value)
            if sizes.dtype.kind in "iu" and len(sizes) == parts and sizes.sum() == width and sizes.min() >= 1:
                yield tuple(int(size) for size in sizes)
    if width % parts == 0 and width > parts:
        yield (width // parts,) * parts


def _floats(tensor: torch.Tensor) -> Floats:
    array: Floats = as_array(tensor).astype(np.float32, copy=False)
    return array
