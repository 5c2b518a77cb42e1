"""`python -m clusterenv.worker`: what every launcher runs. The ticket is in the environment."""

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
    # Ctrl-C in a terminal reaches every process in it; ending workers is the head's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format=_FORMAT)
    try:
        # What a user's environment starts need not know the keys, nor need the environment itself.
        ticket = Ticket.decode(take_variable(TICKET_VARIABLE))
        worker_index = int(os.environ.get(WORKER_VARIABLE, ""))
    except (ConfigError, ValueError) as error:
        logging.error("cannot start: %s ($%s=%s)", error, WORKER_VARIABLE, os.environ.get(WORKER_VARIABLE))
        return 2
    shown = os.environ.pop(SHOWN_VARIABLE, None)
    guardian = guard(
        ticket, worker_index, None if shown is None else int(shown)
    )  # From here on there are two processes, and this is the worker.
    if guardian is not None:
        _log_apart(guardian.log)
    leave = Leave()
    signal.signal(signal.SIGTERM, leave.on_signal)
    faulthandler.enable(2)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nobody has replaced it yet

    # Not before: the guardian needs neither numpy nor ZeroMQ, and may have no threads.
    from clusterenv.worker.loop import run_worker

    run_worker(ticket, worker_index, leave, guardian)
    return leave.status


def _log_apart(stream: TextIO) -> None:
    """Let what this library logs go to the worker's log only: a head shows what environments print."""
    own = logging.getLogger("clusterenv")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    own.addHandler(handler)
    own.propagate = False


if __name__ == "__main__":
    sys.exit(main())
