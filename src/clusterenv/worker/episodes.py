"""Episodes: what each environment has earned since its episode began."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class EpisodeLedger:
    """Adds up returns and lengths, across rollouts, and writes down the episodes that finish."""

    def __init__(self, num_rows: int, *, is_at_start: bool) -> None:
        """Begin to count.

        Args:
            num_rows: The environments.
            is_at_start: Whether every environment stands at the start of an episode. If not, the episode
            it is in is not
                reported, since its beginning was not seen.
        """
        self._returns = np.zeros(num_rows, np.float64)
        self._lengths = np.zeros(num_rows, np.int64)
        self._is_whole = np.full(num_rows, is_at_start)
        self.clear()

    def clear(self) -> None:
        """Forget the finished episodes, not those under way."""
        self._finished: dict[str, list[Any]] = {name: [] for name in ("row", "step", "return", "length", "info")}

    def restart(self, rows: NDArray[np.bool_]) -> None:
        """Note that these environments were reset."""
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        self._is_whole[rows] = True

    def add(
        self, step: int, rewards: NDArray[np.float64], taken: NDArray[np.bool_], done: NDArray[np.bool_], infos: Any
    ) -> None:
        """Count one step.

        Args:
            step: Its number within the rollout.
            rewards: Of every environment.
            taken: Which environments took an action, rather than being reset.
            done: Which finished their episode with it.
            infos: Finds the info of an environment's last step, given its row.
        """
        self._returns += np.where(taken, rewards, 0.0)
        self._lengths += taken
        if done.any():
            for row in np.flatnonzero(done).tolist():
                if self._is_whole[row]:
                    episode = (row, step, float(self._returns[row]), int(self._lengths[row]), infos(row))
                    for column, value in zip(self._finished.values(), episode, strict=True):
                        column.append(value)
            self.restart(done)

    def finished(self) -> dict[str, Any]:
        """Return the episodes that finished since `clear`, in the order in which they did."""
        return {
            "row": np.array(self._finished["row"], np.int64),
            "step": np.array(self._finished["step"], np.int64),
            "return": np.array(self._finished["return"], np.float64),
            "length": np.array(self._finished["length"], np.int64),
            "info": self._finished["info"],
        }
