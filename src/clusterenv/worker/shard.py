"""Shard: the environments of one worker, and the policy beside them, if one was sent."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.policy import Policy
from clusterenv.policy.probes import Probes
from clusterenv.wire.assignment import Assignment, EvaluationPlan, RunSpaces
from clusterenv.wire.buffers import RolloutBuffers, RolloutLayout
from clusterenv.wire.layout import Layout
from clusterenv.worker.collector import Collector, OnStep
from clusterenv.worker.env_host import EnvHost
from clusterenv.worker.episode_player import EpisodePlayer, Task
from clusterenv.worker.host import Host, Pair
from clusterenv.worker.infos import Infos, complete
from clusterenv.worker.making import Envs, make_all, make_vector_env
from clusterenv.worker.masks import ActionMasks
from clusterenv.worker.vector_host import VectorHost

log = logging.getLogger(__name__)

Weights = Mapping[str, NDArray[Any]]


class Shard:
    """All operations on a worker's environments. A head without workers uses a shard in its own process.

    First `make` the environments, then `serve` them in the buffers of the run.

    Attributes:
        failed_row: The row of the environment that raised last, if known.
        rollout_layout: The layout of rollouts, once a policy was adopted.
    """

    host: Host

    def __init__(self, assignment: Assignment) -> None:
        self.rollout_layout: RolloutLayout | None = None
        self._assignment = assignment
        self._made: Envs | None = None
        self._making_row: int | None = None
        self._is_at_start = True  # Whether no environment was stepped since all were reset.
        self._policy_seed: int | None = None
        self._masks = ActionMasks(assignment.num_rows)
        self._num_adopted = 0  # Policies adopted since all environments were last reset.
        self._seeds: list[int | None] = [None] * assignment.num_rows  # Of the last resets.
        self._has_taken_over = False  # Whether the next step reports a loss, and new episodes with these seeds.
        self._collector: Collector | None = None
        self._player: EpisodePlayer | None = None

    @property
    def failed_row(self) -> int | None:
        """The row of the environment that raised last, if known."""
        return self.host.failed_row if hasattr(self, "host") else self._making_row

    def make(self) -> Envs:
        """Make the environments, and return them."""
        _register(self._assignment.registry)
        factories = self._assignment.factories
        if isinstance(factories, list):
            self._made = make_all(factories, self._note_row)
        else:
            self._made = make_vector_env(self._assignment)
        self._making_row = None
        return self._made

    def serve(self, spaces: RunSpaces, pair: Pair, tick: Callable[[], None] = lambda: None) -> None:
        """Host the environments, which fill these buffers.

        Args:
            spaces: The spaces of the run.
            pair: The shard's rows of the two step buffers.
            tick: Called after each environment is reset.
        """
        assert self._made is not None, "they were made"
        self._spaces = spaces
        self._tick = tick
        if isinstance(self._made, VectorEnv):
            self.host = VectorHost(self._made, self._assignment, spaces, pair, tick)
        else:
            self.host = EnvHost(self._made, self._assignment, spaces, pair, tick)

    def close(self) -> None:
        """Close the environments that were made."""
        if self._player is not None:
            self._player.close()
        if hasattr(self, "host"):
            self.host.close()
        elif isinstance(self._made, VectorEnv):
            self._made.close()
        else:
            for env in self._made or ():
                env.close()

    def reset(
        self, buffer: int, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None
    ) -> Infos:
        """Reset all environments, or those in the mask. A seeded reset of all also seeds the policy."""
        infos = self.host.reset(buffer, seeds, mask, options)
        self._masks.reset(complete(infos, len(seeds)), None if mask is None else np.array(mask, np.bool_))
        if mask is None:
            self._is_at_start = True
            self._has_taken_over = False
            self._policy_seed = _policy_seed(seeds[0])
            self._num_adopted = 0
        rows = np.ones(len(seeds), np.bool_) if mask is None else np.array(mask, np.bool_)
        self._seeds = [new if is_reset else old for new, old, is_reset in zip(seeds, self._seeds, rows, strict=True)]
        if self._collector is not None:
            self._collector.restart(rows, self._seeds, self._policy_seed if mask is None else None)
        return infos

    def resume(self, buffer: int, seeds: Sequence[int], seen: Sequence[Any], ended: Sequence[bool]) -> None:
        """Begin new episodes to replace those that were lost with another worker; see `Host.resume`."""
        self.host.resume(buffer, seeds, seen, ended)
        self._masks.reset(complete(self.host.reset_infos, len(seeds)), None)
        self._policy_seed = _policy_seed(seeds[0])
        self._seeds = list(seeds)
        self._has_taken_over = True

    def step(self, buffer: int, actions: Iterable[Any] | None) -> Infos:
        """Step every environment once with the given actions, or those in the buffers."""
        try:
            infos = self.host.step(buffer, actions)
        except BaseException:
            if self._collector is not None:
                self._collector.resume_after_error()
            raise
        self._is_at_start = False
        if self._masks.current is not None:
            self._masks.step(complete(infos, self._assignment.num_rows))
        if self._collector is not None:
            self._collector.account()
        if self._has_taken_over:
            self._note_new_episodes()
        return infos

    def adopt(
        self,
        make: Callable[[], Policy],
        version: int,
        weights: Weights,
        values: Callable[[Policy], Mapping[str, Any]],
    ) -> RolloutLayout:
        """Put a policy beside the environments, in place of an earlier one, and find out what it returns.

        Args:
            make: Returns a copy of the policy. The first is tried out; if it may remember that, a second replaces it.
            version: The version of the weights.
            weights: The weights to load, since a policy is sent without them.
            values: Returns the per-call values to try out a copy with.
        """
        policy = make()
        spaces = self._spaces
        collector = self._collector or Collector(
            policy,
            self.host,
            (spaces.observation_space, spaces.action_space),
            self._assignment.autoreset_mode,
            self._masks,
            start=self._assignment.start,
            is_at_start=self._is_at_start,
            seeds=self._seeds,
        )
        self.host.keeps_infos = self._masks.current is not None
        collector.replace(policy)
        collector.load(version, weights)
        extras, states = collector.rehearse(values(policy))
        if getattr(policy, "can_remember", False):
            tried, policy = policy, make()
            if hasattr(policy, "take_over"):
                policy.take_over(tried)
            del tried  # Freed before its successor's weights take memory.
            collector.replace(policy)
            collector.load(version, weights)
        if self._policy_seed is not None:
            # The second policy since a reset must not repeat the random choices of the first.
            policy.seed(self._policy_seed + self._num_adopted)
        self._num_adopted += 1
        self._collector = collector
        layouts = Layout(spaces.action_space), Layout(spaces.observation_space)
        self.rollout_layout = RolloutLayout(*layouts, tuple(extras), tuple(states))
        return self.rollout_layout

    @property
    def is_stepping(self) -> bool:
        """Whether the environments, not the policy, were running when the last step or rollout ended or raised."""
        return self._collector is not None and self._collector.is_stepping

    @property
    def policy(self) -> Policy:
        """The policy beside the environments."""
        return self._policy().policy

    @property
    def policy_version(self) -> int:
        """The version of the weights the policy holds."""
        return self._policy().version

    def load(self, version: int, weights: Weights) -> None:
        """Give the policy new weights."""
        self._policy().load(version, weights)

    def decide(self, buffer: int, num_probes: int, values: Mapping[str, Any]) -> tuple[Infos, Probes | None]:
        """Let the policy choose actions, and step every environment once; see `Collector.decide`."""
        with self._resuming_after_errors():
            decided = self._policy().decide(buffer, num_probes, values)
        self._is_at_start = False
        if self._has_taken_over:
            self._note_new_episodes()
        return decided

    def collect(
        self, block: RolloutBuffers, num_probes: int, values: Mapping[str, Any], on_step: OnStep | None = None
    ) -> tuple[dict[str, Any], Probes | None]:
        """Fill buffers with a rollout; returns its summary and its probes, see `Collector.collect`."""
        collector = self._policy()
        if self.host.start_over():
            collector.restart(np.ones(self._assignment.num_rows, np.bool_), self._seeds, None)
        self._has_taken_over = False
        with self._resuming_after_errors():
            made = collector.collect(block, num_probes, values, on_step)
        self._is_at_start = False
        return made

    def play(
        self, plan: EvaluationPlan | None, num_envs: int, tasks: Sequence[Task], limit_s: float
    ) -> tuple[list[list[Any]], list[int]]:
        """Play episodes of an evaluation, in environments of its own; see `EpisodePlayer.play`.

        Args:
            plan: The plan of an evaluation that begins now; None continues the last one.
            num_envs: How many environments the evaluation uses.
            tasks: The episodes.
            limit_s: How long to play.
        """
        if self._player is None:
            forgives = self._assignment.on_env_error == "reset"
            self._player = EpisodePlayer(self._spaces, forgives=forgives, tick=self._tick)
        if plan is not None:
            self._player.begin(plan, num_envs)
        return self._player.play(tasks, limit_s)

    @property
    def is_playing(self) -> bool:
        """Whether an evaluation's environments, not its policy, were running when it last ended or raised."""
        return self._player is None or self._player.is_stepping

    def _policy(self) -> Collector:
        if self._collector is None:
            raise PolicyError("No policy was sent to this worker.")
        return self._collector

    @contextlib.contextmanager
    def _resuming_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.is_stepping and self._collector is not None:
                self._collector.resume_after_error()
            raise

    def _note_new_episodes(self) -> None:
        """Note that a step has reported the loss, and that the episodes that follow began with the last seeds."""
        self._has_taken_over = False
        if self._collector is not None:
            self._collector.name_seeds(self._seeds)

    def _note_row(self, row: int) -> None:
        self._making_row = row


def unpickle(data: bytes) -> Any:
    """Unpickle code and arguments. Only workers do this, with data their head sent over the encrypted channel."""
    return pickle.loads(data)  # noqa: S301 - see above


def _policy_seed(first: int | None) -> int | None:
    """Derive the policy's seed from the environments' seed, so that their random numbers differ."""
    return None if first is None else int(np.random.SeedSequence((first, 1)).generate_state(1)[0])


def _register(registry: list[bytes]) -> None:
    """Register environments that are registered on the head only."""
    for pickled in registry:
        try:
            spec = unpickle(pickled)
        except Exception:
            log.debug("an environment registered on the head cannot be registered here", exc_info=True)
        else:
            gym.registry.setdefault(spec.id, spec)
