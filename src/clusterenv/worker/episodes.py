"""Episodes: what each environment has earned since its episode began."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Finished(NamedTuple):
    """Episodes that finished, in the order in which they did; each `[episodes]`."""

    row: NDArray[np.int64]
    step: NDArray[np.int64]
    return_: NDArray[np.float64]
    length: NDArray[np.int64]


class EpisodeLedger:
    """Adds up returns and lengths, across rollouts."""

    def __init__(self, num_rows: int, *, is_at_start: bool, seeds: Sequence[int | None]) -> None:
        """Begin to count.

        Args:
            num_rows: The environments.
            is_at_start: Whether every environment stands at the start of an episode. If not, the episode it is in is
                not reported, since its beginning was not seen.
            seeds: What the environments were reset with.
        """
        self._returns = np.zeros(num_rows, np.float64)
        self._lengths = np.zeros(num_rows, np.int64)
        self._is_whole = np.full(num_rows, is_at_start)
        self._life = secrets.randbits(62)  # No worker that takes over counts the same episodes.
        self._numbers = np.zeros(num_rows, np.int64)
        self._seeds = _as_array(seeds)

    def restart(self, rows: NDArray[np.bool_], seeds: Sequence[int | None] | None = None) -> None:
        """Note that these environments were reset, and with which seeds; there is one for each environment."""
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        self._is_whole[rows] = True
        self._numbers[rows] += 1
        self._seeds[rows] = -1 if seeds is None else _as_array(seeds)[rows]

    def name_seeds(self, seeds: Sequence[int | None]) -> None:
        """Say what all environments were reset with for the episodes that begin now."""
        self._seeds = _as_array(seeds)

    def positions(self) -> dict[str, NDArray[np.int64]]:
        """Say where each environment stands: in which of its episodes, after how many steps of it."""
        return {
            "life": np.full(len(self._numbers), self._life, np.int64),
            "episode": self._numbers.copy(),
            "step": np.where(self._is_whole, self._lengths, -1),
            "seed": self._seeds.copy(),
        }

    def spoil(self, rows: NDArray[np.bool_]) -> None:
        """Note that something of these environments' episodes was not seen: they are not reported."""
        self._is_whole[rows] = False

    def add(self, rewards: NDArray[np.float64], taken: NDArray[np.bool_], done: NDArray[np.bool_]) -> Finished:
        """Count steps, those of a whole rollout in one go: environments evict the caches, and numpy after each is slow.

        Args:
            rewards: Shape `[steps, environments]`, as are the others.
            taken: Where an environment took an action, rather than being reset.
            done: Where it finished its episode with that.
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
    """Return the seeds, and -1 for those that are not known or too large."""
    return np.array([-1 if seed is None or not 0 <= seed < 2**63 else seed for seed in seeds], np.int64)
