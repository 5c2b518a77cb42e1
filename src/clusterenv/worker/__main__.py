"""`python -m clusterenv.worker`: what every launcher runs. The ticket is in the environment."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from clusterenv.errors import ConfigError
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from clusterenv.worker.loop import run_worker

_GRACE_S = 2.0


def main() -> int:
    """Serve the head that the ticket names; returns the exit status."""
    # Ctrl-C in a terminal reaches every process in it; ending workers is the head's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        # Taken out of the environment: what a user's environment starts need not know the keys.
        ticket = Ticket.decode(os.environ.pop(TICKET_VARIABLE, ""))
        worker_index = int(os.environ.get(WORKER_VARIABLE, ""))
    except (ConfigError, ValueError) as error:
        logging.error("cannot start: %s ($%s=%s)", error, WORKER_VARIABLE, os.environ.get(WORKER_VARIABLE))
        return 2
    if ticket.parent_pid is not None:
        threading.Thread(target=_end_with, args=(ticket.parent_pid,), daemon=True).start()
    run_worker(ticket, worker_index)
    return 0


def _end_with(parent_pid: int) -> None:
    """End this process some seconds after its head, even if an environment hangs and the loop cannot notice."""
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    time.sleep(_GRACE_S)  # The loop ends in order, if it can.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
