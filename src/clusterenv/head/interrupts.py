"""DeferInterrupt: Ctrl-C waits until a message has been sent or dealt with as a whole."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes an enum of what it returns: 3 us instead of 0.2
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGINT = int(_signal.SIGINT)


class DeferInterrupt:
    """Defers KeyboardInterrupt until the end of its block, which must be short.

    Python raises it between any two instructions of the main thread: even when a message has been taken from the
    socket and nobody has noted it yet, or when one worker has got its request and the next has not. An answer lost like
    that would be awaited in vain by the next call.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._previous: Any = None
        self._was_interrupted = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if not self._depth:
            self._was_interrupted = False
            # Handlers that are not Python's own cannot be put back, and raise nothing.
            handler = _signal.getsignal(_SIGINT) if threading.current_thread() is threading.main_thread() else None
            self._previous = _signal.signal(_SIGINT, self._note) if callable(handler) else None
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth or self._previous is None:
            return
        _signal.signal(_SIGINT, self._previous)
        if self._was_interrupted:
            frame, self._frame = self._frame, None
            self._previous(_SIGINT, frame)

    def _note(self, _number: int, frame: FrameType | None) -> None:
        self._was_interrupted, self._frame = True, frame
