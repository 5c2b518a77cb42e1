"""Trace: record what a module does to observations, as a program that numpy can run.

All calls of torch's functions are seen while the agent's own method runs on real observations. What leads from them to
the distribution's parameters and to the values becomes a program, if each operation on that way is a known one.
Anything else means that there is no program, never an error: an unknown operation, a number that leaves a tensor for
Python (the code may branch on it), a layer that draws random numbers. Whether a program returns what the method
returns is for its user to try.
"""

# ruff: noqa: A002, A006 - torch's own functions name a parameter "input", "min" or "max", and so may a call.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from clusterenv.policy.distribution import Array
from clusterenv.policy.program import Program, Ref, Step


class NoProgram(Exception):
    """Something that a program cannot do; the message says what."""


@dataclass(frozen=True)
class Sheet:
    """A distribution's parameters as tensors, and further outputs.

    Attributes:
        family: The family of the distribution.
        parameters: By the names that `policy.program.make_distribution` knows.
        constants: Parameters that are the same for all observations.
        extras: Returned besides actions: "value".
        nvec: The number of actions of each choice of a multi-categorical distribution.
        action: The action that the agent itself drew; None if drawing is left to us.
    """

    family: str
    parameters: dict[str, torch.Tensor]
    constants: dict[str, Any]
    extras: dict[str, torch.Tensor]
    nvec: tuple[int, ...] = ()
    action: torch.Tensor | None = None


@dataclass(frozen=True)
class Traced:
    """A program, and the plain numbers it uses."""

    program: Program
    constants: Array


class Recorder(TorchFunctionMode):
    """Records calls of torch's functions.

    Args:
        leaves: The observations.
        arrays: The module's tensors, by name.
    """

    def __init__(self, leaves: Sequence[torch.Tensor], arrays: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._num_rows = len(leaves[0])
        self._leaves = leaves
        self._refs: dict[int, Ref] = {id(leaf): Ref("obs", index) for index, leaf in enumerate(leaves)}
        self._refs |= {id(tensor): Ref("array", name) for name, tensor in arrays.items()}
        self._steps: list[Step | str] = []  # A text says why a call cannot be a step.
        self._constants: list[float] = []
        self._kept: list[Any] = [leaves, dict(arrays)]  # Kept alive, so that no id is reused.
        self._origins: dict[int, tuple[str, list[int]]] = {}  # Which call made a tensor, and from which others.
        self._random: set[int] = set()  # The tensors that depend on random numbers.
        self._escape: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def finish(self, sheet: Sheet) -> Traced:
        """Return the program that computes a sheet.

        Raises:
            NoProgram: There is none.
        """
        if self._escape is not None:
            raise NoProgram(self._escape)
        if sheet.action is not None:
            self._check_drawn(sheet.action)
        parameters = {name: self._skip_normalisation(self._ref(tensor)) for name, tensor in sheet.parameters.items()}
        constants = {name: self._ref(value) for name, value in sheet.constants.items()}
        extras = {name: self._ref(tensor) for name, tensor in sheet.extras.items()}
        steps: list[Step] = [step if isinstance(step, Step) else Step(step, ()) for step in self._steps]
        dtype = str(self._leaves[0].dtype).removeprefix("torch.")
        whole = Program(
            dtype,
            tuple(steps),
            sheet.family,
            tuple(parameters.items()),
            tuple(constants.items()),
            tuple(extras.items()),
            sheet.nvec,
        )
        program = whole.only(tuple(extras))
        for step in program.steps:
            if step.name.startswith("unknown"):
                raise NoProgram(step.name)
        return Traced(*_renumber_constants(program, self._constants))

    def _check_drawn(self, action: torch.Tensor) -> None:
        """Check that an action is a draw as it came, or moved and scaled: nothing may have clipped or replaced it.

        That it is a draw from the right distribution is seen by drawing again; a bound that was not met is not.
        """
        if id(action) not in self._random:
            raise NoProgram("an action that is not drawn")
        unseen = [id(action)]
        while unseen:
            name, inputs = self._origins[unseen.pop()]
            if name not in _DRAWS:
                if name not in _KEEPS_DRAWS:
                    raise NoProgram(f"{name}() of an action")
                unseen += self._random.intersection(inputs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = f"get {getattr(func.__self__, '__name__', '')}"
        results = list(_tensors_in(result)) if not isinstance(result, torch.Tensor) else [result]
        is_operator = name.startswith("__i") and name != "__invert__"  # As in `x += 1`.
        changes = (name.endswith("_") and not name.endswith("__")) or is_operator or kwargs.get("inplace")
        inputs = [id(tensor) for tensor in _tensors_in((args, kwargs))]
        for tensor in results:
            if changes or id(tensor) not in inputs:
                self._origins[id(tensor)] = name, inputs
                if name in _DRAWS or not self._random.isdisjoint(inputs):
                    self._random.add(id(tensor))
        self._kept.append((args, kwargs, results))
        if not results:
            if name not in _METADATA and any(True for _ in _tensors_in((args, kwargs))):
                self._escape = self._escape or f"{name}() of a tensor"
            return
        if name in _DRAWS and changes and self._is_new(args[0]):
            return
        if name == "__setitem__" or (changes and self._is_shared(args[0])):
            self._escape = f"{name}() writes to a tensor"
            return
        if not changes and all(id(tensor) in self._refs for tensor in results):
            return  # Its input, unchanged: the function had nothing to do.
        step = self._translate(name.rstrip("_") if changes and not name.startswith("__") else name, args, kwargs)
        if isinstance(step, Ref) and len(results) == 1:
            self._refs[id(results[0])] = step
        else:
            self._steps.append(step if not isinstance(step, Ref) else Step("same", (step,)))
            for part, tensor in enumerate(results):
                if id(tensor) in self._refs and not changes:
                    continue
                index = len(self._steps) - 1
                self._refs[id(tensor)] = Ref("step", index, None if isinstance(result, torch.Tensor) else part)

    def _is_new(self, tensor: Any) -> bool:
        """Return whether a tensor has no contents yet."""
        ref = self._refs.get(id(tensor))
        return ref is not None and ref.source == "step" and self._steps[ref.key] == "unknown empty"

    def _is_shared(self, tensor: Any) -> bool:
        """Return whether writing to a tensor may change another one."""
        ref = self._refs.get(id(tensor))
        if ref is None or ref.source != "step" or ref.part is not None:
            return True
        step = self._steps[ref.key]
        return not isinstance(step, Step) or step.name in _VIEWS

    def _translate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | Ref | str:
        if name in _LITERALS and not list(_tensors_in((args, kwargs))) and np.ndim(args[0]) == 0:
            return self._ref(float(args[0]))
        translate = _TRANSLATIONS.get(name)
        if translate is None:
            return f"unknown {name}"
        try:
            return translate(self, *args, **kwargs)
        except (NoProgram, TypeError, ValueError, AttributeError, IndexError) as error:
            return f"unknown form of {name}: {error}"

    def _ref(self, value: Any) -> Ref:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._refs:
                raise NoProgram("a tensor of unknown origin")
            return self._refs[id(value)]
        if isinstance(value, bool | int | float | np.number):
            self._constants.append(float(value))
            return Ref("constant", len(self._constants) - 1)
        raise NoProgram(f"a {type(value).__name__}")

    def step(self, name: str, *inputs: Any, **options: Any) -> Step:
        """Make a step from tensors and numbers."""
        return Step(name, tuple(self._ref(value) for value in inputs), tuple(options.items()))

    def same(self, value: torch.Tensor) -> Ref:
        """Return the reference to a tensor."""
        return self._ref(value)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Check that a shape holds for any number of rows."""
        if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size):
            shape = shape[0]
        if shape[0] in (-1, self._num_rows) and -1 not in shape[1:]:
            return (-1, *(int(size) for size in shape[1:]))
        raise NoProgram(f"shape {tuple(shape)}")

    def _skip_normalisation(self, ref: Ref) -> Ref:
        """Return unnormalised logits: torch's Categorical normalises them, and ours need not be."""
        step = self._steps[ref.key] if ref.source == "step" else None
        if isinstance(step, Step) and step.name == "subtract" and step.inputs[1].source == "step":
            other = self._steps[step.inputs[1].key]
            if isinstance(other, Step) and other.name == "log_sum_exp" and other.inputs[0] == step.inputs[0]:
                return step.inputs[0]
        return ref


def _renumber_constants(program: Program, numbers: list[float]) -> tuple[Program, Array]:
    used = list(dict.fromkeys(ref.key for ref in program._refs() if ref.source == "constant"))
    order = {old: new for new, old in enumerate(used)}

    def renumber(ref: Ref) -> Ref:
        return ref._replace(key=order[ref.key]) if ref.source == "constant" else ref

    def renumber_all(named: tuple[tuple[str, Ref], ...]) -> tuple[tuple[str, Ref], ...]:
        return tuple((name, renumber(ref)) for name, ref in named)

    steps = tuple(step._replace(inputs=tuple(renumber(ref) for ref in step.inputs)) for step in program.steps)
    changed = Program(
        program.dtype,
        steps,
        program.family,
        renumber_all(program.parameters),
        renumber_all(program.constants),
        renumber_all(program.extras),
        program.nvec,
    )
    return changed, np.array([numbers[old] for old in used], np.float64)


def _tensors_in(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)


def _freeze(index: Any) -> Any:
    if isinstance(index, slice):
        if any(isinstance(bound, torch.Tensor) for bound in (index.start, index.stop, index.step)):
            raise NoProgram("an index that is a tensor")
        return ("slice", index.start, index.stop, index.step)
    if isinstance(index, tuple):
        return ("all", *(_freeze(part) for part in index))
    if index is Ellipsis:
        return "ellipsis"
    if index is None or isinstance(index, int):
        return index
    raise NoProgram("an index that is not a slice")


def _check_rows_stay(index: Any, num_rows: int) -> None:
    first = index[0] if isinstance(index, tuple) else index
    if not (first is Ellipsis or first == slice(None)):
        raise NoProgram(f"an index into {num_rows} rows")


def _binary(name: str, *, is_reversed: bool = False) -> Callable[..., Step]:
    def translate(trace: Recorder, input: Any, other: Any, *, alpha: float = 1, rounding_mode: None = None) -> Step:
        if alpha != 1 or rounding_mode is not None:
            raise NoProgram("alpha or rounding_mode")
        return trace.step(name, *((other, input) if is_reversed else (input, other)))

    return translate


def _unary(name: str) -> Callable[..., Step]:
    return lambda trace, input, inplace=False: trace.step(name, input)


def _same(trace: Recorder, input: Any, *args: Any, **kwargs: Any) -> Ref:
    return trace.same(input)


def _linear(trace: Recorder, input: Any, weight: Any, bias: Any = None) -> Step:
    return trace.step("linear", input, weight, *(() if bias is None else (bias,)))


def _dropout(trace: Recorder, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Ref:
    if training and p:
        raise NoProgram("dropout in train mode")
    return trace.same(input)


def _clamp(trace: Recorder, input: Any, min: Any = None, max: Any = None) -> Step:
    step = trace.step("same", input)
    for name, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            trace._steps.append(step)
            step = Step(name, (Ref("step", len(trace._steps) - 1), trace._ref(bound)))
    return step


def _hardtanh(trace: Recorder, input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Step:
    return _clamp(trace, input, min_val, max_val)


def _layer_norm(
    trace: Recorder, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Step:
    arrays = [array for array in (weight, bias) if array is not None]
    has = {"has_weight": weight is not None, "has_bias": bias is not None}
    return trace.step("layer_norm", input, *arrays, axes=len(normalized_shape), eps=eps, **has)


def _batch_norm(
    trace: Recorder,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Step:
    if training or running_mean is None:
        raise NoProgram("a batch norm by the batch's own statistics")
    arrays = [array for array in (weight, bias) if array is not None]
    return trace.step("batch_norm", input, running_mean, running_var, *arrays, eps=eps, has_weight=weight is not None)


def _reduce(name: str) -> Callable[..., Step]:
    def translate(trace: Recorder, input: Any, dim: Any = None, keepdim: bool = False) -> Step:
        dims = dim if isinstance(dim, tuple | list) else (dim,)
        if dim is None or any(axis % input.ndim == 0 for axis in dims):
            raise NoProgram("a sum over rows")
        return trace.step(name, input, axis=tuple(dims), keepdims=keepdim)

    return translate


def _softmax(name: str) -> Callable[..., Step]:
    def translate(trace: Recorder, input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Step:
        if dim is None or dim % input.ndim == 0 or dtype is not None:
            raise NoProgram("a softmax over rows")
        return trace.step(name, input, axis=dim)

    return translate


def _log_sum_exp(trace: Recorder, input: Any, dim: int, keepdim: bool = False) -> Step:
    return trace.step("log_sum_exp", input, axis=_inner_axis(input, dim), keepdims=keepdim)


def _inner_axis(tensor: torch.Tensor, dim: int, extra: int = 0) -> int:
    """Return an axis counted from the front, which must not be that of the rows."""
    axis = dim % (tensor.ndim + extra)
    if axis == 0:
        raise NoProgram("an operation across rows")
    return axis


def _cat(trace: Recorder, tensors: Any, dim: int = 0) -> Step:
    return trace.step("concatenate", *tensors, axis=_inner_axis(tensors[0], dim))


def _stack(trace: Recorder, tensors: Any, dim: int = 0) -> Step:
    return trace.step("stack", *tensors, axis=_inner_axis(tensors[0], dim, 1))


def _split(trace: Recorder, tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Step:
    axis = _inner_axis(tensor, dim)
    width = tensor.shape[axis]
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        sizes = [sizes] * (width // sizes) + ([width % sizes] if width % sizes else [])
    return trace.step("split", tensor, stops=tuple(int(stop) for stop in np.cumsum(sizes)[:-1]), axis=axis)


def _chunk(trace: Recorder, input: Any, chunks: int, dim: int = 0) -> Step:
    return _split(trace, input, -(-input.shape[dim] // chunks), dim)


def _reshape(trace: Recorder, input: Any, *shape: Any) -> Step:
    return trace.step("reshape", input, shape=trace.shape(shape))


def _flatten(trace: Recorder, input: Any, start_dim: int = 0, end_dim: int = -1) -> Step:
    if end_dim not in (-1, input.ndim - 1):
        raise NoProgram("flatten up to an inner axis")
    if start_dim % input.ndim == 0:  # Rows and all: only of a column is that a row's own number.
        if input.numel() != len(input):
            raise NoProgram("flatten across rows")
        return trace.step("reshape", input, shape=(-1,))
    return trace.step("flatten", input, start=start_dim % input.ndim)


def _unsqueeze(trace: Recorder, input: Any, dim: int) -> Step:
    return trace.step("expand_dims", input, axis=_inner_axis(input, dim, 1))


def _squeeze(trace: Recorder, input: Any, dim: int | None = None) -> Step:
    if dim is None:
        return _flatten(trace, input)
    return trace.step("squeeze", input, axis=_inner_axis(input, dim))


def _getitem(trace: Recorder, input: Any, index: Any) -> Step:
    _check_rows_stay(index, trace._num_rows)
    return trace.step("index", input, index=_freeze(index))


def _where(trace: Recorder, condition: Any, input: Any, other: Any) -> Step:
    return trace.step("where", condition, input, other)


def _masked_fill(trace: Recorder, input: Any, mask: Any, value: Any) -> Step:
    return trace.step("masked_fill", input, mask, value)


def _expand_as(trace: Recorder, input: Any, other: Any) -> Step | Ref:
    if input.shape[1 if input.ndim == other.ndim else 0 :] == other.shape[1:]:
        return trace.same(input)  # Only rows are repeated, which numpy's broadcasting does.
    return trace.step("expand_as", input, other)


def _leaky_relu(trace: Recorder, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Step:
    return trace.step("leaky_relu", input, negative_slope)


def _elu(trace: Recorder, input: Any, alpha: float = 1.0, inplace: bool = False) -> Step:
    return trace.step("elu", input, alpha)


def _gelu(trace: Recorder, input: Any, approximate: str = "none") -> Step:
    if approximate == "none" and input.dtype == torch.float64:
        raise NoProgram("an error function in float64")
    return trace.step("gelu", input, approximate=approximate)


def _softplus(trace: Recorder, input: Any, beta: float = 1, threshold: float = 20) -> Step:
    return trace.step("softplus", input, beta, threshold)


def _float(trace: Recorder, input: Any) -> Ref:
    if input.dtype is not torch.float32:
        raise NoProgram("a change of dtype")
    return trace.same(input)


def _to(trace: Recorder, input: Any, *args: Any, **kwargs: Any) -> Ref:
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    if any(isinstance(value, torch.Tensor) for value in args) or any(dtype is not input.dtype for dtype in wanted):
        raise NoProgram("a change of dtype")
    return trace.same(input)


def _broadcast(trace: Recorder, *tensors: Any) -> Ref | Step:
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    return Step("together", tuple(trace._ref(tensor) for tensor in given))


_METADATA = frozenset(
    {f"get {name}" for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_sparse", "layout", "is_cuda")}
    | {"get is_nested", "get is_meta", "get is_quantized", "get is_mkldnn", "get names", "get itemsize", "get nbytes"}
    | {"size", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "stride", "is_contiguous", "__len__"}
    | {"__hash__", "__repr__", "get_device", "storage_offset", "is_inference", "get _backward_hooks", "get grad_fn"}
    | {"get grad", "get is_leaf", "_is_view", "get is_cpu", "element_size", "is_same_size", "get is_xla", "get is_mps"}
)
_DRAWS = frozenset({"multinomial", "normal", "bernoulli", "randn", "randn_like", "normal_"})
_KEEPS_DRAWS = frozenset(
    {"reshape", "view", "expand", "squeeze", "unsqueeze", "flatten", "stack", "cat", "transpose", "permute", "t"}
    | {"get T", "get mT", "get data", "__getitem__", "detach", "clone", "contiguous", "alias", "cpu", "to", "long"}
    | {"int", "float", "double", "add", "__add__", "__radd__", "mul", "__mul__", "__rmul__", "tanh"}
)
_LITERALS = frozenset({"tensor", "as_tensor", "scalar_tensor"})
_VIEWS = frozenset({"split", "reshape", "flatten", "expand_dims", "squeeze", "index", "same", "together"})
_TRANSLATIONS: dict[str, Callable[..., Step | Ref]] = {
    **{name: _binary("add") for name in ("add", "__add__", "__radd__", "__iadd__")},
    **{name: _binary("subtract") for name in ("sub", "subtract", "__sub__", "__isub__")},
    "__rsub__": _binary("subtract", is_reversed=True),
    "rsub": _binary("subtract", is_reversed=True),
    **{name: _binary("multiply") for name in ("mul", "multiply", "__mul__", "__rmul__", "__imul__")},
    **{name: _binary("divide") for name in ("div", "divide", "true_divide", "__truediv__", "__div__", "__itruediv__")},
    **{name: _binary("divide", is_reversed=True) for name in ("__rtruediv__", "__rdiv__")},
    **{name: _binary("power") for name in ("pow", "__pow__")},
    **{name: _binary("matmul") for name in ("matmul", "__matmul__", "mm", "bmm")},
    **{name: _binary("greater") for name in ("gt", "__gt__", "greater")},
    **{name: _binary("greater_equal") for name in ("ge", "__ge__", "greater_equal")},
    **{name: _binary("less") for name in ("lt", "__lt__", "less")},
    **{name: _binary("less_equal") for name in ("le", "__le__", "less_equal")},
    **{name: _binary("equal") for name in ("eq", "__eq__")},
    **{name: _binary("not_equal") for name in ("ne", "__ne__", "not_equal")},
    **{name: _binary("maximum") for name in ("maximum",)},
    **{name: _binary("minimum") for name in ("minimum",)},
    **{name: _unary(name) for name in ("exp", "log", "sqrt", "square", "abs", "sin", "cos", "tanh", "sigmoid", "relu")},
    **{name: _unary("negative") for name in ("neg", "negative", "__neg__")},
    **{name: _unary("logical_not") for name in ("logical_not", "__invert__", "bitwise_not")},
    **{name: _unary("silu") for name in ("silu",)},
    "softsign": _unary("softsign"),
    "bool": _unary("as_bool"),
    "linear": _linear,
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_dropout"), _dropout),
    **dict.fromkeys(("contiguous", "detach", "clone", "alias", "cpu", "get data", "requires_grad"), _same),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "hardtanh": _hardtanh,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "logsumexp": _log_sum_exp,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
    "split": _split,
    "chunk": _chunk,
    **dict.fromkeys(("reshape", "view"), _reshape),
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "__getitem__": _getitem,
    "where": _where,
    "masked_fill": _masked_fill,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _gelu,
    "softplus": _softplus,
    "float": _float,
    "to": _to,
    "expand_as": _expand_as,
    "broadcast_tensors": _broadcast,
}
