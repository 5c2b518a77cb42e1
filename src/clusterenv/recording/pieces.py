"""Pieces: files that rollouts are appended to while a run goes on, readable up to the last whole record at any time.

A piece is a row of records, each written at once: a header of fixed size (`_HEADER`), a head (`wire.values`) that says
what the record holds and names its arrays, and the arrays' bytes. The first record tells of the run. A record that was
cut off by a crash or a full disk fails its size or its checksum; all that was written before it counts.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import RecordingError, WireError
from clusterenv.wire import values
from clusterenv.wire.spaces import checked_dtype, checked_shape

SUFFIX = ".piece"
FORMAT = 1

Arrays = dict[str, dict[str, NDArray[Any]]]

_HEADER = struct.Struct("<8sIIQ")  # a marker, the checksum of what follows, the sizes of head and arrays
_MARKER = b"CEPIECE1"


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """Steps of some environments, as one rollout has them: arrays `[T, N, ...]`.

    Attributes:
        notes: What is said of it as a whole, and of each column; see `Recorder.add`.
        arrays: By group ("obs", "actions", "extras", ...), then by name: a leaf's place in its space, or an extra's name.
    """

    notes: Mapping[str, Any]
    arrays: Arrays

    def column(self, name: str, index: int) -> NDArray[Any]:
        """Return one environment's part of rewards, flags, or `valid`."""
        return self.arrays["steps"][name][:, index]

    @cached_property
    def finals(self) -> dict[tuple[int, int], int]:
        """Which of the final observations is that of an episode which ended at this step, in this column."""
        places = zip(self.notes["final_steps"].tolist(), self.notes["final_columns"].tolist(), strict=True)
        return {place: index for index, place in enumerate(places)}


def encode(notes: Mapping[str, Any], arrays: Arrays) -> tuple[bytes, bytearray]:
    """Return a record's head and arrays as bytes of their own: what they were made of may change from now on."""
    named = [(group, name, array) for group, members in arrays.items() for name, array in members.items()]
    specs = [[group, name, array.dtype.str, list(array.shape)] for group, name, array in named]
    body = bytearray(sum(array.nbytes for *_, array in named))
    offset = 0
    for *_, array in named:
        np.frombuffer(body, array.dtype, array.size, offset).reshape(array.shape)[...] = array
        offset += array.nbytes
    return values.dumps({"notes": dict(notes), "arrays": specs}), body


class PieceWriter:
    """Appends records to a new file."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Make the file.

        Args:
            path: There must be no such file yet.
            about: The run: what the first record tells.

        Raises:
            OSError: It cannot be made.
        """
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._size_bytes = 0
        try:
            self.append(*encode({"format": FORMAT, **about}, {}))
        except BaseException:
            self.close()
            raise

    def append(self, head: bytes, body: bytes | bytearray) -> None:
        """Write what `encode` has returned.

        Raises:
            OSError: It cannot be written; the file is as it was before.
        """
        checksum = zlib.crc32(body, zlib.crc32(head))
        rest = [memoryview(part) for part in (_HEADER.pack(_MARKER, checksum, len(head), len(body)), head, body)]
        try:
            while rest:
                count = os.writev(self._descriptor, rest)
                self._size_bytes += count
                while rest and count >= len(rest[0]):
                    count -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][count:]
        except OSError:
            whole = _HEADER.size + len(head) + len(body) - sum(map(len, rest))
            self._size_bytes -= whole
            os.ftruncate(self._descriptor, self._size_bytes)
            os.lseek(self._descriptor, self._size_bytes, os.SEEK_SET)
            raise

    def close(self) -> None:
        """Close the file; again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Piece:
    """A piece that is being read. Its arrays are read from the disk when they are looked at.

    Attributes:
        about: What the first record tells of the run.
        lost_bytes: The size of what follows the last whole record.
    """

    def __init__(self, path: Path) -> None:
        """Open a piece.

        Raises:
            RecordingError: It cannot be read, or is none.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size_bytes else b"")
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error}.") from error
        self.lost_bytes = 0
        self._end = 0
        first = self._read(0)
        if first is None:
            raise RecordingError(
                f"{path} is not a piece of a recording: it does not begin as one does. Pieces are the files "
                f"*{SUFFIX} that a Recorder writes."
            )
        self.about = first.notes
        if self.about.get("format") != FORMAT:
            raise RecordingError(f"{path} was recorded by another version of ClusterEnv. Merge it with that one.")
        self._start = self._end

    def records(self) -> Iterator[Record]:
        """Yield the records up to the last whole one."""
        offset = self._start
        while (record := self._read(offset)) is not None:
            offset = self._end
            yield record
        self.lost_bytes = len(self._bytes) - offset

    def _read(self, offset: int) -> Record | None:
        """Return the record that begins here, or None if there is no whole one; note where it ends."""
        if len(self._bytes) - offset < _HEADER.size:
            return None
        marker, checksum, head_bytes, body_bytes = _HEADER.unpack_from(self._bytes, offset)
        start = offset + _HEADER.size
        end = start + head_bytes + body_bytes
        if marker != _MARKER or end > len(self._bytes) or zlib.crc32(self._bytes[start:end]) != checksum:
            return None
        self._end = end
        try:
            head = values.loads(self._bytes[start : start + head_bytes])
            return Record(head["notes"], self._view(head["arrays"], start + head_bytes))
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{self.path} holds a record that this version cannot read: {error}.") from error

    def _view(self, specs: Sequence[Sequence[Any]], offset: int) -> Arrays:
        arrays: Arrays = {}
        for group, name, kind, sizes in specs:
            dtype, shape = checked_dtype(kind), checked_shape(tuple(sizes))
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(self._bytes, dtype, count, offset).reshape(shape)
            arrays.setdefault(group, {})[name] = array
            offset += array.nbytes
        return arrays
