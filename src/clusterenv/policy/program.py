"""Program: a policy's arithmetic as numpy operations over named arrays, for workers without a learning framework.

An adapter records the program from a network of known layers; a worker evaluates it. For a small network on a small
batch this is also faster than the framework, which spends most of its time on call overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import NO_VALUES, Array, Call, Distribution, Floats
from clusterenv.policy.families import (
    Bernoulli,
    Categorical,
    Deterministic,
    DiagonalGaussian,
    MultiCategorical,
    QValues,
    SquashedGaussian,
)
from clusterenv.policy.policy import BasePolicy, Decision, State, Tree, draw
from clusterenv.policy.weights import Weights, WeightsSpec

CONSTANTS = "(constants)"
"""The name, among the weights, of the array of plain numbers that a program's operations use."""

Options: TypeAlias = tuple[tuple[str, Any], ...]


class Ref(NamedTuple):
    """A reference to what an operation reads.

    Attributes:
        source: "obs" (a leaf of the observations), "array", "constant" or "step".
        key: The number of the leaf, constant or step, or the name of the array.
        part: Which result, if the step has several.
    """

    source: str
    key: Any
    part: int | None = None


class Step(NamedTuple):
    """One operation; arguments that are not arrays are its options."""

    name: str
    inputs: tuple[Ref, ...]
    options: Options = ()


@dataclass(frozen=True)
class Program:
    """The operations that compute a policy's action distribution and its extras from observations.

    Attributes:
        dtype: The dtype to which observations are converted.
        steps: The operations in order; a step reads only earlier ones.
        family: The family of the distribution.
        parameters: The distribution's parameters, by name.
        constants: The distribution's parameters that are the same for all observations.
        extras: What else is returned: "value".
    """

    dtype: str
    steps: tuple[Step, ...]
    family: str
    parameters: tuple[tuple[str, Ref], ...]
    constants: tuple[tuple[str, Ref], ...]
    extras: tuple[tuple[str, Ref], ...]
    nvec: tuple[int, ...] = ()

    def arrays(self) -> list[str]:
        """Return the names of the arrays that the program reads."""
        return list(dict.fromkeys(ref.key for ref in self._refs() if ref.source == "array"))

    def only(self, extras: tuple[str, ...]) -> Program:
        """Return a program without the steps that only other extras need."""
        kept = tuple((name, ref) for name, ref in self.extras if name in extras)
        outputs = [ref for _, ref in (*self.parameters, *self.constants, *kept)]
        needed: set[int] = set()
        pending = [ref.key for ref in outputs if ref.source == "step"]
        while pending:
            if (index := pending.pop()) not in needed:
                needed.add(index)
                pending += [ref.key for ref in self.steps[index].inputs if ref.source == "step"]
        numbers = {old: new for new, old in enumerate(sorted(needed))}

        def renumber(ref: Ref) -> Ref:
            return ref._replace(key=numbers[ref.key]) if ref.source == "step" else ref

        def renumber_all(named: tuple[tuple[str, Ref], ...]) -> tuple[tuple[str, Ref], ...]:
            return tuple((name, renumber(ref)) for name, ref in named)

        steps = [self.steps[index] for index in sorted(needed)]
        return Program(
            self.dtype,
            tuple(step._replace(inputs=tuple(renumber(ref) for ref in step.inputs)) for step in steps),
            self.family,
            renumber_all(self.parameters),
            renumber_all(self.constants),
            renumber_all(kept),
            self.nvec,
        )

    def _refs(self) -> list[Ref]:
        named = [ref for _, ref in (*self.parameters, *self.constants, *self.extras)]
        return [ref for step in self.steps for ref in step.inputs] + named


class Evaluator:
    """A program with the arrays it reads.

    Steps that do not depend on observations are done once, by `refresh`.
    """

    def __init__(self, program: Program, arrays: Weights) -> None:
        self._program = program
        self._arrays = arrays
        self._leaves: list[int] = sorted({ref.key for ref in program._refs() if ref.source == "obs"})
        self._dtype = np.dtype(program.dtype)
        self._places: dict[tuple[str, Any], int] = {}
        varying = self._find_varying()
        self._fixed = [index for index in range(len(program.steps)) if index not in varying]
        self._values: list[Any] = []
        for ref in program._refs():
            if ref.source != "step" and (ref.source, ref.key) not in self._places:
                self._places[ref.source, ref.key] = len(self._places)
        self._base = len(self._places)
        self._values = [None] * (self._base + len(program.steps))
        self._calls = [self._compile(index, varying) for index in sorted(varying)]
        self._obs_places = [(leaf, self._places["obs", leaf]) for leaf in self._leaves]
        self.refresh()

    def refresh(self, arrays: Weights | None = None) -> None:
        """Note that the arrays have changed, or replace them."""
        self._arrays = self._arrays if arrays is None else arrays
        numbers = self._arrays.get(CONSTANTS, np.zeros(0)).tolist()
        for (source, key), place in self._places.items():
            if source == "array":
                self._values[place] = self._arrays[key]
            elif source == "constant":
                self._values[place] = numbers[key]
        for index in self._fixed:
            step = self._program.steps[index]
            operation = OPERATIONS[step.name]
            self._values[self._base + index] = operation(*map(self._read, step.inputs), **dict(step.options))

    def __call__(self, leaves: list[Array]) -> tuple[Distribution, dict[str, Array]]:
        """Return the distributions and the extras for observations, one array `[n, ...]` per leaf."""
        values = self._values
        for leaf, place in self._obs_places:
            values[place] = leaves[leaf].astype(self._dtype, copy=False)
        for place, operation, inputs, options in self._calls:
            values[place] = operation(
                *[values[i] if part is None else values[i][part] for i, part in inputs], **options
            )
        program, num_rows = self._program, len(leaves[0])
        parameters = {name: self._read(ref) for name, ref in program.parameters}
        constants = {name: self._read(ref) for name, ref in program.constants}
        extras = {name: _as_column(self._read(ref), num_rows) for name, ref in program.extras}
        return make_distribution(program.family, parameters, constants, program.nvec), extras

    def _read(self, ref: Ref) -> Any:
        place = self._base + ref.key if ref.source == "step" else self._places[ref.source, ref.key]
        value = self._values[place]
        return value if ref.part is None else value[ref.part]

    def _find_varying(self) -> set[int]:
        varying: set[int] = set()
        for index, step in enumerate(self._program.steps):
            if any(ref.source == "obs" or (ref.source == "step" and ref.key in varying) for ref in step.inputs):
                varying.add(index)
        return varying

    def _compile(self, index: int, varying: set[int]) -> tuple[int, Callable[..., Any], list[Any], dict[str, Any]]:
        step = self._program.steps[index]
        operation, options = OPERATIONS[step.name], dict(step.options)
        first = step.inputs[0] if step.inputs else None
        if step.name in IN_PLACE and first is not None and self._is_ours_alone(first, varying):
            operation = IN_PLACE[step.name]
        inputs = [
            (self._base + ref.key if ref.source == "step" else self._places[ref.source, ref.key], ref.part)
            for ref in step.inputs
        ]
        return self._base + index, operation, inputs, options

    def _is_ours_alone(self, ref: Ref, varying: set[int]) -> bool:
        """Return whether a result is new at every call and read only once, so that it may be overwritten."""
        if ref.source != "step" or ref.key not in varying or ref.part is not None:
            return False
        uses = sum(other.source == "step" and other.key == ref.key for other in self._program._refs())
        return uses == 1 and self._program.steps[ref.key].name in ("linear", "add", "subtract", "multiply", "divide")


class ProgramPolicy(BasePolicy):
    """A policy that consists of a program and its arrays, which a worker has in place of a network.

    Args:
        program: The program.
        spec: The spec of the arrays.
        paths: The path to each leaf of the nested observations.
    """

    def __init__(self, program: Program, spec: WeightsSpec, paths: tuple[tuple[Any, ...], ...]) -> None:
        self._arrays: dict[str, Array] = {
            array.name: np.zeros(array.shape, np.dtype(array.dtype)) for array in spec.arrays
        }
        self._spec = spec
        self._paths = paths
        self._evaluator = Evaluator(program, self._arrays)

    def act(self, obs: Tree, state: State | None = None, call: Call = NO_VALUES) -> Decision:
        distribution, extras = self._evaluator(leaves_of(obs, self._paths))
        return draw(distribution, self.rng, call, extras)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution:
        return self._evaluator(leaves_of(obs, self._paths))[0]

    def weights(self) -> dict[str, Array]:
        return self._arrays

    def load(self, weights: Weights) -> None:
        self._spec.check(weights)
        for name, array in self._arrays.items():
            np.copyto(array, weights[name])
        with np.errstate(all="ignore"):  # Weights may hold anything; the results are checked later.
            self._evaluator.refresh()


def leaves_of(obs: Any, paths: tuple[tuple[Any, ...], ...]) -> list[Any]:
    """Return the arrays of nested observations at the given paths."""
    leaves = []
    for path in paths:
        part: Any = obs
        for key in path:
            part = part[key]
        leaves.append(part)
    return leaves


def paths_of(obs: Tree) -> tuple[tuple[Any, ...], ...]:
    """Return the path to each leaf of nested observations."""
    if isinstance(obs, dict):
        return tuple((key, *path) for key, part in obs.items() for path in paths_of(part))
    if isinstance(obs, tuple):
        return tuple((index, *path) for index, part in enumerate(obs) for path in paths_of(part))
    return ((),)


def make_distribution(
    family: str, parameters: Mapping[str, Any], constants: Mapping[str, Any], nvec: tuple[int, ...] = ()
) -> Distribution:
    """Make a distribution from its parameters, in the form of the frameworks' own distributions."""
    match family:
        case "categorical":
            return Categorical(parameters["logits"])
        case "multi_categorical":
            parts = list(parameters.values())
            return MultiCategorical(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), nvec)
        case "bernoulli":
            return Bernoulli(_two_axes(parameters["logits"]))
        case "q_values":
            return QValues(parameters["q"])
        case "deterministic":
            return Deterministic(parameters["action"], **constants)
    mean = _two_axes(parameters["mean"])
    log_std = parameters["log_std"] if "log_std" in parameters else np.log(parameters["std"])
    if log_std.ndim == 1 and log_std.shape == parameters["mean"].shape:
        log_std = log_std[:, None]
    if log_std.shape != mean.shape:  # Most likely the same for all states: one row is enough.
        is_row = log_std.ndim < 2 or len(log_std) == 1
        log_std = log_std.reshape(-1) if is_row else log_std.reshape(len(mean), -1)
        if log_std.shape[-1] != mean.shape[1]:
            log_std = np.broadcast_to(log_std, mean.shape[1:] if is_row else mean.shape)
    elif (log_std == log_std[:1]).all():
        log_std = log_std[0]  # So that head and worker agree, however each of them obtained it.
    if family == "diagonal_gaussian":
        return DiagonalGaussian(mean, log_std)
    if family == "squashed_gaussian":
        return SquashedGaussian(mean, log_std, **constants)
    raise PolicyError(f"A program cannot end in a {family} distribution.")


def _two_axes(array: Array) -> Array:
    return array[:, None] if array.ndim == 1 else array


def _as_column(array: Array, num_rows: int) -> Array:
    return array.reshape(num_rows) if array.size == num_rows else array


def _linear(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    out: Floats = x @ weight.T
    if bias is not None:
        out += bias
    return out


def _layer_norm(x: Floats, *arrays: Floats, axes: int, eps: float, has_weight: bool, has_bias: bool) -> Floats:
    axis = tuple(range(-axes, 0))
    centred = x - x.mean(axis=axis, keepdims=True)
    out: Floats = centred / np.sqrt(np.square(centred).mean(axis=axis, keepdims=True) + x.dtype.type(eps))
    rest = list(arrays)
    if has_weight:
        out *= rest.pop(0)
    if has_bias:
        out += rest.pop(0)
    return out


def _batch_norm(x: Floats, mean: Floats, var: Floats, *arrays: Floats, eps: float, has_weight: bool) -> Floats:
    shape = (1, -1, *([1] * (x.ndim - 2)))
    scale = 1.0 / np.sqrt(var + var.dtype.type(eps))
    if has_weight:
        scale = scale * arrays[0]
    out: Floats = (x - mean.reshape(shape)) * scale.reshape(shape)
    if len(arrays) > has_weight:
        out += arrays[-1].reshape(shape)
    return out


def _sigmoid(x: Floats) -> Floats:
    half = x.dtype.type(0.5)
    out: Floats = half * np.tanh(half * x) + half
    return out


def _softmax(x: Floats, axis: int) -> Floats:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    out: Floats = powers / powers.sum(axis=axis, keepdims=True)
    return out


def _log_sum_exp(x: Floats, axis: Any, keepdims: bool = False) -> Floats:
    top = x.max(axis=axis, keepdims=True)
    out: Floats = np.log(np.exp(x - top).sum(axis=axis, keepdims=True)) + top
    return out if keepdims else out.squeeze(axis)


def _softplus(x: Floats, beta: float, threshold: float) -> Floats:
    scaled = x * beta
    return np.where(scaled > threshold, x, np.logaddexp(x.dtype.type(0), scaled) / beta)


def _elu(x: Floats, alpha: float) -> Floats:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _erf(x: Floats) -> Floats:
    """Approximate the error function to 1.2e-7, by Numerical Recipes' Chebyshev fit."""
    t = 1.0 / (1.0 + 0.5 * np.abs(x))
    series = np.full_like(t, 0.17087277)
    for term in (-0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368):
        series = term + t * series
    tail = t * np.exp(-x * x - 1.26551223 + t * series)
    return np.where(x >= 0, 1.0 - tail, tail - 1.0)


def _gelu(x: Floats, approximate: str) -> Floats:
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + np.tanh(inner))
    wide = x.astype(np.float64)
    out: Floats = (0.5 * wide * (1.0 + _erf(wide * math.sqrt(0.5)))).astype(x.dtype)
    return out


def _index(x: Array, index: Any) -> Array:
    out: Array = x[_thaw(index)]
    return out


def _thaw(index: Any) -> Any:
    """Turn the encoded form of an index, such as ("slice", 0, 3, None), back into the index."""
    if isinstance(index, tuple) and index and index[0] == "slice":
        return slice(*index[1:])
    if isinstance(index, tuple) and index and index[0] == "all":
        return tuple(_thaw(part) for part in index[1:])
    return Ellipsis if index == "ellipsis" else index


def _split(x: Array, stops: tuple[int, ...], axis: int) -> list[Array]:
    return np.split(x, stops, axis=axis)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": np.matmul,
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "power": lambda a, b: a**b,
    "negative": lambda a: -a,
    "maximum": lambda a, b: np.maximum(a, b),
    "minimum": lambda a, b: np.minimum(a, b),
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "logical_not": np.logical_not,
    "as_bool": lambda a: a.astype(np.bool_),
    "where": lambda c, a, b: np.where(c, a, b),
    "masked_fill": lambda a, mask, value: np.where(mask, a.dtype.type(value), a),
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "square": np.square,
    "abs": np.abs,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x, slope: np.where(x > 0, x, x * slope),
    "elu": _elu,
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "softplus": _softplus,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "softmax": _softmax,
    "log_softmax": lambda x, axis: x - _log_sum_exp(x, axis, keepdims=True),
    "log_sum_exp": _log_sum_exp,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "sum": lambda x, axis, keepdims: x.sum(axis=axis, keepdims=keepdims),
    "mean": lambda x, axis, keepdims: x.mean(axis=axis, keepdims=keepdims),
    "concatenate": lambda *parts, axis: np.concatenate(parts, axis=axis),
    "stack": lambda *parts, axis: np.stack(parts, axis=axis),
    "split": _split,
    "reshape": lambda x, shape: x.reshape(shape),
    "flatten": lambda x, start: x.reshape(*x.shape[:start], -1),
    "expand_dims": np.expand_dims,
    "squeeze": lambda x, axis: x.squeeze(axis) if x.shape[axis] == 1 else x,
    "index": _index,
    "same": lambda x: x,
    "together": lambda *parts: parts,
    "expand_as": lambda x, like: np.broadcast_to(x, like.shape),
}

IN_PLACE: dict[str, Callable[..., Any]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
}
