"""A torch module: its structure, its weights as arrays, and how to run it without leaving a trace."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution as TorchDistribution

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array, Floats
from clusterenv.policy.policy import State, Tree, map_tree
from clusterenv.policy.weights import WeightsSpec

TensorTree: TypeAlias = "torch.Tensor | tuple[TensorTree, ...] | dict[str, TensorTree]"
Prepare: TypeAlias = Callable[[Tree], TensorTree]

_SAMPLES_PER_TENSOR = 16


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module from inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def strip(obj: object, module: nn.Module) -> bytes:
    """Pickle an object that holds `module`, without the module's weights and for a machine without GPUs.

    Weights become zeros of the same shape; tied weights stay tied. Other tensors (plain attributes, non-persistent
    buffers) keep their values. Optimizers become None.

    Raises:
        PolicyError: Something in the object cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Stripper(buffer, {id(tensor) for tensor in _tensors(module)}).dump(obj)
    except PolicyError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise PolicyError(
            f"The structure of {type(module).__name__} cannot be sent to the workers: {error} Does the agent hold "
            "something that only the learner needs, such as an environment, a logger or a lock?"
        ) from error
    return buffer.getvalue()


def perturbed_copy(module: nn.Module) -> nn.Module:
    """Copy a module and add noise to its parameters.

    A freshly initialised agent is degenerate (all its logits are close to 0), so wrong guesses about its inner workings
    look right. What holds for perturbed weights too holds because of the module's structure.
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


def read_weights(module: nn.Module) -> dict[str, Array]:
    """Return parameters and persistent buffers as arrays, without a copy if they are in this machine's memory.

    Tied weights appear once. A dtype that numpy lacks, such as bfloat16, appears as integers of the same size.
    """
    return {name: _raw_array(tensor) for name, tensor in _named_tensors(module)}


def load_weights(module: nn.Module, weights: Mapping[str, Array]) -> None:
    """Overwrite parameters and persistent buffers in place.

    Raises:
        PolicyError: Names, shapes or dtypes do not fit.
    """
    WeightsSpec.of(read_weights(module)).check(weights)
    for name, tensor in _named_tensors(module):
        if tensor.device.type == "cpu":
            np.copyto(_raw_array(tensor), weights[name])
        else:
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(weights[name].copy()).view(tensor.dtype).reshape(tensor.shape))


class ChangeDetector:
    """Detects that a module's weights may have changed.

    Tensors count their in-place writes, but not those through `.data`, through numpy, or by a fused optimizer; so a
    few numbers of every tensor are compared as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._identity: Hashable = None
        self._samples: list[Array] = []
        self._device_samples: list[torch.Tensor] = []

    def stamp(self) -> Hashable:
        """Return a value that differs from an earlier one if any weight may have changed in between."""
        tensors = list(_tensors(self._module))
        identity = tuple((id(tensor), tensor.data_ptr()) for tensor in tensors)
        if identity != self._identity:
            self._identity = identity
            self._sample(tensors)
        numbers = b"".join([sample.tobytes() for sample in self._samples])
        if self._device_samples:  # One copy for all of them, because each copy waits for the device.
            numbers += torch.cat(self._device_samples).cpu().numpy().tobytes()
        return identity, tuple([tensor._version for tensor in tensors]), numbers

    def _sample(self, tensors: list[torch.Tensor]) -> None:
        self._samples, self._device_samples = [], []
        for tensor in tensors:
            step = max(1, tensor.numel() // _SAMPLES_PER_TENSOR)
            if tensor.device.type == "cpu":
                self._samples.append(_raw_array(tensor).reshape(-1)[::step])
            elif tensor.is_floating_point():
                self._device_samples.append(tensor.detach().view(-1)[::step].float())


class Randomness:
    """A policy's own random numbers, for numpy and for torch, separate from all others in the process.

    Args:
        seed: If None, one is drawn from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.numpy = np.random.default_rng(seed)
        self._state = torch.Generator().manual_seed(int(self.numpy.integers(2**63))).get_state()

    @contextmanager
    def torch(self) -> Iterator[None]:
        """Give torch's global generator, which user code draws from, this policy's state for a while."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(outside)


class Evaluation:
    """Runs a module without changing it.

    The module stays in the mode (train or eval) its user chose, because layers such as NoisyLinear explore by it. Only
    batch norms are held in eval mode, because in train mode they would write to their own weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Switch off gradients, the checks of torch.distributions, and updates of batch norms' statistics."""
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
    """Turn nested arrays into nested tensors, sharing memory if dtype and device allow it."""

    def convert(array: Array) -> torch.Tensor:
        writeable = array if array.flags.writeable else array.copy()  # torch has no read-only tensors, and warns.
        return torch.from_numpy(writeable).to(device=device, dtype=dtype)

    tensors: TensorTree = map_tree(convert, tree)
    return tensors


def as_array(tensor: torch.Tensor) -> Array:
    """Turn one result into an array; bfloat16, which numpy lacks, becomes float32."""
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def as_floats(tensor: torch.Tensor) -> Floats:
    """Turn one result into an array of float32."""
    array: Floats = as_array(tensor).astype(np.float32, copy=False)
    return array


def as_arrays(tree: TensorTree) -> Tree:
    """Turn nested tensors, or what is already arrays, into nested arrays."""
    arrays: Tree = map_tree(lambda leaf: as_array(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf), tree)
    return arrays


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
    """Turn a recurrent state into arrays; they are copies, because the policy may reuse its tensors."""
    return {name: as_array(tensor).copy() for name, tensor in state.items()}


class _Stripper(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles a module's weights as their shapes."""

    def __init__(self, file: io.BytesIO, weight_ids: set[int]) -> None:
        super().__init__(file)
        self._weight_ids = weight_ids

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise PolicyError("The agent has lazy layers without weights yet: call it once on an observation first.")
        if isinstance(obj, torch.Tensor):
            values = None if id(obj) in self._weight_ids else _raw_array(obj)
            is_parameter = isinstance(obj, nn.Parameter)
            return _rebuild_tensor, (tuple(obj.shape), obj.dtype, obj.requires_grad, is_parameter, values)
        if isinstance(obj, torch.device):
            return torch.device, ("cpu",)
        if isinstance(obj, torch.optim.Optimizer):
            return _none, ()
        return super().reducer_override(obj)


def _rebuild_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool, values: Array | None
) -> torch.Tensor:
    if values is None:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = torch.from_numpy(values.copy()).view(dtype).reshape(shape)
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


def _none() -> None:
    return None


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what `_named_tensors` yields, but several times faster and without names; tied weights more than once."""
    for tensor in module._parameters.values():
        if tensor is not None:
            yield tensor
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer
    for child in module._modules.values():
        if child is not None:
            yield from _tensors(child)


def _raw_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    try:
        array: Array = tensor.numpy()
    except TypeError:  # numpy has no bfloat16 and the like, but can carry the bits.
        array = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
    return array
