"""clusterenv launch: what a launcher would run, or its workers for a head elsewhere."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import Any

from clusterenv.cli.options import LAUNCHERS, add_num_workers, add_options, count_workers, make_launcher
from clusterenv.errors import ConfigError
from clusterenv.launchers.kubernetes.launcher import KubernetesLauncher

_LOOK_S = 1.0


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    launch = commands.add_parser(
        "launch",
        help="show what a launcher would run, or run it for a ticket file",
        description="Show what a launcher would run, or start workers for a head that waits elsewhere with a "
        "ByHandLauncher. A head that starts its own workers needs no command: ClusterEnv(launcher=...).",
    )
    kinds = launch.add_subparsers(required=True, metavar="LAUNCHER")
    for name, (recipe, text) in LAUNCHERS.items():
        kind = kinds.add_parser(name, help=text, description=f"Start {text}.")
        add_options(kind, recipe)
        add_num_workers(kind)
        choice = kind.add_mutually_exclusive_group(required=True)
        choice.add_argument("--dry-run", action="store_true", help="show the commands, and run nothing")
        choice.add_argument(
            "--ticket", type=Path, metavar="FILE", help="start workers for the head that wrote this, until they end"
        )
        if recipe is KubernetesLauncher:
            choice.add_argument(
                "--head",
                type=Path,
                metavar="SCRIPT",
                help="print a Job that runs a script as a head in the cluster, with the rights it needs, for kubectl "
                "apply",
            )
            kind.add_argument(
                "--indexed-job",
                action="store_true",
                help="print one Job of all workers and the Secret with their ticket, for kubectl apply",
            )
        kind.set_defaults(run=_run, launcher=name, head=None, indexed_job=False)


def _run(arguments: argparse.Namespace) -> int:
    from clusterenv.launchers.by_hand import read_ticket

    if arguments.head is not None and arguments.indexed_job:
        raise ConfigError("--head prints a Job for a script, and --indexed-job one for workers: give one of the two.")
    launcher = make_launcher(LAUNCHERS[arguments.launcher][0], arguments)
    num_workers = count_workers(arguments, launcher)
    if arguments.head is not None:
        print(launcher.render_head(arguments.head))
        return 0
    if arguments.indexed_job:
        ticket = None if arguments.dry_run else read_ticket(arguments.ticket)
        print(launcher.render_indexed_job(num_workers, ticket))
        return 0
    if arguments.dry_run:
        print(launcher.render(num_workers))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    fleet = launcher.launch(read_ticket(arguments.ticket), num_workers)
    said = None
    try:
        while len(exits := fleet.exits()) < num_workers:
            status = fleet.status()
            if status != said:
                print(status or f"{num_workers} workers started", flush=True)
                said = status
            time.sleep(_LOOK_S)
        if said != "":
            print(f"{num_workers} workers started")  # And ended before anybody looked.
        for worker_index, how in sorted(exits.items()):
            print(f"worker {worker_index} ended: {how}\n{fleet.log_tail(worker_index)}".rstrip())
        return 0 if all(how.startswith("exit status 0") for how in exits.values()) else 1
    finally:
        fleet.stop(timeout_s=5.0)
