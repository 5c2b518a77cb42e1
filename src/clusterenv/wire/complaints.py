"""Complaints: what the head refuses is logged, but no flood of it may fill the log."""

from __future__ import annotations

import logging
import time

_PERIOD_S = 60.0
_MAX_LENGTH = 500


class Complaints:
    """Logs the first complaints of every minute, and how many more there were."""

    def __init__(self, log: logging.Logger, limit: int = 50) -> None:
        """Complain to a log.

        Args:
            log: Where to.
            limit: How many a minute.
        """
        self._log = log
        self._limit = limit
        self._since = time.monotonic()
        self._count = 0

    def note(self, text: str, *args: object) -> None:
        """Log a warning, unless there were too many of late. Newlines in it cannot pass for lines of the log."""
        now = time.monotonic()
        if now - self._since > _PERIOD_S:
            if self._count > self._limit:
                self._log.warning("refused as much %d more times", self._count - self._limit)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= self._limit:
            whole = "".join([char if char.isprintable() else "?" for char in (text % args)[:_MAX_LENGTH]])
            self._log.warning("%s", whole)
