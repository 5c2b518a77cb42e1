"""How a module is run on a batch of numpy observations: no gradients, no validation, no trace left behind."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution as TorchDistribution

from clusterenv.adapters.torch.structure import strip
from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array
from clusterenv.policy.policy import State, Tree

TensorTree: TypeAlias = "torch.Tensor | tuple[TensorTree, ...] | dict[str, TensorTree]"


class Randomness:
    """A policy's own random numbers, for numpy and for torch, apart from everybody else's in the process.

    Args:
        seed: None draws one from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.numpy = np.random.default_rng(seed)
        self._state = torch.Generator().manual_seed(int(self.numpy.integers(2**63))).get_state()

    @contextmanager
    def torch(self) -> Iterator[None]:
        """Let torch's global generator, the one user code draws from, be this one for a while."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)


class Evaluation:
    """Runs a module without changing it.

    The module stays in the mode (train or eval) its user chose, because layers such as NoisyLinear explore by it; only
    batch norms are held in eval mode, since in train mode they would write to their own weights.

    Args:
        module: The user's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Switch off gradients, the checks of torch.distributions, and batch norms' statistics."""
        modes = [norm.training for norm in self._norms]
        checks = TorchDistribution._validate_args
        TorchDistribution.set_default_validate_args(False)
        for norm in self._norms:
            norm.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            TorchDistribution.set_default_validate_args(checks)
            for norm, mode in zip(self._norms, modes, strict=True):
                norm.training = mode

    def tensors(self, tree: Tree) -> TensorTree:
        """Turn observations into tensors of the module's floating dtype on its device, as `torch.Tensor(obs)` would."""
        parameter = next(self._module.parameters(), None)
        if parameter is None:
            return as_tensors(tree, torch.float32, torch.device("cpu"))
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        return as_tensors(tree, dtype, parameter.device)


def as_tensors(tree: Tree, dtype: torch.dtype | None, device: torch.device) -> TensorTree:
    """Turn nested arrays into nested tensors, sharing memory where dtype and device allow it."""
    if isinstance(tree, dict):
        return {name: as_tensors(part, dtype, device) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(as_tensors(part, dtype, device) for part in tree)
    if not tree.flags.writeable:  # torch has no read-only tensors, and warns.
        tree = tree.copy()
    return torch.from_numpy(tree).to(device=device, dtype=dtype)


def as_array(tensor: torch.Tensor) -> Array:
    """Turn one result into an array; the dtypes numpy lacks become float32."""
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def as_arrays(tree: TensorTree) -> Tree:
    """Turn nested tensors, or what is already arrays, into nested arrays."""
    if isinstance(tree, dict):
        return {name: as_arrays(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(as_arrays(part) for part in tree)
    return as_array(tree) if isinstance(tree, torch.Tensor) else np.asarray(tree)


def as_column(tensor: torch.Tensor, name: str, num_envs: int) -> Array:
    """Turn a value head's `[n, 1]` or `[n]` into an array `[n]`; anything else keeps its shape.

    Raises:
        PolicyError: The first axis does not count environments.
    """
    array = as_array(tensor)
    if array.shape == (num_envs, 1):
        return array[:, 0]
    if array.shape[:1] != (num_envs,):
        raise PolicyError(f"The agent's {name} for {num_envs} environments has shape {array.shape}.")
    return array


def as_state(state: Mapping[str, torch.Tensor]) -> State:
    """Turn a recurrent state into arrays of its own: the policy may reuse its tensors."""
    return {name: as_array(tensor).copy() for name, tensor in state.items()}


def perturbed_copy(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters shaken.

    A fresh agent is degenerate (all its logits nearly 0), so that wrong guesses about its inner workings look right.
    What holds for shaken weights as well holds by structure.
    """
    twin: nn.Module = pickle.loads(strip(module, module))  # noqa: S301  # made in this very line
    twin.load_state_dict(module.state_dict())
    if (parameter := next(module.parameters(), None)) is not None:
        twin.to(parameter.device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                size = 0.1 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(size * noise.to(parameter.device))
    return twin
