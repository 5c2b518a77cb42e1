"""RateLimitedLog: keeps a flood of warnings, which strangers may provoke, from filling the log."""

from __future__ import annotations

import logging
import time

_PERIOD_S = 60.0
_MAX_LENGTH = 500


class RateLimitedLog:
    """Logs the first warnings of every minute, and how many more there were."""

    def __init__(self, log: logging.Logger, limit: int = 50) -> None:
        """Log to `log`, at most `limit` warnings per minute."""
        self._log = log
        self._limit = limit
        self._since = time.monotonic()
        self._count = 0

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, unless there have been too many. Newlines are replaced, so that it stays on one line."""
        now = time.monotonic()
        if now - self._since > _PERIOD_S:
            if self._count > self._limit:
                self._log.warning("left out %d more warnings like the last ones", self._count - self._limit)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= self._limit:
            printable = "".join([char if char.isprintable() else "?" for char in (text % args)[:_MAX_LENGTH]])
            self._log.warning("%s", printable)
