"""Report: which laws a vector environment has kept, which it has broken and how, and which do not concern it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from clusterenv.errors import ClusterEnvError

Outcome = Literal["kept", "broken", "not applicable", "skipped"]

_WIDTH = 116


@dataclass(frozen=True)
class Verdict:
    """What was found about one law.

    Attributes:
        law: Its name.
        text: The law itself, in a sentence.
        message: If it is broken: what happened, what was expected, and calls that show it again. If it is not
            applicable: why not.
    """

    law: str
    text: str
    outcome: Outcome
    message: str = ""


@dataclass(frozen=True)
class Report:
    """What was found about a vector environment; printed, it is a list.

    Attributes:
        subject: The vector environment, as it shows itself.
        verdicts: One for each law, in the order in which they were looked at.
    """

    subject: str
    verdicts: tuple[Verdict, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the laws that are kept."""
        return self._names("kept")

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the laws that are broken."""
        return self._names("broken")

    @property
    def not_applicable(self) -> tuple[str, ...]:
        """The names of the laws that say nothing about this vector environment."""
        return self._names("not applicable")

    def __getitem__(self, law: str) -> Verdict:
        """Return the verdict on the law of this name."""
        for verdict in self.verdicts:
            if verdict.law == law:
                return verdict
        raise KeyError(law)

    def __str__(self) -> str:
        counts = f"{len(self.kept)} laws kept, {len(self.broken)} broken, {len(self.not_applicable)} not applicable"
        return "\n".join([f"{self.subject}: {counts}", *map(_show, self.verdicts)])

    def _names(self, outcome: Outcome) -> tuple[str, ...]:
        return tuple(verdict.law for verdict in self.verdicts if verdict.outcome == outcome)


class LawsBroken(ClusterEnvError, AssertionError):
    """A vector environment breaks laws; the message lists them all.

    Attributes:
        report: All that was found.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[LawsBroken], tuple[Report]]:
        return LawsBroken, (self.report,)


def _show(verdict: Verdict) -> str:
    lines = [f"{verdict.outcome:<15} {verdict.law:<20} {verdict.text}"]
    for line in verdict.message.splitlines():
        # What can be typed again stays as it is.
        is_code = line.startswith("    ")
        lines += [line] if is_code else textwrap.wrap(line, _WIDTH - 20) or [""]
    return f"\n{' ' * 16}".join(lines)
