"""Boards: weights that one worker keeps for the others on its machine, so that they cross the network once.

Every worker has a board: a few bytes of nameless memory that others on the machine find as `/proc/<pid>/fd/<n>`. It
begins with a token, by which they know that it is the right one, and lists the weights that are kept, each by its
version and the descriptor of sealed memory of its own. Nothing has a name: whoever is killed, nothing is left.

    [ token, 16 bytes | version, descriptor | version, descriptor ]     numbers of 64 bits

What is read is not trusted. It must be nameless memory, which neither blocks nor does anything when it is opened; it is
copied before it is looked at, and counts only if it has the digest that the head has told.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from clusterenv.wire.messages import BoardAddress, Copy

if hasattr(os, "memfd_create"):
    import fcntl  # Windows has none, and no use for it: there are memfds on Linux only.

_NUM_KEPT = 2  # The newest, and the one before it, which somebody may be reading.
_TOKEN_BYTES = 16
_ENTRY = struct.Struct("=Qq")
_SIZE_BYTES = _TOKEN_BYTES + _NUM_KEPT * _ENTRY.size
_NO_ENTRY = _ENTRY.pack(0, -1)
_PIECE_BYTES = 1 << 30  # Linux reads and writes at most two of these at a time.

Buffer: TypeAlias = Any  # What `hashlib` takes: bytes, arrays, frames. Python names it from 3.12 on.


class Unreachable(Exception):
    """What should lie on another worker's board never will, for this worker."""


class Board:
    """A worker's own board, and its way to those of others.

    Attributes:
        address: For others to find it by.
    """

    def __init__(self) -> None:
        """Make an empty board.

        Raises:
            OSError: There is no nameless memory here.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no nameless memory")
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._kept: deque[tuple[int, int]] = deque()  # Versions and descriptors, the newest last.
        self._descriptor = _make_memory([token, _NO_ENTRY * _NUM_KEPT], is_writable=True)
        self._device = os.fstat(self._descriptor).st_dev  # All nameless memory is on one device, and nothing else is.
        self.address = BoardAddress(os.getpid(), self._descriptor, token)

    def keep(self, version: int, pieces: Sequence[memoryview]) -> None:
        """Keep weights for others to read, in place of the oldest that are kept.

        Raises:
            OSError: There is no memory, or no descriptor, for them.
        """
        descriptor = _make_memory(pieces, is_writable=False)
        gone = self._kept.popleft() if len(self._kept) == _NUM_KEPT else None
        self._kept.append((version, descriptor))
        entries = [_ENTRY.pack(*each) for each in self._kept]
        entries += [_NO_ENTRY] * (_NUM_KEPT - len(entries))
        os.pwrite(self._descriptor, b"".join(entries), _TOKEN_BYTES)
        if gone is not None:
            os.close(gone[1])

    def reaches(self, other: BoardAddress) -> bool:
        """Tell whether this process can read another's board."""
        try:
            self._read_board(other)
        except Unreachable:
            return False
        return True

    def read(self, copy: Copy, version: int) -> memoryview | None:
        """Return a private copy of weights that another worker keeps; None if they are not there yet.

        Raises:
            Unreachable: That worker is gone, cannot be reached from here, or keeps something else.
        """
        listed = self._read_board(copy.board)
        descriptors = dict(_ENTRY.iter_unpack(listed[_TOKEN_BYTES:]))
        if version not in descriptors:
            kept = [number for number in descriptors if number]
            if kept and min(kept) > version:
                raise Unreachable(f"process {copy.board.pid} keeps newer ones only")
            return None
        data = self._read_memory(copy.board.pid, descriptors[version], copy.size_bytes)
        if digest_of([data]) != copy.digest:
            raise Unreachable(f"version {version} of process {copy.board.pid} is not what the head has sent")
        return memoryview(data)

    def close(self) -> None:
        """Let no one else in; may be called again."""
        while self._kept:
            os.close(self._kept.pop()[1])
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_board(self, address: BoardAddress) -> bytes:
        found = self._read_memory(address.pid, address.descriptor, _SIZE_BYTES)
        if not secrets.compare_digest(found[:_TOKEN_BYTES], address.token):
            raise Unreachable(f"process {address.pid} is another one than was meant")
        return found

    def _read_memory(self, pid: int, descriptor: int, size_bytes: int) -> bytes:
        """Copy another process's nameless memory of exactly this size."""
        try:
            with contextlib.ExitStack() as stack:
                # Not yet opened: what is no memory might block, or do something, if it were.
                path = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
                stack.callback(os.close, path)
                found = os.fstat(path)
                if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_size) != (self._device, size_bytes):
                    raise Unreachable(f"descriptor {descriptor} of process {pid} is not the memory that was meant")
                opened = os.open(f"/proc/self/fd/{path}", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, opened)
                pieces: list[bytes] = []
                while left := size_bytes - sum(len(piece) for piece in pieces):
                    piece = os.pread(opened, min(left, _PIECE_BYTES), size_bytes - left)
                    if not piece:
                        raise Unreachable(f"the memory of process {pid} has shrunk")
                    pieces.append(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except OSError as error:
            raise Unreachable(f"the memory of process {pid} cannot be read: {error}") from error


def describe_machine() -> str:
    """Return what processes have in common that may be able to read each other's memory; nothing if none can.

    The kernel's boot, the user, the namespaces of processes and of the network: what has an address of its own is a
    machine of its own.
    """
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    except OSError:
        return ""
    return " ".join([boot, str(os.getuid()), *namespaces])


def digest_of(pieces: Iterable[Buffer]) -> bytes:
    """Return the SHA-256 of weights that are in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _make_memory(pieces: Sequence[bytes | memoryview], *, is_writable: bool) -> int:
    """Return a descriptor of nameless memory with this content, and of this size forever."""
    descriptor = os.memfd_create("clusterenv-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for piece in pieces:
            left = memoryview(piece)
            while len(left):
                left = left[os.write(descriptor, left[:_PIECE_BYTES]) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals if is_writable else seals | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
