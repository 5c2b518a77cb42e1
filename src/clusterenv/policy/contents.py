"""Contents: what a policy's pickle carries by value, and how what changes in it reaches the copies on workers.

Code travels once. What it refers to by value (attributes, closure cells, globals of a script, arguments of a partial,
the object of a bound method) is copied with it, and would go stale there. So it is found by a walk through everything
that cloudpickle would copy, and divided into three:

- *arrays*, such as a network's parameters: they travel as a version's weights;
- *plain values*, such as a temperature, a flag, a mode, a small array: compared at every call, and sent with the next
  version, in a block of bytes that is one more array of the weights;
- *structure*, such as classes, layers, what a function refers to: if it changes, the policy is sent anew.
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import cloudpickle
import numpy as np

from clusterenv.errors import PolicyError
from clusterenv.policy.distribution import Array
from clusterenv.policy.weights import Weights, WeightsSpec

log = logging.getLogger(__name__)

Access: TypeAlias = Literal["attribute", "item", "cell", "global"]

VALUES = "(plain values)"
"""The name, among the weights, of the block that holds plain values."""

SMALL_BYTES = 1 << 16
"""Arrays and objects below this size are compared in full."""

_MAX_ITEMS = 1000  # A longer list is data, not settings.
_NUM_SAMPLES = 1024  # Numbers of a large array that are compared.
_SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, np.bool_}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
    | {np.float16, np.float32, np.float64}
)
_MODULE_DICTS = ("_modules", "_parameters", "_buffers")  # Where a torch module keeps what it is made of.
_RANDOM = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_FIXED = (type, FunctionType, BuiltinFunctionType, ModuleType, np.dtype, np.ufunc)


class ArrayKind(Protocol):
    """How one framework's arrays are told apart, read and written. Only its name travels."""

    def is_array(self, obj: object) -> bool:
        """Whether it is one of this framework's arrays."""

    def view(self, obj: Any) -> Array:
        """Return the numbers; the array's own memory if that is possible."""

    def write(self, obj: Any, array: Array) -> None:
        """Overwrite the numbers in place."""

    def watch(self, arrays: Sequence[Any]) -> Callable[[], Hashable]:
        """Return what returns a value that differs from an earlier one if any of these arrays was written to."""

    def reduce(self, obj: Any, *, has_values: bool) -> tuple[Any, ...]:
        """Pickle an array: with its numbers, or to be filled later."""

    def replace(self, obj: Any) -> object:
        """Return what travels in place of an object: itself, or for instance None for an optimizer."""

    def reduce_object(self, obj: Any) -> tuple[Any, ...] | None:
        """Pickle an object, other than an array, that cannot be pickled as it is; None for all others."""

    def hidden(self, obj: Any) -> frozenset[str]:
        """Return the attributes of an object that are bookkeeping."""

    def is_weight(self, obj: Any) -> bool:
        """Whether an array is of a learner's own making, whatever its size: a parameter."""


class Place(NamedTuple):
    """Where something is kept: an attribute, an item, a cell of a closure, a global of a function."""

    owner: Any
    access: Access
    key: Any

    def read(self) -> Any:
        return self.mapping()[self.key]

    def mapping(self) -> Any:
        """Return what is subscripted by the key to read."""
        match self.access:
            case "attribute":
                return _Slots(self.owner) if not hasattr(self.owner, "__dict__") else vars(self.owner)
            case "global":
                return self.owner.__globals__
            case "cell":
                return _Cells(self.owner)
            case "item":
                return self.owner

    def write(self, value: Any) -> None:
        if self.access == "attribute" and (isinstance(self.owner, type) or not hasattr(self.owner, "__dict__")):
            setattr(self.owner, self.key, value)
        else:
            self.mapping()[self.key] = value


class Contents:
    """What some objects carry by value: on the head found by a walk, on a worker as it was delivered.

    Attributes:
        payload: The objects.
        generation: How often the structure has changed.
    """

    def __init__(self, payload: Any, kinds: Sequence[ArrayKind] = (), own: Callable[[], Weights] | None = None) -> None:
        """Find out what the payload carries.

        Args:
            payload: What travels.
            kinds: The frameworks whose arrays may be among it; numpy's always may.
            own: Returns arrays that somebody else takes care of.
        """
        self.payload = payload
        self.generation = 0
        self._kinds = tuple(kinds)
        self._own = own
        self._warned: set[str] = set()
        self._block: tuple[Hashable, Array] | None = None
        self._capacity = 0
        self._num_walks = 0
        self._last_values: Hashable = None
        self._take()

    def stamp(self) -> Hashable:
        """Return a value that differs from an earlier one if anything may have changed in between."""
        if (values := self._read_values()) is None:
            before = self._signature
            self._take()
            self._num_walks += 1
            if self._signature != before:
                self.generation += 1
                self._capacity = 0
            values = self._read_values()
        if values != self._last_values:
            self._last_values = values
            if self._slots:
                self._encode_values()  # It may no longer fit its block.
        return self.generation, self._num_walks, values, tuple([read() for read in self._watches])

    def plain_values(self) -> Hashable:
        """Return the plain values, to be compared with those of another time."""
        return self._last_values

    def read_plain(self) -> list[tuple[str, Any]]:
        """Return the plain values themselves, each with where it is kept."""
        return [(path, place.read()) for place, path in self._slots]

    def announce(self) -> None:
        """Take for changed what cannot be compared: if there is any, the next call sends everything anew."""
        self.generation += self._is_blind

    def weights(self) -> dict[str, Array]:
        """Return the arrays by name and, if there are plain values, the block that holds them."""
        arrays = {name: kind.view(array) for name, (kind, array) in self._arrays.items()}
        if self._slots:
            arrays[VALUES] = self._encode_values()
        return arrays

    def parameters(self) -> dict[str, Array]:
        """Return those of the arrays that a learner's optimizer writes."""
        return {name: kind.view(array) for name, (kind, array) in self._arrays.items() if kind.is_weight(array)}

    def pack(self) -> bytes:
        """Pickle the payload without its arrays' numbers.

        Raises:
            PolicyError: Something in it cannot be pickled.
        """
        self._take()  # What it carries now, and not what it carried when it was looked at last.
        slots = [place for place, _ in self._slots]
        arrays = [(name, type(kind), array) for name, (kind, array) in self._arrays.items()]
        buffer = io.BytesIO()
        pickler = _Stripper(buffer, self._kinds, {id(array) for _, array in self._arrays.values()})
        try:
            pickler.dump((self.payload, slots, arrays, self.weights().get(VALUES)))
        except PolicyError:
            raise
        except Exception as error:
            why = f", because of its {self._unsendable[0]}" if self._unsendable else ""
            raise PolicyError(
                f"The agent cannot be sent to workers{why}: {error}. Keep what only the learner needs (an environment, "
                "a logger, a lock) outside of the agent."
            ) from error
        return buffer.getvalue()

    def _take(self) -> None:
        walk = _Walk(self._kinds, {} if self._own is None else self._own())
        walk.visit(self.payload, None, "")
        self._signature = tuple(walk.signature), tuple(walk.arrays), tuple(path for _, path in walk.slots)
        self._arrays, self._slots = walk.arrays, walk.slots
        self._lengths = [(container, len(container)) for container in walk.containers]
        self._same = [(place.mapping(), place.key, value) for place, value in walk.same]
        self._scalars = [(place.mapping(), place.key) for place, _ in walk.scalars]
        self._deep = [place for place, _ in walk.deep]
        by_kind: dict[ArrayKind, list[Any]] = {}
        for kind, array in walk.arrays.values():
            by_kind.setdefault(kind, []).append(array)
        self._watches = [kind.watch(arrays) for kind, arrays in by_kind.items()]
        self._is_blind = bool(walk.warnings)
        self._unsendable = walk.unsendable
        for warning in walk.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)

    def _read_values(self) -> Hashable:
        """Return all plain values; None if they are not where they were, so that a new walk must find them."""
        for container, length in self._lengths:
            if len(container) != length:
                return None
        try:
            for mapping, key, value in self._same:
                if mapping[key] is not value:
                    return None
            scalars = [mapping[key] for mapping, key in self._scalars]
            deep = tuple([_freeze(place.read(), self._kinds) for place in self._deep]) if self._deep else None
        except (KeyError, IndexError, AttributeError, ValueError):  # ValueError: an empty cell.
            return None
        kinds = [type(scalar) for scalar in scalars]
        return None if not _SCALARS.issuperset(kinds) else (tuple(scalars), tuple(kinds), deep)

    def _dump_slot(self, place: Place, path: str) -> bytes:
        try:
            return _dump(place.read(), self._kinds)
        except Exception as error:
            raise PolicyError(
                f"The agent cannot be sent to workers, because of its {path}: {error}. Keep what only the learner "
                "needs (an environment, a logger, a lock) outside of the agent."
            ) from error

    def _encode_values(self) -> Array:
        values = tuple(self._dump_slot(place, path) for place, path in self._slots)
        if self._block is not None and self._block[0] == values and len(self._block[1]) == self._capacity:
            return self._block[1]
        data = pickle.dumps(values, 5)
        if len(data) + 8 > self._capacity:
            if self._capacity:
                self.generation += 1  # No longer the same weights: the policy is sent anew.
            self._capacity = -(-(2 * len(data) + 8) // 256) * 256
        block = np.zeros(self._capacity, np.uint8)
        block[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        block[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self._block = values, block
        return block


class Delivered:
    """What came to a worker: a payload of its own, whose arrays and plain values the head can overwrite.

    Attributes:
        payload: The objects.
    """

    def __init__(self, packed: bytes) -> None:
        self.payload, self._slots, arrays, block = pickle.loads(packed)  # noqa: S301 - only workers do, and only what their head sent
        self._arrays: dict[str, tuple[ArrayKind, Any]] = {name: (kind(), array) for name, kind, array in arrays}
        self._block: Array | None = block
        self._values = () if block is None else _split(block)

    def weights(self) -> dict[str, Array]:
        """Return the arrays, and the block of plain values, as they were loaded last."""
        arrays = {name: kind.view(array) for name, (kind, array) in self._arrays.items()}
        return arrays if self._block is None else {**arrays, VALUES: self._block}

    def named_arrays(self) -> dict[str, Any]:
        """Return the arrays as the payload has them."""
        return {name: array for name, (_, array) in self._arrays.items()}

    def load(self, weights: Weights) -> bool:
        """Overwrite arrays in place, and plain values that have changed on the head; says whether any has.

        What this copy has itself changed since stays, unless the head changed it too.

        Raises:
            PolicyError: Names, shapes or dtypes do not fit.
        """
        WeightsSpec.of(self.weights()).check(weights)
        for name, (kind, array) in self._arrays.items():
            kind.write(array, weights[name])
        if self._block is None:
            return False
        self._block = weights[VALUES].copy()
        if not (values := _split(self._block)):
            return False
        before, self._values = self._values, values
        changed = [index for index, value in enumerate(self._values) if value != before[index]]
        for index in changed:
            self._slots[index].write(pickle.loads(self._values[index]))  # noqa: S301 - as above
        return bool(changed)


class NumpyArrays:
    """Arrays of numpy."""

    def is_array(self, obj: object) -> bool:
        return isinstance(obj, np.ndarray) and obj.dtype.kind in "biufc"

    def view(self, obj: Any) -> Array:
        array: Array = obj
        return array

    def write(self, obj: Any, array: Array) -> None:
        np.copyto(obj, array)

    def watch(self, arrays: Sequence[Any]) -> Callable[[], Hashable]:
        samples = [_sampler(array) for array in arrays]
        return lambda: b"".join([read() for read in samples])

    def reduce(self, obj: Any, *, has_values: bool) -> tuple[Any, ...]:
        if has_values:
            return tuple(obj.__reduce_ex__(5))
        return np.zeros, (obj.shape, obj.dtype)

    def replace(self, obj: Any) -> object:
        return obj

    def reduce_object(self, obj: Any) -> tuple[Any, ...] | None:
        return None

    def hidden(self, obj: Any) -> frozenset[str]:
        return frozenset()

    def is_weight(self, obj: Any) -> bool:
        return False


class _Walk:
    """One walk through all that a pickle would copy."""

    def __init__(self, kinds: Sequence[ArrayKind], own: Weights) -> None:
        self.signature: list[Hashable] = []
        self.arrays: dict[str, tuple[ArrayKind, Any]] = {}
        self.slots: list[tuple[Place, str]] = []
        self.scalars: list[tuple[Place, str]] = []
        self.deep: list[tuple[Place, str]] = []
        self.same: list[tuple[Place, Any]] = []
        self.containers: list[Any] = []
        self.warnings: list[str] = []
        self.unsendable: list[str] = []
        self._kinds = (*kinds, NUMPY)
        self._own = list(own.values())
        self._weight_dicts: set[int] = set()
        self._first: dict[
            int, str
        ] = {}  # Where each was met first: what is bound to it elsewhere is part of the structure.
        self._seen: dict[int, Any] = {}  # Holds what it has seen, so that no id is given away twice.

    def visit(self, obj: Any, place: Place | None, path: str) -> None:
        if type(obj) in _SCALARS:
            if place is not None:
                self.scalars.append((place, path))
                self.slots.append((place, path))
            return
        if place is not None and isinstance(obj, _RANDOM):
            return  # Each worker draws its own random numbers.
        for kind in self._kinds:
            obj = kind.replace(obj)
            if kind.is_array(obj):
                self._visit_array(kind, obj, place, path)
                return
        if place is not None:
            self.same.append((place, place.read()))
        if id(obj) in self._seen:
            self.signature.append((path, "is", self._first.get(id(obj))))
            return
        self._seen[id(obj)] = obj
        self._first[id(obj)] = path
        self._visit_object(obj, place, path)

    def _visit_array(self, kind: ArrayKind, array: Any, place: Place | None, path: str) -> None:
        is_weight = place is None or id(place.owner) in self._weight_dicts or kind.is_weight(array)
        is_value = not is_weight and kind.view(array).nbytes < SMALL_BYTES
        if kind is NUMPY and any(array is own or np.shares_memory(array, own) for own in self._own):
            if place is not None:
                self.same.append((place, array))
        elif is_value and place is not None:
            self.deep.append((place, path))
            self.slots.append((place, path))
        else:
            if place is not None:
                self.same.append((place, array))
            if id(array) not in self._seen:
                self._seen[id(array)] = array
                name = path or "array"
                while name in self.arrays:
                    name += "'"
                self.arrays[name] = kind, array
                self._first[id(array)] = name
                self.signature.append((name, kind.view(array).shape, kind.view(array).dtype.str))
                if kind is NUMPY and array.nbytes >= SMALL_BYTES:
                    self.warnings.append(
                        f"The agent carries an array of {array.nbytes} bytes ({path or 'its own'}), of which only "
                        "samples are compared: a change of a few of its numbers may not reach the workers. Call "
                        "envs.publish(agent) after such a change, or keep what only the learner needs elsewhere."
                    )
            else:
                self.signature.append((path, "is", self._first.get(id(array))))

    def _visit_object(self, obj: Any, place: Place | None, path: str) -> None:
        if isinstance(obj, FunctionType):
            if _is_by_value(obj):
                self._visit_function(obj, path)
            else:
                self._visit_leaf(obj, place, path)
        elif isinstance(obj, type):
            if _is_by_value(obj):
                self._visit_class(obj, path)
            else:
                self._visit_leaf(obj, place, path)
        elif isinstance(obj, MethodType):
            self.visit(obj.__self__, None, path)
            self.visit(obj.__func__, None, path)
        elif isinstance(obj, functools.partial):
            self.signature.append((path, "partial", len(obj.args)))
            self.visit(obj.func, None, path)
            self.visit(obj.args, None, path)
            self.visit(obj.keywords, None, path)
        elif type(obj) in (dict, list, tuple) or _is_ordered_dict(obj):
            self._visit_container(obj, place, path)
        else:
            self._visit_instance(obj, place, path)

    def _visit_instance(self, obj: Any, place: Place | None, path: str) -> None:
        reduced = next((found for kind in self._kinds if (found := kind.reduce_object(obj)) is not None), None)
        if isinstance(obj, _FIXED) or (reduced is None and not _has_plain_state(obj)):
            self._visit_leaf(obj, place, path)
        else:
            cls = type(obj) if reduced is None else reduced[1][0]
            self.signature.append((path, cls))
            self.visit(cls, None, path)
            hidden = frozenset[str]().union(*(kind.hidden(obj) for kind in self._kinds))
            attributes = vars(obj) if hasattr(obj, "__dict__") else _Slots(obj)
            self.containers.append(attributes)
            for name in attributes:
                if name not in hidden:
                    inner = "" if name in _MODULE_DICTS else name
                    if name in ("_parameters", "_buffers"):
                        self._weight_dicts.add(id(attributes[name]))
                    self.visit(attributes[name], Place(obj, "attribute", name), _join(path, inner))

    def _visit_container(self, obj: Any, place: Place | None, path: str) -> None:
        if len(obj) > _MAX_ITEMS:
            self.signature.append((path, type(obj)))
            self.warnings.append(
                f"The agent carries a {type(obj).__name__} of {len(obj)} items ({path or 'its own'}): what changes in "
                "it does not reach the workers. Keep what only the learner needs outside of the agent, make it an "
                "array if the policy needs it, or call envs.publish(agent) after each change."
            )
            return
        self.signature.append((path, type(obj), tuple(obj) if isinstance(obj, dict) else len(obj)))
        if isinstance(obj, tuple):
            if place is not None and all(type(item) in _SCALARS for item in obj):
                self._visit_leaf(obj, place, path)
                return
            self.signature.append(tuple((type(item), repr(item)) for item in obj if type(item) in _SCALARS))
            for index, item in enumerate(obj):
                if type(item) not in _SCALARS:
                    self.visit(item, None, _join(path, str(index)))
            return
        self.containers.append(obj)
        for key in list(obj) if isinstance(obj, dict) else range(len(obj)):
            self.visit(obj[key], Place(obj, "item", key), _join(path, str(key)))

    def _visit_function(self, function: FunctionType, path: str) -> None:
        self.signature.append((path, function.__code__))
        for index, cell in enumerate(function.__closure__ or ()):
            name = function.__code__.co_freevars[index]
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                try:
                    value = cell.cell_contents
                except ValueError:  # Empty so far.
                    continue
                self.visit(value, Place(function, "cell", index), _join(path, name))
        for name in _globals_of(function.__code__):
            if name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType):
                key = id(function.__globals__), name
                if hash(key) not in self._seen:
                    self._seen[hash(key)] = key
                    self.visit(function.__globals__[name], Place(function, "global", name), _join(path, name))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, None, path)
        if vars(function):
            self._visit_container(vars(function), None, path)

    def _visit_class(self, cls: type, path: str) -> None:
        self.signature.append((path, cls))
        for base in cls.__mro__[:-1]:
            if not _is_by_value(base):
                continue
            for name, value in list(vars(base).items()):
                function = getattr(value, "__func__", value)  # A class method or a static method.
                if isinstance(value, property):
                    self.visit(value.fget, None, path)
                elif isinstance(function, FunctionType):
                    self.visit(getattr(function, "__wrapped__", function), None, path)
                    self.visit(function, None, path)
                elif isinstance(value, MemberDescriptorType | GetSetDescriptorType):
                    continue  # How slots are read: instances have the values.
                elif not name.startswith("__") and not name.startswith("_abc"):
                    self.visit(value, Place(base, "attribute", name), _join(path, name))

    def _visit_leaf(self, obj: Any, place: Place | None, path: str) -> None:
        """Note something that is sent as it is, if it is replaced by another."""
        if place is None or isinstance(obj, ModuleType):
            self.signature.append((path, obj if isinstance(obj, _FIXED) else type(obj)))
            return
        if isinstance(obj, (*_FIXED, tuple)):
            self.slots.append((place, path))
            return
        try:
            size = len(_dump(obj, self._kinds))
        except Exception:  # noqa: BLE001 - what cannot be pickled is told by `pack`, with what to do about it
            self.signature.append((path, type(obj)))
            self.unsendable.append(path)
            return
        if size > SMALL_BYTES:
            self.signature.append((path, type(obj)))
            self.warnings.append(
                f"The agent carries a {type(obj).__name__} ({path}) whose changes do not reach the workers: it is too "
                "large to be compared at every call. Keep what only the learner needs outside of the agent, or call "
                "envs.publish(agent) after each change."
            )
            return
        self.deep.append((place, path))
        self.slots.append((place, path))


class _Stripper(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles arrays that are sent apart as their shapes."""

    def __init__(self, file: io.BytesIO, kinds: Sequence[ArrayKind], apart: set[int]) -> None:
        super().__init__(file)
        self._kinds = (*kinds, NUMPY)
        self._apart = apart

    def reducer_override(self, obj: Any) -> Any:
        for kind in self._kinds:
            if kind.is_array(obj):
                return kind.reduce(obj, has_values=id(obj) not in self._apart)
            if (other := kind.replace(obj)) is not obj:
                return _itself, (other,)
            if (reduced := kind.reduce_object(obj)) is not None:
                return reduced
        return super().reducer_override(obj)


class _Cells:
    """The cells of a function's closure, by index."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = function.__closure__ or ()

    def __getitem__(self, index: int) -> Any:
        return self._cells[index].cell_contents

    def __setitem__(self, index: int, value: Any) -> None:
        self._cells[index].cell_contents = value


class _Slots:
    """The attributes of an object that has __slots__ instead of a dict."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        names = [name for cls in type(obj).__mro__ for name in getattr(cls, "__slots__", ())]
        self._names = [name for name in names if hasattr(obj, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._obj, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._obj, name, value)


NUMPY = NumpyArrays()


def _dump(value: Any, kinds: Sequence[ArrayKind]) -> bytes:
    if type(value) in _SCALARS:
        return pickle.dumps(value, 5)
    buffer = io.BytesIO()
    _Stripper(buffer, kinds, set()).dump(value)
    return buffer.getvalue()


def _freeze(value: Any, kinds: Sequence[ArrayKind]) -> Hashable:
    """Return something that differs if the value does."""
    for kind in (*kinds, NUMPY):
        if kind.is_array(value):
            array = kind.view(value)
            return array.shape, array.dtype.str, array.tobytes()
    return _dump(value, kinds)


def _split(block: Array) -> tuple[bytes, ...]:
    if (size := int.from_bytes(block[:8].tobytes(), "little")) == 0:
        return ()
    values: tuple[bytes, ...] = pickle.loads(block[8 : 8 + size].tobytes())  # noqa: S301 - from the head
    return values


def sample(array: Array) -> Array:
    """Return a view of the whole array, or of some of its numbers if it is too large to be compared in full."""
    flat = array.reshape(-1)
    return flat if array.nbytes < SMALL_BYTES else flat[:: max(1, flat.size // _NUM_SAMPLES)]


def _sampler(array: Array) -> Callable[[], bytes]:
    """Return what reads the array, or some of its numbers, from its own memory however that is laid out."""
    if array.flags.c_contiguous or array.nbytes < SMALL_BYTES:
        view = sample(array) if array.flags.c_contiguous else array
        return lambda: view.tobytes()
    if array.flags.f_contiguous:
        view = sample(array.T)
        return lambda: view.tobytes()
    where = np.unravel_index(np.arange(0, array.size, max(1, array.size // _NUM_SAMPLES)), array.shape)
    return lambda: array[where].tobytes()


def _is_by_value(obj: Any) -> bool:
    """Tell whether cloudpickle copies a function or class, rather than import it on the other side."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return True
    registered = cloudpickle.list_registry_pickle_by_value()
    if any(module.__name__ == name or module.__name__.startswith(f"{name}.") for name in registered):
        return True
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not obj


@functools.cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the globals that a function, and functions inside it, may read."""
    names = dict.fromkeys(
        instruction.argval for instruction in dis.get_instructions(code) if instruction.opname.endswith("_GLOBAL")
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_globals_of(constant))
    return tuple(names)


def _has_plain_state(obj: Any) -> bool:
    """Tell whether an object is pickled attribute by attribute."""
    cls: Any = type(obj)
    if cls is SimpleNamespace:
        return True
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return False
    if isinstance(obj, dict | list | tuple | set | frozenset | str | bytes | int | float | complex):
        return False  # It has more to it than its attributes.
    return hasattr(obj, "__dict__") or any(getattr(base, "__slots__", ()) for base in cls.__mro__)


def _is_ordered_dict(obj: Any) -> bool:
    return isinstance(obj, dict) and type(obj).__module__ == "collections"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _itself(obj: Any) -> Any:
    return obj


def generation_of(policy: object) -> int:
    """Return how often a policy's structure has changed, if it can tell."""
    generation: int = getattr(policy, "generation", 0)
    return generation


def announce(policy: object) -> None:
    """Let the next call send a policy anew, if there is something of it that cannot be compared."""
    if (tell := getattr(policy, "announce", None)) is not None:
        tell()
