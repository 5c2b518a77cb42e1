"""clusterenv doctor: whether workers can start, reach this machine and run an environment."""

from __future__ import annotations

import argparse
from typing import Any

from clusterenv.cli.options import LAUNCHERS, add_num_workers, add_options, count_workers, make_launcher


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    doctor = commands.add_parser(
        "doctor",
        help="check that workers can start, reach this machine and run your environment",
        description="Start workers as a training script on this machine would, and check all that a run needs: whether "
        "they start, reach this machine, have the same versions, can make your environment and share the cores well; "
        "then measure how fast messages travel. Ends with status 0 if all is well and with 1 if not; "
        "what is not comes with the next step to take.",
    )
    kinds = doctor.add_subparsers(required=True, metavar="LAUNCHER")
    for name, (recipe, text) in LAUNCHERS.items():
        kind = kinds.add_parser(name, help=text, description=f"Check {text}.")
        add_options(kind, recipe, env="variable")
        add_num_workers(kind)
        kind.add_argument(
            "--env",
            dest="env_id",
            metavar="ID",
            help="an environment that must work there: CartPole-v1, or my_module:MyEnv-v0",
        )
        kind.add_argument("--listen", metavar="ADDRESS", help="as ClusterEnv(network=Network(listen=...))")
        kind.add_argument("--advertise", metavar="ADDRESS", help="as ClusterEnv(network=Network(advertise=...))")
        kind.add_argument(
            "--timeout",
            type=float,
            default=120.0,
            metavar="SECONDS",
            help="how long workers may take to join, time in a queue included (default: 120)",
        )
        kind.set_defaults(run=_run, launcher=name)


def _run(arguments: argparse.Namespace) -> int:
    from clusterenv.doctor.examination import examine

    launcher = make_launcher(LAUNCHERS[arguments.launcher][0], arguments)
    is_well = True
    for finding in examine(
        launcher,
        count_workers(arguments, launcher),
        env_id=arguments.env_id,
        addresses=(arguments.listen, arguments.advertise),
        join_s=arguments.timeout,
    ):
        print(finding, flush=True)
        is_well = is_well and finding.is_ok
    return 0 if is_well else 1
