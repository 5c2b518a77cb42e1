"""`python -m clusterenv.worker.follow`: shows what workers elsewhere have printed, as it comes into their logs.

Its arguments are descriptors of the logs, in the order of the workers. It writes to its standard error until its
standard input ends, as it does with the head.
"""

from __future__ import annotations

import os
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


def main(arguments: Sequence[str]) -> None:
    """Follow the logs to the end."""
    for number in (signal.SIGINT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    logs = [_FollowedLog(int(descriptor), Echo(index)) for index, descriptor in enumerate(arguments)]
    sink = Sink(_STDERR, is_capped=False)
    head = select.poll()
    head.register(_STDIN, select.POLLIN)
    is_over = False
    while not is_over:
        is_over = bool(head.poll(_LOOK_MS))
        for log in logs:
            while data := log.read():
                sink.add(data)
                sink.write()
        sink.write()
    for log in logs:
        sink.add(log.echo.finish())
    sink.finish(time.monotonic() + _LAST_WRITE_S)


class _FollowedLog:
    def __init__(self, descriptor: int, echo: Echo) -> None:
        self.echo = echo
        self._descriptor = descriptor
        self._position = 0

    def read(self) -> bytes:
        """Return the lines that were written since the last time, or some of them; nothing if there are no more."""
        shown = b""
        while not shown:
            # Its position is shared with whoever writes it: read without moving it.
            data = os.pread(self._descriptor, _READ_BYTES, self._position)
            if not data:
                break
            self._position += len(data)
            shown = self.echo.take(data, time.monotonic())
        return shown


if __name__ == "__main__":
    main(sys.argv[1:])
