"""Attendance: how many workers were present over time, and so the worker hours a run has used. Time is passed in."""

from __future__ import annotations


class Attendance:
    """Counts workers from when they join until they are lost.

    Attributes:
        num_present: How many are present now.
    """

    def __init__(self, now: float) -> None:
        self.num_present = 0
        self._began_at = self._changed_at = now
        self._worker_s = 0.0
        self._ended_at: float | None = None

    def change(self, by: int, now: float) -> None:
        """Note that workers joined or were lost."""
        self._worker_s = self.worker_s(now)
        self._changed_at = now
        self.num_present += by

    def end(self, now: float) -> None:
        """Note that the run has ended, and the workers with it."""
        if self._ended_at is None:
            self._ended_at = now

    def worker_s(self, now: float) -> float:
        """Return for how many seconds workers have been present, summed over all of them."""
        return self._worker_s + self.num_present * (self._until(now) - self._changed_at)

    def report(self, now: float) -> dict[str, float]:
        """Return the current number of workers, the mean since the run began, and the total worker hours."""
        worker_s = self.worker_s(now)
        return {
            "workers": self.num_present,
            "workers_mean": worker_s / max(1e-9, self._until(now) - self._began_at),
            "worker_hours": worker_s / 3600,
        }

    def _until(self, now: float) -> float:
        return now if self._ended_at is None else max(self._changed_at, self._ended_at)
