"""One run, in a process of its own: `python -m experiments.training SETTINGS RULE SEED RECORD`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from clusterenv import Rollout
from experiments import ppo
from experiments.record import Record
from experiments.rules import Rule, read_rule
from experiments.settings import DqnSettings, PpoSettings, read_settings


def main(argv: Sequence[str]) -> None:
    """Train once; the record is at its place if, and only if, the run came to its end."""
    # End as with Ctrl-C, workers closed: a job in the background of a shell is deaf to Ctrl-C itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings_path, rule, seed, record_path = argv
    settings = read_settings(Path(settings_path))
    torch.set_num_threads(1)  # More only slow networks as small as these.
    with Record(Path(record_path), settings) as record, closing(train(settings, read_rule(rule), int(seed))) as run:
        for rollout, stats in run:
            record.add(rollout, stats)


def train(
    settings: PpoSettings | DqnSettings, rule: Rule, seed: int
) -> Generator[tuple[Rollout, Mapping[str, Any]], None, None]:
    """Train with the learner that the settings are for."""
    if isinstance(settings, PpoSettings):
        return ppo.train(settings, rule.make(settings), seed, is_decoupled=not rule.is_plain)
    from experiments import dqn  # Needs what the examples need.

    return dqn.train(settings, rule.make(settings), seed)


if __name__ == "__main__":
    main(sys.argv[1:])
