"""Progress of a run of several parts: what it does now, and how long it will still take."""

import sys
from collections.abc import Sequence


class Forecast:
    """Corrects the expectation for what is left by what is done; time is passed in.

    Args:
        expected_s: How long each part should take, in order.
    """

    def __init__(self, expected_s: Sequence[float]) -> None:
        self._expected_s = list(expected_s)
        self._num_done = 0
        self._done_after_s = 0.0

    def finish_part(self, elapsed_s: float) -> None:
        """Note that one more part is done, so long after the beginning."""
        self._num_done += 1
        self._done_after_s = elapsed_s

    def remaining_s(self, elapsed_s: float) -> float:
        """Say how long it will still take, so long after the beginning."""
        done_s = sum(self._expected_s[: self._num_done])
        pace = self._done_after_s / done_s if done_s else 1.0
        current, *later = self._expected_s[self._num_done :] or [0.0]
        return max(0.0, current * pace - (elapsed_s - self._done_after_s)) + pace * sum(later)


class Progress:
    """Says what is happening, on standard error: in one changing line on a terminal, in lines elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._is_line_open = False

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(f"\r\033[K{text}\n" if self._is_line_open else f"{text}\n")
        self._is_line_open = False

    def update(self, text: str) -> None:
        """Replace the current line."""
        self._write(f"\r\033[K{text}" if self._is_terminal else f"{text}\n")
        self._is_line_open = self._is_terminal

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
