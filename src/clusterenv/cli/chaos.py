"""clusterenv chaos: faults for the workers of a running script."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from typing import Any

from clusterenv.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    chaos = commands.add_parser(
        "chaos",
        help="kill and freeze the workers of a running script, to see whether it survives",
        description="Kill and freeze the workers of a training script, by a seed, to see whether it survives. Only "
        "workers on this machine, and only processes that are known to be that script's workers. Ends with status 0 if "
        "the script went on, or ended with status 0 itself; with 1 if not.",
        usage="clusterenv chaos [options] --pid PID\n       clusterenv chaos [options] -- python train.py ...",
    )
    chaos.add_argument("--pid", type=int, metavar="PID", help="of the script, or of what has started it")
    chaos.add_argument("--faults", type=int, default=10, metavar="N", help="how many (default: 10)")
    chaos.add_argument(
        "--every", type=float, default=5.0, metavar="SECONDS", help="between two faults, on average (default: 5)"
    )
    chaos.add_argument("--kinds", default="kill,freeze", metavar="KINDS", help="what is done (default: kill,freeze)")
    chaos.add_argument(
        "--freeze",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="how long a worker is frozen (default: 15); one that is for longer than Timeouts.silence_s, 10 by "
        "default, is replaced",
    )
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="of when, what and to whom (default: 0)")
    chaos.add_argument(
        "--patience",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for workers, at first and after a fault (default: 300)",
    )
    chaos.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="starts the script")
    chaos.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from clusterenv.testing.chaos import Plan, harass_command, harass_process

    plan = Plan(
        num_faults=arguments.faults,
        every_s=arguments.every,
        kinds=tuple(filter(None, arguments.kinds.split(","))),
        freeze_s=arguments.freeze,
        seed=arguments.seed,
        patience_s=arguments.patience,
    )
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if (arguments.pid is None) == (not command):
        raise ConfigError("Give either --pid, of a running script, or a command that starts one: -- python train.py.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # As under nohup.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    lines = harass_command(command, plan) if command else harass_process(arguments.pid, plan)
    with contextlib.closing(lines):  # However this ends, what is frozen is thawed.
        while True:
            try:
                print(f"chaos: {next(lines)}", file=sys.stderr, flush=True)
            except StopIteration as end:
                return 0 if end.value else 1
