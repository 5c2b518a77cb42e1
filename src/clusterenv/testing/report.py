"""Report: which laws a vector environment keeps, which it breaks and how, and which do not apply."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

from clusterenv.errors import ClusterEnvError

Outcome = Literal["kept", "broken", "not applicable", "skipped"]

_WIDTH = 116


@dataclass(frozen=True)
class Verdict:
    """The result for one law.

    Attributes:
        law: The law's name.
        text: The law itself, in a sentence.
        message: If it is broken: what happened, what was expected, and calls that reproduce it. If it is not
            applicable: why not.
    """

    law: str
    text: str
    outcome: Outcome
    message: str = ""


@dataclass(frozen=True)
class Report:
    """The results for a vector environment; printed, a list of all laws.

    Attributes:
        subject: The repr of the vector environment.
        verdicts: One per law, in the order in which they were checked.
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
        """The names of the laws that do not apply to this vector environment."""
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
        report: The full report.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[LawsBroken], tuple[Report]]:
        return LawsBroken, (self.report,)


def _show(verdict: Verdict) -> str:
    lines = [f"{verdict.outcome:<15} {verdict.law:<20} {verdict.text}"]
    for line in verdict.message.splitlines():
        # Code that can be pasted stays as it is.
        is_code = line.startswith("    ")
        lines += [line] if is_code else textwrap.wrap(line, _WIDTH - 20) or [""]
    return f"\n{' ' * 16}".join(lines)
