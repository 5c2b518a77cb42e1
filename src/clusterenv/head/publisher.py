"""Publisher: numbers the policy's versions, and decides with the sync rule which worker takes which."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clusterenv.head.ledger import Ledger
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
from clusterenv.policy.sync import Reason, SyncRule, Tracker
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire.block import Block
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes

log = logging.getLogger(__name__)


class PolicyBackend(Protocol):
    """Where policies run."""

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The environments of each worker."""

    @property
    def planes(self) -> Planes:
        """The newest observations."""

    def adopt(
        self, policy: Policy, spec: WeightsSpec, version: int, num_probes: int, arguments: Mapping[str, Any]
    ) -> None:
        """Send the policy's structure and weights to every worker."""

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Encode a version's weights once, for all workers that will take them."""

    def measure(self, sketches: Mapping[int, Sketch], number: int) -> dict[int, Measurement]:
        """Let workers compare their policy with the newest."""

    def take_new(self) -> dict[int, int]:
        """Return the versions held by workers that are new since the last time."""


class Publisher:
    """Keeps the workers' policies as new as the sync rule wants them."""

    def __init__(self, rule: SyncRule, backend: PolicyBackend, observations: Layout, ledger: Ledger) -> None:
        self.version = 0
        self.number = 0
        self._rule = rule
        self._backend = backend
        self._observations = observations
        self._ledger = ledger
        self._policy: Policy | None = None
        self._stamp: Hashable = None
        self._is_told = False
        self._spec = WeightsSpec(())
        self._shards = backend.shards
        self._own = [0] * len(self._shards)
        self._checked = [0] * len(self._shards)
        self._divergence = [float("nan")] * len(self._shards)
        self._trackers: list[Tracker] = []
        self._probes: list[Probes | None] = [None] * len(self._shards)
        self._has_probes = False
        self._warned: set[Reason] = set()

    def tell(self) -> None:
        """Note that the weights have changed, for policies that cannot notice it themselves."""
        self._is_told = True

    def prepare(self, policy: Policy, arguments: Mapping[str, Any]) -> list[bool]:
        """Bring the newest version to the workers that need it; returns which of them must load it now."""
        if policy is not self._policy:
            self._adopt(policy, arguments)
            return [False] * len(self._shards)
        self.note_new()
        stamp = policy.stamp()
        if self._is_told or stamp != self._stamp:
            self._stamp, self._is_told = stamp, False
            self._number_version()
        return self._choose(policy)

    def remember(self, block: Block) -> None:
        """Keep the probes of a rollout, the same that its workers keep."""
        if not self._rule.needs_sketch:
            return
        self._has_probes = True
        num_steps = len(block.rewards)
        for index, (start, stop) in enumerate(self._shards):
            columns = block.columns(start, stop)
            indices = choose_probes(
                num_steps, stop - start, count=DEFAULT_PROBES, seed=0, number=self.number, valid=columns.valid
            )
            obs = self._observations.nest([column[:num_steps] for column in columns.observations])
            self._probes[index] = take_probes(indices, obs, columns.states or None)

    def note_new(self) -> None:
        """Learn which workers were replaced: these hold no probes, and the weights that were encoded last."""
        for index, version in self._backend.take_new().items():
            self._own[index] = version
            self._divergence[index] = float("nan") if version < self.version else 0.0
            self._probes[index] = None
            self._trackers[index] = self._rule.start()
            self._ledger.pulls += 1
            self._ledger.reasons[Reason.FIRST] += 1
            self._ledger.bytes["weights"] += self._spec.size_bytes

    def forget_probes(self) -> None:
        """Note that the newest observations are the planes'."""
        if self._has_probes:
            self._has_probes = False
            self._probes = [None] * len(self._shards)

    def forget_policy(self) -> None:
        """Note that it is not known what the workers hold, after a failure: the next call sends everything anew."""
        self._policy = None

    def provenance(self) -> dict[str, NDArray[Any]]:
        """Return, for every environment, the version its worker holds, its age and its last measured divergence."""
        sizes = [stop - start for start, stop in self._shards]
        versions = np.repeat(np.array(self._own, np.int64), sizes)
        return {
            "versions": versions,
            "ages": self.version - versions,
            "divergences": np.repeat(np.array(self._divergence, np.float64), sizes),
        }

    def _adopt(self, policy: Policy, arguments: Mapping[str, Any]) -> None:
        self.forget_policy()  # Should adopting fail halfway, no worker is trusted to hold any policy.
        weights = policy.weights()
        self._spec = WeightsSpec.of(weights)
        num_probes = DEFAULT_PROBES if self._rule.needs_sketch else 0
        stamp = policy.stamp()
        self._backend.adopt(policy, self._spec, self.version + 1, num_probes, arguments)
        self._policy, self._stamp, self._is_told = policy, stamp, False
        self._number_version()
        self._trackers = [self._rule.start() for _ in self._shards]
        self.forget_probes()
        for index in range(len(self._shards)):
            self._pull(index, Reason.FIRST)

    def _number_version(self) -> None:
        self.version += 1
        self._ledger.note_version(len(self._shards), self._spec.size_bytes)

    def _choose(self, policy: Policy) -> list[bool]:
        behind = [index for index in range(len(self._shards)) if self._own[index] < self.version > self._checked[index]]
        for index in behind:
            self._divergence[index] = float("nan")
        if self._rule.needs_sketch and behind:
            self._measure(policy, behind)
            self.note_new()
        verdicts: dict[int, Reason] = {}
        for index in behind:
            self._checked[index] = self.version
            measured = self._divergence[index]
            divergence = measured if self._rule.needs_sketch and not math.isnan(measured) else None
            verdict = self._trackers[index].judge(self._own[index], self.version, divergence)
            if verdict.pulls:
                verdicts[index] = verdict.reason
                if verdict.advice is not None and verdict.reason not in self._warned:
                    self._warned.add(verdict.reason)
                    log.warning("%s", verdict.advice)
        if verdicts:
            self._backend.load(self._spec, policy.weights(), self.version)
        for index, reason in verdicts.items():
            self._pull(index, reason)
        self._ledger.age = float(np.mean([self.version - own for own in self._own]))
        return [index in verdicts for index in range(len(self._shards))]

    def _pull(self, index: int, reason: Reason) -> None:
        self._own[index] = self.version
        self._divergence[index] = 0.0
        self._ledger.pulls += 1
        self._ledger.reasons[reason] += 1
        self._ledger.bytes["weights"] += self._spec.size_bytes

    def _measure(self, policy: Policy, behind: Sequence[int]) -> None:
        self.number += 1
        sketches: dict[int, Sketch] = {}
        for index in behind:
            sketch = make_sketch(policy, self._probes[index] or self._current_probes(policy, index), self.version)
            if sketch is not None:
                sketches[index] = sketch
                self._ledger.checks += 1
                self._ledger.bytes["sketches"] += sketch.size_bytes
        if sketches:
            for index, measurement in self._backend.measure(sketches, self.number).items():
                self._divergence[index] = measurement.mean
            self._ledger.divergence = float(np.nanmean([self._divergence[index] for index in sketches]))

    def _current_probes(self, policy: Policy, index: int) -> Probes:
        start, stop = self._shards[index]
        count = min(DEFAULT_PROBES, stop - start)
        indices = choose_probes(1, stop - start, count=count, seed=0, number=self.number)
        rows = [plane[None, start:stop] for plane in self._backend.planes.observations if plane is not None]
        probes = take_probes(indices, self._observations.nest(rows))
        return probes._replace(state=policy.initial_state(count))
