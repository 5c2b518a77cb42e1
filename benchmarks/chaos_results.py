"""Lays out what came of a run of `benchmarks/chaos.py`: for the terminal, and for `benchmarks/results`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.footprint import Moment
from benchmarks.incidents import Struck

NUM_SHOWN = 11  # of the moments at which it was looked what the processes held


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        seconds: How long it took.
        struck: What happened, to each worker it reached.
        num_losses: Workers that were lost and replaced.
        thrown_away: Steps of environments, at most.
        reached: What the workload has to say.
        moments: What the processes held, in the course of time.
        problems: What should not be so.
    """

    seconds: float
    struck: Sequence[Struck]
    num_losses: int
    thrown_away: int
    reached: Mapping[str, Any]
    moments: Sequence[Moment]
    problems: Sequence[str]

    def to_markdown(self, title: str, command: str, notes: Sequence[str]) -> str:
        """Return a page about it."""
        lines = [f"# Chaos: {title}", "", f"Made by `{command}`.", ""]
        if self.struck:
            lines += [*self._tabulate_faults(), ""]
        facts = {
            "faults": len({s.incident for s in self.struck}),
            "workers lost and replaced": self.num_losses,
            "steps thrown away, at most": self.thrown_away,
            **self.reached,
            "seconds": round(self.seconds),
        }
        lines += [f"- {name}: {value:,}" for name, value in facts.items()]
        lines += [f"- problem: {problem}" for problem in self.problems] or ["- problems: none"]
        lines += ["", *self._tabulate_moments(), "", *(f"- {note}" for note in notes)]
        return "\n".join(lines) + "\n"

    def _tabulate_faults(self) -> list[str]:
        """Say of each kind how often it happened, how long it took to be noticed, and then to be made up for."""
        rows = [
            "| kind | faults | workers lost | noticed after: median, longest | then replaced in: median, longest |",
            "|---|---:|---:|---|---|",
        ]
        counts = Counter(incident.kind for incident in dict.fromkeys(s.incident for s in self.struck))
        for kind, count in sorted(counts.items()):
            cases = [s for s in self.struck if s.incident.kind == kind]
            lost = [s for s in cases if s.replaced_at is not None]
            noticed = [s.noticed_at - s.at for s in lost if s.noticed_at is not None]
            replaced = [s.replaced_at - s.noticed_at for s in lost if s.replaced_at and s.noticed_at]
            rows.append(f"| {kind} | {count} | {len(lost)} | {spread(noticed)} | {spread(replaced)} |")
        return rows

    def _tabulate_moments(self) -> list[str]:
        rows = [
            "| after s | head, MB | its descriptors | workers, MB each | their descriptors |",
            "|---:|---:|---:|---|---|",
        ]
        shown = np.unique(np.linspace(0, len(self.moments) - 1, NUM_SHOWN).round().astype(int))
        for moment in (self.moments[index] for index in shown):
            sizes = ", ".join(f"{worker.resident_bytes / 1e6:.1f}" for worker in moment.workers)
            counts = ", ".join(str(worker.descriptors) for worker in moment.workers)
            head = f"{moment.head.resident_bytes / 1e6:.1f} | {moment.head.descriptors}"
            rows.append(f"| {moment.at_s:.0f} | {head} | {sizes} | {counts} |")
        return rows


def spread(seconds: Sequence[float]) -> str:
    """Give median and maximum."""
    return f"{np.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else ""
