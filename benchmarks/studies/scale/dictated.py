"""A sync rule for measurements: workers pull when they are told to."""

from dataclasses import dataclass

from clusterenv.policy.sync import Reason, Verdict


@dataclass
class Dictated:
    """A sync rule that decides as it is told.

    Attributes:
        pulls: Whether workers pull.
        spares: Whether every eighth one does not.
    """

    num_workers: int
    pulls: bool = False
    spares: bool = False
    needs_sketch: bool = True
    max_lag: float = float("inf")
    _num_started: int = 0

    def start(self) -> "Told":
        """Return the tracker for one worker: they are asked for in order."""
        self._num_started += 1
        return Told(self, (self._num_started - 1) % self.num_workers)


@dataclass(frozen=True)
class Told:
    """One worker's side of it."""

    rule: Dictated
    worker_index: int

    def judge(self, own: int, newest: int, divergence: float | None = None) -> Verdict:
        """Decide as told."""
        pulls = self.rule.pulls and not (self.rule.spares and is_spared(self.worker_index))
        return Verdict(pulls, Reason.UPDATE if pulls else Reason.WAITING)


def is_spared(worker_index: int) -> bool:
    """Whether this is one of the workers that go on with their weights in a storm."""
    return worker_index % 8 == 0
