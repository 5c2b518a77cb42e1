"""Inline: the stand-in for remote workers when there are none, and everything runs in the head's own process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from numpy.typing import NDArray

from clusterenv.head.outcome import Collection, Outcome
from clusterenv.policy.policy import Policy
from clusterenv.policy.sketch import Measurement, Sketch
from clusterenv.policy.weights import WeightsSpec
from clusterenv.rollout import Rollout
from clusterenv.wire.arrays import allocate
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.block import Block
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes
from clusterenv.worker.infos import Infos, complete
from clusterenv.worker.shard import Shard


class Inline:
    """One worker that is no process of its own.

    Calls run when they are waited for, so that an environment's exception comes up where the user stands. A policy is
    copied, and updated by the sync rule, just as on a real worker.
    """

    pids: tuple[int, ...] = ()
    losses: Sequence[Any] = ()  # There is nobody to lose.

    def __init__(self, assignment: Assignment) -> None:
        layouts = Layout(assignment.action_space), Layout(assignment.observation_space)
        self.planes = Planes.make(*layouts, assignment.num_envs, allocate)
        self._shard = Shard(assignment, self.planes)
        self._num_envs = assignment.num_envs
        self._work: Callable[[], Outcome] | None = None
        self._weights: Mapping[str, NDArray[Any]] = {}
        self._block: Block | None = None
        try:
            self._shard.host.open()
        except BaseException:
            self._shard.host.close()
            raise

    @property
    def shards(self) -> list[tuple[int, int]]:
        """One shard with everything."""
        return [(0, self._num_envs)]

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> None:
        """Note a reset."""
        self._work = lambda: self._stepped(self._shard.reset(seeds, mask, options))

    def step(self, actions: Iterable[Any] | None) -> None:
        """Note a step."""
        self._work = lambda: self._stepped(self._shard.step(actions))

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call."""
        self._work = lambda: Outcome({}, [], self._shard.host.call(name, args, kwargs))

    def set_attr(self, name: str, items: Sequence[Any]) -> None:
        """Note the setting of an attribute."""

        def work() -> Outcome:
            self._shard.host.set_attr(name, items)
            return Outcome({}, [], [])

        self._work = work

    def apply(self, function: Callable[[Any], Any], env_indices: Sequence[int]) -> None:
        """Note a function to run."""
        self._work = lambda: Outcome({}, [], self._shard.host.apply(function, env_indices))

    def decide(self, version: int, pulls: Sequence[bool], arguments: Mapping[str, Any]) -> None:
        """Note a step in which the policy chooses the actions."""
        self._load(version, pulls)
        self._work = lambda: self._stepped(self._shard.decide(arguments))

    def step_shard(self, index: int) -> None:
        """Note a step of the only shard there is."""
        self.step(None)

    def finish_some(self, timeout_s: float | None = None) -> list[tuple[int, Outcome]]:
        """Do what was noted."""
        return [(0, self.finish(timeout_s))]

    def finish(self, timeout_s: float | None = None) -> Outcome:
        """Do what was noted. There is nobody to wait for, so the timeout has no meaning."""
        work, self._work = self._work, None
        assert work is not None, "a call is under way"
        return work()

    def adopt(
        self, policy: Policy, spec: WeightsSpec, version: int, num_probes: int, arguments: Mapping[str, Any]
    ) -> None:
        """Take a copy of the policy."""
        weights = spec.decode(spec.encode(policy.weights()))
        self._shard.adopt(copy.deepcopy(policy), version, weights, num_probes, arguments)
        self._block = None

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Keep a version's weights until they are taken."""
        self._weights = spec.decode(spec.encode(weights))

    def take_new(self) -> dict[int, int]:
        """Return nothing: no worker is ever new."""
        return {}

    def measure(self, sketches: Mapping[int, Sketch], numbers: Mapping[int, int]) -> dict[int, Measurement]:
        """Compare the copy with the newest policy."""
        return {index: self._shard.measure(sketch, numbers[index]) for index, sketch in sketches.items()}

    def collect(
        self, num_steps: int, number: int, version: int, pulls: Sequence[bool], arguments: Mapping[str, Any]
    ) -> Collection:
        """Make a rollout."""
        started = time.perf_counter()
        self._load(version, pulls)
        if self._block is None or len(self._block.rewards) != num_steps:
            assert self._shard.block_spec is not None, "a policy was adopted"
            self._block = self._shard.block_spec.make(num_steps, self._num_envs, allocate)
        summary = self._shard.collect(self._block, number, arguments)
        return Collection(self._block, [summary], [time.perf_counter() - started])

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """Close the environments."""
        self._shard.host.close()

    def _stepped(self, infos: Infos) -> Outcome:
        return Outcome(complete(infos, self._num_envs), [list(column) for column in self._shard.host.objects()], [])

    def _load(self, version: int, pulls: Sequence[bool]) -> None:
        if pulls[0]:
            self._shard.load(version, self._weights)


class InlineStream:
    """A stream where there are no workers: each rollout is made when it is asked for.

    Attributes:
        values: Per-call values for the policy.
    """

    def __init__(self, rollout: Callable[[Mapping[str, Any]], Rollout], values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self._rollout = rollout
        self._is_open = True

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __next__(self) -> Rollout:
        """Make a rollout."""
        if not self._is_open:
            raise StopIteration
        return self._rollout(self.values)

    def close(self) -> None:
        """End it."""
        self._is_open = False

    abandon = close

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self.close()
