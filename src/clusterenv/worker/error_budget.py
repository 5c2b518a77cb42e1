"""ErrorBudget: how often an environment may raise before that ends the run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from clusterenv.worker.failure_report import summarize

log = logging.getLogger(__name__)

_MAX_IN_A_ROW = 5
_MAX_TEXT = 1000
_NEARBY_STEPS = 8  # An environment that raises again within this many steps has achieved nothing.


@dataclass(eq=False)
class _Record:
    in_a_row: int = 0
    last_step: int = -(10**9)


class ErrorBudget:
    """Counts the exceptions of each environment, and decides when there were too many.

    Attributes:
        step: How many steps the host has made; the host updates it.
        text: The text of the last forgiven exception.
        errors: Rows and texts of forgiven exceptions; the host clears the list.
    """

    def __init__(self, num_rows: int, start: int, *, forgives: bool) -> None:
        """Begin to count.

        Args:
            num_rows: The number of environments.
            start: The index of the first environment, for the log.
            forgives: Whether to continue after an exception at all.
        """
        self.step = 0
        self.text = ""
        self.errors: list[tuple[int, str]] = []
        self._start = start
        self._forgives = forgives
        self._records = [_Record() for _ in range(num_rows)]

    def forgive(self, row: int, error: BaseException) -> bool:
        """Note an environment's exception; returns False if it must be raised."""
        if not self._forgives or not isinstance(error, Exception):
            return False
        record = self._records[row]
        record.in_a_row = record.in_a_row + 1 if self.step - record.last_step <= _NEARBY_STEPS else 1
        record.last_step = self.step
        if record.in_a_row > _MAX_IN_A_ROW:
            error.add_note(f"(This environment has now raised {_MAX_IN_A_ROW + 1} times in a row.)")
            return False
        self.text = summarize(error)[:_MAX_TEXT]
        self.errors.append((row, self.text))
        log.warning("environment %d raised; its episode is truncated", self._start + row, exc_info=error)
        return True
