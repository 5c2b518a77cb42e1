"""The command `clusterenv`, one file per subcommand."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

import clusterenv
from clusterenv.cli import chaos, doctor, evaluate, launch, merge, worker
from clusterenv.cli.options import LAUNCHERS
from clusterenv.errors import ClusterEnvError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parsed = _parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        return int(parsed.run(parsed))
    except ClusterEnvError as error:
        print(f"clusterenv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser()
    # `clusterenv doctor --env X` is about this machine, like `clusterenv doctor`.
    is_left_out = arguments[:1] == ["doctor"] and arguments[1:2] not in ([], ["-h"], ["--help"])
    is_left_out = is_left_out and arguments[1].startswith("-")
    if arguments == ["doctor"] or is_left_out:
        arguments.insert(1, "local")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        named = next((word for word in unknown if word in LAUNCHERS), None) if is_left_out else None
        remedy = f"; the launcher comes first: clusterenv doctor {named} ..." if named else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
    return parsed


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="clusterenv", description="Gymnasium environments on many processes and machines."
    )
    parser.add_argument("--version", action="version", version=f"clusterenv {clusterenv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (worker, launch, doctor, evaluate, merge, chaos):
        command.add(commands)
    return parser
