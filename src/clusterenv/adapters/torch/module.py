"""A torch module: its structure, its weights as arrays, and how to run it without side effects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution as TorchDistribution
from torch.nn.utils import parametrize

from clusterenv.errors import PolicyError
from clusterenv.policy.array_kinds import NUMPY
from clusterenv.policy.contents import Contents, Delivered
from clusterenv.policy.distribution import Array, Floats
from clusterenv.policy.policy import State, Tree, map_tree

TensorTree: TypeAlias = "torch.Tensor | tuple[TensorTree, ...] | dict[str, TensorTree]"
Prepare: TypeAlias = Callable[[Tree], TensorTree]

_SAMPLES_PER_TENSOR = 16
_CPU = torch.device("cpu")
_LAST_ASKED = frozenset({"distribution"})  # Where SB3's models keep the distribution they made last.
# Attributes that every module has and no user changes by hand; hooks that act on a forward pass are not among them.
_BOOKKEEPING = (frozenset(vars(nn.Module())) | {"_compiled_call_impl"}) - {
    *("training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module from inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def perturbed_copy(module: nn.Module) -> nn.Module:
    """Copy a module and add noise to its parameters.

    A freshly initialised agent is degenerate (all its logits are close to 0), so wrong guesses about its inner workings
    look right. What also holds for perturbed weights follows from the module's structure.
    """
    contents = Contents(module, [TORCH], warns=False)
    delivered = Delivered(contents.pack())
    delivered.load(contents.weights())
    twin: nn.Module = delivered.payload
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


class TorchArrays:
    """Torch's tensors as an `ArrayKind` of `policy.contents`."""

    def is_array(self, obj: object) -> bool:
        return isinstance(obj, torch.Tensor)

    def view(self, obj: torch.Tensor) -> Array:
        """Return the tensor's own memory if it is on the CPU; a dtype that numpy lacks appears as integers."""
        if isinstance(obj, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise PolicyError("The agent has lazy layers without weights yet: call it once on an observation first.")
        return _raw_array(obj)

    def write(self, obj: torch.Tensor, array: Array) -> None:
        if obj.device.type == "cpu":
            np.copyto(_raw_array(obj), array)
        else:
            with torch.no_grad():
                obj.copy_(torch.from_numpy(array.copy()).view(obj.dtype).reshape(obj.shape))

    def watch(self, arrays: Sequence[torch.Tensor]) -> Callable[[], Hashable]:
        return ChangeDetector(arrays).stamp

    def reduce(self, obj: torch.Tensor, *, has_values: bool) -> tuple[Any, ...]:
        values = self.view(obj) if has_values else None
        arguments = tuple(obj.shape), obj.dtype, obj.requires_grad, isinstance(obj, nn.Parameter), values
        return _rebuild_tensor, arguments

    def replace(self, obj: object) -> object:
        """Unwrap compiled modules and functions; do not send optimizers, generators and devices."""
        if isinstance(obj, nn.Module):
            if parametrize.is_parametrized(obj):
                return obj
            return unwrap(obj)
        if isinstance(obj, FunctionType):
            return getattr(obj, "_torchdynamo_orig_callable", obj)
        if isinstance(obj, torch.optim.Optimizer | torch.Generator):
            return None
        return _CPU if isinstance(obj, torch.device) else obj

    def reduce_object(self, obj: object) -> tuple[Any, ...] | None:
        """Pickle a module with parametrizations, which torch refuses to pickle."""
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            kind = type(obj).__mro__[1]
            return kind.__new__, (kind,), vars(obj), None, None, _restore_parametrized
        return None

    def hidden(self, obj: object) -> frozenset[str]:
        if type(obj).__module__ == "stable_baselines3.common.distributions":
            return _LAST_ASKED
        return _BOOKKEEPING if isinstance(obj, nn.Module) else frozenset()

    def is_weight(self, obj: torch.Tensor) -> bool:
        return isinstance(obj, nn.Parameter)


TORCH = TorchArrays()


class ChangeDetector:
    """Detects that tensors may have changed.

    Tensors count their in-place writes, but not those through `.data`, through numpy, or by a fused optimizer; so
    their values are compared as well: small tensors in full, large ones by checksums or samples.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._identity: tuple[int, ...] = ()
        self._read: Callable[[], Hashable] = NUMPY.watch([])
        self._device_samples: list[torch.Tensor] = []

    def stamp(self) -> Hashable:
        """Return a value that differs from the last one returned if any tensor may have changed since."""
        identity = tuple([tensor.data_ptr() for tensor in self._tensors])
        if identity != self._identity:
            self._identity = identity
            self._sample()
        numbers = b""
        if self._device_samples:  # One copy for all of them, because each copy waits for the device.
            numbers = torch.cat(self._device_samples).cpu().numpy().tobytes()
        return identity, tuple([tensor._version for tensor in self._tensors]), self._read(), numbers

    def _sample(self) -> None:
        self._read = NUMPY.watch([_raw_array(tensor) for tensor in self._tensors if tensor.device.type == "cpu"])
        self._device_samples = []
        for tensor in self._tensors:
            if tensor.device.type != "cpu" and tensor.is_floating_point():
                step = max(1, tensor.numel() // _SAMPLES_PER_TENSOR)
                self._device_samples.append(tensor.detach().reshape(-1)[::step].float())


class Randomness:
    """A policy's own random numbers, for numpy and for torch, separate from all others in the process.

    Args:
        seed: If None, one is drawn from the operating system.

    Attributes:
        numpy: The numpy generator.
        state: The state of the torch generator, which changes with every draw.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.numpy = np.random.default_rng(seed)
        self.state = torch.Generator().manual_seed(int(self.numpy.integers(2**63))).get_state()

    @contextmanager
    def torch(self) -> Iterator[None]:
        """Within the block, give torch's global generator, which user code draws from, this policy's state."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)


class Evaluation:
    """Runs a module without changing it.

    The module stays in the mode (train or eval) its user chose, because layers such as NoisyLinear depend on it to
    explore. Only batch norms are held in eval mode, because in train mode they would write to their own weights.

    Attributes:
        keeps_dtype: Whether observations keep their own dtype: initially if the module has parameters of several
            dtypes, or narrow ones, because it then converts them itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        self.keeps_dtype = len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}

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
        """Turn observations into tensors on the module's device, of its floating dtype as `torch.Tensor(obs)` would."""
        parameter = next(self._module.parameters(), None)
        if self.keeps_dtype:
            return as_tensors(tree, None, _CPU if parameter is None else parameter.device)
        if parameter is None:
            return as_tensors(tree, torch.float32, _CPU)
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
    """Turn one result into an array of floats: float64 if it is of that, otherwise float32."""
    array: Floats = as_array(tensor)
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)


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


def as_state(state: Mapping[str, torch.Tensor | Array]) -> State:
    """Turn a recurrent state into arrays; they are copies, because the policy may reuse its tensors."""
    return {
        name: as_array(part).copy() if isinstance(part, torch.Tensor) else np.array(part)
        for name, part in state.items()
    }


def _rebuild_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool, values: Array | None
) -> torch.Tensor:
    if values is None:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = torch.from_numpy(values.copy()).view(dtype).reshape(shape)
    return nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


def _restore_parametrized(module: nn.Module, state: dict[str, Any]) -> None:
    """Do what `register_parametrization` did, to a module that has its parametrizations already."""
    vars(module).update(state)
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]  # a ModuleDict
        parametrize._inject_property(module, str(name))


def _raw_array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    try:
        array: Array = tensor.numpy()
    except TypeError:  # numpy has no bfloat16 and the like, but can carry the bits.
        array = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
    return array
