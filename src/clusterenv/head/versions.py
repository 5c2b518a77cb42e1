"""Versions: numbers the versions of the learner's policy, and brings them to the workers."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any

from clusterenv.head.backend import Backend
from clusterenv.head.holdings import Holdings
from clusterenv.head.probing import Probing
from clusterenv.head.pulls import Pulls
from clusterenv.head.stats import Stats
from clusterenv.head.worker import Worker
from clusterenv.policy.contents import generation_of
from clusterenv.policy.policy import Policy
from clusterenv.policy.rehearsal import Rehearsal
from clusterenv.policy.sync import EveryUpdate, Reason, SyncRule
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire.layout import Layout
from clusterenv.wire.zeromq import Frames, cut

log = logging.getLogger(__name__)


class Versions:
    """Keeps the workers' policies as new as the sync rule wants them.

    Attributes:
        holdings: The policy, and which version each worker holds.
        probing: How far these versions have diverged from the newest.
        pulls: Which workers pull the newest.
    """

    def __init__(self, rule: SyncRule, backend: Backend, layouts: tuple[Layout, Layout], stats: Stats) -> None:
        self.holdings = Holdings(backend.workers)
        self.probing = Probing(rule, backend, self.holdings, layouts[1], stats)
        self.pulls = Pulls(rule, backend, self.holdings, self.probing, stats)
        self._rule = rule
        self._backend = backend
        self._actions, self._observations = layouts
        self._stats = stats
        is_every = isinstance(rule, EveryUpdate)
        self._rehearsal = stats.rehearsal = Rehearsal(self._observations.nest) if is_every else None
        self._stamp: Hashable = None
        self._is_told = False
        self._generation = 0
        self._encoded: tuple[int, Frames] | None = None

    def tell(self) -> None:
        """Note that the weights have changed, for policies whose changes cannot be detected."""
        self._is_told = True

    def prepare(self, policy: Policy, arguments: Mapping[str, Any], *, for_all: bool = False) -> set[Worker]:
        """Bring the newest version to the workers that need it, or to all; returns those that must load it now.

        A policy that the workers do not hold yet is sent at once, and tried out with these per-call values.
        """
        holdings = self.holdings
        if policy is not holdings.policy or not self.notice(policy):
            self._adopt(policy, arguments)
            return set()
        self.pulls.count_version()
        pulls = self.pulls.note_all(self.pulls.find_exempt()) | self.pulls.note_all(self.pulls.judge())
        if for_all:
            pulls |= self.pulls.note_all(self.pulls.find_late(0))
        if pulls:
            self.note_sent(self._backend.load(holdings.spec, policy.weights(), holdings.newest, pulls))
        return pulls

    def notice(self, policy: Policy) -> bool:
        """Check whether the weights have changed, and if so number a new version.

        Returns:
            False if the policy's structure has changed, not only its weights: then `prepare` must send the policy.
        """
        stamp = policy.stamp()
        has_changed = self._is_told or stamp != self._stamp
        if has_changed:
            self._show(policy)
        if generation_of(policy) != self._generation:
            return False
        if has_changed:
            self._number_version()  # First: an interrupt in between costs a superfluous number, not a label.
            self._stamp, self._is_told = stamp, False
            if self._rehearsal is not None:
                self._rehearsal.judge(policy, self.holdings.newest)
        return True

    def note_adopted(self, worker: Worker, version: int) -> None:
        """Note that a replacement worker has adopted the policy, with the weights of this version."""
        self.pulls.note(worker, Reason.FIRST, version)
        self.pulls.count_newcomer(worker)
        self.note_sent(1)

    def note_sent(self, num_copies: int) -> None:
        """Count copies of the weights as really sent: workers on the same machine may share a copy."""
        self._stats.bytes["weights"] += num_copies * self.holdings.spec.size_bytes

    def note_missing(self, worker: Worker, version: int, held: int, frames: Frames | None) -> Frames | None:
        """Return the frames to send a worker that did not find a version on its machine: `frames`, if given.

        None if the version is no longer available: the worker then keeps the version it held, and is judged again.

        Raises:
            WireError: The worker was not given the version it says it holds.
        """
        if frames is None and self._encoded is not None and self._encoded[0] == version:
            frames = self._encoded[1]
        if frames is not None:
            self.note_sent(1)
        else:
            self.holdings.take_back(worker, held)
            self.pulls.judge_again(worker)
        return frames

    def offer_newest(self) -> tuple[int, Frames] | None:
        """Return the newest version and its weights for a replacement worker; None if the worker has to wait.

        The learner may have changed its weights since the last call that took the policy; then they are a new version.
        """
        policy = self.holdings.policy
        try:
            if policy is not None and self.notice(policy):
                return self.encode_newest()
        except Exception:  # The agent's own code: the next call that takes the policy raises it.
            log.debug("the policy cannot be sent now", exc_info=True)
        self.forget_policy()  # The next call then sends it to all workers anew.
        return None

    def encode_newest(self) -> tuple[int, Frames]:
        """Return the newest version and its weights, encoded and cut once for all workers they are sent to."""
        newest, policy = self.holdings.newest, self.holdings.policy
        if self._encoded is None or self._encoded[0] != newest:
            assert policy is not None, "a policy was adopted"
            self._encoded = newest, cut(self.holdings.spec.encode(policy.weights()))
        return self._encoded

    def forget_policy(self) -> None:
        """Forget what the workers hold, after a failure: the next call sends the whole policy anew."""
        self.holdings.policy = None
        self._backend.forget_policy()

    def _adopt(self, policy: Policy, arguments: Mapping[str, Any]) -> None:
        self.forget_policy()  # If this fails halfway, no worker is trusted to hold a policy.
        holdings = self.holdings
        stamp = policy.stamp()  # First, because it finds out what the policy contains.
        self._show(policy)
        form = self.probing.find_form(policy) if self._rule.compares else None
        holdings.spec = WeightsSpec.of(policy.weights(), getattr(policy, "rounded", ()))
        generation = generation_of(policy)
        num_copies = self._backend.adopt(policy, holdings.spec, holdings.newest + 1, arguments)
        holdings.policy, self._stamp, self._is_told, self._generation = policy, stamp, False, generation
        self._number_version()
        if self._rehearsal is not None:
            self._rehearsal.adopt(holdings.newest)
        self.note_sent(num_copies)
        holdings.clear()
        self.probing.begin(form)
        self.pulls.begin()

    def _show(self, policy: Policy) -> None:
        """Show the newest observations to a policy with `look_at`, before its weights are read."""
        if (look_at := getattr(policy, "look_at", None)) is not None:
            look_at(self._observations.nest(self.probing.shown), self._actions.space)
        self._stats.fast_path = int(getattr(policy, "is_fast", False))

    def _number_version(self) -> None:
        self.holdings.newest += 1
        self._stats.updates += 1
