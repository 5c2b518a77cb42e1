"""Leave: how a worker is asked to leave: by SIGTERM, which schedulers send before a time limit or a preemption."""

from __future__ import annotations

import logging
import signal
import time

log = logging.getLogger(__name__)

# A scheduler signals all processes of a job, and the guardian forwards its signal: that is one request, not two.
_SAME_REQUEST_S = 1.0


class Left(SystemExit):
    """Raised when this worker is asked twice to leave. Unlike an environment's SystemExit, it ends the worker."""


class Leave:
    """Whether this worker was asked to leave. The first signal lets it finish its current call; the second does not.

    Attributes:
        status: The exit status.
    """

    def __init__(self) -> None:
        self.status = 0
        self._asked_at = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether to leave as soon as no answer is owed to the head."""
        return self.status != 0

    def on_signal(self, signum: int, frame: object) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if not self.is_wanted:
            self.status, self._asked_at = 128 + signum, now
            log.warning("%s: this worker ends when it has answered", signal.Signals(signum).name)
        elif now - self._asked_at >= _SAME_REQUEST_S:
            raise Left(self.status)
