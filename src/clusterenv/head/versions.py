"""Versions: numbers the policy's versions, and decides with the sync rule which worker takes which."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clusterenv.head.stats import Stats
from clusterenv.head.worker import HeldPolicy, Worker
from clusterenv.policy.contents import generation_of
from clusterenv.policy.policy import Policy
from clusterenv.policy.sketch import (
    DEFAULT_PROBES,
    Measurement,
    Probes,
    Sketch,
    choose_probes,
    make_sketch,
    take_probes,
)
from clusterenv.policy.sync import Reason, SyncRule
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire.buffers import RolloutBuffers, StepBuffers
from clusterenv.wire.layout import Layout
from clusterenv.wire.zeromq import Frames, cut

log = logging.getLogger(__name__)

_MAX_SHOWN = 64  # Observations are a policy's to try itself on: a few will do.


class PolicyBackend(Protocol):
    """Where policies run."""

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that hold them."""

    @property
    def newest(self) -> StepBuffers:
        """The newest observations."""

    def adopt(
        self, policy: Policy, spec: WeightsSpec, version: int, num_probes: int, arguments: Mapping[str, Any]
    ) -> None:
        """Send the policy's structure and weights to every worker."""

    def forget_policy(self) -> None:
        """Do not trust any worker to hold a policy."""

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]]) -> None:
        """Encode the newest weights once, for all workers that will take them."""

    def measure(self, sketches: Mapping[Worker, tuple[int, Sketch]]) -> dict[Worker, Measurement]:
        """Let workers compare their policy with the newest."""


class Versions:
    """Keeps the workers' policies as new as the sync rule wants them.

    Attributes:
        newest: The number of the newest version.
        number: Of the last rollout.
    """

    def __init__(self, rule: SyncRule, backend: PolicyBackend, observations: Layout, stats: Stats) -> None:
        self.newest = 0
        self.number = 0
        self._rule = rule
        self._backend = backend
        self._workers = backend.workers
        self._observations = observations
        self._stats = stats
        self._policy: Policy | None = None
        self._stamp: Hashable = None
        self._is_told = False
        self._generation = 0
        self._spec = WeightsSpec(())
        self._sum_held = 0
        self._encoded: tuple[int, Frames] | None = None
        self._warned: set[Reason] = set()

    def tell(self) -> None:
        """Note that the weights have changed, for policies that cannot notice it themselves."""
        self._is_told = True

    def prepare(self, policy: Policy, arguments: Mapping[str, Any]) -> set[Worker]:
        """Bring the newest version to the workers that need it; returns which of them must load it now."""
        if policy is not self._policy or not self.notice(policy):
            self._adopt(policy, arguments)
            return set()
        return self._choose(policy)

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
        return True

    def remember(self, buffers: RolloutBuffers) -> None:
        """Keep the probes of a rollout of all environments, the same that its workers keep."""
        for worker in self._workers:
            self.remember_shard(worker, buffers.columns(worker.start, worker.stop), self.number)

    def remember_shard(self, worker: Worker, columns: RolloutBuffers, number: int) -> None:
        """Keep the probes of one worker's part of a rollout."""
        if not self._rule.needs_sketch:
            return
        num_steps, num_envs = columns.rewards.shape
        indices = choose_probes(num_steps, num_envs, count=DEFAULT_PROBES, seed=0, number=number, valid=columns.valid)
        obs = self._observations.nest([column[:num_steps] for column in columns.observations])
        worker.policy.probes = number, take_probes(indices, obs, columns.states or None)

    def note_adopted(self, worker: Worker, version: int) -> None:
        """Note that a new worker has taken over, with the weights of this version."""
        self._sum_held -= worker.policy.version
        worker.policy = HeldPolicy(tracker=self._rule.start())
        self._pull(worker, Reason.FIRST)
        if version < self.newest:
            self._hold(worker, version)
            worker.policy.divergence = float("nan")

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

    def forget_probes(self) -> None:
        """Note that the newest observations are those of the step buffers."""
        if self._rule.needs_sketch and self._policy is not None:
            for worker in self._workers:
                worker.policy.probes = None

    def forget_policy(self) -> None:
        """Note that it is not known what the workers hold, after a failure: the next call sends everything anew."""
        self._policy = None
        self._backend.forget_policy()

    def provenance(self) -> dict[str, NDArray[Any]]:
        """Return, for every environment, the version its worker holds, its age and its last measured divergence."""
        sizes = [worker.num_envs for worker in self._workers]
        versions = np.repeat(np.array([worker.policy.version for worker in self._workers], np.int64), sizes)
        divergences = np.array([worker.policy.divergence for worker in self._workers], np.float64)
        return {"versions": versions, "ages": self.newest - versions, "divergences": np.repeat(divergences, sizes)}

    def is_behind(self, worker: Worker) -> bool:
        """Whether a worker holds an older version than the newest, and nobody has judged yet whether that will do."""
        return worker.policy.version < self.newest > worker.policy.checked

    def can_judge(self, worker: Worker) -> bool:
        """Whether a worker has delivered observations to compare policies on, if the rule compares them."""
        return worker.policy.probes is not None or not self._rule.needs_sketch

    def judge(self, worker: Worker, version: int, divergence: float | None) -> bool:
        """Decide whether a worker takes the newest version; then count that.

        Args:
            worker: Whose.
            version: That it was compared with.
            divergence: What came out; None if they cannot be compared.
        """
        held = worker.policy
        held.checked = version
        held.divergence = float("nan") if divergence is None else divergence
        assert held.tracker is not None, "it was given a policy"
        verdict = held.tracker.judge(held.version, version, divergence)
        if verdict.pulls:
            if verdict.advice is not None and verdict.reason not in self._warned:
                self._warned.add(verdict.reason)
                log.warning("%s", verdict.advice)
            self._pull(worker, verdict.reason)
        self._stats.age = self.newest - self._sum_held / len(self._workers)
        return verdict.pulls

    def sketch(self, policy: Policy, worker: Worker) -> tuple[int, Sketch] | None:
        """Sketch the newest policy for a worker, with the number of the rollout its probes are of; None if none can."""
        if not self._rule.needs_sketch:
            return None
        if worker.policy.probes is None:
            self.number += 1
            number, probes = self.number, self._current_probes(policy, worker)
        else:
            number, probes = worker.policy.probes
        sketch = make_sketch(policy, probes, self.newest)
        if sketch is None:
            return None
        self._stats.checks += 1
        self._stats.bytes["sketches"] += sketch.size_bytes
        return number, sketch

    def _adopt(self, policy: Policy, arguments: Mapping[str, Any]) -> None:
        self.forget_policy()  # Should adopting fail halfway, no worker is trusted to hold any policy.
        stamp = policy.stamp()  # First: it finds out what there is.
        self._show(policy)
        self._spec = WeightsSpec.of(policy.weights())
        num_probes = DEFAULT_PROBES if self._rule.needs_sketch else 0
        generation = generation_of(policy)
        self._backend.adopt(policy, self._spec, self.newest + 1, num_probes, arguments)
        self._policy, self._stamp, self._is_told, self._generation = policy, stamp, False, generation
        self._number_version()
        self._sum_held = 0
        for worker in self._workers:
            worker.policy = HeldPolicy(tracker=self._rule.start())
            if worker.is_ready:
                self._pull(worker, Reason.FIRST)

    def _show(self, policy: Policy) -> None:
        """Show a policy that wants to see them the newest observations, before its weights are read."""
        if (look_at := getattr(policy, "look_at", None)) is not None:
            rows = [array[:_MAX_SHOWN] for array in self._backend.newest.observations if array is not None]
            look_at(self._observations.nest(rows))
        self._stats.fast_path = int(getattr(policy, "is_fast", False))

    def _number_version(self) -> None:
        self.newest += 1
        self._stats.note_version(len(self._workers), self._spec.size_bytes)

    def _choose(self, policy: Policy) -> set[Worker]:
        behind = [worker for worker in self._workers if worker.is_ready and self.is_behind(worker)]
        sketches = {worker: found for worker in behind if (found := self.sketch(policy, worker)) is not None}
        measured: dict[Worker, Measurement] = {}
        if sketches:
            measured = self._backend.measure(sketches)
            self._stats.divergence = float(np.nanmean([m.mean for m in measured.values()])) if measured else math.nan
        pulls = set()
        for worker in behind:
            # One that took over in the meantime has the newest.
            if self.is_behind(worker):
                divergence = measured[worker].mean if worker in measured else None
                if self.judge(worker, self.newest, divergence):
                    pulls.add(worker)
        if pulls:
            self._backend.load(self._spec, policy.weights())
        return pulls

    def _hold(self, worker: Worker, version: int) -> None:
        """Note which version a worker holds."""
        self._sum_held += version - worker.policy.version
        worker.policy.version = version

    def _pull(self, worker: Worker, reason: Reason) -> None:
        self._hold(worker, self.newest)
        worker.policy.divergence = 0.0
        self._stats.pulls += 1
        self._stats.reasons[reason] += 1
        self._stats.bytes["weights"] += self._spec.size_bytes

    def _current_probes(self, policy: Policy, worker: Worker) -> Probes:
        start, stop = worker.start, worker.stop
        count = min(DEFAULT_PROBES, worker.num_envs)
        indices = choose_probes(1, worker.num_envs, count=count, seed=0, number=self.number)
        rows = [array[None, start:stop] for array in self._backend.newest.observations if array is not None]
        probes = take_probes(indices, self._observations.nest(rows))
        return probes._replace(state=policy.initial_state(count))
