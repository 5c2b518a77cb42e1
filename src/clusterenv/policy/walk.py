"""The walk through everything that a pickle would copy: what is stored where, and which of it can change."""

from __future__ import annotations

import contextlib
import dis
import functools
import io
from collections.abc import Hashable, Iterator, Sequence
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
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from clusterenv.policy.array_kinds import NUMPY, SMALL_BYTES, ArrayKind, is_sampled
from clusterenv.policy.stripping import RANDOM, SCALARS, dump, is_by_value, is_own_file
from clusterenv.policy.weights import Weights

Access: TypeAlias = Literal["attribute", "item", "cell", "global"]

_MAX_ITEMS = 1000  # A longer list is data, not settings.
_MODULE_DICTS = ("_modules", "_parameters", "_buffers")  # Where a torch module keeps its parts.
_FIXED = (type, FunctionType, BuiltinFunctionType, ModuleType, np.dtype, np.ufunc)


class Place(NamedTuple):
    """Where something is stored: an attribute, an item, a cell of a closure, a global of a function."""

    owner: Any
    access: Access
    key: Any

    def read(self) -> Any:
        return self.mapping()[self.key]

    def mapping(self) -> Any:
        """Return the object that the key subscripts."""
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


class Walk:
    """One walk through everything that a pickle would copy."""

    def __init__(self, kinds: Sequence[ArrayKind], own: Weights) -> None:
        self.signature: list[Hashable] = []
        self.arrays: dict[str, tuple[ArrayKind, Any]] = {}
        self.slots: list[tuple[Place, str]] = []
        self.scalars: list[tuple[Place, str]] = []
        self.deep: list[tuple[Place, str]] = []
        self.same: list[tuple[Place, Any]] = []
        self.containers: list[Any] = []
        self.instances: list[Any] = []
        self.caches: list[Any] = []
        self.warnings: list[str] = []
        self.unsendable: list[str] = []
        self._kinds = (*kinds, NUMPY)
        self._own = list(own.values())
        self._weight_dicts: set[int] = set()
        self._first: dict[
            int, str
        ] = {}  # The path where each object was met first: other references to it are part of the structure.
        self._seen: dict[int, Any] = {}  # Keeps what was seen alive, so that no id is reused.

    def visit(self, obj: Any, place: Place | None, path: str) -> None:
        if type(obj) in SCALARS:
            if place is not None:
                self.scalars.append((place, path))
                self.slots.append((place, path))
            return
        if place is not None and isinstance(obj, RANDOM):
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
                if kind is NUMPY and is_sampled(array):
                    self.warnings.append(
                        f"The agent carries an array of {array.nbytes} bytes ({path or 'its own'}), of which only "
                        "samples are compared: a change of a few of its numbers may not reach the workers. Call "
                        "envs.publish(agent) after such a change, or keep what only the learner needs elsewhere."
                    )
            else:
                self.signature.append((path, "is", self._first.get(id(array))))

    def _visit_object(self, obj: Any, place: Place | None, path: str) -> None:
        if isinstance(obj, FunctionType):
            if is_by_value(obj):
                self._visit_function(obj, path)
            else:
                self._visit_leaf(obj, place, path)
                self._search_imported([obj])
        elif isinstance(obj, type):
            if is_by_value(obj):
                self._visit_class(obj, path)
            else:
                self._visit_leaf(obj, place, path)
                self._visit_imported_class(obj, path)
        elif isinstance(obj, functools._lru_cache_wrapper) and is_by_value(obj):
            self.caches.append(obj)
            self.visit(obj.__wrapped__, None, path)
        elif isinstance(obj, functools.cached_property):
            self.caches.append(obj)
            self.visit(obj.func, None, path)
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
            self.instances.append(obj)
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
            if place is not None and all(type(item) in SCALARS for item in obj):
                self._visit_leaf(obj, place, path)
                return
            self.signature.append(tuple((type(item), repr(item)) for item in obj if type(item) in SCALARS))
            for index, item in enumerate(obj):
                if type(item) not in SCALARS:
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
                except ValueError:  # The cell is still empty.
                    continue
                self.visit(value, Place(function, "cell", index), _join(path, name))
        for name in _globals_of(function.__code__):
            if name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType):
                key = id(function.__globals__), name
                if hash(key) not in self._seen:
                    self._seen[hash(key)] = key
                    self.visit(function.__globals__[name], Place(function, "global", name), _join(path, name))
        self._search_imported([function])
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, None, path)
        self.containers.append(vars(function))
        for name in vars(function):
            self.visit(vars(function)[name], Place(function, "attribute", name), _join(path, name))

    def _visit_class(self, cls: type, path: str) -> None:
        self.signature.append((path, cls))
        for base in cls.__mro__[:-1]:
            if not is_by_value(base):
                continue
            self.containers.append(_ClassAttributes(base))
            for name, value in list(vars(base).items()):
                if isinstance(value, MemberDescriptorType | GetSetDescriptorType):
                    continue  # A slot's descriptor: the values are in the instances.
                place = Place(base, "attribute", name)
                function = getattr(value, "__func__", value)  # A class method or a static method.
                if isinstance(value, property) or isinstance(function, FunctionType):
                    self.same.append((place, value))
                    self.visit(value.fget if isinstance(value, property) else function, None, path)
                elif not name.startswith("__") and not name.startswith("_abc"):
                    self.visit(value, place, _join(path, name))

    def _visit_imported_class(self, cls: type, path: str) -> None:
        self._search_imported(self._note_imported_class(cls, path))

    def _note_imported_class(self, cls: type, path: str) -> list[FunctionType]:
        """Note the plain attributes of a class in an imported file of the user's own, and return its methods."""
        methods: list[FunctionType] = []
        for base in cls.__mro__[:-1]:
            if hash((id(base), "imported")) in self._seen or is_by_value(base) or not is_own_file(base.__module__):
                continue
            self._seen[hash((id(base), "imported"))] = base
            for name, value in list(vars(base).items()):
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    methods.append(function)
                elif type(value) in SCALARS and not name.startswith("__"):
                    self.visit(value, Place(base, "attribute", name), _join(path, name))
        return methods

    def _search_imported(self, functions: list[FunctionType]) -> None:
        """Look for networks that functions, or those they call, refer to as globals of a file which workers import."""
        while functions:  # Not by recursion: a chain of calls may be longer than Python's stack.
            function = functions.pop()
            code, home = function.__code__, function.__module__ or ""
            if id(code) in self._seen:
                continue
            self._seen[id(code)] = code
            found = {name: function.__globals__.get(name) for name in _globals_of(code)}
            is_imported = not is_by_value(function) and is_own_file(home)
            referred = [(home, name, value) for name, value in found.items() if is_imported]
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # Empty so far.
                    found[f"cell {id(cell)}"] = cell.cell_contents
            for module in found.values():
                if isinstance(module, ModuleType) and is_own_file(module.__name__):
                    referred += [(module.__name__, name, vars(module).get(name)) for name in code.co_names]
            for place, name, value in referred:
                if isinstance(value, FunctionType):
                    functions += [] if is_by_value(value) else [value]
                elif isinstance(value, type):
                    functions += [] if is_by_value(value) else self._note_imported_class(value, f"{place}.{name}")
                elif _has_parameters(value):
                    self.warnings.append(
                        f"The policy uses {name}, a global of the module {place}. Workers import that module "
                        f"themselves, so their {name} is not the learner's: what was drawn at random differs, and what "
                        "is learned does not reach them. Make it an attribute of the agent or an argument of the "
                        f"function, or have the module sent: cloudpickle.register_pickle_by_value({place})."
                    )

    def _visit_leaf(self, obj: Any, place: Place | None, path: str) -> None:
        """Note something that is sent as a whole whenever it changes."""
        if place is None or isinstance(obj, ModuleType):
            self.signature.append((path, obj if isinstance(obj, _FIXED) else type(obj)))
            return
        if isinstance(obj, (*_FIXED, tuple)):
            self.slots.append((place, path))
            return
        try:
            size = len(dump(obj, self._kinds))
        except Exception:  # noqa: BLE001 - `pack` reports what cannot be pickled, and what to do about it
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


class _ClassAttributes:
    """Counts the attributes of a class, without those that Python itself adds when it first needs them."""

    _ADDED = ("__slotnames__", "__annotations__", "__annotations_cache__")

    def __init__(self, cls: type) -> None:
        self._attributes = vars(cls)

    def __len__(self) -> int:
        return len(self._attributes) - sum(name in self._attributes for name in self._ADDED)


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


def _has_parameters(value: Any) -> bool:
    """Whether something is a network, or what an optimizer would change."""
    if hasattr(type(value), "requires_grad"):
        return bool(value.requires_grad)
    state = getattr(value, "__dict__", None) if not isinstance(value, type) else None
    if not isinstance(state, dict) or not isinstance(state.get("_parameters"), dict):
        return False
    return next(value.parameters(), None) is not None


def _has_plain_state(obj: Any) -> bool:
    """Return whether an object is pickled attribute by attribute."""
    cls: Any = type(obj)
    if cls is SimpleNamespace:
        return True
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return False
    if isinstance(obj, io.IOBase):
        return False  # A file is more than its attributes.
    if isinstance(obj, dict | list | tuple | set | frozenset | str | bytes | int | float | complex):
        return False  # So are these.
    return hasattr(obj, "__dict__") or any(getattr(base, "__slots__", ()) for base in cls.__mro__)


def _is_ordered_dict(obj: Any) -> bool:
    return isinstance(obj, dict) and type(obj).__module__ == "collections"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
