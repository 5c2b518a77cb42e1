"""A torch module taken apart: its structure, pickled to the workers once, and its weights, which are arrays."""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Iterator, Mapping

import cloudpickle
import numpy as np
import torch
from torch import nn

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array
from clusterenv.policy.weights import WeightsSpec

_SAMPLES_PER_TENSOR = 16


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module out of torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def strip(obj: object, module: nn.Module) -> bytes:
    """Pickle an object that holds `module`, without the module's weights and for a machine without GPUs.

    Weights become zeros of the same shape; tied weights stay tied. Tensors that are no weights (plain attributes,
    non-persistent buffers) keep their values. Optimizers stay on the head.

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
            "something that belongs to the learner only, such as an environment, a logger or a lock?"
        ) from error
    return buffer.getvalue()


def read_weights(module: nn.Module) -> dict[str, Array]:
    """Return parameters and persistent buffers as arrays, without a copy where they are in this machine's memory.

    Tied weights appear once. A dtype numpy lacks, such as bfloat16, appears as integers of the same size.
    """
    return {name: _as_array(tensor) for name, tensor in _named_tensors(module)}


def load_weights(module: nn.Module, weights: Mapping[str, Array]) -> None:
    """Overwrite parameters and persistent buffers in place.

    Raises:
        PolicyError: Names, shapes or dtypes do not fit.
    """
    WeightsSpec.of(read_weights(module)).check(weights)
    for name, tensor in _named_tensors(module):
        if tensor.device.type == "cpu":
            np.copyto(_as_array(tensor), weights[name])
        else:
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(weights[name].copy()).view(tensor.dtype).reshape(tensor.shape))


class Stamper:
    """Notices that a module's weights may have changed.

    Tensors count their in-place writes, but not those through `.data`, through numpy, or by a fused optimizer; so a
    few numbers of every tensor are looked at as well.

    Args:
        module: Whose weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._identity: Hashable = None
        self._samples: list[Array] = []
        self._remote_samples: list[torch.Tensor] = []

    def stamp(self) -> Hashable:
        """Return a value that differs from an earlier one if any weight may have changed in between."""
        tensors = list(_tensors(self._module))
        identity = tuple((id(tensor), tensor.data_ptr()) for tensor in tensors)
        if identity != self._identity:
            self._identity = identity
            self._sample(tensors)
        numbers = b"".join([sample.tobytes() for sample in self._samples])
        if self._remote_samples:  # One copy for all: each waits for the device.
            numbers += torch.cat(self._remote_samples).cpu().numpy().tobytes()
        return identity, tuple([tensor._version for tensor in tensors]), numbers

    def _sample(self, tensors: list[torch.Tensor]) -> None:
        self._samples, self._remote_samples = [], []
        for tensor in tensors:
            step = max(1, tensor.numel() // _SAMPLES_PER_TENSOR)
            if tensor.device.type == "cpu":
                self._samples.append(_as_array(tensor).reshape(-1)[::step])
            elif tensor.is_floating_point():
                self._remote_samples.append(tensor.detach().view(-1)[::step].float())


class _Stripper(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles a module's weights as their shapes."""

    def __init__(self, file: io.BytesIO, weight_ids: set[int]) -> None:
        super().__init__(file)
        self._weight_ids = weight_ids

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise PolicyError("The agent has lazy layers without weights yet: call it once on an observation first.")
        if isinstance(obj, torch.Tensor):
            values = None if id(obj) in self._weight_ids else _as_array(obj)
            return _rebuild_tensor, (
                tuple(obj.shape),
                obj.dtype,
                obj.requires_grad,
                isinstance(obj, nn.Parameter),
                values,
            )
        if isinstance(obj, torch.device):
            return torch.device, ("cpu",)
        if isinstance(obj, torch.optim.Optimizer):
            return _nothing, ()
        return super().reducer_override(obj)


def _rebuild_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool, values: Array | None
) -> torch.Tensor:
    if values is None:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = torch.from_numpy(values.copy()).view(dtype).reshape(shape)
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


def _nothing() -> None:
    return None


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what `_named_tensors` yields, without the names and several times faster; tied weights more than once."""
    for tensor in module._parameters.values():
        if tensor is not None:
            yield tensor
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer
    for child in module._modules.values():
        if child is not None:
            yield from _tensors(child)


def _as_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    try:
        array: Array = tensor.numpy()
    except TypeError:  # bfloat16 and the like: numpy has no name for them, but can carry the bits.
        array = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
    return array
