"""Shard: the environments of one worker, and the policy beside them if one was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.policy import Policy
from clusterenv.policy.sketch import Measurement, Sketch
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.block import Block, BlockSpec
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes
from clusterenv.worker.collector import Collector, OnStep
from clusterenv.worker.infos import Infos
from clusterenv.worker.native import make_host

Weights = Mapping[str, NDArray[Any]]


class Shard:
    """What can be done with a worker's environments. A head without workers uses one in its own process.

    Attributes:
        host: The environments; open it first.
        block_spec: What rollouts look like, once a policy was adopted.
    """

    def __init__(self, assignment: Assignment, planes: Planes) -> None:
        self.host = make_host(assignment, planes)
        self.block_spec: BlockSpec | None = None
        self._assignment = assignment
        self._planes = planes
        self._is_at_start = True  # Whether no environment was stepped since all were reset.
        self._policy_seed: int | None = None
        self._collector: Collector | None = None

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Infos:
        """Reset all environments, or those in the mask. A seed for all also seeds the policy."""
        infos = self.host.reset(seeds, mask, options)
        if mask is None:
            self._is_at_start = True
            # The policy's choices follow from the environments' seed, yet not by the same numbers.
            first = seeds[0]
            self._policy_seed = None if first is None else int(np.random.SeedSequence((first, 1)).generate_state(1)[0])
        if self._collector is not None:
            rows = np.ones(len(seeds), np.bool_) if mask is None else np.array(mask, np.bool_)
            self._collector.restart(rows, self._policy_seed if mask is None else None)
        return infos

    def step(self, actions: Iterable[Any] | None) -> Infos:
        """Step every environment once with the given actions, or those in the planes."""
        infos = self.host.step(actions)
        self._is_at_start = False
        if self._collector is not None:
            self._collector.account()
        return infos

    def truncate(self, seen: Sequence[NDArray[Any] | None]) -> None:
        """Take all episodes for truncated: those of a lost worker, that this one has replaced.

        The new ones begin by the rules of the autoreset mode; in SAME_STEP mode they have begun already.

        Args:
            seen: The last observations as the learner saw them, one array a leaf, None for leaves of objects.
        """
        if self._assignment.autoreset_mode is AutoresetMode.SAME_STEP:
            return
        for plane, leaf in zip(self._planes.observations, seen, strict=True):
            if plane is not None:
                plane[...] = leaf
        self.host.truncate()
        if self._collector is not None:
            self._collector.truncate()

    def adopt(
        self, policy: Policy, version: int, weights: Weights, num_probes: int, values: Mapping[str, Any]
    ) -> BlockSpec:
        """Put a policy beside the environments, in place of an earlier one, and find out what it returns.

        Args:
            policy: This shard's own from now on.
            version: Of its weights.
            weights: To load: a policy travels without them.
            num_probes: How many observations of each rollout to keep for `measure`.
            values: Per-call values to try it with.
        """
        assignment = self._assignment
        collector = self._collector or Collector(
            policy,
            self.host,
            self._planes,
            (assignment.observation_space, assignment.action_space),
            assignment.autoreset_mode,
            is_at_start=self._is_at_start,
        )
        collector.replace(policy, num_probes=num_probes)
        collector.load(version, weights)
        extras, states = collector.rehearse(values)
        if self._policy_seed is not None:
            policy.seed(self._policy_seed)
        self._collector = collector
        layouts = Layout(assignment.action_space), Layout(assignment.observation_space)
        self.block_spec = BlockSpec(*layouts, tuple(extras), tuple(states))
        return self.block_spec

    @property
    def policy_version(self) -> int:
        """The version of the weights the policy holds."""
        return self._policy().version

    def load(self, version: int, weights: Weights) -> None:
        """Give the policy new weights."""
        self._policy().load(version, weights)

    def measure(self, sketch: Sketch, number: int) -> Measurement:
        """Estimate how far the policy is from the sketched one."""
        return self._policy().measure(sketch, number)

    def decide(self, values: Mapping[str, Any]) -> Infos:
        """Let the policy choose actions, and step every environment once."""
        infos = self._policy().decide(values)
        self._is_at_start = False
        return infos

    def collect(
        self, block: Block, number: int, values: Mapping[str, Any], on_step: OnStep | None = None
    ) -> dict[str, Any]:
        """Fill a block with a rollout; returns its summary."""
        summary = self._policy().collect(block, number, values, on_step)
        self._is_at_start = False
        return summary

    def _policy(self) -> Collector:
        if self._collector is None:
            raise PolicyError("No policy was sent to this worker.")
        return self._collector
