"""Host: what hosting a shard's environments means, whichever kind they are."""

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
    """What a worker's handler, or a head without workers, needs of the environments it runs.

    Attributes:
        failed_row: The row of the environment that raised last, if that is known.
        takes_batches: Whether `step` takes actions as the batched space has them, rather than one per environment.
        buffers: The one of the two step buffers that was filled last.
        errors: The exceptions of environments that were forgiven since `step` or `reset` was called: rows and texts.
        keeps_infos: Whether a rollout's steps return all infos: they hold action masks.
        reset_infos: Of the last reset.
    """

    takes_batches: bool
    keeps_infos = False

    def __init__(
        self, assignment: Assignment, spaces: RunSpaces, pair: Pair, tick: Callable[[], None], *, num_budgets: int
    ) -> None:
        """Host environments.

        Args:
            assignment: What they were made from.
            spaces: Of the run.
            pair: The shard's rows of the two step buffers.
            tick: Told of each environment that was reset.
            num_budgets: How many of them can be told apart when one raises.
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
        """Reset all environments, or those in the mask, filling this one of the two buffers."""

    @abc.abstractmethod
    def step(self, buffer: int | None, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        """Step every environment once. If one raises, its row and those after it keep the observation they had.

        Args:
            buffer: Which of the two step buffers to fill; None goes on with the one that was filled last.
            actions: One per environment; None takes those in the buffers.
            for_rollout: Of the infos keep only those of episodes that end, and, without autoreset, leave finished
                environments alone instead of raising.
        """

    @abc.abstractmethod
    def pending_rows(self) -> list[bool] | None:
        """Return whose episode is over and was not begun anew; None if a step that fails leaves that as it was."""

    def show_again(self, buffer: int) -> None:
        """Show in this step buffer what was shown last, if it was not filled since: a step has failed."""
        if buffer != self._buffer:
            self._turn_to(buffer)
            self._show_last()

    @abc.abstractmethod
    def resume(self, buffer: int, seeds: Sequence[int], seen: Sequence[Any], ended: Sequence[bool]) -> None:
        """Begin new episodes in the place of those that were lost with another worker.

        The next step answers as if it had truncated the lost ones.

        Args:
            buffer: Which of the two step buffers the learner saw last.
            seeds: What to reset the environments with.
            seen: What it saw, one array or list per leaf.
            ended: Whose episode had ended before.
        """

    @abc.abstractmethod
    def start_over(self) -> bool:
        """Show the new episodes' first observations now, if the next step was to tell of lost ones; returns whether."""

    @abc.abstractmethod
    def observe_into(self, arrays: Sequence[NDArray[Any] | None] | None) -> None:
        """From now on write observations into these arrays, one per leaf; None: into the step buffers again."""

    @abc.abstractmethod
    def objects(self) -> list[list[Any]]:
        """Return the newest observations' leaves that have no fixed size, one list per leaf."""

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
        """Show once more what was shown last: a step has failed, or is not to be made."""


class Aside:
    """Where a rollout's steps put rewards and flags: the step buffers keep what the learner saw until it is over."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._own = buffers.beside()
        self._is_used = False

    def use(self, is_rollout: bool, buffers: StepBuffers) -> StepBuffers:
        """Return what the next step fills; after a rollout the step buffers, with what its last step has left."""
        if is_rollout:
            self._is_used = True
            return self._own
        if self._is_used:
            self._is_used = False
            buffers.rewards[:] = self._own.rewards
            buffers.terminations[:] = self._own.terminations
            buffers.truncations[:] = self._own.truncations
        return buffers
