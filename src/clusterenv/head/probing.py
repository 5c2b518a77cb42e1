"""Probing: asks workers how their actions are distributed, and measures how far their versions have diverged."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError, WireError
from clusterenv.head.backend import Backend
from clusterenv.head.holdings import Holdings
from clusterenv.head.stats import Stats
from clusterenv.head.worker import Version, Worker
from clusterenv.policy.measure import NEEDS_PROBABILITIES, Measure, measure_divergence
from clusterenv.policy.policy import Policy, State
from clusterenv.policy.pool import POOL_ROWS, RENEWAL, Pool, Sample
from clusterenv.policy.probes import Form, Probes, unpack
from clusterenv.policy.rehearsal import NUM_ROWS
from clusterenv.policy.sync import SyncRule
from clusterenv.wire import values
from clusterenv.wire.buffers import RolloutBuffers
from clusterenv.wire.layout import Layout

_POOLS_BYTES = 64 << 20  # Of all versions together.
_MAX_SHOWN = 64  # Observations on which a policy is tried: a few will do.


class Probing:
    """Keeps how each version acted in states that its holders met.

    Along with steps and rollouts, workers report for a few rows how their actions were distributed. The newest policy
    is evaluated once on all of a version's rows, from whichever worker they came.
    """

    def __init__(
        self, rule: SyncRule, backend: Backend, holdings: Holdings, observations: Layout, stats: Stats
    ) -> None:
        self._rule = rule
        # A user's own rule may not have these.
        self._measure: Measure = getattr(rule, "measure", "kl")
        self._max_shared_bytes: float = getattr(rule, "max_shared_bytes", math.inf)
        self._backend = backend
        self._holdings = holdings
        self._observations = observations
        self._stats = stats
        self._form: Form | None = None
        self._is_studied = False  # Whether the form was determined.
        self._pooled: weakref.WeakSet[Version] = weakref.WeakSet()  # The versions that have a pool.
        self._probed = 0  # The newest version when a step last requested probes.
        self._asked: dict[Worker, int] = {}  # Workers whose probes of the step under way are due, and how many rows.

    @property
    def shown(self) -> list[NDArray[Any]]:
        """Some of the newest observations, one array per leaf."""
        return [array[:_MAX_SHOWN] for array in self._backend.newest.observations if array is not None]

    def find_form(self, policy: Policy) -> Form | None:
        """Find out what a policy's distributions look like; None if it has none.

        Raises:
            PolicyError: The distributions cannot be compared with the rule's measure.
        """
        shown = self.shown
        form = Form.of(policy, self._observations.nest(shown), policy.initial_state(len(shown[0])))
        if self._measure in NEEDS_PROBABILITIES:
            if form is None:
                raise PolicyError(
                    f'measure="{self._measure}" is computed from the probabilities of actions, and this policy gives '
                    "neither its distribution nor log-probabilities that could be computed for other versions. Give "
                    "it a distribution() (TorchPolicy takes distribution=...), or choose EveryUpdate()."
                )
            measure_divergence(form.model, form.model, self._measure)  # Raises if this family has none.
        return form

    def begin(self, form: Form | None) -> None:
        """Forget all pools: they are of a policy of another structure, which cannot be compared with this one."""
        for held in self._pooled:
            held.pool = None
        self._pooled.clear()
        self._form, self._is_studied = form, self._rule.compares

    @property
    def can_compare(self) -> bool:
        """Whether versions are compared: the rule asks for it, and the policy has distributions."""
        return self._rule.compares and self._study() is not None

    def is_exempt(self, worker: Worker) -> bool:
        """Whether a worker pulls every version because that is faster than judging whether it should."""
        return worker.mailbox is not None and self._holdings.spec.size_bytes > self._max_shared_bytes

    def divergence_of(self, held: Version) -> float:
        """Return how far a version has diverged from the newest; NaN if that is not known.

        A version is compared once with each newer one, and again when its pool has doubled. If weights are rounded for
        sending, even the newest version on the workers differs slightly from the learner's.
        """
        newest, policy = self._holdings.newest, self._holdings.policy
        if held.number == newest and self._holdings.spec.is_exact:
            return 0.0
        if held.pool is None or not held.pool or policy is None:
            return held.divergence if held.compared == newest else float("nan")
        if held.compared < newest or len(held.pool) >= 2 * held.num_compared:
            held.divergence = held.pool.diverges_from(policy, self._observations.nest, self._measure)
            held.compared, held.num_compared = newest, len(held.pool)
            self._stats.checks += 1
        return held.divergence

    def num_probes(self, held: Version) -> int:
        """Return at how many rows each holder of a version should report how it acts: its share of a pool."""
        if not self._rule.compares or (self._is_studied and self._form is None):
            return 0
        most = self._most_rows(held)
        wanted = most if held.num_rows < most else most / RENEWAL
        return math.ceil(wanted / max(1, len(held.holders)))

    def share(self) -> dict[Worker, int]:
        """Return at how many rows each worker should report how it acts; workers that need not are left out."""
        return self._share_among(self._holdings.versions.values())

    def share_for_step(self) -> dict[Worker, int]:
        """Return the same for a single step: a full pool is enough until there is a newer version."""
        self._rehearse()
        is_first, self._probed = self._probed < self._holdings.newest, self._holdings.newest
        versions = self._holdings.versions.values()
        self._asked = self._share_among(
            [held for held in versions if is_first or held.num_rows < self._most_rows(held)]
        )
        return dict(self._asked)

    def take_rollout(self, held: Version, data: bytes | None, columns: RolloutBuffers, at_most: int) -> None:
        """Add a worker's report on how its actions in a rollout were distributed, for `at_most` rows.

        Raises:
            WireError: The report is malformed.
        """
        self._rehearse(columns)
        if data is None:
            held.is_silent = held.is_silent or at_most > 0
            return
        num_steps, num_envs = columns.rewards.shape
        read = self._read(data, num_steps * num_envs, at_most, {})
        if read is not None:
            self._add(held, *_states_at(columns, *np.divmod(read.rows.astype(np.int64), num_envs)), read)

    def take_step(self, worker: Worker, incarnation: int, data: bytes) -> None:
        """Add a worker's report on how its actions in the last step were distributed.

        What a lost incarnation reported is dropped: its successor holds another version, and shows other observations.

        Raises:
            WireError: The report is malformed, or was not asked for.
        """
        given, policy = worker.policy.given, self._holdings.policy
        at_most = self._asked.pop(worker, 0)
        state = None if policy is None else policy.initial_state(1)
        if given and incarnation == worker.incarnation:
            read = self._read(data, worker.num_envs, at_most, state or {})
            if read is not None:
                before = worker.buffers[1 - worker.shown]
                leaves = [array[read.rows] for array in before.observations if array is not None]
                self._add(given[-1], leaves, read.states, read)

    def end_step(self) -> None:
        """Note that no more reports on the last step will come."""
        for worker in self._asked:
            if worker.policy.given:
                worker.policy.given[-1].is_silent = True
        self._asked.clear()

    def _share_among(self, versions: Iterable[Version]) -> dict[Worker, int]:
        shares = [(held, share) for held in versions if (share := self.num_probes(held))]
        return {worker: share for held, share in shares for worker in held.holders if not self.is_exempt(worker)}

    def _rehearse(self, columns: RolloutBuffers | None = None) -> None:
        """Give the rehearsal of another rule some states, of a rollout or of the next step."""
        rehearsal, policy, newest = self._stats.rehearsal, self._holdings.policy, self._holdings.newest
        if rehearsal is None or policy is None or not rehearsal.wants_states_of(policy):
            return
        if columns is not None:
            steps, rows = np.nonzero(columns.valid)
            if len(steps):
                chosen = np.linspace(0, len(steps) - 1, min(len(steps), NUM_ROWS)).astype(np.int64)
                rehearsal.take(policy, newest, *_states_at(columns, steps[chosen], rows[chosen]))
        elif policy.initial_state(1) is None:  # Recurrent states would be on the workers only.
            rehearsal.take(policy, newest, [array.copy() for array in self.shown], {})

    def _study(self) -> Form | None:
        """Find out what the policy's distributions look like, if that was not done on adoption."""
        if not self._is_studied and self._holdings.policy is not None:
            self._form = self.find_form(self._holdings.policy)
            self._is_studied = True
        return self._form

    def _most_rows(self, held: Version) -> int:
        """Return how many rows a version's pool may have, to keep all pools together within their limit."""
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
        if form is None or self._holdings.policy is None:  # There is no policy if a failure has ended the stream.
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


def _states_at(
    columns: RolloutBuffers, steps: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[list[NDArray[Any]], State]:
    """Copy the observations and recurrent states at some steps and rows of a rollout."""
    where = steps, rows
    return (
        [column[where] for column in columns.observations],
        {name: column[where] for name, column in columns.states.items()},
    )
