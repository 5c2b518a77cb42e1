"""A benchmark's page: what it found, where it ran, printed and written."""

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.processes import ROOT


def publish(lines: Sequence[str], load_before: float, path: Path) -> None:
    """Print a page and write it, with a note on the machine below it.

    Args:
        lines: The page, which ends with a list of notes.
        load_before: The load average before the run.
        path: Where to write it.
    """
    described = machine.describe_machine(ROOT / ".bench", load_before, 0.0)[:2]
    text = "\n".join([*lines, *(f"- {note}" for note in described), f"- load average before the run {load_before:.2f}"])
    print(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    print(f"\nwrote {os.path.relpath(path)}")
