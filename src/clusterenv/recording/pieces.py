"""Pieces: files to which rollouts are appended during a run, readable up to the last whole record at any time.

A piece is a sequence of records: a header of fixed size (`_HEADER`), a head (`wire.values`) with the record's notes and
the names of its arrays, the arrays' bytes, and `_END`. The first record describes the run. A record that was cut off by
a crash has no `_END` where its header says; all records before it are valid.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ConfigError, RecordingError, WireError
from clusterenv.wire import values
from clusterenv.wire.spaces import checked_dtype, checked_shape

SUFFIX = ".piece"
FORMAT = 1
PROVENANCE = {"policy_version": "versions", "policy_age": "ages", "policy_divergence": "divergences"}
"""The notes about the policy that acted, by the names they have in a dataset."""

Arrays = dict[str, dict[str, NDArray[Any]]]

_HEADER = struct.Struct("<8sIIQ")  # a marker, the head's checksum, the sizes of head and arrays
_MARKER, _END = b"CEPIECE1", b"CERECEND"
_MAX_PARTS = 1000  # The operating system takes 1,024 at once.


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """The steps of some environments from one rollout: arrays `[T, N, ...]`.

    Attributes:
        notes: The metadata of the rollout and of each column; see `describe`.
        arrays: By group ("obs", "actions", "extras", ...), then by name: a leaf's path in its space, an extra's name.
    """

    notes: Mapping[str, Any]
    arrays: Arrays

    def column(self, name: str, index: int) -> NDArray[Any]:
        """Return one environment's part of rewards, flags, or `valid`."""
        return self.arrays["steps"][name][:, index]

    @cached_property
    def finals(self) -> dict[tuple[int, int], int]:
        """The index of the final observation of the episode that ended at a given step and column."""
        places = zip(self.notes["final_steps"].tolist(), self.notes["final_columns"].tolist(), strict=True)
        return {place: index for index, place in enumerate(places)}


def describe(
    number: int,
    env_indices: NDArray[np.int64],
    *,
    ends: Iterable[tuple[int, int, Mapping[str, Any]]],
    **columns: NDArray[Any],
) -> dict[str, Any]:
    """Return a rollout's metadata.

    Args:
        number: The number of the rollout in the recording.
        env_indices: The environment of each column.
        ends: For each episode that finished: its last step, its column, and the info of that step.
        columns: `lives`, `episodes`, `steps` and `seeds`, as in `rollout.Positions`; `versions`, `ages` and
            `divergences`, likewise per column; `final_steps` and `final_columns`, of the final observations.
    """
    errors = {f"{step} {column}": str(info["env_error"]) for step, column, info in ends if "env_error" in info}
    return {"number": number, "env_indices": env_indices, "errors": errors, **columns}


def check_extras(names: Iterable[str]) -> None:
    """Raise ConfigError if one of the policy's outputs has a name under which it cannot be recorded."""
    if bad := [name for name in names if name in PROVENANCE or not name.strip(".") or "/" in name]:
        raise ConfigError(f"The policy's {bad[0]!r} cannot be recorded by that name: give it another.")


def open_piece(path: Path, name: str, about: Mapping[str, Any]) -> PieceWriter:
    """Begin a piece of a dataset that does not exist yet.

    Args:
        path: The dataset's directory, which may hold nothing but pieces of the same run.
        name: The name of the piece, which begins with the run's.
        about: The description of the run, for the first record.

    Raises:
        ConfigError: The directory holds something else, or cannot be written to.
    """
    pieces = path / "pieces"
    with contextlib.suppress(OSError):  # Any problem is reported when the directory is made.
        if (path / "data").exists():
            raise ConfigError(
                f"There is a dataset at {path} already, and it is not overwritten. Choose another name or version, or "
                "delete it."
            )
        if any(not piece.name.startswith(about["run"]) for piece in pieces.glob(f"*{SUFFIX}")):
            raise ConfigError(
                f"{path} holds the pieces of a recording that goes on, or was not closed. If it was not, make its "
                f"dataset: clusterenv merge {path} --out {path}. Or choose another path."
            )
    try:
        pieces.mkdir(parents=True, exist_ok=True)
        return PieceWriter(pieces / f"{name}{SUFFIX}", about)
    except OSError as error:
        raise ConfigError(f"Nothing can be recorded to {path}: {error}. Choose another path.") from error


class PieceWriter:
    """Appends records to a new file.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Make the file.

        Args:
            path: The path of the file, which must not exist yet.
            about: The description of the run, for the first record.

        Raises:
            OSError: The file cannot be made.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self.append({"format": FORMAT, **about}, {})
        except BaseException:
            self.close()
            os.unlink(path)
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the file is closed."""
        return self._descriptor < 0

    def append(self, notes: Mapping[str, Any], arrays: Arrays) -> None:
        """Write a record; once this returns, the operating system has all of it, whatever becomes of the process.

        Raises:
            OSError: The record cannot be written; the file is unchanged.
        """
        named = [(group, name, array) for group, members in arrays.items() for name, array in members.items()]
        specs = [[group, name, array.dtype.str, list(array.shape)] for group, name, array in named]
        head = values.dumps({"notes": dict(notes), "arrays": specs})
        header = _HEADER.pack(_MARKER, zlib.crc32(head), len(head), sum(array.nbytes for *_, array in named))
        # As bytes: a memoryview of a flag or a scalar cannot be sliced.
        body = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for *_, array in named if array.nbytes]
        start = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        try:
            self._write([header, head, *body, _END])
        except BaseException:  # Ctrl-C, too, must not leave half a record in the middle.
            os.ftruncate(self._descriptor, start)
            os.lseek(self._descriptor, start, os.SEEK_SET)
            raise

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, parts: Sequence[Any]) -> None:
        waiting = [memoryview(part) for part in reversed(parts)]
        while waiting:
            count = os.writev(self._descriptor, waiting[: -_MAX_PARTS - 1 : -1])
            while waiting and count >= len(waiting[-1]):
                count -= len(waiting.pop())
            if waiting:
                waiting[-1] = waiting[-1][count:]


class Piece:
    """A piece that is being read; its arrays are read from disk only when they are accessed.

    Attributes:
        about: The description of the run, from the first record.
        lost_bytes: The size of what follows the last whole record.
    """

    def __init__(self, path: Path) -> None:
        """Open a piece.

        Raises:
            RecordingError: The file cannot be read, or is not a piece.
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
        """Return the record that begins at this offset, or None if there is no whole one; note where it ends."""
        if len(self._bytes) - offset < _HEADER.size:
            return None
        marker, checksum, head_bytes, body_bytes = _HEADER.unpack_from(self._bytes, offset)
        start = offset + _HEADER.size
        body = start + head_bytes
        end = body + body_bytes
        if marker != _MARKER or self._bytes[end : end + len(_END)] != _END:
            return None
        if zlib.crc32(self._bytes[start:body]) != checksum:
            return None
        self._end = end + len(_END)
        try:
            head = values.loads(self._bytes[start:body])
            return Record(head["notes"], self._view(head["arrays"], body))
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
