"""`python -m clusterenv.worker`: the command that every launcher runs. The ticket is in an environment variable."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import TextIO

from clusterenv.errors import ConfigError
from clusterenv.wire.ticket import SHOWN_VARIABLE, TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from clusterenv.worker.guardian import guard
from clusterenv.worker.leave import Leave
from clusterenv.worker.secret import take_variable

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def main() -> int:
    """Serve the head that the ticket names; returns the exit status."""
    # Ctrl-C in a terminal reaches every process in it, but ending workers is up to the head.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format=_FORMAT)
    try:
        # Neither a user's environment nor the processes it starts should see the keys.
        ticket = Ticket.decode(take_variable(TICKET_VARIABLE))
        worker_index = int(os.environ.get(WORKER_VARIABLE, ""))
    except (ConfigError, ValueError) as error:
        logging.error("cannot start: %s ($%s=%s)", error, WORKER_VARIABLE, os.environ.get(WORKER_VARIABLE))
        return 2
    shown = os.environ.pop(SHOWN_VARIABLE, None)
    guardian = guard(
        ticket, worker_index, None if shown is None else int(shown)
    )  # From here on there are two processes, of which this one is the worker.
    if guardian is not None:
        _log_apart(guardian.log)
    leave = Leave()
    signal.signal(signal.SIGTERM, leave.on_signal)
    faulthandler.enable(2)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nobody has replaced it yet

    # Imported this late because the guardian needs neither numpy nor ZeroMQ, and must not have threads.
    from clusterenv.worker.loop import run_worker

    run_worker(ticket, worker_index, leave, guardian)
    return leave.status


def _log_apart(stream: TextIO) -> None:
    """Send this library's log messages to the worker's log only, since the head may show what environments print."""
    own = logging.getLogger("clusterenv")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    own.addHandler(handler)
    own.propagate = False


if __name__ == "__main__":
    sys.exit(main())
