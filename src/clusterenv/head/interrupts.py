"""DeferInterrupt: defers Ctrl-C and other signals until a message has been fully sent or processed."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps its results in enums: 3 us instead of 0.2
import threading
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C, and signals whose handlers are known to raise: time limits, and schedulers that end the process.
_NAMES = ("SIGINT", "SIGALRM", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_NUMBERS = tuple(int(getattr(_signal, name)) for name in _NAMES if hasattr(_signal, name))


class DeferInterrupt:
    """Defers signal handlers until the end of its block, which must be short.

    Python runs handlers between any two instructions of the main thread, and they may raise, as Ctrl-C's does: even
    when a message has been taken from the socket but not recorded yet, or when only some workers have been sent their
    request. The next call would wait in vain for an answer lost in this way.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._previous: dict[int, Any] = {}
        self._noted: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if not self._depth and threading.current_thread() is threading.main_thread():
            try:
                for number in _NUMBERS:
                    handler = _signal.getsignal(number)
                    # Handlers not installed from Python cannot be restored, and raise nothing.
                    if callable(handler) and handler != self._note:
                        self._previous[number] = handler
                        _signal.signal(number, self._note)
            except BaseException:  # Raised by a handler that is not deferred yet.
                self._put_back()
                raise
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth or not self._previous:
            return
        try:
            self._put_back()
        except BaseException:  # Raised by a handler that is no longer deferred.
            self._put_back()
            raise
        finally:
            self._run_noted()

    def _put_back(self) -> None:
        for number, handler in reversed(self._previous.items()):  # Ctrl-C, the most common, is deferred longest.
            _signal.signal(number, handler)
        self._previous.clear()

    def _run_noted(self) -> None:
        if self._noted:
            number, frame = self._noted.pop(0)
            try:
                _signal.getsignal(number)(number, frame)
            finally:
                self._run_noted()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))
