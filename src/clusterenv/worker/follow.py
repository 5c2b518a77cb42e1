"""`python -m clusterenv.worker.follow`: shows what remote workers print, by following their logs.

Its arguments are file descriptors of the logs, in the order of the workers. Each line of its standard input names one
more log, written by Slurm: the index of its worker, or `-` if each of its lines is labelled, and a path, which need not
exist yet. It writes to standard error until its standard input ends, which happens when the head ends.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Sequence

from clusterenv.worker.echo import Echo
from clusterenv.worker.relay import Sink

_STDIN, _STDERR = 0, 2
_LOOK_MS = 200.0
_READ_BYTES = 1 << 16
_LAST_WRITE_S = 2.0
_LABEL = re.compile(rb"^ *(\d+): ")  # srun --label
# Meant for the head, not for people; follows the worker's last output directly if that lacks a newline.
_MARK = re.compile(rb"clusterenv: worker \d+ (starts on .*|ended with status \d+)$")


def main(arguments: Sequence[str]) -> None:
    """Follow the logs to the end."""
    for number in (signal.SIGINT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    echoes = _Echoes()
    logs: list[_WorkerLog | _SlurmLog] = [_WorkerLog(int(text), index) for index, text in enumerate(arguments)]
    sink = Sink(_STDERR, is_capped=False)
    head = select.poll()
    head.register(_STDIN, select.POLLIN)
    names, is_over = b"", False
    while not is_over:
        if head.poll(_LOOK_MS):
            told = os.read(_STDIN, _READ_BYTES)
            is_over = not told
            *lines, names = (names + told).split(b"\n")
            logs += map(_SlurmLog, lines)
        for log in logs:
            while pieces := log.read() or (log.finish() if is_over else []):
                for worker_index, data in pieces:
                    sink.add(echoes[worker_index].take(data, time.monotonic()))
                sink.write()
        sink.write()
    for _, echo in sorted(echoes.items()):
        sink.add(echo.finish())
    sink.finish(time.monotonic() + _LAST_WRITE_S)


class _Echoes(dict[int, Echo]):
    """One `Echo` per worker, created on first use, whichever log its output is in."""

    def __missing__(self, worker_index: int) -> Echo:
        self[worker_index] = echo = Echo(worker_index)
        return echo


class _WorkerLog:
    """The log of one worker."""

    def __init__(self, descriptor: int, worker_index: int) -> None:
        self._descriptor = descriptor
        self._worker_index = worker_index
        self._position = 0

    def read(self) -> list[tuple[int, bytes]]:
        """Return some of what was written since the last call, and by which worker; empty if there is no more."""
        # The file position is shared with the writer, so read without moving it.
        data = os.pread(self._descriptor, _READ_BYTES, self._position)
        self._position += len(data)
        return [(self._worker_index, data)] if data else []

    def finish(self) -> list[tuple[int, bytes]]:
        """Return what is left at the end."""
        return []


class _SlurmLog:
    """A log that Slurm writes: of one worker, or of many with labelled lines. Unlabelled lines are not a worker's."""

    def __init__(self, name: bytes) -> None:
        worker, _, self._path = name.partition(b" ")
        self._worker_index = None if worker == b"-" else int(worker)
        self._position = 0
        self._unfinished = b""

    def read(self) -> list[tuple[int, bytes]]:
        """Return some of what was written since the last call, and by which worker; empty if there is no more."""
        pieces: list[tuple[int, bytes]] = []
        while not pieces:
            try:
                with open(self._path, "rb", buffering=0) as file:  # Reopened: NFS checks for changes on open.
                    data = os.pread(file.fileno(), _READ_BYTES, self._position)
            except OSError:  # The job has not begun, or its files are not accessible to us.
                data = b""
            if not data:
                break
            self._position += len(data)
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            pieces = [piece for line in lines if (piece := self._read_line(line)) is not None]
        return pieces

    def finish(self) -> list[tuple[int, bytes]]:
        """Return what is left at the end: a line without a newline."""
        line, self._unfinished = self._unfinished, b""
        piece = self._read_line(line) if line else None
        return [] if piece is None else [piece]

    def _read_line(self, line: bytes) -> tuple[int, bytes] | None:
        worker_index = self._worker_index
        if worker_index is None:
            label = _LABEL.match(line)
            if label is None:
                return None
            worker_index, line = int(label[1]), line[label.end() :]
        text = _MARK.sub(b"", line)
        return (worker_index, text + b"\n") if text or not line else None


if __name__ == "__main__":
    main(sys.argv[1:])
