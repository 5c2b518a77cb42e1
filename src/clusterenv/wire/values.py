"""Values: a codec for what environments return that is not an array of fixed size, without pickle.

Infos, results of `call`, text and graph observations cross as MessagePack with a handful of extension types. Decoding
builds plain data only and runs no code of the sender's, so the head may decode what any worker sends. What has no
safe form (a user's own class) arrives as a `RemoteObject`: its type's name and its text.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import GraphInstance

from clusterenv.errors import WireError
from clusterenv.wire import spaces
from clusterenv.wire.dtypes import PLAIN_KINDS, checked_dtype, checked_shape

_TUPLE, _SET, _FROZENSET, _ITEMS, _BIGINT, _COMPLEX, _SURROGATES = 1, 2, 3, 4, 5, 6, 7
_ARRAY, _OBJECTS, _SCALAR, _GENERATOR = 10, 11, 12, 13
_GRAPH, _SPACE, _SPEC, _REMOTE = 20, 21, 22, 23

_BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_MAX_BIGINT_BYTES = 4096  # int.from_bytes is linear, but printing such a number later is not.
_MAX_EMPTY_STRINGS = 4096  # In an array of strings of no length: it takes no bytes here, but would on the head.
_MAX_NAME, _MAX_TEXT = 200, 1000
_MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True)
class RemoteObject:
    """Stands for an object that stayed on its worker because it has no safe form to travel in."""

    type_name: str
    text: str


def dumps(value: object) -> bytes:
    """Encode a value; what cannot travel is replaced by a `RemoteObject`."""
    try:
        return _encode(_lower(value))
    except RecursionError as error:
        raise WireError("A value nested this deeply, or within itself, cannot be sent.") from error


def loads(data: bytes | memoryview) -> Any:
    """Decode what `dumps` wrote, checking every part of it.

    Raises:
        WireError: The bytes are no value.
    """
    try:
        return _decoder.decode(data)
    except WireError:
        raise
    # Everything here comes from the bytes alone; whichever check they trip, they are no value.
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        OverflowError,
        KeyError,
        AttributeError,
        IndexError,
        AssertionError,
        MemoryError,
        RecursionError,
    ) as error:
        raise WireError(f"These bytes are no value: {type(error).__name__}: {error}") from error


def _ext(code: int, tree: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(tree))


def _lower(value: Any) -> Any:
    """Turn a value into a tree of what MessagePack knows."""
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is bytes:
        return value
    if kind is str:
        return value if value.isascii() else _lower_text(value)
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _lower_bigint(value)
    if kind is np.ndarray:
        return _lower_array(value)
    if kind is dict:
        if all(type(key) is str and key.isascii() for key in value):
            return {key: _lower(item) for key, item in value.items()}
        return _ext(_ITEMS, [[_lower(key), _lower(item)] for key, item in value.items()])
    if kind is list:
        return [_lower(item) for item in value]
    if isinstance(value, np.ndarray):
        return _lower_array(value)
    if isinstance(value, np.generic):
        if value.dtype.kind in PLAIN_KINDS:
            data = value.tobytes()[: value.dtype.itemsize]  # numpy gives an empty string one byte.
            return _ext(_SCALAR, [value.dtype.str, data])
        return _lower_remote(value)
    return _lower_other(value)


def _lower_other(value: Any) -> Any:
    match value:
        case GraphInstance():
            return _ext(_GRAPH, [_lower(value.nodes), _lower(value.edges), _lower(value.edge_links)])
        case tuple():
            return _ext(_TUPLE, [_lower(item) for item in value])
        case set():
            return _ext(_SET, [_lower(item) for item in value])
        case frozenset():
            return _ext(_FROZENSET, [_lower(item) for item in value])
        case complex():
            return _ext(_COMPLEX, [value.real, value.imag])
        case RemoteObject():
            return _ext(_REMOTE, [value.type_name, value.text])
        case np.random.Generator() if type(value.bit_generator).__name__ in _BIT_GENERATORS:
            bits = value.bit_generator
            return _ext(_GENERATOR, [type(bits).__name__, _lower(bits.state)])
        case Space():
            parts = spaces.describe(value)
            return _lower_remote(value) if parts is None else _ext(_SPACE, _lower(parts))
        case EnvSpec():
            try:
                return _ext(_SPEC, value.to_json())
            except (ValueError, TypeError):  # A callable entry point has no JSON form.
                return _lower_remote(value)
        # Enums and other subclasses of plain values keep their value; Mapping covers OrderedDict and the like.
        case bool() | int() | float() | str() | bytes() | list():
            base: Any = next(base for base in (int, float, str, bytes, list) if isinstance(value, base))
            return _lower(base(value))
        case Mapping():
            return _lower(dict(value))
        case bytearray() | memoryview():
            return bytes(value)
    return _lower_remote(value)


def _lower_text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # A lone surrogate, as in the name of a file with undecodable bytes.
        return msgspec.msgpack.Ext(_SURROGATES, value.encode(errors="surrogatepass"))
    return value


def _lower_bigint(value: int) -> msgspec.msgpack.Ext:
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return msgspec.msgpack.Ext(_BIGINT, data)


def _lower_array(value: np.ndarray) -> Any:
    if value.dtype.kind in PLAIN_KINDS:
        return _ext(_ARRAY, [value.dtype.str, value.shape, value.tobytes()])
    if value.dtype.kind == "O":
        return _ext(_OBJECTS, [value.shape, [_lower(item) for item in value.ravel()]])
    return _lower_remote(value)


def _lower_remote(value: object) -> msgspec.msgpack.Ext:
    cls = type(value)
    try:
        text = repr(value)[:_MAX_TEXT]
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything, and must not end the run
        text = f"<repr failed: {error}>"
    return _ext(_REMOTE, [f"{cls.__module__}.{cls.__qualname__}", text])


def _raise(code: int, data: memoryview) -> Any:
    """Turn an extension back into the value it stands for."""
    if code == _BIGINT:
        if len(data) > _MAX_BIGINT_BYTES:
            raise WireError(f"An integer of {len(data)} bytes is too large.")
        return int.from_bytes(data, "little", signed=True)
    if code == _SURROGATES:
        return bytes(data).decode(errors="surrogatepass")
    tree = _decoder.decode(data)
    if code == _SPEC:
        return EnvSpec.from_json(tree)
    if type(tree) is not list:  # Bytes, of all things, could be unpacked too, into eight times their size.
        raise WireError(f"An extension {code} holds a {type(tree).__name__} where a list was expected.")
    if code == _ARRAY:
        return _raise_array(*tree)
    if code in _SEQUENCES:
        return _SEQUENCES[code](tree)
    return _RAISERS[code](*tree)


def _raise_remote(type_name: object, text: object) -> RemoteObject:
    found = RemoteObject(str(type_name)[:_MAX_NAME], str(text)[:_MAX_TEXT])
    warnings.warn(
        f"A {found.type_name} stayed on its worker: it cannot travel without pickle. Its text arrived instead.",
        RuntimeWarning,
        stacklevel=3,
    )
    return found


def _raise_array(dtype: object, shape: list[int], data: bytes) -> np.ndarray:
    checked, size = checked_dtype(dtype), checked_shape(shape)
    count = math.prod(size)
    if type(data) is not bytes or count * checked.itemsize != len(data):
        raise WireError(f"An array of shape {size} and dtype {checked} does not have these bytes.")
    if not data:
        if count > _MAX_EMPTY_STRINGS:
            raise WireError(f"{count} strings of no length are too many.")
        return np.zeros(size, checked)
    if checked.kind == "b":
        # A byte other than 0 or 1 is no bool; numpy's behaviour with one is undefined.
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(size)
    flat = np.frombuffer(bytearray(data), checked)
    if checked.kind == "U" and flat.view(f"{checked.str[0]}u4").max() > _MAX_CODE_POINT:
        raise WireError("An array of text holds what is no character.")
    return flat.reshape(size)


def _raise_objects(shape: list[int], items: list[Any]) -> np.ndarray:
    size = checked_shape(shape)
    if type(items) is not list or math.prod(size) != len(items):
        raise WireError(f"An array of shape {size} does not have these items.")
    flat = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        flat[index] = item
    return flat.reshape(size)


def _raise_scalar(dtype: object, data: bytes) -> Any:
    array = _raise_array(dtype, [], data)
    return array.dtype.type() if not data else array[()]  # An empty string has no bytes to read.


def _raise_generator(name: str, state: dict[str, Any]) -> np.random.Generator:
    bits: Any = _BIT_GENERATORS[name]()
    bits.state = state
    # numpy does not check where in its buffer a generator is said to be, and would read from there.
    taken = bits.state
    position, size = {
        "MT19937": lambda: (taken["state"]["pos"], len(taken["state"]["key"])),
        "Philox": lambda: (taken["buffer_pos"], len(taken["buffer"])),
    }.get(name, lambda: (0, 0))()
    if not 0 <= position <= size:
        raise WireError(f"A {name} cannot be at position {position} of {size}.")
    return np.random.Generator(bits)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ext_hook=_raise)
_SEQUENCES: dict[int, Any] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _ITEMS: dict,
    _SPACE: spaces.build,
}
_RAISERS: dict[int, Any] = {
    _COMPLEX: complex,
    _OBJECTS: _raise_objects,
    _SCALAR: _raise_scalar,
    _GENERATOR: _raise_generator,
    _GRAPH: GraphInstance,
    _REMOTE: _raise_remote,
}
