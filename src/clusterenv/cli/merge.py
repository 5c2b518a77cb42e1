"""clusterenv merge: a Minari dataset of what recorders have written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    command = commands.add_parser(
        "merge",
        help="make a Minari dataset of what recorders have written",
        description="Make a Minari dataset of the pieces that a Recorder left where a run was killed, or of those of "
        "several runs. They stay as they are.",
    )
    command.add_argument("pieces", type=Path, nargs="+", metavar="PIECES", help="files, or directories that hold them")
    command.add_argument(
        "--out", type=Path, required=True, metavar="DATASET", help="the dataset's directory, such as datasets/expert-v0"
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from clusterenv.recording.merging import merge

    print(merge(arguments.pieces, arguments.out))
    return 0
