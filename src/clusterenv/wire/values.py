"""Values: encodes, without pickle, what environments return besides arrays of fixed size.

Infos, results of `call`, and text and graph observations are sent as MessagePack with a handful of extension types.
Decoding builds plain data only and runs no code from the sender, so the head can decode what any worker sends. Objects
without a safe form (of a user's own class) arrive as a `RemoteObject`: the type's name and the object's text.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import GraphInstance

from clusterenv.errors import WireError
from clusterenv.wire import spaces
from clusterenv.wire.spaces import PLAIN_KINDS, checked_dtype, checked_shape

_TUPLE, _SET, _FROZENSET, _ITEMS, _BIGINT, _COMPLEX, _SURROGATES = 1, 2, 3, 4, 5, 6, 7
_ARRAY, _OBJECTS, _SCALAR, _GENERATOR = 10, 11, 12, 13
_GRAPH, _SPACE, _SPEC, _REMOTE = 20, 21, 22, 23

_BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_MAX_BIGINT_BYTES = 4096  # int.from_bytes is linear, but printing such a number later is not.
_MAX_EMPTY_STRINGS = 4096  # In one array. An empty string takes no bytes on the wire, but some in memory.
# Keys with equal hashes are compared with each other, so n of them cost n * n, and integers, complex numbers and tuples
# can be chosen to have equal hashes. So a dict that is large, or has other keys than text, is sent as pairs, which are
# checked first.
_MAX_EQUAL_HASHES = 64
_MAX_MAP_ENTRIES = 256
_SMALL_BYTES = 1 << 14  # A map in fewer bytes than this is never slow, whatever its keys.
_MAX_NAME, _MAX_TEXT = 200, 1000
_MAX_CODE_POINT = 0x10FFFF


@dataclass(frozen=True)
class RemoteObject:
    """Stands for an object that stayed on its worker because it cannot be sent safely."""

    type_name: str
    text: str


def dumps(value: object) -> bytes:
    """Encode a value; parts that cannot be sent are replaced by a `RemoteObject`.

    Raises:
        WireError: The value is nested too deeply, or contains itself.
    """
    try:
        return _encode(_lower(value))
    except RecursionError as error:
        raise WireError("A value that is nested this deeply, or contains itself, cannot be sent.") from error


def loads(data: bytes | memoryview) -> Any:
    """Decode what `dumps` wrote, checking every part of it.

    Raises:
        WireError: The bytes are malformed.
    """
    try:
        return _decode(data)
    except WireError:
        raise
    # The outcome depends on the bytes alone: whichever check they fail, they are malformed.
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
        raise WireError(f"A malformed value: {type(error).__name__}: {error}") from error


def _ext(code: int, tree: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(tree))


def _lower(value: Any) -> Any:
    """Turn a value into a tree of MessagePack's own types and our extensions."""
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
        if len(value) <= _MAX_MAP_ENTRIES and all(type(key) is str and key.isascii() for key in value):
            return {key: _lower(item) for key, item in value.items()}
        return _ext(_ITEMS, [[_lower(key), _lower(item)] for key, item in value.items()])
    if kind is list:
        return [_lower(item) for item in value]
    if isinstance(value, np.ndarray):
        return _lower_array(value)
    if isinstance(value, np.generic):
        if value.dtype.kind in PLAIN_KINDS:
            data = value.tobytes()[: value.dtype.itemsize]  # numpy returns one byte for an empty string.
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
        # Enums and other subclasses of plain types keep their value; Mapping covers OrderedDict and the like.
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
    except Exception as error:  # noqa: BLE001  # a user's __repr__ may raise anything, and must not end the run
        text = f"<repr failed: {error}>"
    return _ext(_REMOTE, [f"{cls.__module__}.{cls.__qualname__}", text])


def _restore(code: int, data: memoryview) -> Any:
    """Turn an extension back into the value it stands for."""
    if code == _BIGINT:
        if len(data) > _MAX_BIGINT_BYTES:
            raise WireError(f"An integer of {len(data)} bytes is too large.")
        return int.from_bytes(data, "little", signed=True)
    if code == _SURROGATES:
        return bytes(data).decode(errors="surrogatepass")
    tree = _decode(data)
    if code == _SPEC:
        return EnvSpec.from_json(tree)
    if type(tree) is not list:  # Bytes could be unpacked as well, into eight times their size.
        raise WireError(f"Extension {code} holds a {type(tree).__name__} where a list was expected.")
    if code == _ARRAY:
        return _restore_array(*tree)
    if code in _SEQUENCES:
        return _SEQUENCES[code](tree)
    return _RESTORERS[code](*tree)


def _decode(data: bytes | memoryview) -> Any:
    if len(data) > _SMALL_BYTES:
        _refuse_large_maps(data)
    return _decoder.decode(data)


def _refuse_large_maps(data: bytes | memoryview) -> None:
    position, end = 0, len(data)
    while position < end:
        first = data[position]
        size, width = _TOKENS[first]
        if width:
            length = int.from_bytes(data[position + 1 : position + 1 + width], "big")
            if first < _MAP16:
                size += length
            elif length > _MAX_MAP_ENTRIES:
                raise WireError(f"A map of {length} entries is too large; larger dicts are sent as pairs.")
        position += size


def _restore_dict(pairs: list[Any]) -> dict[Any, Any]:
    _refuse_collisions([key for key, _ in pairs])
    return dict(pairs)


def _restore_set(items: list[Any]) -> set[Any]:
    _refuse_collisions(items)
    return set(items)


def _refuse_collisions(keys: list[Hashable]) -> None:
    if len(keys) > _MAX_EQUAL_HASHES and max(Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES:
        raise WireError(f"More than {_MAX_EQUAL_HASHES} keys of a dict or set have the same hash.")


def _restore_remote(type_name: object, text: object) -> RemoteObject:
    found = RemoteObject(str(type_name)[:_MAX_NAME], str(text)[:_MAX_TEXT])
    warnings.warn(
        f"A {found.type_name} stayed on its worker: it cannot be sent without pickle. Its text was sent instead.",
        RuntimeWarning,
        stacklevel=3,
    )
    return found


def _restore_array(dtype: object, shape: list[int], data: bytes) -> np.ndarray:
    checked, size = checked_dtype(dtype), checked_shape(shape)
    count = math.prod(size)
    if type(data) is not bytes or count * checked.itemsize != len(data):
        raise WireError(f"The bytes do not fit an array of shape {size} and dtype {checked}.")
    if not data:
        if count > _MAX_EMPTY_STRINGS:
            raise WireError(f"{count} empty strings in one array are too many.")
        return np.zeros(size, checked)
    if checked.kind == "b":
        # A byte other than 0 or 1 is not a bool; numpy's behaviour with one is undefined.
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(size)
    flat = np.frombuffer(bytearray(data), checked)
    if checked.kind == "U" and flat.view(f"{checked.str[0]}u4").max() > _MAX_CODE_POINT:
        raise WireError("An array of text holds a number that is not a character.")
    return flat.reshape(size)


def _restore_objects(shape: list[int], items: list[Any]) -> np.ndarray:
    size = checked_shape(shape)
    if type(items) is not list or math.prod(size) != len(items):
        raise WireError(f"The items do not fit an array of shape {size}.")
    flat = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        flat[index] = item
    return flat.reshape(size)


def _restore_scalar(dtype: object, data: bytes) -> Any:
    array = _restore_array(dtype, [], data)
    return array.dtype.type() if not data else array[()]  # An empty string has no bytes to read.


def _restore_generator(name: str, state: dict[str, Any]) -> np.random.Generator:
    bits: Any = _BIT_GENERATORS[name]()
    bits.state = state
    # numpy does not check a state's position in its buffer, and would read out of bounds.
    taken = bits.state
    position, size = {
        "MT19937": lambda: (taken["state"]["pos"], len(taken["state"]["key"])),
        "Philox": lambda: (taken["buffer_pos"], len(taken["buffer"])),
    }.get(name, lambda: (0, 0))()
    if not 0 <= position <= size:
        raise WireError(f"A {name} cannot be at position {position} of {size}.")
    return np.random.Generator(bits)


_MAP16 = 0xDE
# By a MessagePack token's first byte: the token's size without its contents, and the width of its length field.
_TOKENS = (
    [(1, 0)] * 0xA0  # small integers, and the heads of small maps and arrays
    + [(1 + length, 0) for length in range(32)]  # short text
    + [(1, 0)] * 4  # nil, unused, false, true
    + [(2, 1), (3, 2), (5, 4), (3, 1), (4, 2), (6, 4)]  # bytes, extensions
    + [(5, 0), (9, 0)]  # floats
    + [(2, 0), (3, 0), (5, 0), (9, 0)] * 2  # unsigned and signed integers
    + [(3, 0), (4, 0), (6, 0), (10, 0), (18, 0)]  # small extensions
    + [(2, 1), (3, 2), (5, 4)]  # text
    + [(3, 0), (5, 0)]  # the heads of arrays
    + [(3, 2), (5, 4)]  # the heads of maps
    + [(1, 0)] * 0x20  # small negative integers
)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ext_hook=_restore)
_SEQUENCES: dict[int, Any] = {
    _TUPLE: tuple,
    _SET: _restore_set,
    _FROZENSET: lambda items: frozenset(_restore_set(items)),
    _ITEMS: _restore_dict,
    _SPACE: spaces.build,
}
_RESTORERS: dict[int, Any] = {
    _COMPLEX: complex,
    _OBJECTS: _restore_objects,
    _SCALAR: _restore_scalar,
    _GENERATOR: _restore_generator,
    _GRAPH: GraphInstance,
    _REMOTE: _restore_remote,
}
