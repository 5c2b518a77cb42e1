"""Pickling by value, without the arrays that are sent separately."""

from __future__ import annotations

import functools
import io
import pickle
import random
import sys
import sysconfig
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np

from clusterenv.policy.array_kinds import NUMPY, ArrayKind

SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, np.bool_}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
    | {np.float16, np.float32, np.float64}
)
"""Types that are pickled without looking into them."""

RANDOM = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
"""Types of random generators, except for torch's."""


class Stripper(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles only the shapes and dtypes of arrays that are sent separately."""

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
        if isinstance(obj, functools._lru_cache_wrapper) and is_by_value(obj):
            return _cache, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):
            return Computed, (obj.func,)
        return super().reducer_override(obj)


class Restorer(pickle.Unpickler):
    """Unpickles what was pickled by value, with its own copies of classes.

    By default, cloudpickle keeps one class per process for each that was pickled, and on the head that is the user's
    own: unpickling would overwrite its methods with copies, which refer to copies of everything else.

    Args:
        data: The pickle.
        classes: The classes that belong to the same copy of an agent; new ones are added.
    """

    def __init__(self, data: bytes, classes: dict[str, type]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = classes
        self._known = set(classes.values())

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(_make_class, found, self._classes)
            if name == "_class_setstate":
                return functools.partial(_fill_class, found, self._known)
        return found


class Computed(functools.cached_property[Any]):
    """A cached property in a copy: uses what the head has computed, or keeps its own result until weights are loaded.

    The result is kept outside the object, which would otherwise look as if it had changed.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__(function)
        self._kept: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        kept = self._kept.get(id(instance))
        if kept is None or kept[0]() is not instance:
            kept = self._kept[id(instance)] = weakref.ref(instance), self.func(instance)
        return kept[1]

    def forget(self) -> None:
        """Drop all results, to be computed again when needed, except for random generators."""
        self._kept = {key: kept for key, kept in self._kept.items() if holds_generator(kept[1])}


def forget(cache: Any) -> None:
    """Empty a copy's cache, whose results may have been computed from other weights."""
    if isinstance(cache, Computed):
        cache.forget()
    elif not cache.generators:
        cache.cache_clear()


def holds_generator(value: Any) -> bool:
    """Return whether something is a random generator, or holds one."""
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        each = left.pop()
        cls = type(each)
        if isinstance(each, RANDOM) or (cls.__module__, cls.__name__) == ("torch._C", "Generator"):
            return True
        if id(each) not in seen and not isinstance(each, type | ModuleType):
            seen[id(each)] = each
            left += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()
            left += getattr(each, "__dict__", {}).values()
    return False


def dump(value: Any, kinds: Sequence[ArrayKind]) -> bytes:
    """Pickle something with all values of its arrays."""
    if type(value) in SCALARS:
        return pickle.dumps(value, 5)
    buffer = io.BytesIO()
    Stripper(buffer, kinds, set()).dump(value)
    return buffer.getvalue()


# Not methods of a Restorer: it remembers what it finds, and would form a reference cycle with all it has read.
def _make_class(make: Callable[..., type], classes: dict[str, type], *arguments: Any) -> type:
    *others, identifier, extra = arguments
    if identifier not in classes:
        classes[identifier] = make(*others, None, extra)
    return classes[identifier]


def _fill_class(fill: Callable[[type, Any], type], known: set[type], cls: type, state: Any) -> type:
    return cls if cls in known else fill(cls, state)


def _cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    generators: list[Any] = []

    @functools.wraps(function)
    def compute(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if holds_generator(result):
            generators.append(result)
        return result

    cache: Any = functools.lru_cache(**parameters)(compute)
    cache.generators = generators
    return cache


def _itself(obj: Any) -> Any:
    return obj


def is_by_value(obj: Any) -> bool:
    """Return whether cloudpickle copies a function or class, rather than import it on the other side."""
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


def is_own_file(name: str) -> bool:
    """Whether a module is a file of the user's own: neither Python's, nor installed, nor this library's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name == "__main__" or name.partition(".")[0] == "clusterenv":
        return False
    return not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    path = Path(file).resolve()
    python = (Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(map(path.is_relative_to, python))
