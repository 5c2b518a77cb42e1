"""`python -m clusterenv.worker.follow`: shows what workers elsewhere have printed, as it comes into their logs.

Its arguments are descriptors of the logs, in the order of the workers. Each line of its standard input names one more,
of Slurm's: the worker whose log it is, or `-` if each of its lines has a label, and a path, which need not exist yet.
It writes to its standard error until its standard input ends, as it does with the head.
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
# For the head, not for people; behind what the worker has printed last, if that has no end.
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
    """What makes lines of each worker's output, whichever logs it is in."""

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
        """Return what was written since the last time, or some of it, and by whom; nothing if there is no more."""
        # Its position is shared with whoever writes it: read without moving it.
        data = os.pread(self._descriptor, _READ_BYTES, self._position)
        self._position += len(data)
        return [(self._worker_index, data)] if data else []

    def finish(self) -> list[tuple[int, bytes]]:
        """Return what is left once there is no more."""
        return []


class _SlurmLog:
    """A log that Slurm writes: of one worker, or of many with labels. What then has none is not of a worker."""

    def __init__(self, name: bytes) -> None:
        worker, _, self._path = name.partition(b" ")
        self._worker_index = None if worker == b"-" else int(worker)
        self._position = 0
        self._unfinished = b""

    def read(self) -> list[tuple[int, bytes]]:
        """Return what was written since the last time, or some of it, and by whom; nothing if there is no more."""
        pieces: list[tuple[int, bytes]] = []
        while not pieces:
            try:
                with open(self._path, "rb", buffering=0) as file:  # Anew: over NFS that is when changes are looked for.
                    data = os.pread(file.fileno(), _READ_BYTES, self._position)
            except OSError:  # It has not begun, or its files are not ours.
                data = b""
            if not data:
                break
            self._position += len(data)
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            pieces = [piece for line in lines if (piece := self._read_line(line)) is not None]
        return pieces

    def finish(self) -> list[tuple[int, bytes]]:
        """Return what is left once there is no more: a line without an end."""
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
