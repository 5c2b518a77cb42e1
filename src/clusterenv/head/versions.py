"""Versions: numbers the policy's versions, and decides with the sync rule which worker takes which."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError, WireError
from clusterenv.head.stats import Stats
from clusterenv.head.worker import HeldPolicy, Version, Worker
from clusterenv.policy.contents import generation_of
from clusterenv.policy.measure import NEEDS_PROBABILITIES, Measure, measure_divergence
from clusterenv.policy.policy import Policy, State
from clusterenv.policy.pool import Pool, Sample
from clusterenv.policy.probes import Form, Probes, unpack
from clusterenv.policy.rehearsal import NUM_ROWS, Rehearsal
from clusterenv.policy.sync import EveryUpdate, Reason, SyncRule, Verdict
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import values
from clusterenv.wire.buffers import RolloutBuffers, StepBuffers
from clusterenv.wire.layout import Layout
from clusterenv.wire.zeromq import Frames, cut

log = logging.getLogger(__name__)

POOL_ROWS = 512  # At a threshold of 0.05 their mean is within 5 % of the truth; see docs/explanation/sync.md.
_RENEWAL = 4  # Once a pool is full, so many rounds of rollouts renew it: states change slowly, and rows are bytes.
_POOLS_BYTES = 64 << 20  # Of all versions together.
_MAX_SHOWN = 64  # Observations are a policy's to try itself on: a few will do.
_LATE = Verdict(True, Reason.LAG)


class PolicyBackend(Protocol):
    """Where policies run."""

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that hold them."""

    @property
    def newest(self) -> StepBuffers:
        """The newest observations."""

    def adopt(self, policy: Policy, spec: WeightsSpec, version: int, arguments: Mapping[str, Any]) -> int:
        """Send the policy's structure and weights to every worker; returns how often the weights were sent."""

    def forget_policy(self) -> None:
        """Do not trust any worker to hold a policy."""

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int, pulls: set[Worker]) -> int:
        """Encode the newest weights once, for all workers that will take them; returns how often they are sent."""

    def count_copies(self, size_bytes: int) -> int:
        """Return how often weights of this size would be sent if all workers took them."""


class Versions:
    """Keeps the workers' policies as new as the sync rule wants them.

    Workers that hold the same version are judged together: they say with what they make how their actions were
    distributed, at a few rows each, and the newest policy is evaluated once on all these rows.

    Attributes:
        newest: The number of the newest version.
    """

    def __init__(self, rule: SyncRule, backend: PolicyBackend, layouts: tuple[Layout, Layout], stats: Stats) -> None:
        self.newest = 0
        self._rule = rule
        # Not every rule of a user's own has these.
        self._measure: Measure = getattr(rule, "measure", "kl")
        self._max_shared_bytes: float = getattr(rule, "max_shared_bytes", math.inf)
        self._backend = backend
        self._workers = backend.workers
        self._actions, self._observations = layouts
        self._stats = stats
        self._tracker = rule.start()
        self._rehearsal = stats.rehearsal = (
            Rehearsal(self._observations.nest) if isinstance(rule, EveryUpdate) else None
        )
        self._policy: Policy | None = None
        self._stamp: Hashable = None
        self._is_told = False
        self._generation = 0
        self._spec = WeightsSpec(())
        self._held: dict[int, Version] = {}  # Those with holders.
        self._pooled: weakref.WeakSet[Version] = weakref.WeakSet()  # Those with rows.
        self._form: Form | None = None
        self._is_studied = False
        self._sum_held = 0
        self._counted = 0
        self._probed = 0  # The newest version when steps were last asked how actions are distributed.
        self._asked: dict[Worker, int] = {}  # Who has yet to say how it acted in the step under way, at how many rows.
        self._encoded: tuple[int, Frames] | None = None
        self._warned: set[Reason] = set()

    def tell(self) -> None:
        """Note that the weights have changed, for policies that cannot notice it themselves."""
        self._is_told = True

    def prepare(self, policy: Policy, arguments: Mapping[str, Any], *, for_all: bool = False) -> set[Worker]:
        """Bring the newest version to the workers that need it; returns which of them must load it now.

        Args:
            policy: Of the learner.
            arguments: Per-call values to try a new one with.
            for_all: Whether all need it, whatever the rule says.
        """
        if policy is not self._policy or not self.notice(policy):
            self._adopt(policy, arguments)
            return set()
        if self._counted < self.newest:
            self._counted = self.newest
            self._count_needed(len(self._workers))
        pulls = {*self._pull_shared(), *self.judge()}
        if for_all:
            for worker in self.farther_behind(0):
                if worker.is_ready:
                    self.insist(worker)
                    pulls.add(worker)
        if pulls:
            self.note_sent(self._backend.load(self._spec, policy.weights(), self.newest, pulls))
        for worker in pulls:  # Nothing is under way: what they make next they make with these.
            worker.policy.given = deque([worker.policy.given[-1]])
        return pulls

    def notice(self, policy: Policy) -> bool:
        """Find out whether the weights have changed: then they are a new version.

        Returns:
            False if not only weights have changed, but the structure: `prepare` sends it to the workers.
        """
        stamp = policy.stamp()
        if self._is_told or stamp != self._stamp:
            self._show(policy)
        if generation_of(policy) != self._generation:
            return False
        if self._is_told or stamp != self._stamp:
            self._stamp, self._is_told = stamp, False
            self._number_version()
            if self._rehearsal is not None and _may_rehearse(policy):
                self._rehearsal.judge(policy, self.newest)
        return True

    def judge(self, can_take: Callable[[Worker], bool] = lambda worker: True) -> list[Worker]:
        """Judge every version that is held and was not judged since there is a newer one; count who pulls.

        One that nobody has said anything of yet was taken only just now: it is judged when somebody has, unless its
        holders have fallen behind as far as the rule lets anybody. If the rule lets them fall behind forever, those who
        do not say how they act are judged after all others.

        Args:
            can_take: Tells of a ready worker whether it can be sent weights.

        Returns:
            Those that take the newest version.
        """
        behind = [held for held in self._held.values() if held.number < self.newest > held.judged]
        pulls: list[Worker] = []
        for held, takers, verdict in self._judge_in_order(behind, can_take):
            held.judged = self.newest
            if verdict.pulls:
                takers = takers[: verdict.at_most]
                for worker in takers:
                    self._pull(worker, verdict.reason)
                pulls += takers
                if takers and held.compared == self.newest:  # The least of them comes last.
                    self._stats.threshold = held.divergence
        if behind:
            self._stats.age = self.newest - self._sum_held / len(self._workers)
        return pulls

    def judge_again(self, worker: Worker) -> None:
        """Judge the version that a worker holds once more: it could not be sent any when that was judged."""
        if worker.policy.given:
            worker.policy.given[-1].judged = 0

    def can_judge(self, held: Version) -> bool:
        """Whether a version that could not be judged, for want of rows, can be now."""
        return held.number < self.newest > held.judged and bool(held.num_rows) and bool(held.holders)

    def farther_behind(self, lag: float) -> Iterator[Worker]:
        """Yield those whose version is more than so many behind the newest."""
        for held in [held for held in self._held.values() if self.newest - held.number > lag]:
            yield from list(held.holders)

    def divergence_of(self, held: Version) -> float:
        """Return how far a version is from the newest; NaN if that is not known.

        It is compared once with each newer one, and again if there are twice as many rows to compare it on. If weights
        are rounded on their way, the newest itself is not quite what the learner has.
        """
        if held.number == self.newest and self._spec.is_exact:
            return 0.0
        if held.pool is None or not held.pool or self._policy is None:
            return held.divergence if held.compared == self.newest else float("nan")
        if held.compared < self.newest or len(held.pool) >= 2 * held.num_compared:
            held.divergence = held.pool.diverges_from(self._policy, self._observations.nest, self._measure)
            held.compared, held.num_compared = self.newest, len(held.pool)
            self._stats.checks += 1
        return held.divergence

    def num_probes(self, held: Version) -> int:
        """Return at how many rows each holder of a version should say how it acts: its share of a pool."""
        if not self._rule.compares or (self._is_studied and self._form is None):
            return 0
        most = self._most_rows(held)
        wanted = most if held.num_rows < most else most / _RENEWAL
        return math.ceil(wanted / max(1, len(held.holders)))

    def share_probes(self) -> dict[Worker, int]:
        """Return at how many rows each worker should say how it acts; those who need not are left out."""
        shares = [(held, self.num_probes(held)) for held in self._held.values()]
        return self._give_shares(shares)

    def share_step_probes(self) -> dict[Worker, int]:
        """Return the same for a single step: enough is known of a version until there is a newer one."""
        self._rehearse_step()
        is_first, self._probed = self._probed < self.newest, self.newest
        shares = [
            (held, self.num_probes(held))
            for held in self._held.values()
            if is_first or held.num_rows < self._most_rows(held)
        ]
        self._asked = self._give_shares(shares)
        return dict(self._asked)

    def take_version(self, worker: Worker, number: int) -> Version:
        """Return the version with which a worker says that it made something.

        Raises:
            WireError: It was not given that one, or has made something with a newer one before.
        """
        given = worker.policy.given
        if not any(held.number == number for held in given):
            numbers = ", ".join(str(held.number) for held in given) or "none"
            raise WireError(f"It says that it acted with version {number} of the policy, but can have: {numbers}.")
        while given[0].number != number:
            given.popleft()
        return given[0]

    def take_rollout(self, held: Version, data: bytes | None, columns: RolloutBuffers, at_most: int) -> None:
        """Take in how a worker says that its actions in a rollout were distributed.

        Args:
            held: The version it acted with.
            data: What it says; None if nothing.
            columns: The rollout.
            at_most: How many rows it was asked for.

        Raises:
            WireError: It is malformed.
        """
        self._rehearse_rollout(columns)
        if data is None:
            held.is_silent = held.is_silent or at_most > 0
            return
        num_steps, num_envs = columns.rewards.shape
        read = self._read(data, num_steps * num_envs, at_most, {})
        if read is not None:
            where = np.divmod(read.rows.astype(np.int64), num_envs)
            leaves = [column[where] for column in columns.observations]
            self._add(held, leaves, {name: column[where] for name, column in columns.states.items()}, read)

    def take_step(self, worker: Worker, data: bytes) -> None:
        """Take in how a worker says that its actions in the last step were distributed.

        Raises:
            WireError: It is malformed, or was not asked for.
        """
        given = worker.policy.given
        at_most = self._asked.pop(worker, 0)
        state = None if self._policy is None else self._policy.initial_state(1)
        if given:
            read = self._read(data, worker.num_envs, at_most, state or {})
            if read is not None:
                before = worker.buffers[1 - worker.shown]
                leaves = [array[read.rows] for array in before.observations if array is not None]
                self._add(given[-1], leaves, read.states, read)

    def end_step(self) -> None:
        """Note that nobody will say any more how it acted in the last step."""
        for worker in self._asked:
            if worker.policy.given:
                worker.policy.given[-1].is_silent = True
        self._asked.clear()

    def note_adopted(self, worker: Worker, version: int) -> None:
        """Note that a new worker has taken over, with the weights of this version.

        What its predecessor was given stays: that may have answered before it was lost, and others not yet.
        """
        self._give(worker, version)
        worker.policy.counted = self.newest
        self._count_needed(1)
        self._note_pull(Reason.FIRST)
        self.note_sent(1)

    def note_sent(self, num_copies: int) -> None:
        """Count weights as they are on the wire: workers that share a machine may share what is sent."""
        self._stats.bytes["weights"] += num_copies * self._spec.size_bytes

    def note_missing(self, worker: Worker, version: int, held: int, frames: Frames | None) -> Frames | None:
        """Return what to send a worker that did not find a version on its machine.

        None if that is no longer at hand: the worker then has what it had, and is judged by that again.

        Args:
            worker: Who.
            version: What it did not find.
            held: What it has instead.
            frames: The weights, if somebody has them.

        Raises:
            WireError: It was not given what it says that it has.
        """
        if frames is None and self._encoded is not None and self._encoded[0] == version:
            frames = self._encoded[1]
        if frames is not None:
            self.note_sent(1)
            return frames
        given = worker.policy.given
        if not any(each.number == held for each in given):
            raise WireError(f"It says that it holds version {held} of the policy, which it was not given.")
        last = given[-1]
        last.holders.pop(worker, None)
        if not last.holders:
            self._held.pop(last.number, None)
        while given[-1].number != held:
            given.pop()
        given[-1] = self._held.setdefault(held, given[-1])
        given[-1].holders[worker] = None
        self._sum_held += held - last.number
        self.judge_again(worker)
        return None

    def offer_newest(self) -> tuple[int, Frames] | None:
        """Return the newest version and its weights for a worker that takes over in any call; None if it has to wait.

        The learner may have changed its weights since the last call that took the policy: they are a new version.
        """
        try:
            if self._policy is not None and self.notice(self._policy):
                return self.encode_newest()
        except Exception:  # The agent's own code: the next call that takes the policy raises it.
            log.debug("the policy cannot be sent now", exc_info=True)
        self.forget_policy()  # All are given it anew then.
        return None

    def encode_newest(self) -> tuple[int, Frames]:
        """Return the newest version and its weights, encoded and cut once for all workers that get them by message."""
        if self._encoded is None or self._encoded[0] != self.newest:
            assert self._policy is not None, "a policy was adopted"
            self._encoded = self.newest, cut(self._spec.encode(self._policy.weights()))
        return self._encoded

    @property
    def max_lag(self) -> float:
        """How many versions behind the rule lets a worker be."""
        return self._rule.max_lag

    def insist(self, worker: Worker) -> None:
        """Count a pull that the rule did not ask for: the worker is too far behind for its work to be used."""
        self._pull(worker, Reason.LAG)

    def count_rollout(self, worker: Worker, at_most: int) -> None:
        """Count how often a worker of a stream would have pulled since its last rollout, had it pulled every version.

        Args:
            worker: Who has made one more.
            at_most: As often a worker can be sent weights meanwhile.
        """
        since = self.newest - max(worker.policy.counted, self._counted)
        worker.policy.counted = self.newest
        self._count_needed(min(max(since, 0), at_most))

    def forget_policy(self) -> None:
        """Note that it is not known what the workers hold, after a failure: the next call sends everything anew."""
        self._policy = None
        self._backend.forget_policy()

    def _adopt(self, policy: Policy, arguments: Mapping[str, Any]) -> None:
        self.forget_policy()  # Should adopting fail halfway, no worker is trusted to hold any policy.
        stamp = policy.stamp()  # First: it finds out what there is.
        self._show(policy)
        form = self._find_form(policy) if self._rule.compares else None
        self._spec = WeightsSpec.of(policy.weights(), getattr(policy, "rounded", ()))
        generation = generation_of(policy)
        num_copies = self._backend.adopt(policy, self._spec, self.newest + 1, arguments)
        self._policy, self._stamp, self._is_told, self._generation = policy, stamp, False, generation
        for held in list(self._pooled):
            held.pool = None  # What a policy of another structure did cannot be compared with.
        self._pooled.clear()
        self._form, self._is_studied = form, self._rule.compares
        self._number_version()
        if self._rehearsal is not None:
            self._rehearsal.adopt(self.newest)
        self.note_sent(num_copies)
        self._counted = self.newest
        self._count_needed(len(self._workers))
        self._tracker = self._rule.start()
        self._held.clear()
        self._sum_held = 0
        for worker in self._workers:
            worker.policy = HeldPolicy()
            if worker.is_ready:
                self._pull(worker, Reason.FIRST)

    def _show(self, policy: Policy) -> None:
        """Show a policy that wants to see them the newest observations, before its weights are read."""
        if (look_at := getattr(policy, "look_at", None)) is not None:
            look_at(self._observations.nest(self._shown()), self._actions.space)
        self._stats.fast_path = int(getattr(policy, "is_fast", False))

    def _shown(self) -> list[NDArray[Any]]:
        return [array[:_MAX_SHOWN] for array in self._backend.newest.observations if array is not None]

    def _study(self) -> Form | None:
        """Find out what the policy's distributions look like; None if it has none."""
        if not self._is_studied and self._policy is not None:
            self._form = self._find_form(self._policy)
            self._is_studied = True
        return self._form

    def _find_form(self, policy: Policy) -> Form | None:
        shown = self._shown()
        form = Form.of(policy, self._observations.nest(shown), policy.initial_state(len(shown[0])))
        if self._measure in NEEDS_PROBABILITIES:
            if form is None:
                raise PolicyError(
                    f'measure="{self._measure}" is computed from the probabilities of actions, and this policy says '
                    "neither its distribution nor any log-probabilities that other versions could be asked for. Give "
                    "it a distribution() (TorchPolicy takes distribution=...), or choose EveryUpdate()."
                )
            measure_divergence(form.model, form.model, self._measure)  # Raises if this family has none.
        return form

    def _pulls_unjudged(self, worker: Worker) -> bool:
        """Whether a worker pulls every version because that takes less time than to judge whether it should."""
        return worker.mailbox is not None and self._spec.size_bytes > self._max_shared_bytes

    def _pull_shared(self) -> list[Worker]:
        behind = [worker for held in self._held.values() if held.number < self.newest for worker in held.holders]
        pulls = [worker for worker in behind if worker.is_ready and self._pulls_unjudged(worker)]
        for worker in pulls:
            self._pull(worker, Reason.SHARED)
        self._stats.age = self.newest - self._sum_held / len(self._workers)
        return pulls

    def _give_shares(self, shares: Sequence[tuple[Version, int]]) -> dict[Worker, int]:
        return {
            worker: share
            for held, share in shares
            if share
            for worker in held.holders
            if not self._pulls_unjudged(worker)
        }

    def _rehearse_rollout(self, columns: RolloutBuffers) -> None:
        if self._rehearsal is None or not _may_rehearse(self._policy) or not self._rehearsal.wants_states:
            return
        steps, rows = np.nonzero(columns.valid)
        if len(steps):
            chosen = np.linspace(0, len(steps) - 1, min(len(steps), NUM_ROWS)).astype(np.int64)
            where = steps[chosen], rows[chosen]
            leaves = [column[where] for column in columns.observations]
            states = {name: column[where] for name, column in columns.states.items()}
            self._rehearsal.take(self._policy, self.newest, leaves, states)

    def _rehearse_step(self) -> None:
        if self._rehearsal is None or not _may_rehearse(self._policy) or not self._rehearsal.wants_states:
            return
        if self._policy.initial_state(1) is None:  # Else the states are the workers' own.
            self._rehearsal.take(self._policy, self.newest, [array.copy() for array in self._shown()], {})

    def _number_version(self) -> None:
        self.newest += 1
        self._stats.updates += 1

    def _count_needed(self, num_pulls: int) -> None:
        self._stats.note_needed(num_pulls, round(num_pulls * self._share_of_copies() * self._spec.size_bytes))

    def _share_of_copies(self) -> float:
        """Return how many copies of the weights are sent for each worker that pulls: fewer than 1 if some share one."""
        return self._backend.count_copies(self._spec.size_bytes) / len(self._workers)

    def _judge_in_order(
        self, behind: Sequence[Version], can_take: Callable[[Worker], bool]
    ) -> Iterator[tuple[Version, list[Worker], Verdict]]:
        """Ask the rule about versions, those that have diverged most first; leave out what it cannot be asked yet.

        Yields:
            A version, those of its holders that can be sent weights, and the verdict.
        """
        found: list[tuple[float | None, Version]] = []
        late: list[Version] = []
        silent: list[Version] = []
        if not self._rule.compares or self._study() is None:
            found = [(None, held) for held in behind]
        else:
            found = [(self.divergence_of(held), held) for held in behind if held.num_rows]
            late = [held for held in behind if not held.num_rows and self.newest - held.number >= self.max_lag]
            if math.isinf(self.max_lag):
                silent = [held for held in behind if not held.num_rows and held.is_silent]
            self._note_divergence(found)
        found.sort(key=lambda each: (-(each[0] or 0.0), each[1].number))
        found += [(None, held) for held in sorted(silent, key=lambda held: held.number)]
        now_s = time.monotonic()
        pull_bytes = round(self._spec.size_bytes * self._share_of_copies())
        for divergence, held in found:
            takers = [worker for worker in held.holders if worker.is_ready and can_take(worker)]
            verdict = self._tracker.judge(
                held.number,
                self.newest,
                divergence,
                len(takers),
                num_all=len(self._workers),
                pull_bytes=pull_bytes,
                now_s=now_s,
            )
            if verdict.advice is not None and verdict.reason not in self._warned and held not in silent:
                self._warned.add(verdict.reason)
                log.warning("%s", verdict.advice)
            yield held, takers, verdict
        for held in late:
            yield held, [worker for worker in held.holders if worker.is_ready and can_take(worker)], _LATE

    def _note_divergence(self, found: Sequence[tuple[float | None, Version]]) -> None:
        """Keep the mean over the workers."""
        if found:
            weights = [max(1, len(held.holders)) for _, held in found]
            self._stats.divergence = float(np.average([divergence for divergence, _ in found], weights=weights))

    def _most_rows(self, held: Version) -> int:
        """Return how many rows a version's pool may have, so that all pools together are not too large."""
        if held.pool is None or not held.pool:
            leaves = (array for array in self._backend.newest.observations if array is not None)
            row_bytes = sum(array[:1].nbytes for array in leaves)
        else:
            row_bytes = held.pool.row_bytes
        num_pools = len(self._pooled) + (held not in self._pooled)
        return max(1, min(POOL_ROWS, _POOLS_BYTES // max(1, row_bytes * num_pools)))

    def _read(self, data: bytes, num_rows: int, at_most: int, states: State) -> Probes | None:
        if not at_most:
            raise WireError("It says how its actions were distributed, which it was not asked for.")
        form = self._study()
        if form is None or self._policy is None:  # Or a failure has ended the stream that this was for.
            return None
        self._stats.bytes["checks"] += len(data)
        return unpack(values.loads(data), form, num_rows=num_rows, at_most=at_most, states=states)

    def _add(self, held: Version, leaves: list[NDArray[Any]], states: State, probes: Probes) -> None:
        if held.pool is None:
            assert self._form is not None, "something was read"
            held.pool = Pool(self._form)
            self._pooled.add(held)
            for other in self._pooled:
                if other.pool is not None:
                    other.pool.trim(self._most_rows(other))
        held.pool.add(Sample(leaves, states, probes.arrays), self._most_rows(held))

    def _give(self, worker: Worker, number: int) -> None:
        """Note that a worker holds a version from now on."""
        self._sum_held += number - worker.policy.version
        if worker.policy.given:
            old = worker.policy.given[-1]
            old.holders.pop(worker, None)
            if not old.holders:
                self._held.pop(old.number, None)
        held = self._held.setdefault(number, Version(number))
        held.holders[worker] = None
        worker.policy.given.append(held)

    def _pull(self, worker: Worker, reason: Reason) -> None:
        self._give(worker, self.newest)
        self._note_pull(reason)

    def _note_pull(self, reason: Reason) -> None:
        self._stats.pulls += 1
        self._stats.reasons[reason] += 1


def _may_rehearse(policy: Policy | None) -> TypeGuard[Policy]:
    """Whether evaluating a policy leaves no trace: a learner's own module is not to be run for a mere figure."""
    return policy is not None and bool(getattr(policy, "is_fast", True))
