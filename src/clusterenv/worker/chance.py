"""Chance: gives each episode of an evaluation its own random numbers, although generators are shared."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from clusterenv.policy.policy import Policy

_STREAM = 3  # Unlike the streams of the environment's own generator and of `EpisodeGenerator`.
_LOOK_EVERY = 16  # Decisions; comparing generators takes as long as a small policy's decision.


class _Generator(NamedTuple):
    """A process-wide random generator, from which any code may draw."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


class Chance:
    """Finds out whether a policy draws from generators that all episodes share.

    Those are the process-wide ones (Python's, numpy's, torch's), the policy's own torch generator, and the part of an
    `EpisodeGenerator` that is common to all rows. If the policy draws from them at its first decision, it decides for
    each episode separately from then on, with all of them seeded by the episode's seed and step number. The numbers
    then depend on that episode only, whichever other episodes are played at the same time.

    Attributes:
        is_alone: Whether the policy decides for each episode separately.
        is_mixed: Whether the policy began to draw only after it had decided for several episodes at once, so that the
            numbers depend on the other episodes.
    """

    def __init__(self, policy: Policy) -> None:
        self.is_alone = self.is_mixed = False
        self._policy = policy
        self._num_decisions = 0

    def watches(self, has_new_episode: bool) -> bool:
        """Whether to check the next decision for draws: the first of every episode, and every few decisions."""
        self._num_decisions += 1
        return not self.is_mixed and (has_new_episode or self._num_decisions % _LOOK_EVERY == 0)

    def read(self, rng: np.random.Generator) -> list[Any]:
        """Return the current states of the generators."""
        own = getattr(self._policy, "chance", None)
        return [rng.bit_generator.state, own, *(generator.read() for generator in _process_generators())]

    def compare(self, before: list[Any], rng: np.random.Generator) -> None:
        """Note whether any generator was drawn from since `before` was read."""
        common, own, *shared = self.read(rng)
        if not all(map(_is_same, before, (common, own, *shared[: len(before) - 2]))):
            self.is_alone = self._num_decisions == 1
            self.is_mixed = not self.is_alone

    @contextlib.contextmanager
    def of_episode(self, seed: int, num_steps: int) -> Iterator[None]:
        """Make all draws depend on an episode's seed and on how many steps it has taken."""
        number = int(np.random.SeedSequence((seed, _STREAM, num_steps)).generate_state(1)[0])
        self._policy.seed(number)
        outside = [(generator, generator.read()) for generator in _process_generators()]  # Environments use them, too.
        for generator, _ in outside:
            generator.seed(number)
        try:
            yield
        finally:
            for generator, state in outside:
                generator.write(state)


class OwnGenerators:
    """An evaluation's own states of Python's, numpy's and torch's generators, apart from those used in training."""

    def __init__(self) -> None:
        self._states: list[Any] = []

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the evaluation's states in the process-wide generators within a block."""
        outside = [(generator, generator.read()) for generator in _process_generators()]
        for (generator, _), state in zip(outside, self._states, strict=False):  # Torch may have been imported since.
            generator.write(state)
        try:
            yield
        finally:
            self._states = [generator.read() for generator, _ in outside]
            for generator, state in outside:
                generator.write(state)


def _process_generators() -> list[_Generator]:
    found = [
        _Generator(random.getstate, random.setstate, random.seed),
        _Generator(np.random.get_state, np.random.set_state, np.random.seed),
    ]
    if (torch := sys.modules.get("torch")) is not None:
        found.append(_Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed))
    return found


def _is_same(then: Any, now: Any) -> bool:
    if isinstance(then, tuple | list):
        return len(then) == len(now) and all(map(_is_same, then, now))
    if isinstance(then, dict):
        return all(_is_same(then[name], now[name]) for name in then)
    return np.array_equal(then, now) if hasattr(then, "__array__") else bool(then == now)
