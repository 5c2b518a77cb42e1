"""Course: how a training went so far, and what of it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SOLVED = 200.0  # What LunarLander's authors count as solved.
WINDOW = 100  # Episodes that a mean return is taken over.


@dataclass(frozen=True)
class Point:
    """What was known after an update.

    Attributes:
        seconds: Since the training began.
        env_steps: Made by then.
        mean_return: Of the last episodes; NaN before the first has ended.
        divergence: How far the workers' policies were from the newest before this update's pulls; NaN if never
            measured.
        pulls: Made by all workers by then.
        pulls_saved: How many more it would have been with a pull at every update.
    """

    seconds: float
    env_steps: int
    mean_return: float
    divergence: float
    pulls: int
    pulls_saved: int


@dataclass
class Course:
    """A training, update by update.

    Attributes:
        num_envs: Landers.
        num_workers: Processes they are spread over.
        budget_s: How long the training may take.
        threshold: The divergence beyond which a worker pulls new weights.
        points: One an update.
        returns: Of all episodes, in the order in which they ended.
        ended_at: At how many environment steps each had ended.
    """

    num_envs: int
    num_workers: int
    budget_s: float
    threshold: float
    points: list[Point] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    ended_at: list[int] = field(default_factory=list)

    @property
    def mean_return(self) -> float:
        """Of the last episodes; NaN before the first has ended."""
        return float(np.mean(self.returns[-WINDOW:])) if self.returns else float("nan")

    @property
    def first_return(self) -> float:
        """Mean of the first episodes; NaN if none has ended."""
        return float(np.mean(self.returns[:WINDOW])) if self.returns else float("nan")

    @property
    def is_solved(self) -> bool:
        """Whether enough episodes have ended, and well enough."""
        return len(self.returns) >= WINDOW and self.mean_return >= SOLVED

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return self.points[-1].seconds if self.points else 0.0

    @property
    def steps_per_second(self) -> float:
        """Environment steps per second, the learner's time included."""
        return self.points[-1].env_steps / self.seconds if self.points else 0.0
