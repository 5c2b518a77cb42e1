"""Conductor: leads the policies on the workers: brings them new versions, lets them act, and counts what that costs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.head.assemble import assemble
from clusterenv.head.lane import Made
from clusterenv.head.ledger import Ledger
from clusterenv.head.outcome import Collection
from clusterenv.head.publisher import PolicyBackend, Publisher
from clusterenv.head.remote import Remote
from clusterenv.head.stream import Stream, StreamWish
from clusterenv.policy.policy import Policy
from clusterenv.policy.sync import SyncRule
from clusterenv.rollout import Rollout
from clusterenv.wire.block import Block, check_collectable
from clusterenv.wire.layout import Layout

log = logging.getLogger(__name__)


class ActingBackend(PolicyBackend, Protocol):
    """Where policies run and act."""

    def decide(self, version: int, pulls: list[bool], arguments: Mapping[str, Any]) -> None:
        """Start a step in which the workers choose the actions."""

    def collect(
        self, num_steps: int, number: int, version: int, pulls: list[bool], arguments: Mapping[str, Any]
    ) -> Collection:
        """Let every worker make its part of a rollout."""


class Conductor:
    """Runs one learner's policy on the workers."""

    def __init__(
        self,
        backend: ActingBackend,
        rule: SyncRule,
        layouts: tuple[Layout, Layout],
        mode: AutoresetMode,
        *,
        copies: bool,
    ) -> None:
        """Lead a backend's policies.

        Args:
            backend: Where they run.
            rule: When they take new weights.
            layouts: Of actions and observations.
            mode: How environments are reset.
            copies: Whether rollouts are the caller's own, rather than overwritten by the next.
        """
        self.ledger = Ledger()
        self._backend = backend
        self._layouts = layouts
        self._mode = mode
        self._copies = copies
        self._publisher = Publisher(rule, backend, layouts[1], self.ledger)
        self._num_envs = backend.shards[-1][1]

    def publish(self) -> None:
        """Note that the weights have changed, for policies that cannot notice it themselves."""
        self._publisher.tell()

    def start_step(self, policy: Policy, arguments: Mapping[str, Any]) -> None:
        """Start a step in which the policy chooses the actions."""
        check_collectable(*self._layouts)
        with self._distrust_after_failure():
            pulls = self._publisher.prepare(policy, arguments)
            self._backend.decide(self._publisher.version, pulls, arguments)

    def note_step(self, infos: Mapping[str, Any], env_indices: Sequence[int] | None = None) -> None:
        """Count a step, by whomever its actions were chosen: the newest observations are now the planes'."""
        self.ledger.env_steps += self._num_envs if env_indices is None else len(env_indices)
        self._publisher.forget_probes()
        if "_env_error" in infos:
            self._note_errors(infos, env_indices)

    def note_reset(self, infos: Mapping[str, Any]) -> None:
        """Note that environments were reset: the newest observations are now the planes'."""
        self._publisher.forget_probes()
        if "_env_error" in infos:
            self._note_errors(infos, None)

    def rollout(self, policy: Policy, num_steps: int, arguments: Mapping[str, Any]) -> Rollout:
        """Collect a rollout."""
        check_collectable(*self._layouts)
        before = self.ledger.snapshot()
        with self._distrust_after_failure():
            pulls = self._publisher.prepare(policy, arguments)
            self._publisher.number += 1
            started = time.perf_counter()
            collection = self._backend.collect(
                num_steps, self._publisher.number, self._publisher.version, pulls, arguments
            )
            seconds = time.perf_counter() - started
        self._publisher.note_new()
        self._publisher.remember(collection.block)
        self.ledger.note_rollout(num_steps * self._num_envs, collection, seconds)
        self._note_rollout_errors(collection.summaries, [start for start, _ in self._backend.shards])
        if self._copies:
            collection = replace(collection, block=collection.block.copy())
        provenance = self._publisher.provenance()
        return assemble(
            collection,
            self._backend.shards,
            self._layouts,
            self._mode,
            provenance,
            self._cost(before, collection, seconds),
        )

    def stream(self, remote: Remote, policy: Policy, wish: StreamWish) -> Stream:
        """Let the workers make rollouts while the learner learns."""
        check_collectable(*self._layouts)
        with self._distrust_after_failure():
            pulls = self._publisher.prepare(policy, wish.values)
            return Stream(remote, self._publisher, self.ledger, policy, self._assemble_stream(), wish, pulls)

    def _assemble_stream(self) -> Callable[[Sequence[Made]], Rollout]:
        """Return what makes a rollout of the parts that workers made."""
        delivered_at = time.perf_counter()
        before = self.ledger.snapshot()

        def join(group: Sequence[Made]) -> Rollout:
            nonlocal delivered_at, before
            now = time.perf_counter()
            seconds, delivered_at = now - delivered_at, now
            block = Block.beside([made.block for made in group])
            collection = Collection(block, [made.summary for made in group], [made.busy_s for made in group])
            sizes = [made.block.rewards.shape[1] for made in group]
            bounds = np.cumsum([0, *sizes]).tolist()
            versions = np.repeat([made.version for made in group], sizes)
            indices = [made.lane.member.index for made in group]
            self.ledger.note_rollout(block.rewards.size, collection, seconds)
            self._note_rollout_errors(collection.summaries, [made.lane.member.start for made in group])
            rollout = assemble(
                collection,
                list(itertools.pairwise(bounds)),
                self._layouts,
                self._mode,
                {
                    "versions": versions,
                    "ages": self._publisher.version - versions,
                    "divergences": np.repeat([self._publisher.divergence(index) for index in indices], sizes),
                },
                self._cost(before, collection, seconds),
                np.concatenate([made.lane.member.env_indices for made in group]),
            )
            before = self.ledger.snapshot()
            return rollout

        return join

    def _note_errors(self, infos: Mapping[str, Any], env_indices: Sequence[int] | None) -> None:
        for row in np.flatnonzero(infos["_env_error"]).tolist():
            self._note_error(row if env_indices is None else env_indices[row], infos["env_error"][row])

    def _note_rollout_errors(self, summaries: Sequence[Mapping[str, Any]], starts: Sequence[int]) -> None:
        for summary, start in zip(summaries, starts, strict=True):
            for row, text in summary.get("errors", ()):
                self._note_error(start + row, text)

    def _note_error(self, env_index: int, text: str) -> None:
        self.ledger.env_errors += 1
        log.warning("environment %d raised, its episode was truncated: %s", env_index, text)

    @contextlib.contextmanager
    def _distrust_after_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._publisher.forget_policy()
            raise

    def _cost(self, before: Mapping[str, float], collection: Collection, seconds: float) -> dict[str, Any]:
        after = self.ledger.snapshot()
        return {
            "seconds": seconds,
            "env_steps_per_second": (after["env_steps"] - before["env_steps"]) / seconds,
            "worker_idle_share": 1.0 - float(np.mean(collection.busy_s)) / seconds,
            **{name: after[name] - before[name] for name in after if name != "env_steps"},
        }
