"""Evaluating: workers that play the episodes of an evaluation, each in environments of its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from clusterenv.config import split_shards
from clusterenv.errors import WireError, WorkerLost
from clusterenv.head.acting import Acting, pickle_policy
from clusterenv.head.dealer import Dealer
from clusterenv.head.failure import naming
from clusterenv.head.infos import checked_dict, checked_list, expect
from clusterenv.head.pending import PendingCall
from clusterenv.head.worker import Worker
from clusterenv.head.workers import WAIT_S, JoinWatch
from clusterenv.wire import values
from clusterenv.wire.assignment import EvaluationPlan
from clusterenv.wire.messages import Episode, Evaluate, Evaluated

_MAX_LOSSES = 10  # An episode lost with its worker this often kills workers, or takes longer than they live.
_ANSWER_S = 0.2  # How often a worker reports finished episodes.
_ANSWER_S_PER_WORKER = 0.002  # Less often with many workers: the head needs some time for each answer.


@dataclass(frozen=True)
class Finished:
    """An episode that is over.

    Attributes:
        index: Its index in the evaluation's table.
        was_cut: Whether it was truncated only because it reached `max_steps`.
        was_mixed: Whether the policy's random numbers depended on other episodes played at the same time.
        info: The info of its last step.
    """

    index: int
    total: float
    length: int
    terminated: bool
    truncated: bool
    was_cut: bool
    was_mixed: bool
    info: dict[str, Any]


class Evaluating(Acting):
    """Workers that also play evaluation episodes, without touching their training environments and policy."""

    def play(
        self, plan: EvaluationPlan, episodes: Sequence[Episode], dealer: Dealer, num_envs: int
    ) -> Generator[list[Finished], None, None]:
        """Let the workers play until every episode is over; yields finished episodes as they come in.

        Each worker has one request at a time, and answers it after a moment with the episodes finished by then. If the
        worker is lost, its episodes are dealt to others, and its replacement is sent the plan.

        Args:
            plan: What is evaluated.
            episodes: All episodes of the table, by index.
            dealer: Deals the episodes that are to be played.
            num_envs: How many environments to use, over all workers.

        Raises:
            PolicyError: The policy cannot be pickled.
        """
        code = pickle_policy(plan)
        self.settle()
        shares = self._share(num_envs)
        informed: dict[Worker, int] = {}  # Which incarnation of a worker has been sent the plan.
        asked: dict[Worker, PendingCall] = {}
        limit_s = max(_ANSWER_S, _ANSWER_S_PER_WORKER * len(shares))

        def ask(call: int, worker: Worker, _buffer: int) -> Evaluate:
            knows = informed.get(worker) == worker.incarnation
            if not knows:
                dealer.take_back(worker)
            informed[worker] = worker.incarnation
            chosen = dealer.deal(worker, shares[worker])
            dealt = [episodes[index] for index in chosen]
            return Evaluate(call, None if knows else code, shares[worker], dealt, limit_s)

        watch: JoinWatch | None = None
        try:
            while dealer.num_left:
                for worker in shares:
                    if not worker.is_ready:
                        dealer.take_back(worker)
                        self._check_losses(dealer, episodes, worker)
                    if worker not in asked and dealer.wants(worker):
                        asked[worker] = self._start(PendingCall(self.calls, ask), [worker])
                self.advance(WAIT_S)
                self.raise_fatal(shares)
                for worker, pending in list(asked.items()):
                    if not pending.waiting:
                        del asked[worker]
                        self.wait_for(pending)
                        yield self._read(worker, pending, dealer, plan.max_steps)
                if not any(worker.is_ready for worker in shares) and any(map(self._may_never_come, shares)):
                    watch = watch or JoinWatch(self)
                    watch.look()
                else:
                    watch = None
        finally:
            for pending in asked.values():
                pending.abandon()

    def _share(self, num_envs: int) -> dict[Worker, int]:
        """Divide environments among the workers, ready ones first."""
        present = sorted(self.workers, key=lambda worker: not worker.is_ready)
        sizes = [stop - start for start, stop in split_shards(num_envs, min(num_envs, len(present)))]
        return dict(zip(present, sizes, strict=False))

    def _read(self, worker: Worker, pending: PendingCall, dealer: Dealer, max_steps: int) -> list[Finished]:
        pending.raise_failure()
        with naming(worker):
            answer: Evaluated = expect(Evaluated, pending.replies[worker])
            finished = read_finished(values.loads(answer.finished), max_steps)
            try:
                dealer.accept(worker, [each.index for each in finished], answer.unstarted)
            except ValueError as error:
                raise WireError(str(error)) from error
        return finished

    def _check_losses(self, dealer: Dealer, episodes: Sequence[Episode], worker: Worker) -> None:
        """Raise if an episode is lost again and again: it may be what kills its workers."""
        often = [index for index, count in dealer.losses.items() if count >= _MAX_LOSSES]
        if often:
            named = ", ".join(f"{index} (seed {episodes[index].seed})" for index in sorted(often)[:8])
            raise WorkerLost(
                f"{_MAX_LOSSES} workers were lost, one after another, while they played episode {named}. One of these "
                f"may be what kills them. The last loss: {worker.loss}",
                worker_index=worker.index,
                env_indices=worker.env_indices,
            )


def read_finished(answer: Any, max_steps: int) -> list[Finished]:
    """Read and check a worker's report of finished episodes.

    Raises:
        WireError: The report is malformed.
    """
    finished = []
    for item in checked_list(answer):
        each = checked_list(item, len(fields(Finished)))
        if list(map(type, each)) != [int, float, int, bool, bool, bool, bool, bytes]:
            raise WireError("Its report of an episode is malformed.")
        index, total, length, terminated, truncated, was_cut, was_mixed, info = each
        if not 1 <= length <= max_steps or not (terminated or truncated):
            raise WireError("Its report of how an episode ended is impossible.")
        ending = terminated, truncated, was_cut, was_mixed
        finished.append(Finished(index, total, length, *ending, checked_dict(values.loads(info))))
    return finished
