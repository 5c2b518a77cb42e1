"""`python -m clusterenv.worker`: what every launcher runs. The ticket is in the environment."""

from __future__ import annotations

import logging
import os
import signal
import sys

from clusterenv.errors import ConfigError
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from clusterenv.worker.leave import Leave
from clusterenv.worker.loop import run_worker


def main() -> int:
    """Serve the head that the ticket names; returns the exit status."""
    # Ctrl-C in a terminal reaches every process in it; ending workers is the head's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave = Leave()
    signal.signal(signal.SIGTERM, leave.on_signal)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        # Taken out of the environment: what a user's environment starts need not know the keys.
        ticket = Ticket.decode(os.environ.pop(TICKET_VARIABLE, ""))
        worker_index = int(os.environ.get(WORKER_VARIABLE, ""))
    except (ConfigError, ValueError) as error:
        logging.error("cannot start: %s ($%s=%s)", error, WORKER_VARIABLE, os.environ.get(WORKER_VARIABLE))
        return 2
    run_worker(ticket, worker_index, leave)
    return leave.status


if __name__ == "__main__":
    sys.exit(main())
