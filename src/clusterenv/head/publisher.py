"""Publisher: numbers the policy's versions, and decides with the sync rule which worker takes which."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping
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

    def measure(self, sketches: Mapping[int, Sketch], numbers: Mapping[int, int]) -> dict[int, Measurement]:
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
        self._sum_own = 0
        self._checked = [0] * len(self._shards)
        self._divergence = [float("nan")] * len(self._shards)
        self._trackers: list[Tracker] = []
        self._probes: dict[int, tuple[int, Probes]] = {}
        self._warned: set[Reason] = set()

    def tell(self) -> None:
        """Note that the weights have changed, for policies that cannot notice it themselves."""
        self._is_told = True

    @property
    def weights_spec(self) -> WeightsSpec:
        """The form of the weights."""
        return self._spec

    def prepare(self, policy: Policy, arguments: Mapping[str, Any]) -> list[bool]:
        """Bring the newest version to the workers that need it; returns which of them must load it now."""
        if policy is not self._policy:
            self._adopt(policy, arguments)
            return [False] * len(self._shards)
        self.note_new()
        self.notice(policy)
        return self._choose(policy)

    def notice(self, policy: Policy) -> None:
        """Find out whether the weights have changed: then they are a new version."""
        stamp = policy.stamp()
        if self._is_told or stamp != self._stamp:
            self._stamp, self._is_told = stamp, False
            self._number_version()

    def remember(self, block: Block) -> None:
        """Keep the probes of a rollout of all environments, the same that its workers keep."""
        for index, (start, stop) in enumerate(self._shards):
            self.remember_shard(index, block.columns(start, stop), self.number)

    def remember_shard(self, index: int, columns: Block, number: int) -> None:
        """Keep the probes of one worker's part of a rollout."""
        if not self._rule.needs_sketch:
            return
        num_steps, num_envs = columns.rewards.shape
        indices = choose_probes(num_steps, num_envs, count=DEFAULT_PROBES, seed=0, number=number, valid=columns.valid)
        obs = self._observations.nest([column[:num_steps] for column in columns.observations])
        self._probes[index] = number, take_probes(indices, obs, columns.states or None)

    def note_new(self) -> None:
        """Learn which workers were replaced: these hold no probes, and the weights that were encoded last."""
        for index, version in self._backend.take_new().items():
            self.note_replaced(index, version)

    def note_replaced(self, index: int, version: int) -> None:
        """Note that a new worker has taken over, with the weights of this version."""
        self._probes.pop(index, None)
        self._trackers[index] = self._rule.start()
        self._pull(index, Reason.FIRST)
        if version < self.version:
            self._hold(index, version)
            self._divergence[index] = float("nan")

    @property
    def max_lag(self) -> float:
        """How many versions behind the rule lets a worker be."""
        return self._rule.max_lag

    def lag(self, index: int) -> int:
        """How many versions a worker is behind the newest."""
        return self.version - self._own[index]

    def insist(self, index: int) -> None:
        """Count a pull that the rule did not ask for: the worker is too far behind for its work to be used."""
        self._pull(index, Reason.LAG)

    def forget_probes(self) -> None:
        """Note that the newest observations are the planes'."""
        if self._probes:
            self._probes = {}

    def forget_policy(self) -> None:
        """Note that it is not known what the workers hold, after a failure: the next call sends everything anew."""
        self._policy = None

    def divergence(self, index: int) -> float:
        """The divergence last measured between a worker's policy and the newest; NaN if never."""
        return self._divergence[index]

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

    def is_behind(self, index: int) -> bool:
        """Whether a worker holds an older version than the newest, and nobody has judged yet whether that will do."""
        return self._own[index] < self.version > self._checked[index]

    def judge(self, index: int, version: int, divergence: float | None) -> bool:
        """Decide whether a worker takes the newest version; then count that.

        Args:
            index: Whose.
            version: That it was compared with.
            divergence: What came out; None if they cannot be compared.
        """
        self._checked[index] = version
        self._divergence[index] = float("nan") if divergence is None else divergence
        verdict = self._trackers[index].judge(self._own[index], version, divergence)
        if verdict.pulls:
            if verdict.advice is not None and verdict.reason not in self._warned:
                self._warned.add(verdict.reason)
                log.warning("%s", verdict.advice)
            self._pull(index, verdict.reason)
        self._ledger.age = self.version - self._sum_own / len(self._own)
        return verdict.pulls

    def sketch(self, policy: Policy, index: int) -> tuple[int, Sketch] | None:
        """Sketch the newest policy for a worker, with the number of the rollout its probes are of; None if none can."""
        if not self._rule.needs_sketch:
            return None
        if index not in self._probes:
            self.number += 1
            number, probes = self.number, self._current_probes(policy, index)
        else:
            number, probes = self._probes[index]
        sketch = make_sketch(policy, probes, self.version)
        if sketch is None:
            return None
        self._ledger.checks += 1
        self._ledger.bytes["sketches"] += sketch.size_bytes
        return number, sketch

    def _choose(self, policy: Policy) -> list[bool]:
        behind = [index for index in range(len(self._shards)) if self.is_behind(index)]
        sketches = {index: found for index in behind if (found := self.sketch(policy, index)) is not None}
        measured: dict[int, Measurement] = {}
        if sketches:
            measured = self._backend.measure(
                {index: sketch for index, (_, sketch) in sketches.items()},
                {index: number for index, (number, _) in sketches.items()},
            )
            self._ledger.divergence = float(np.nanmean([m.mean for m in measured.values()])) if measured else math.nan
            self.note_new()
        pulls = [False] * len(self._shards)
        for index in behind:
            if index in sketches and index not in measured:  # A new worker: it pulls because it is new.
                pulls[index] = self._own[index] < self.version
                if pulls[index]:
                    self._pull(index, Reason.FIRST)
            else:
                pulls[index] = self.judge(index, self.version, measured[index].mean if index in measured else None)
        if any(pulls):
            self._backend.load(self._spec, policy.weights(), self.version)
        return pulls

    def _hold(self, index: int, version: int) -> None:
        """Note which version a worker holds."""
        self._sum_own += version - self._own[index]
        self._own[index] = version

    def _pull(self, index: int, reason: Reason) -> None:
        self._hold(index, self.version)
        self._divergence[index] = 0.0
        self._ledger.pulls += 1
        self._ledger.reasons[reason] += 1
        self._ledger.bytes["weights"] += self._spec.size_bytes

    def _current_probes(self, policy: Policy, index: int) -> Probes:
        start, stop = self._shards[index]
        count = min(DEFAULT_PROBES, stop - start)
        indices = choose_probes(1, stop - start, count=count, seed=0, number=self.number)
        rows = [plane[None, start:stop] for plane in self._backend.planes.observations if plane is not None]
        probes = take_probes(indices, self._observations.nest(rows))
        return probes._replace(state=policy.initial_state(count))
