"""Leave: how a worker is asked to go: SIGTERM, as schedulers send it before a time limit or a preemption."""

from __future__ import annotations

import logging
import signal
import sys

log = logging.getLogger(__name__)


class Leave:
    """Whether this worker was asked to go. The first signal lets it finish what it is at; the second does not.

    Attributes:
        status: What to exit with.
    """

    def __init__(self) -> None:
        self.status = 0

    @property
    def is_wanted(self) -> bool:
        """Whether to go as soon as nothing is owed to the head."""
        return self.status != 0

    def on_signal(self, signum: int, frame: object) -> None:
        """Take a signal."""
        if self.is_wanted:
            sys.exit(self.status)
        self.status = 128 + signum
        log.warning("%s: this worker ends when it has answered", signal.Signals(signum).name)
