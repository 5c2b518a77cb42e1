"""clusterenv worker: one worker with a ticket file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from clusterenv.config import thread_variables
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    worker = commands.add_parser(
        "worker",
        help="run one worker with a ticket file",
        description="Run one worker, here, for the head that wrote the ticket file (ClusterEnv with a ByHandLauncher). "
        "It ends when the head tells it to or is gone.",
    )
    worker.add_argument("--ticket", type=Path, required=True, metavar="FILE", help="the head's ticket file, or a copy")
    worker.add_argument(
        "--index",
        type=int,
        metavar="N",
        help="which worker this is: 0, 1, ... each once. By default what the scheduler says: $CLUSTERENV_WORKER, "
        "$SLURM_PROCID, $OMPI_COMM_WORLD_RANK, $PMI_RANK, $PBS_ARRAY_INDEX, $JOB_COMPLETION_INDEX, $SGE_TASK_ID - 1 or "
        "$LSB_JOBINDEX - 1",
    )
    worker.add_argument(
        "--cpus",
        type=int,
        default=1,
        metavar="N",
        help="threads of BLAS, OpenMP and torch, unless $OMP_NUM_THREADS and its like are set (default: 1)",
    )
    worker.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> NoReturn:
    from clusterenv.launchers.by_hand import find_index, read_ticket

    ticket = read_ticket(arguments.ticket)
    worker_index = find_index(os.environ) if arguments.index is None else arguments.index
    environment = {
        **thread_variables(arguments.cpus),
        **os.environ,
        TICKET_VARIABLE: ticket.encode(),
        WORKER_VARIABLE: str(worker_index),
    }
    # Once more from the start: the libraries that are loaded by now have already chosen their number of threads.
    os.execve(sys.executable, [sys.executable, "-m", "clusterenv.worker"], environment)
