"""Finding: what one check found."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

_INDENT = " " * 21
_WRAP = 100


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        is_ok: Whether it is as it should be.
        text: What was seen or measured.
        next_step: What to do about it, if it is not ok.
    """

    subject: str
    is_ok: bool
    text: str
    next_step: str = ""

    def __str__(self) -> str:
        """Write it as a line, and the next step below."""
        first, *more = self.text.strip().splitlines()
        if self.next_step:
            more += textwrap.wrap(f"next: {self.next_step}", _WRAP)
        head = f"{'ok' if self.is_ok else 'failed':7} {self.subject:13}{first}"
        return "\n".join([head, *(_INDENT + text for text in more)])
