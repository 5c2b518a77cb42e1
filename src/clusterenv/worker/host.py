"""Host: the interface for hosting a shard's environments, plain or native vector ones."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from clusterenv.wire.assignment import Assignment, RunSpaces
from clusterenv.wire.buffers import StepBuffers
from clusterenv.worker.error_budget import ErrorBudget
from clusterenv.worker.infos import Infos

Pair = tuple[StepBuffers, StepBuffers]


class Host(abc.ABC):
    """Runs the environments of a worker, or of a head without workers.

    Attributes:
        failed_row: The row of the environment that raised last, if known.
        takes_batches: Whether `step` takes actions nested like the batched space, rather than one per environment.
        buffers: The one of the two step buffers that was filled last.
        errors: Rows and texts of exceptions forgiven in the last `step` or `reset`.
        keeps_infos: Whether a rollout's steps return all infos, because these hold action masks.
        reset_infos: The infos of the last reset.
    """

    takes_batches: bool
    keeps_infos = False

    def __init__(
        self, assignment: Assignment, spaces: RunSpaces, pair: Pair, tick: Callable[[], None], *, num_budgets: int
    ) -> None:
        """Host environments.

        Args:
            assignment: What the environments were made from.
            spaces: The spaces of the run.
            pair: The shard's rows of the two step buffers.
            tick: Called after each environment is reset.
            num_budgets: How many environments can be told apart when one raises.
        """
        self.failed_row: int | None = None
        self.buffers = pair[0]
        self.reset_infos: Infos = {}
        self._pair = pair
        self._buffer = 0
        self._aside = Aside(pair[0])
        self._tick = tick
        self._spaces = spaces
        self._num_rows = assignment.num_rows
        self._mode = assignment.autoreset_mode
        self._forgives = assignment.on_env_error == "reset"
        self._budget = ErrorBudget(num_budgets, assignment.start, forgives=self._forgives)
        self.errors = self._budget.errors
        self._attributes: dict[str, Sequence[Any]] = {}

    @abc.abstractmethod
    def reset(
        self, buffer: int, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None
    ) -> Infos:
        """Reset all environments, or those in the mask, filling this one of the two step buffers."""

    @abc.abstractmethod
    def step(self, buffer: int | None, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        """Step every environment once. If one raises, its row and later ones keep their observations.

        Args:
            buffer: Which of the two step buffers to fill; None for the one that was filled last.
            actions: One per environment; None takes those in the buffers.
            for_rollout: Whether to keep only the infos of episodes that end and, without autoreset, to leave finished
                environments alone instead of raising.
        """

    @abc.abstractmethod
    def pending_rows(self) -> list[bool] | None:
        """Return which environments have finished and not been reset; None if a failed step does not change that."""

    def show_again(self, buffer: int) -> None:
        """After a failed step, show the last observations in this step buffer, unless it was filled since."""
        if buffer != self._buffer:
            self._turn_to(buffer)
            self._show_last()

    @abc.abstractmethod
    def resume(self, buffer: int, seeds: Sequence[int], seen: Sequence[Any], ended: Sequence[bool]) -> None:
        """Begin new episodes to replace those that were lost with another worker.

        The next step reports the lost episodes as truncated.

        Args:
            buffer: Which of the two step buffers the learner saw last.
            seeds: What to reset the environments with.
            seen: The observations the learner saw, one array or list per leaf.
            ended: Which episodes had ended before the loss.
        """

    @abc.abstractmethod
    def start_over(self) -> bool:
        """Show new episodes now, if the next step would report lost ones instead; returns whether that was so."""

    @abc.abstractmethod
    def observe_into(self, arrays: Sequence[NDArray[Any] | None] | None) -> None:
        """From now on write observations into these arrays, one per leaf; None for the step buffers again."""

    @abc.abstractmethod
    def objects(self) -> list[list[Any]]:
        """Return the newest observations' leaves without a fixed size, one list per leaf."""

    @abc.abstractmethod
    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method, or read an attribute, of every environment."""

    @abc.abstractmethod
    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""

    @abc.abstractmethod
    def apply(self, function: Callable[[Any], Any], rows: Sequence[int]) -> list[Any]:
        """Run a function on the environments of these rows."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the environments."""

    @abc.abstractmethod
    def _turn_to(self, buffer: int) -> None:
        """Fill this one of the two step buffers from now on; the other keeps what was filled last."""

    @abc.abstractmethod
    def _show_last(self) -> None:
        """Show the last observations again, after a step that failed or was not made."""


class Aside:
    """Where a rollout's steps put rewards and flags; until it is over, the step buffers keep what the learner saw."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._own = buffers.beside()
        self._is_used = False

    def use(self, is_rollout: bool, buffers: StepBuffers) -> StepBuffers:
        """Return the buffers the next step fills; after a rollout, these are the step buffers with its last step."""
        if is_rollout:
            self._is_used = True
            return self._own
        if self._is_used:
            self._is_used = False
            buffers.rewards[:] = self._own.rewards
            buffers.terminations[:] = self._own.terminations
            buffers.truncations[:] = self._own.truncations
        return buffers
