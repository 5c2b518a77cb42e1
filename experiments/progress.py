"""Progress: how far the runs are and how much time is left, on standard error."""

from __future__ import annotations

import sys
import time

WIDTH = 24
PLAIN_LINE_EVERY_S = 30.0


class Progress:
    """One rewritten line in a terminal, plain lines now and then elsewhere.

    Args:
        total: How much there is to do, in any unit.
    """

    def __init__(self, total: float) -> None:
        self._total = total
        self._began = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._said_at = float("-inf")

    def show(self, done: float, text: str) -> None:
        """Show how much is done, with some words."""
        now = time.monotonic()
        if not self._is_terminal and now - self._said_at < PLAIN_LINE_EVERY_S:
            return
        self._said_at = now
        share = done / self._total
        left = (now - self._began) * (1 - share) / share if share > 0 else None
        bar = "█" * round(share * WIDTH) + "·" * (WIDTH - round(share * WIDTH))
        time_left = f", {write_duration(left)} left" if left is not None else ""
        line = f"{share:4.0%}{time_left}; {text}"
        self._write(f"\r\033[K{bar} {line}" if self._is_terminal else f"{line}\n")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._write(f"\r\033[K{text}\n" if self._is_terminal else f"{text}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def write_duration(seconds: float) -> str:
    """Write a duration for people."""
    minutes = seconds / 60
    if minutes < 1.5:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
