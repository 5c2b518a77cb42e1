"""What came of the faults, as a page of Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from chaos.campaign import Case
from chaos.modes import MODES


@dataclass
class Result:
    """What came of one place.

    Attributes:
        place: In words.
        left: What was left behind.
        problems: What is wrong beyond single cases.
    """

    place: str
    cases: list[Case] = field(default_factory=list)
    num_steps: int = 0
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, what: str) -> int:
        """Count the problems that begin with a word."""
        found = [case.problem for case in self.cases] + self.problems
        return sum(problem.startswith(what) for problem in found)

    @property
    def is_well(self) -> bool:
        """Whether all is as it should be."""
        return not (self.left or self.problems or any(case.problem for case in self.cases))


def to_markdown(results: Sequence[Result], command: str, notes: Sequence[str]) -> str:
    """Lay out a page."""
    cases = [case for result in results for case in result.cases]
    lines = [
        "# Chaos",
        "",
        f"Made by `{command}`. Environments number their own episodes and steps, so that a transition that is lost, "
        "repeated, in another's row or half made is found; all that were delivered are checked. *Wedged*: the learner "
        "could not go on within the deadline, or got an error that the fault does not justify. *Time to go on*: from "
        "the fault until every environment it harmed had delivered a transition again, the wait until a silence or a "
        "hung step is taken for a loss included.",
        "",
        "| place | faults | transitions checked | inconsistent | wedged | left behind | time to go on: median, worst |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for result in results:
        counts = f"{result.count('inconsistent')} | {result.count('wedged')} | {len(result.left)}"
        row = f"{len(result.cases)} | {result.num_steps:,} | {counts} | {spread(result.cases)}"
        lines.append(f"| {result.place} | {row} |")
    totals = [sum(r.count(what) for r in results) for what in ("inconsistent", "wedged")]
    totals.append(sum(len(result.left) for result in results))
    num_steps = sum(result.num_steps for result in results)
    bold = " | ".join(f"**{total}**" for total in totals)
    lines += [f"| **all** | **{len(cases)}** | **{num_steps:,}** | {bold} | {spread(cases)} |", ""]
    lines += [*tabulate_kinds(cases), ""]
    lines += [f"- {result.place}: {text}" for result in results for text in list_problems(result)]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def tabulate_kinds(cases: Sequence[Case]) -> list[str]:
    """Say how often each kind of fault came in each mode, and how long it took to go on."""
    lines = [
        f"| fault | {' | '.join(MODES)} | inconsistent or wedged | time to go on: median, worst |",
        "|---|" + "---:|" * len(MODES) + "---:|---|",
    ]
    names: Sequence[Callable[[Case], str]] = (lambda case: case.kind, lambda case: f"{case.kind}, {case.variant}")
    for kind in sorted({case.kind for case in cases}):
        same = [case for case in cases if case.kind == kind]
        variants = sorted({case.variant for case in same if case.variant})
        for name_of in names[: 1 + (len(variants) > 1)]:
            for name in sorted({name_of(case) for case in same}):
                chosen = [case for case in same if name_of(case) == name]
                counts = Counter(case.mode for case in chosen)
                columns = " | ".join(str(counts[mode]) for mode in MODES)
                bad = sum(bool(case.problem) for case in chosen)
                lines.append(f"| {name} | {columns} | {bad} | {spread(chosen)} |")
    return lines


def list_problems(result: Result) -> list[str]:
    """Describe everything that should not be so."""
    described = [
        f"{case.kind} ({case.variant or 'plain'}) in {case.mode}, at its {case.moment}, worker {case.worker_index}: "
        f"{case.problem}"
        for case in result.cases
        if case.problem
    ]
    return [*described, *result.problems, *(f"left behind: {left}" for left in result.left)]


def spread(cases: Sequence[Case]) -> str:
    """Give median and maximum of the seconds to go on."""
    seconds = [case.seconds for case in cases if case.seconds is not None]
    return f"{np.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else ""
