"""Holdings: the learner's policy, and which of its versions each worker holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from clusterenv.errors import WireError
from clusterenv.head.worker import HeldPolicy, Version, Worker
from clusterenv.policy.policy import Policy
from clusterenv.policy.weights import WeightsSpec


class Holdings:
    """Tracks which version each worker holds, from what it was given and reports having acted with.

    Attributes:
        policy: The learner's policy; None if it is not known what the workers hold.
        spec: The specification of its weights.
        newest: The number of its newest version.
        versions: The versions that workers hold, by number.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.policy: Policy | None = None
        self.spec = WeightsSpec(())
        self.newest = 0
        self.versions: dict[int, Version] = {}
        self._workers = workers

    @property
    def age(self) -> float:
        """How many versions behind the workers are on average."""
        total = sum(held.number * len(held.holders) for held in self.versions.values())
        return self.newest - total / len(self._workers)

    def farther_behind(self, lag: float) -> list[Worker]:
        """Return the workers whose version is more than `lag` behind the newest."""
        late = [held for held in self.versions.values() if self.newest - held.number > lag]
        return [worker for held in late for worker in held.holders]

    def clear(self) -> None:
        """Note that no worker holds any version."""
        self.versions.clear()
        for worker in self._workers:
            worker.policy = HeldPolicy()

    def give(self, worker: Worker, number: int) -> None:
        """Note that a worker holds a version from now on.

        Versions given earlier, also to its predecessor, are remembered: answers made with them may still arrive.
        """
        self._release(worker)
        held = self.versions.setdefault(number, Version(number))
        held.holders[worker] = None
        worker.policy.given.append(held)

    def take_back(self, worker: Worker, number: int) -> None:
        """Note that newer versions have not reached a worker, and it still holds this one.

        Raises:
            WireError: The worker was not given this version.
        """
        given = worker.policy.given
        if not any(each.number == number for each in given):
            raise WireError(f"It says that it holds version {number} of the policy, which it was not given.")
        self._release(worker)
        while given[-1].number != number:
            given.pop()
        given[-1] = self.versions.setdefault(number, given[-1])
        given[-1].holders[worker] = None

    def forget_older(self, workers: Iterable[Worker]) -> None:
        """Note that nothing is under way with these workers, which act next with the version given last."""
        for worker in workers:
            worker.policy.given = deque([worker.policy.given[-1]])

    def find_acted_with(self, worker: Worker, number: int) -> Version:
        """Return the version that a worker says it acted with.

        Raises:
            WireError: The worker was not given this version, or has already acted with a newer one.
        """
        given = worker.policy.given
        if not any(held.number == number for held in given):
            numbers = ", ".join(str(held.number) for held in given) or "none"
            raise WireError(f"It says that it acted with version {number} of the policy, but was given: {numbers}.")
        while given[0].number != number:
            given.popleft()
        return given[0]

    def _release(self, worker: Worker) -> None:
        if worker.policy.given:
            old = worker.policy.given[-1]
            old.holders.pop(worker, None)
            if not old.holders:
                self.versions.pop(old.number, None)
