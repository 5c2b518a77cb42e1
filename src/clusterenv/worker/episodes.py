"""Episodes: the return and length of each environment's current episode."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Finished(NamedTuple):
    """Finished episodes, in the order in which they finished; arrays of shape `[episodes]`."""

    row: NDArray[np.int64]
    step: NDArray[np.int64]
    return_: NDArray[np.float64]
    length: NDArray[np.int64]


class EpisodeLedger:
    """Accumulates returns and lengths across rollouts."""

    def __init__(self, num_rows: int, *, is_at_start: bool, seeds: Sequence[int | None]) -> None:
        """Begin to count.

        Args:
            num_rows: The number of environments.
            is_at_start: Whether every environment is at the start of an episode. If not, its current episode is not
                reported, since its beginning was not seen.
            seeds: What the environments were reset with.
        """
        self._returns = np.zeros(num_rows, np.float64)
        self._lengths = np.zeros(num_rows, np.int64)
        self._is_whole = np.full(num_rows, is_at_start)
        self._life = secrets.randbits(62)  # Sets this worker's episodes apart from a replacement's.
        self._numbers = np.zeros(num_rows, np.int64)
        self._seeds = _as_array(seeds)

    def restart(self, rows: NDArray[np.bool_], seeds: Sequence[int | None] | None = None) -> None:
        """Note that these environments were reset; `seeds` has one entry per environment, reset or not."""
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        self._is_whole[rows] = True
        self._numbers[rows] += 1
        self._seeds[rows] = -1 if seeds is None else _as_array(seeds)[rows]

    def name_seeds(self, seeds: Sequence[int | None]) -> None:
        """Record the seeds that the current episodes of all environments were reset with."""
        self._seeds = _as_array(seeds)

    def positions(self) -> dict[str, NDArray[np.int64]]:
        """Return each environment's position: which of its episodes, and after how many steps."""
        return {
            "life": np.full(len(self._numbers), self._life, np.int64),
            "episode": self._numbers.copy(),
            "step": np.where(self._is_whole, self._lengths, -1),
            "seed": self._seeds.copy(),
        }

    def spoil(self, rows: NDArray[np.bool_]) -> None:
        """Note that part of these environments' episodes was not seen, so that they are not reported."""
        self._is_whole[rows] = False

    def add(self, rewards: NDArray[np.float64], taken: NDArray[np.bool_], done: NDArray[np.bool_]) -> Finished:
        """Count the steps of a whole rollout at once; numpy calls between steps are slow, as environments evict caches.

        Args:
            rewards: Shape `[steps, environments]`, like the others.
            taken: Where an environment took an action, rather than being reset.
            done: Where that action finished its episode.
        """
        earned = np.where(taken, rewards, 0.0)
        returns, lengths = np.zeros(done.shape, np.float64), np.zeros(done.shape, np.int64)
        is_reported = done.copy()
        for step, has_ends in enumerate(np.any(done, axis=1).tolist()):
            self._returns += earned[step]
            self._lengths += taken[step]
            if has_ends:
                returns[step], lengths[step] = self._returns, self._lengths
                is_reported[step] &= self._is_whole
                self.restart(done[step])
        steps, rows = is_reported.nonzero()
        return Finished(rows, steps, returns[steps, rows], lengths[steps, rows])


def _as_array(seeds: Sequence[int | None]) -> NDArray[np.int64]:
    """Return the seeds, with -1 for unknown or too large ones."""
    return np.array([-1 if seed is None or not 0 <= seed < 2**63 else seed for seed in seeds], np.int64)
