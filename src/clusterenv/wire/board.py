"""Boards: weights that one worker keeps for the others on its machine, so that they cross the network once.

Every worker has a board: a few bytes of anonymous memory that others on the machine open as `/proc/<pid>/fd/<n>`. It
begins with a token that identifies it, and lists the kept weights by version and the descriptor of their own sealed
memory. The memory has no name, so nothing is left behind when a process is killed.

    [ token, 16 bytes | version, descriptor | version, descriptor ]     64-bit numbers

What is read is not trusted. It must be anonymous memory, which neither blocks nor has side effects when opened; it is
copied before it is examined, and accepted only if it has the digest that the head announced.
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

_NUM_KEPT = 2  # The newest, and the one before it, which another worker may be reading.
_TOKEN_BYTES = 16
_ENTRY = struct.Struct("=Qq")
_SIZE_BYTES = _TOKEN_BYTES + _NUM_KEPT * _ENTRY.size
_NO_ENTRY = _ENTRY.pack(0, -1)
_PIECE_BYTES = 1 << 30  # Linux reads and writes at most two of these at a time.

Buffer: TypeAlias = Any  # What `hashlib` takes: bytes, arrays, frames. Python 3.12 has a type for it.


class Unreachable(Exception):
    """Raised when this worker will never get the expected weights from another worker's board."""


class Board:
    """A worker's own board, which can also read other workers' boards.

    Attributes:
        address: Where others find this board.
    """

    def __init__(self) -> None:
        """Make an empty board.

        Raises:
            OSError: This system has no anonymous memory.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no anonymous memory")
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._kept: deque[tuple[int, int]] = deque()  # Versions and descriptors, the newest last.
        self._descriptor = _make_memory([token, _NO_ENTRY * _NUM_KEPT], is_writable=True)
        self._device = os.fstat(self._descriptor).st_dev  # Shared by all anonymous memory, and nothing else.
        self.address = BoardAddress(os.getpid(), self._descriptor, token)

    def keep(self, version: int, pieces: Sequence[memoryview]) -> None:
        """Keep weights for others to read, in place of the oldest kept ones.

        Raises:
            OSError: There is no memory, or no descriptor, for the weights.
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
        """Whether this process can read another's board."""
        try:
            self._read_board(other)
        except Unreachable:
            return False
        return True

    def read(self, copy: Copy, version: int) -> memoryview | None:
        """Return a private copy of weights that another worker keeps; None if they are not there yet.

        Raises:
            Unreachable: That worker is gone, its memory cannot be read from here, or it keeps something else.
        """
        listed = self._read_board(copy.board)
        descriptors = dict(_ENTRY.iter_unpack(listed[_TOKEN_BYTES:]))
        if version not in descriptors:
            kept = [number for number in descriptors if number]
            if kept and min(kept) > version:
                raise Unreachable(f"process {copy.board.pid} keeps newer versions only")
            return None
        data = self._read_memory(copy.board.pid, descriptors[version], copy.size_bytes)
        if digest_of([data]) != copy.digest:
            raise Unreachable(f"version {version} of process {copy.board.pid} is not what the head has sent")
        return memoryview(data)

    def close(self) -> None:
        """Close all memory, so that no other process can open it; may be called again."""
        while self._kept:
            os.close(self._kept.pop()[1])
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_board(self, address: BoardAddress) -> bytes:
        found = self._read_memory(address.pid, address.descriptor, _SIZE_BYTES)
        if not secrets.compare_digest(found[:_TOKEN_BYTES], address.token):
            raise Unreachable(f"process {address.pid} is not the expected one")
        return found

    def _read_memory(self, pid: int, descriptor: int, size_bytes: int) -> bytes:
        """Copy another process's anonymous memory of exactly this size."""
        try:
            with contextlib.ExitStack() as stack:
                # O_PATH does not really open it yet: anything but memory might block, or have side effects.
                path = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
                stack.callback(os.close, path)
                found = os.fstat(path)
                if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_size) != (self._device, size_bytes):
                    raise Unreachable(f"descriptor {descriptor} of process {pid} is not the expected memory")
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
    """Return a text that is equal for processes that may be able to read each other's memory; "" if none can.

    It names the kernel's boot id, the user, and the pid and network namespaces: a container with its own address counts
    as its own machine.
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
    """Return the SHA-256 of weights given in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _make_memory(pieces: Sequence[bytes | memoryview], *, is_writable: bool) -> int:
    """Return a descriptor of anonymous memory with this content, sealed to its size."""
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
