"""Leave: how a worker is asked to go: SIGTERM, as schedulers send it before a time limit or a preemption."""

from __future__ import annotations

import logging
import signal
import time

log = logging.getLogger(__name__)

# A scheduler signals all processes of a job, and the guardian passes on what it gets: that is one request, not two.
_SAME_REQUEST_S = 1.0


class Left(SystemExit):
    """This worker was asked twice to go. Unlike a SystemExit that an environment raises, it ends the worker."""


class Leave:
    """Whether this worker was asked to go. The first signal lets it finish what it is at; the second does not.

    Attributes:
        status: What to exit with.
    """

    def __init__(self) -> None:
        self.status = 0
        self._asked_at = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether to go as soon as nothing is owed to the head."""
        return self.status != 0

    def on_signal(self, signum: int, frame: object) -> None:
        """Take a signal."""
        now = time.monotonic()
        if not self.is_wanted:
            self.status, self._asked_at = 128 + signum, now
            log.warning("%s: this worker ends when it has answered", signal.Signals(signum).name)
        elif now - self._asked_at >= _SAME_REQUEST_S:
            raise Left(self.status)
