"""Progress: shows how far an evaluation has come, if standard error is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

_REFRESH_S = 0.1


class Progress:
    """Shows a bar on standard error, if that is a terminal: rich's, or one line of text if rich is not installed.

    Nothing runs in the background: the display changes only when `show` is called.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None
        self._task: Any = None
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._started_at = time.monotonic()
        self._shown_at = 0.0
        self._has_line = False

    def __enter__(self) -> Self:
        if self._is_terminal:
            try:
                from rich import console, progress
            except ModuleNotFoundError:
                return self
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                console=console.Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("evaluating", total=self._total)
        return self

    def show(self, num_finished: int, mean: float) -> None:
        """Show the number of finished episodes and their mean return."""
        now = time.monotonic()
        if not self._is_terminal or now - self._shown_at < _REFRESH_S:
            return
        self._shown_at = now
        text = f"evaluating: mean return {mean:.5g}"
        if self._bar is not None:
            self._bar.update(self._task, completed=num_finished, description=text)
            self._bar.refresh()
            return
        left_s = (now - self._started_at) / max(1, num_finished) * (self._total - num_finished)
        sys.stderr.write(f"\r\033[K{text}, {num_finished} of {self._total} episodes, {left_s:.0f} s left")
        sys.stderr.flush()
        self._has_line = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._has_line:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
