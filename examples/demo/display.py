"""Display: a panel that is redrawn in a terminal, and a line now and then where there is none."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from examples.demo.course import SOLVED, WINDOW, Course

_BAR = 24
_MIN_ROWS = 10
PLAIN_S = 5.0  # A line in so many seconds.


class Display(Protocol):
    """Shows a training while it goes on."""

    def show(self, course: Course) -> None:
        """Show how things are."""

    def tell(self, text: str) -> None:
        """Say something that stays on the screen."""


def open_display(stream: TextIO = sys.stdout, environ: Mapping[str, str] = os.environ) -> Display:
    """Choose the display that the stream can show."""
    is_capable = stream.isatty() and environ.get("TERM", "dumb") != "dumb"
    if not is_capable or shutil.get_terminal_size().lines < _MIN_ROWS:
        return Lines(stream)
    return Panel(stream, Style(is_coloured=not environ.get("NO_COLOR"), is_unicode=_takes_unicode(stream)))


@dataclass(frozen=True)
class Style:
    """What a terminal can show."""

    is_coloured: bool = True
    is_unicode: bool = True

    def paint(self, text: str, code: str) -> str:
        """Give the text a colour, where there are colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_coloured and code and text else text

    def bar(self, share: float, width: int) -> str:
        """Draw a share, from 0 to 1, as a bar."""
        filled = round(width * min(1.0, max(0.0, share)))
        full, empty = ("█", "░") if self.is_unicode else ("#", "-")
        return full * filled + empty * (width - filled)

    def sparkline(self, values: Sequence[float], width: int) -> str:
        """Draw the course of some values in one line of text, the mean of equal stretches for each character."""
        marks = "▁▂▃▄▅▆▇█" if self.is_unicode else "_.-~=+*#"
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return ""
        count = min(width, len(known))
        edges = [len(known) * cell // count for cell in range(count + 1)]
        means = [sum(known[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]
        low, high = min(means), max(means)
        return "".join(marks[round((len(marks) - 1) * (mean - low) / ((high - low) or 1.0))] for mean in means)


class Panel:
    """Some lines of a terminal that are drawn again and again."""

    def __init__(self, stream: TextIO, style: Style) -> None:
        self._stream = stream
        self._style = style
        self._num_drawn = 0

    def show(self, course: Course) -> None:
        """Draw the panel over the one before."""
        width = shutil.get_terminal_size().columns
        lines = [_cut(parts, width - 1, self._style) for parts in panel(course, self._style)]
        self._stream.write(self._back() + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._num_drawn = len(lines)

    def tell(self, text: str) -> None:
        """Say something above the panel."""
        width = min(100, shutil.get_terminal_size().columns - 1)
        self._stream.write(self._back() + "\n".join(textwrap.wrap(text, width)) + "\n\n")
        self._num_drawn = 0

    def _back(self) -> str:
        """Go back to the panel's first line, and wipe what is there."""
        return f"\x1b[{self._num_drawn}A\x1b[J" if self._num_drawn else ""


class Lines:
    """Plain lines: for files, pipes and terminals that cannot go back."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_s = -math.inf

    def show(self, course: Course) -> None:
        """Print a line, unless the last one is not long ago."""
        if course.seconds - self._shown_s < PLAIN_S:
            return
        self._shown_s = course.seconds
        point = course.points[-1]
        self._stream.write(
            f"{course.seconds:4.0f} s   {point.env_steps:>9,} steps   {course.steps_per_second:>6,.0f} steps/s   "
            f"return {_number(course.mean_return, '7.1f')}   "
            f"divergence {_number(point.divergence, '.3f')} of {course.threshold:.3f}   "
            f"pulls {point.pulls} made, {point.pulls_saved} saved\n"
        )
        self._stream.flush()

    def tell(self, text: str) -> None:
        """Print it."""
        self._stream.write(f"{text}\n")
        self._stream.flush()


Part = tuple[str, str]  # A text and its colour.
_BOLD, _DIM, _GREEN, _YELLOW, _BLUE = "1", "2", "1;32", "33", "36"


def panel(course: Course, style: Style) -> list[list[Part]]:
    """Lay out the panel: its lines, each made of coloured parts."""
    point = course.points[-1]
    left_s = max(0.0, course.budget_s - course.seconds)
    left = "solved" if course.is_solved else f"at most {left_s:.0f} s left"
    is_over = point.divergence > course.threshold
    return [
        _row(
            "time",
            (style.bar(course.seconds / course.budget_s, _BAR), _BLUE),
            (f"{course.seconds:4.0f} s", _BOLD),
            (left, _GREEN if course.is_solved else ""),
        ),
        _row(
            "return",
            (f"{style.sparkline([each.mean_return for each in course.points], _BAR):<{_BAR}}", _BLUE),
            (_number(course.mean_return, "6.1f"), _GREEN if course.is_solved else _BOLD),
            (f"last {WINDOW} flights; solved at {SOLVED:.0f}", _DIM),
        ),
        _row(
            "divergence",
            (style.bar(_zero(point.divergence) / (2 * course.threshold), _BAR), _YELLOW if is_over else _BLUE),
            (_number(point.divergence, "6.3f"), _BOLD),
            (f"workers pull beyond {course.threshold:g}", _DIM),
        ),
        _row(
            "pulls",
            (style.bar(point.pulls / max(1, point.pulls + point.pulls_saved), _BAR), _BLUE),
            (f"{point.pulls:6,}", _BOLD),
            (f"made, {point.pulls_saved:,} of {point.pulls + point.pulls_saved:,} saved", ""),
        ),
        _row(
            "speed",
            (f"{course.steps_per_second:,.0f} steps/s", _BOLD),
            (f"{point.env_steps:,} steps", ""),
            (f"{course.num_envs} landers on {course.num_workers} worker{'s' * (course.num_workers != 1)}", _DIM),
        ),
    ]


def _row(label: str, *parts: Part) -> list[Part]:
    row: list[Part] = [(f"  {label:<11}", "")]
    for text, colour in parts:
        row += [(text, colour), ("  ", "")]
    return row


def _cut(parts: Sequence[Part], width: int, style: Style) -> str:
    """Colour the parts that fit into a line of the terminal: one that wraps cannot be redrawn."""
    line = ""
    for text, colour in parts:
        line += style.paint(text[: max(0, width)], colour)
        width -= len(text)
    return line


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _number(value: float, form: str) -> str:
    """Format a number, or a dash where there is none yet."""
    text = format(value, form)
    return text.replace("nan", "  -") if math.isnan(value) else text


def _takes_unicode(stream: TextIO) -> bool:
    try:
        "▁█░".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
