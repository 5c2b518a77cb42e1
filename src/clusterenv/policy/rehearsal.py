"""Rehearsal: what `AdaptiveSync` would have done in a run that pulls every version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from clusterenv.policy.distribution import Array
from clusterenv.policy.policy import Policy, State
from clusterenv.policy.pool import POOL_ROWS, RENEWAL, Nest, Pool, Sample
from clusterenv.policy.probes import Form
from clusterenv.policy.sync import AdaptiveSync, Case

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

NUM_ROWS = 64  # The mean over this many is within 13 % of the truth, and evaluating them costs little.
_SHARE = 0.01  # Of the run's time: beyond it, versions are skipped rather than the run slowed down.
_ALLOWANCE_S = 0.1  # The first evaluations take longer, and the first versions matter most.


class Rehearsal:
    """Applies the rule to one imagined worker, entirely on the head: real workers are not involved.

    If a policy cannot be compared, or comparing it fails, only the rehearsal ends.

    Attributes:
        rule: The rule that is rehearsed.
        num_versions: The number of versions so far.
        num_judged: How many of them were compared with the one that the imagined worker held.
        num_pulls: How often the imagined worker pulled.

    Args:
        nest: Turns leaves into observations as the policy takes them.
        clock: Returns the time in seconds.
    """

    def __init__(self, nest: Nest, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rule = AdaptiveSync()
        self.num_versions = self.num_judged = self.num_pulls = 0
        self._nest = nest
        self._clock = clock
        self._started_s = clock()
        self._spent_s = 0.0
        self._is_over = False
        self._version = 0
        self._pool: Pool | None = None
        self._form: Form | None = None
        self._row_bytes = 0
        self._tracker = self.rule.start()

    def estimate_check_bytes(self, num_workers: float, num_rows: float) -> float:
        """Estimate how many bytes real workers would have sent per version in order to be judged.

        Workers that pull the same version fill a pool together; those that keep an older one renew its pool.

        Args:
            num_workers: The number of workers.
            num_rows: How many steps the workers make per version, all together.
        """
        share = self.num_pulls / self.num_versions
        wanted = POOL_ROWS * min(1.0, num_workers * share) + POOL_ROWS / RENEWAL * min(num_workers, 1 / share)
        return self._row_bytes * min(wanted, num_rows)

    def adopt(self, version: int) -> None:
        """Note that the workers were given another policy."""
        self.num_versions += 1
        self.num_pulls += 1
        self._version, self._pool, self._form = version, None, None
        self._tracker = self.rule.start()

    def judge(self, policy: Policy, version: int) -> None:
        """Decide whether the imagined worker pulls a new version."""
        if not _leaves_no_trace(policy):
            return
        self.num_versions += 1
        if self._pool is None or not self._may_spend():
            return
        pool = self._pool
        divergence = self._spend(lambda: pool.diverges_from(policy, self._nest))
        if divergence is not None:
            self.num_judged += 1
            if self._tracker.judge(Case(self._version, version, divergence)).pulls:
                self.num_pulls += 1
                self._version, self._pool = version, None

    def wants_states_of(self, policy: Policy) -> bool:
        """Whether `take` should be given states on which to compare this newest version with later ones."""
        return self._pool is None and _leaves_no_trace(policy) and self._may_spend()

    def take(self, policy: Policy, version: int, leaves: Sequence[Array], states: State) -> None:
        """Keep the newest version's action distributions in some states.

        Args:
            policy: The newest version.
            version: Its number.
            leaves: The observations, one array per leaf; they are kept.
            states: The recurrent states, if the policy has any.
        """
        self._pool = self._spend(lambda: self._fill(policy, list(leaves), states))
        self._version = version

    def _fill(self, policy: Policy, leaves: list[Array], states: State) -> Pool | None:
        obs = self._nest(leaves)
        self._form = self._form or Form.of(policy, obs, states or None)
        found = None if self._form is None else policy.distribution(obs, states or None)
        if self._form is None or found is None:
            self._is_over = True
            return None
        found.check()
        self._row_bytes = self._form.row_bytes + sum(array[:1].nbytes for array in states.values())
        pool = Pool(self._form)
        pool.add(Sample(leaves, states, found.to_arrays()[1]), len(leaves[0]))
        return pool

    def _may_spend(self) -> bool:
        return not self._is_over and self._spent_s <= _ALLOWANCE_S + _SHARE * (self._clock() - self._started_s)

    def _spend(self, work: Callable[[], _Found]) -> _Found | None:
        started_s = self._clock()
        try:
            with np.errstate(all="ignore"):
                return work()
        except Exception:  # The agent's own code, run only for a figure in a message: it must not end the run.
            log.debug("what AdaptiveSync would save cannot be told", exc_info=True)
            self._is_over = True
            return None
        finally:
            self._spent_s += self._clock() - started_s


def _leaves_no_trace(policy: Policy) -> bool:
    """Whether evaluating a policy has no side effects: the learner's own module may have some."""
    return bool(getattr(policy, "is_fast", True))
