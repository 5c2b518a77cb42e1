"""Digest: identifies a value, or the code of a function, in the same way in every process.

Python's own hashes, texts with addresses and the order of sets do not affect it. A function's digest covers its code
and that of the functions in it, its defaults and its closure. If the function is the user's own, rather than part of an
installed package, the globals that it names count too; so does the body of a class of the user's own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from gymnasium import Space

from clusterenv.errors import ConfigError

_GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)

_INSTALLED = {"site-packages", "dist-packages"}  # Where packages are, in any Python environment.

_OWN_FLAGS = 0xFFFF  # Of a code object; the higher flags are the file's `from __future__` imports.


def digest_of(value: object, what: str) -> str:
    """Return a digest of everything that makes up a value.

    Raises:
        ConfigError: The value holds something that cannot be compared across processes.
    """
    try:
        return _Digester().digest(value).hex()[:16]
    except (_Unknown, RecursionError) as error:
        held = str(error) if isinstance(error, _Unknown) else "something that is nested too deeply"
        raise ConfigError(
            f"{what} hold {held}, of which cannot be told whether it is the same in another process: give numbers, "
            "text, arrays, or objects that can be pickled."
        ) from error


def digest_of_code(value: object, *, has_state: bool) -> str:
    """Return a digest of what a function or an object does; of what cannot be compared, only the class counts.

    Args:
        value: A function, or something that holds functions.
        has_state: Whether everything else that objects hold counts too.
    """
    try:
        return _Digester(is_strict=False, has_state=has_state).digest(value).hex()[:16]
    except RecursionError:
        return _join("object", [_name(type(value))]).hex()[:16]


class _Unknown(Exception):
    """A value cannot be digested."""


class _Digester:
    def __init__(self, *, is_strict: bool = True, has_state: bool = True) -> None:
        self._is_strict = is_strict
        self._has_state = has_state
        self._known: dict[int, tuple[object, bytes]] = {}  # With the objects, so that no id is reused.

    def digest(self, value: Any) -> bytes:
        if id(value) in self._known:
            return self._known[id(value)][1]
        self._known[id(value)] = value, _join("again", [_name(type(value))])  # In case it contains itself.
        found = self._digest(value)
        self._known[id(value)] = value, found
        return found

    def _digest(self, value: Any) -> bytes:
        kind = type(value)
        if value is None or value is Ellipsis or kind in (bool, int):
            return _join(kind.__name__, [str(value).encode()])
        if kind is float or kind is complex:
            return _join(kind.__name__, [struct.pack("<dd", value.real, value.imag)])
        if kind is str:
            return _join("str", [value.encode(errors="surrogatepass")])
        if kind in (bytes, bytearray):
            return _join(kind.__name__, [bytes(value)])
        if kind in (list, tuple):
            return self._join(kind.__name__, value)
        if kind in (set, frozenset):
            return _join("set", sorted(map(self.digest, value)))
        if kind is dict:
            return self._join_items("dict", value)
        if isinstance(value, np.ndarray | np.generic):
            return self._digest_array(np.asarray(value))
        if isinstance(value, CodeType):
            return self._digest_code(value)
        if isinstance(value, FunctionType):
            cells = [_read_cell(cell) for cell in value.__closure__ or ()]
            found = _globals_of(value) if self._looks_into(value) else {}
            return self._join("function", [value.__code__, value.__defaults__, value.__kwdefaults__, cells, found])
        if isinstance(value, MethodType):
            return self._join("method", [value.__func__, value.__self__])
        if isinstance(value, functools.partial):
            return self._join("partial", [value.func, value.args, value.keywords])
        if isinstance(value, property | functools.cached_property):
            parts = value.func if isinstance(value, functools.cached_property) else (value.fget, value.fset, value.fdel)
            return self._join("property", [parts])
        if isinstance(value, type) and self._looks_into(value):
            bases = [base for base in value.__mro__[1:] if _is_own(base.__module__)]
            return _join("class", [_name(value), self.digest(_body_of(value)), self._join("bases", bases)])
        if isinstance(value, type | BuiltinFunctionType | ModuleType | np.ufunc):
            return _join("name", [_name(value)])
        return self._digest_object(value)

    def _looks_into(self, value: Any) -> bool:
        """Whether what a function or class refers to counts: not in plain values."""
        return not self._is_strict and _is_own(value.__module__)

    def _digest_code(self, code: CodeType) -> bytes:
        flags = code.co_flags & _OWN_FLAGS
        numbers = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags]
        names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
        return self._join("code", [code.co_code, code.co_exceptiontable, numbers, names, code.co_consts])

    def _digest_array(self, array: Any) -> bytes:
        items = array.ravel().tolist() if array.dtype.hasobject else array.tobytes()
        return self._join("array", [array.dtype.str, array.shape, items])

    def _digest_object(self, value: Any) -> bytes:
        name = self.digest(type(value)) if self._looks_into(type(value)) else _name(type(value))
        if isinstance(value, _GENERATORS):
            return self._digest_generator(value)
        if isinstance(value, Space):  # It may hold a generator, which is made when it is first used.
            return _join("space", [name, repr(value).encode()])
        if (inner := getattr(value, "__wrapped__", None)) is not None:
            return _join("wrapped", [name, self.digest(inner)])
        try:
            if hasattr(value, "__array__"):
                return _join("like an array", [name, self._digest_array(np.asarray(value))])
            if not self._has_state:
                held = {key: item for key, item in vars(value).items() if _is_code(key, item)}
                return _join("object", [name, self._join_items("dict", held)])
            made_by = value.__reduce_ex__(2)
            if isinstance(made_by, str):
                return _join("global", [name, made_by.encode()])
            maker, arguments, state, items, pairs = (*made_by, None, None, None)[:5]
            parts = [self.digest(maker), self.digest(arguments), self._digest_state(state)]
            parts.append(self._join("items", items or ()))
            parts.append(self._join_items("pairs", dict(pairs or ())))
        except _Unknown:
            raise
        except Exception as error:  # A user's own class may raise anything when it is reduced.
            if self._is_strict:
                raise _Unknown(f"a {type(value).__qualname__}") from error
            return _join("object", [name])
        return _join("object", [name, *parts])

    def _digest_state(self, state: Any) -> bytes:
        """Digest what an object holds: whether it has already made a generator makes no difference."""
        if isinstance(state, dict):
            return self._join_items(
                "state", {k: v for k, v in state.items() if v is not None and not isinstance(v, _GENERATORS)}
            )
        return self.digest(state)

    def _digest_generator(self, value: Any) -> bytes:
        if not self._is_strict:
            return self.digest(None)
        if isinstance(value, random.Random):
            return self.digest(value.getstate())
        bits = getattr(value, "bit_generator", value)
        return self.digest(bits.get_state() if isinstance(bits, np.random.RandomState) else bits.state)

    def _join(self, kind: str, parts: Iterable[Any]) -> bytes:
        return _join(kind, map(self.digest, list(parts)))

    def _join_items(self, kind: str, items: Mapping[Any, Any]) -> bytes:
        return _join(kind, sorted(self.digest(key) + self.digest(value) for key, value in items.items()))


@functools.cache
def _is_own(module: str | None) -> bool:
    """Whether a module is the user's own: a script, or a file that is not where packages are installed."""
    if module == "__main__":
        return True
    place = getattr(sys.modules.get(module or ""), "__file__", None)
    if place is None or (module or "").partition(".")[0] == "clusterenv":
        return False
    library = Path(os.__file__).parent
    return library not in Path(place).parents and not _INSTALLED & set(Path(place).parts)


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function, or one in it, refers to by name."""
    names: set[str] = set()
    codes = [function.__code__]
    for code in codes:  # Which grows meanwhile.
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    # Sorted: where things refer to each other, it matters which of them is met first.
    return {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}


def _body_of(kind: type) -> dict[str, Any]:
    """Return a class's own attributes, without those that Python adds."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith("__") and name.endswith("__")) or isinstance(value, FunctionType)
    }


def _is_code(name: object, value: object) -> bool:
    """Whether an attribute is a function, or the dict in which a torch module keeps its submodules."""
    return isinstance(value, _FUNCTIONS) or name == "_modules"


def _join(kind: str, parts: Iterable[bytes]) -> bytes:
    found = hashlib.sha256(kind.encode())
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()


def _name(value: Any) -> bytes:
    name = getattr(value, "__qualname__", None) or value.__name__  # Modules and ufuncs have only the latter.
    return f"{getattr(value, '__module__', '')}.{name}".encode()


def _read_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # Nothing was assigned to the name yet.
        return Ellipsis
