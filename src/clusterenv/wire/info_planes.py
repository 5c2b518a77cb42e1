"""Infos in shared memory: numbers that every environment of a shard has under the same keys, as most infos are.

They lie in slots beside the step buffers, a column each, and cost the head only a copy: no message is made, sent or
read. The worker writes the columns' names and dtypes to its mailbox's memory whenever they change, and its replies say
which generation of the names applies. All other infos, and all infos over ZeroMQ, are sent as `wire.values`.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from clusterenv.errors import WireError

MAX_COLUMNS = 32
BOX_BYTES = 1 << 15  # For a worker's names.
MAX_GENERATION = 1 << 29

_LENGTH = struct.Struct("<Q")
_SLOT_BYTES = 8
_DTYPES = {
    dtype.str: dtype for dtype in map(np.dtype, ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"))
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class FullInfos(dict[str, Any]):
    """Infos in Gymnasium's vector layout that fit the slots, without their masks, which are all true.

    Only made from infos that `fits` has accepted.
    """


def fits(columns: Mapping[str, Any], num_rows: int) -> bool:
    """Whether infos that every environment has can be `FullInfos`, which are columns of numbers."""
    return 0 < len(columns) <= MAX_COLUMNS and all(
        type(key) is str
        and key.isascii()
        and key[:1] != "_"
        and type(column) is np.ndarray
        and column.shape == (num_rows,)
        and column.dtype in _CODES
        for key, column in columns.items()
    )


class _Names(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[str, ...], Meta(max_length=MAX_COLUMNS)]
    dtypes: Annotated[tuple[str, ...], Meta(max_length=MAX_COLUMNS)]


class SlotWriter:
    """A worker's side.

    Args:
        slots: `[MAX_COLUMNS, environments]`, eight bytes each, for the worker's own shard.
        box: Where to write the names.
    """

    def __init__(self, slots: NDArray[np.uint64], box: memoryview) -> None:
        self._slots = slots
        self._box = box
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._columns: list[NDArray[Any]] = []
        # Random, to differ from the generations that earlier incarnations of this worker used.
        self._generation = secrets.randbelow(MAX_GENERATION)

    def write(self, infos: FullInfos) -> int:
        """Write infos to the slots; returns the generation of their names, or 0 if the names are too long."""
        names = tuple(infos), tuple([_CODES[column.dtype] for column in infos.values()])
        if names != self._names and not self._rename(*names):
            return 0
        for own, column in zip(self._columns, infos.values(), strict=True):
            own[:] = column
        return self._generation

    def _rename(self, keys: tuple[str, ...], dtypes: tuple[str, ...]) -> bool:
        data = msgspec.msgpack.encode(_Names(keys, dtypes))
        if _LENGTH.size + len(data) > len(self._box):
            return False
        _LENGTH.pack_into(self._box, 0, len(data))
        self._box[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._names = keys, dtypes
        self._columns = [_column(slot, code) for slot, code in zip(self._slots, dtypes, strict=False)]
        self._generation = self._generation % (MAX_GENERATION - 1) + 1  # Never 0.
        return True


class SlotReader:
    """The head's side.

    Args:
        slots: The slots of all environments.
        shards: The environments of each worker, `[start, stop)`.
        find_box: Returns the box of a worker, given its index.
    """

    def __init__(
        self,
        slots: NDArray[np.uint64],
        shards: Sequence[tuple[int, int]],
        find_box: Callable[[int], memoryview],
    ) -> None:
        self._slots = slots
        self._shards = shards
        self._find_box = find_box
        self._names: list[tuple[int, _Names]] = [(0, _Names((), ()))] * len(shards)  # With their generations.
        self._common: list[int] = []  # The generations of all workers, if their names are the same.
        self._makers: list[tuple[str, Callable[[], NDArray[Any]]]] = []

    def read_all(self, generations: list[int]) -> dict[str, Any] | None:
        """Return the infos of all environments; None unless all workers are known to have the same names."""
        if generations != self._common:
            first = self._names[0][1]
            if any(known != (generation, first) for known, generation in zip(self._names, generations, strict=True)):
                return None
            self._makers = _makers(self._slots, first)
            self._common = generations
        return {key: make() for key, make in self._makers}

    def read(self, index: int, generation: int) -> dict[str, Any]:
        """Return the infos of one worker's environments.

        Raises:
            WireError: The names that the worker has written are malformed.
        """
        start, stop = self._shards[index]
        self._learn(index, generation)
        return {key: make() for key, make in _makers(self._slots[:, start:stop], self._names[index][1])}

    def _learn(self, index: int, generation: int) -> None:
        """Read the names of a worker's infos, if they have changed."""
        if self._names[index][0] == generation:
            return
        box = self._find_box(index)
        (size,) = _LENGTH.unpack_from(box)
        if size > BOX_BYTES - _LENGTH.size:
            raise WireError(f"The names of infos cannot take {size} bytes.")
        try:
            names = _decoder.decode(bytes(box[_LENGTH.size : _LENGTH.size + size]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"Malformed info names: {error}") from error
        if len(names.keys) != len(names.dtypes) or not _DTYPES.keys() >= set(names.dtypes):
            raise WireError(f"Infos {str(names.keys)[:100]} cannot be {str(names.dtypes)[:100]}.")
        self._names[index] = generation, names


def _column(slot: NDArray[np.uint64], code: str) -> NDArray[Any]:
    """Return a slot's column; each number starts at a multiple of eight bytes, so that shards never overlap."""
    dtype = _DTYPES[code]
    return slot.view(dtype)[:: _SLOT_BYTES // dtype.itemsize]


def _makers(slots: NDArray[np.uint64], names: _Names) -> list[tuple[str, Callable[[], NDArray[Any]]]]:
    """Return functions that copy each info and make its mask, few and reused for every step to keep caches warm."""
    everyone = np.ones(slots.shape[1], np.bool_)
    makers: list[tuple[str, Callable[[], NDArray[Any]]]] = []
    for slot, key, code in zip(slots, names.keys, names.dtypes, strict=False):
        column = _column(slot, code)
        makers.append((key, _bool_maker(column) if column.dtype == np.bool_ else column.copy))
        makers.append((f"_{key}", everyone.copy))
    return makers


def _bool_maker(column: NDArray[np.bool_]) -> Callable[[], NDArray[np.bool_]]:
    # A byte other than 0 or 1 is not a bool; numpy's behaviour with one is undefined.
    return lambda: np.not_equal(column.view(np.uint8), 0)


_decoder: msgspec.msgpack.Decoder[_Names] = msgspec.msgpack.Decoder(_Names)
