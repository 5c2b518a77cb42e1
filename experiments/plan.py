"""Which runs there are, and in which order: the blocks of PREREGISTRATION.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.record import Curve
from experiments.rules import ADAPTIVE, EVERY, Rule
from experiments.tasks import AnySettings, PpoSettings

PILOT_SEEDS = (901, 902)
SEEDS = tuple(range(301, 311))
NUM_SEEDS = 5  # Of every block; the last block has the other seeds.
ONE_FOR_ALL = tuple(Rule("periodic", k) for k in (2, 4, 8, 16))
PLAIN = (
    Rule("every", is_plain=True),
    Rule("adaptive", ADAPTIVE.value, is_plain=True),
    Rule("unprotected", ADAPTIVE.value, is_plain=True),
)
NEVER = Rule("never")


class Run(NamedTuple):
    """One training."""

    task: str
    rule: Rule
    seed: int

    @property
    def name(self) -> str:
        """A name for files and messages."""
        return f"{self.task}/{self.rule.name}-seed{self.seed}"


class Block(NamedTuple):
    """Runs that answer a question together."""

    name: str
    runs: Sequence[Run]


class Match(NamedTuple):
    """The rules that send as many bytes as the adaptive one did with the pilot seeds.

    Args:
        period: The longest with which periodic pulls send at least as many bytes, so rounding favours them.
        pulls_per_update: Of all workers together.
    """

    period: int
    pulls_per_update: float

    @property
    def rules(self) -> dict[str, Rule]:
        """The rules, by their kind."""
        return {
            "periodic": Rule("periodic", self.period),
            "staggered": Rule("staggered", self.period),
            "budget": Rule("budget", self.pulls_per_update),
        }


def match_bytes(pilots: Sequence[Curve], num_workers: int) -> Match:
    """Find the rules that send as much as these runs of the adaptive rule did, on average."""
    updates = int(pilots[0]["versions"][-1]) - 1  # The first version is no update.
    pulls = float(np.mean([curve["pulls"][-1] for curve in pilots]))
    sent = float(np.mean([curve["bytes_weights"][-1] + curve["bytes_checks"][-1] for curve in pilots]))
    copy = float(np.mean([curve["bytes_weights"][-1] / (1 + curve["pulls"][-1]) for curve in pilots]))
    enough = [k for k in range(1, updates + 1) if copy * (1 + updates // k) >= sent]
    return Match(max(enough, default=1), float(f"{max(1.0, pulls * num_workers) / max(1, updates):.3g}"))


def plan_pilots(tasks: Mapping[str, AnySettings]) -> Block:
    """Plan the runs that set the period and the budget of each task."""
    return Block("pilot", [Run(task, ADAPTIVE, seed) for seed in PILOT_SEEDS for task in tasks])


def plan_blocks(
    tasks: Mapping[str, AnySettings], matches: Mapping[str, Match], num_seeds: int = NUM_SEEDS
) -> list[Block]:
    """Plan everything after the pilots. Seeds come one after another, so that a block can be cut short fairly."""
    seeds, more = SEEDS[:num_seeds], SEEDS[num_seeds:]
    matched = {task: matches[task].rules for task in tasks}
    mandatory = {task: (EVERY, ADAPTIVE, matched[task]["periodic"]) for task in tasks}
    learns_by_ppo = [task for task, settings in tasks.items() if isinstance(settings, PpoSettings)]
    blocks = {
        "mandatory": _cross(mandatory, seeds),
        "trap": _cross(dict.fromkeys(learns_by_ppo, PLAIN), seeds),
        "one-for-all": _cross(dict.fromkeys(tasks, ONE_FOR_ALL), seeds),
        "equal-bytes": _cross({task: (matched[task]["staggered"], matched[task]["budget"]) for task in tasks}, seeds),
        "never": _cross(dict.fromkeys(tasks, (NEVER,)), seeds),
        "more-seeds": _cross(mandatory, more),
    }
    return [Block(name, runs) for name, runs in blocks.items()]


def _cross(rules: Mapping[str, Sequence[Rule]], seeds: Sequence[int]) -> list[Run]:
    return [Run(task, rule, seed) for seed in seeds for task in rules for rule in rules[task]]
