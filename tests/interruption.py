"""Interruption: Ctrl-C, or another signal, before a chosen line of the library."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import clusterenv

LIBRARY = Path(clusterenv.__file__).parent
# What holds a call's state, by place: files in it come and go.
STATEFUL = tuple(
    str(LIBRARY / place) for place in ("env.py", "vector.py", "inline.py", "head/", "wire/zeromq", "wire/shared")
)
NEVER = 10**9


class Interruption:
    """KeyboardInterrupt before the given stateful line of clusterenv that is run inside the block; the first is 0.

    Attributes:
        num_lines: How many stateful lines were run, up to that one.
    """

    def __init__(self, line: int = NEVER, *places: str, number: int = signal.SIGINT) -> None:
        """Choose the line.

        Args:
            line: How many are run before it.
            places: How the paths of the modules begin whose lines count; by default those that hold a call's state.
            number: The signal whose handler raises it.
        """
        self._number = number
        self.num_lines = 0
        self._line = line
        self._places = tuple(str(LIBRARY / place) for place in places) or STATEFUL

    @property
    def has_come(self) -> bool:
        return self.num_lines > self._line

    def __enter__(self) -> None:
        # A shell that starts a job in the background lets it ignore SIGINT.
        self._handler = signal.signal(self._number, signal.default_int_handler)
        self._previous = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._previous)
        signal.signal(self._number, self._handler)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._places):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._line + 1:
                signal.raise_signal(self._number)
        return self._trace


def count_lines(call: Callable[[], object], *places: str) -> int:
    """Return how many stateful lines a call runs, or how many in some places."""
    interruption = Interruption(NEVER, *places)
    with interruption:
        call()
    return interruption.num_lines


def spread_lines(num_lines: int, most: int) -> Iterator[int]:
    """Choose lines to interrupt before: all of them, or `most`, evenly spread but at varying places."""
    stride = max(1, -(-num_lines // most))
    for number, first in enumerate(range(0, num_lines, stride)):
        yield first + number * 7919 % stride


def is_interrupted(
    call: Callable[[], object], line: int, number: int = signal.SIGINT, places: tuple[str, ...] = ()
) -> bool:
    """Make a call and interrupt it; returns whether that came to pass, and demands that the caller was told."""
    interruption = Interruption(line, *places, number=number)
    try:
        with interruption:
            call()
        was_raised = False
    except KeyboardInterrupt:
        was_raised = True
    assert was_raised == interruption.has_come, f"signal {number} before line {line} was swallowed"
    return was_raised
