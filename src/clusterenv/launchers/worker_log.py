"""WorkerLog: the file that a worker, or the client that started it, writes to; the head reads its end."""

from __future__ import annotations

import os
import tempfile
from typing import BinaryIO

_TAIL_BYTES = 4096


class WorkerLog:
    """A file for one worker's output.

    Attributes:
        file: Where to write; give it to the process as its standard output and error.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None, worker_index: int) -> None:
        """Open it, as `worker-<index>.log` in a directory; without one it has no name and is gone when closed."""
        self.file: BinaryIO
        if log_dir is None:
            # Nothing to remove, even if the head is killed.
            self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the log
        else:
            os.makedirs(log_dir, exist_ok=True)
            self.file = open(os.path.join(log_dir, f"worker-{worker_index}.log"), "w+b")  # noqa: SIM115 - as above

    @property
    def size_bytes(self) -> int:
        """How much has been written so far."""
        return os.fstat(self.file.fileno()).st_size

    def read(self, start: int, size_bytes: int) -> str:
        """Return a part of it."""
        # The file's position is shared with the worker that writes it: read without moving it.
        return os.pread(self.file.fileno(), size_bytes, start).decode(errors="replace")

    def tail(self) -> str:
        """Return the last lines; nothing once it is closed."""
        if self.file.closed:
            return ""
        return self.read(max(0, self.size_bytes - _TAIL_BYTES), _TAIL_BYTES).strip()

    def close(self) -> None:
        """Close it; if it has a name, it stays."""
        self.file.close()
