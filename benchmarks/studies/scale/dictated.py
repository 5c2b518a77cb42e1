"""A sync rule for measurements: workers pull when they are told to."""

from dataclasses import dataclass

from clusterenv.policy.sync import Case, Reason, Verdict


@dataclass
class Dictated:
    """A sync rule that decides as it is told.

    Attributes:
        pulls: Whether workers pull.
        spares: Whether the last eighth of them does not.
    """

    num_workers: int
    pulls: bool = False
    spares: bool = False
    compares: bool = True
    max_lag: float = float("inf")

    def start(self) -> "Dictated":
        """Return the tracker: there is nothing to remember."""
        return self

    def judge(self, case: Case) -> Verdict:
        """Decide as told."""
        if case.own >= case.newest or not self.pulls:
            return Verdict(False, Reason.WAITING)
        return Verdict(True, Reason.UPDATE, self.num_workers - self.num_workers // 8 if self.spares else None)


def is_spared(worker_index: int, num_workers: int) -> bool:
    """Whether this is one of the workers that go on with their weights in a storm."""
    return worker_index >= num_workers - num_workers // 8
