"""EpisodePlayer: plays the episodes of an evaluation, in environments and with a policy of its own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Env
from numpy.typing import NDArray

from clusterenv.policy.contents import read_values
from clusterenv.policy.episode_generator import EpisodeGenerator
from clusterenv.policy.policy import Decision, Policy, State, start_episodes
from clusterenv.wire import values
from clusterenv.wire.assignment import EnvFactory, EvaluationPlan, RunSpaces
from clusterenv.wire.layout import Layout
from clusterenv.worker.chance import Chance, OwnGenerators
from clusterenv.worker.choices import Choices, checked_state
from clusterenv.worker.error_budget import ErrorBudget
from clusterenv.worker.making import check_spaces, make_env
from clusterenv.worker.masks import NAME
from clusterenv.worker.observation_writer import ObservationWriter

log = logging.getLogger(__name__)

ROWS = 8
"""How many rows the policy always decides for at a time, since a row's result may depend on the batch size.

It may depend on the row's position as well, since kernels may compute some rows differently in the last bits. Episode i
therefore always uses row i modulo `ROWS`.
"""


_HOW_MANY = f"(An evaluation lets the policy decide for {ROWS} episodes at a time, or for one, whatever num_envs is.)"


@dataclass(frozen=True)
class Task:
    """An episode to play.

    Attributes:
        index: Its index in the evaluation's table.
        options: The options for `reset`.
    """

    index: int
    seed: int
    options: dict[str, Any] | None


class EpisodePlayer:
    """Plays the episodes it is dealt, as many at a time as it has environments.

    It touches neither the worker's shard nor the states of the process-wide random generators.

    Attributes:
        is_stepping: Whether the environments, not the policy, are running; not reset when something raises.
    """

    is_stepping = True

    def __init__(self, spaces: RunSpaces, *, forgives: bool, tick: Callable[[], None]) -> None:
        """Play in environments with these spaces.

        Args:
            spaces: The spaces of the run.
            forgives: Whether to truncate an episode whose environment raises, and continue with the others.
            tick: Called after each environment is made or reset, and after each step.
        """
        self._spaces = spaces
        self._forgives = forgives
        self._tick = tick
        self._seats: list[_Seat] = []
        self._free: list[_Seat] = []
        self._batches: list[_Batch] = []
        self._generators = OwnGenerators()

    def begin(self, plan: EvaluationPlan, num_envs: int) -> None:
        """Begin another evaluation with this many environments, reusing those of the last one.

        Episodes under way are dropped.
        """
        with self._closing_after_errors(), self._generators.used():
            policy: Policy = plan.policy
            policy.load(plan.weights_spec.decode(plan.weights))
            self._values = read_values(policy, plan.values)
            policy.seed(plan.seed)
            for seat in self._seats:
                if seat.is_broken:
                    _close(seat.env)
            self._seats = [seat for seat in self._seats if not seat.is_broken]
            while len(self._seats) > num_envs:
                _close(self._seats.pop().env)
            self.is_stepping = True
            while len(self._seats) < num_envs:
                self._seats.append(_Seat(make_env(plan.factory)))
                self._tick()
                env = self._seats[-1].env
                check_spaces(env.observation_space, env.action_space, self._spaces)
            self._free = self._seats[::-1]
            self._plan, self._batches, self._chance = plan, [], Chance(policy)

    def play(self, tasks: Sequence[Task], limit_s: float) -> tuple[list[list[Any]], list[int]]:
        """Play until the time is up, or an environment is free and there is something to report.

        Args:
            tasks: Episodes to play besides those under way.
            limit_s: How long to play; then the current step is still finished.

        Returns:
            The finished episodes as `[index, return, length, terminated, truncated, whether it was cut at max_steps,
            whether its random numbers depend on other episodes, info]`, the info encoded as a value. And the indices
            of the tasks that were not begun.
        """
        queue, finished = deque(tasks), list[list[Any]]()
        deadline = time.monotonic() + limit_s
        with self._closing_after_errors(), self._generators.used():
            while True:
                self.is_stepping = True
                while queue and self._free:
                    self._start_one(queue)
                for batch in self._batches:
                    if batch.num_under_way:
                        self.is_stepping = False
                        try:
                            actions = batch.decide()
                        except Exception as error:
                            error.add_note(_HOW_MANY)
                            raise
                        self.is_stepping = True
                        self._free += batch.step(actions, finished)
                        self._tick()
                is_idle = len(self._free) == len(self._seats)
                if time.monotonic() >= deadline or (not queue and self._free and (finished or is_idle)):
                    break
        return finished, [task.index for task in queue]

    def close(self) -> None:
        """Close the environments, even if one of them raises."""
        seats, self._seats, self._free, self._batches = self._seats, [], [], []
        for seat in seats:
            _close(seat.env)

    def _start_one(self, queue: deque[Task]) -> None:
        """Start the first task whose row is free in some batch; if there is none, start a task in a new batch."""
        for batch in self._batches:
            if batch.num_under_way < ROWS:
                for position, task in enumerate(queue):
                    if batch.is_free(task):
                        del queue[position]
                        batch.start(task, self._free.pop())
                        return
        self._batches.append(_Batch(self._plan, self._values, self._spaces, self._forgives, self._tick, self._chance))
        self._batches[-1].start(queue.popleft(), self._free.pop())

    @contextlib.contextmanager
    def _closing_after_errors(self) -> Iterator[None]:
        """Close all environments after an exception, since some may be in the middle of a step."""
        try:
            yield
        except BaseException:
            self.close()
            raise


@dataclass(eq=False)
class _Seat:
    """An environment, and whether it has raised and must be replaced."""

    env: Env[Any, Any]
    is_broken: bool = False


@dataclass(eq=False)
class _UnderWay:
    task: Task
    seat: _Seat
    budget: ErrorBudget
    total: float = 0.0
    length: int = 0


class _Batch:
    """Up to `ROWS` episodes, for which the policy decides at once, or one by one if it draws from shared generators.

    Rows without an episode show their last observation, or a copy of another row's.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        values: Mapping[str, Any],
        spaces: RunSpaces,
        forgives: bool,
        tick: Callable[[], None],
        chance: Chance,
    ) -> None:
        self.num_under_way = 0
        self._spaces = spaces
        self._forgives = forgives
        self._tick = tick
        self._layout = Layout(spaces.observation_space)
        self._arrays: list[NDArray[Any] | None] = [
            np.zeros((ROWS, *leaf.shape), leaf.dtype) for leaf in self._layout.leaves
        ]
        self._put = ObservationWriter(self._layout, self._arrays, ROWS).put
        self._choices = Choices(spaces.action_space, ROWS)
        self._choices_of_one = Choices(spaces.action_space, 1)
        self._chance = chance
        self._rng = EpisodeGenerator(ROWS)
        self._policy: Policy = plan.policy
        self._use_generator = getattr(plan.policy, "use_generator", None)
        self._values = values
        self._takes_masks = NAME in getattr(plan.policy, "takes", ())
        self._factory: EnvFactory = plan.factory
        self._max_steps = plan.max_steps
        self._rows: list[_UnderWay | None] = [None] * ROWS
        self._is_idle = np.ones(ROWS, np.bool_)  # Rows without an episode, now or at the last decision.
        self._state: State | None = checked_state(self._policy.initial_state(ROWS))
        self._masks: NDArray[Any] | None = None
        self._has_begun = False
        self._has_new_episode = False

    def is_free(self, task: Task) -> bool:
        """Whether the row of an episode is free."""
        return self._rows[task.index % ROWS] is None

    def start(self, task: Task, seat: _Seat) -> None:
        """Reset an environment for an episode."""
        row = task.index % ROWS
        playing = _UnderWay(task, seat, ErrorBudget(1, task.index, forgives=self._forgives))
        with _naming(task):
            observation, info = self._reset(playing)
            self._put(row, observation)
        self._tick()
        if not self._has_begun:  # The policy must not see observations that no environment returned.
            self._has_begun = True
            for array in self._arrays:
                array[:] = array[row]  # type: ignore[index]  # evaluations have leaves of fixed size only
        if self._takes_masks:
            self._note_mask(row, info)
        self._rng.restart(row, task.seed)
        self._rows[row] = playing
        self._has_new_episode = True
        self.num_under_way += 1

    def decide(self) -> Any:
        """Let the policy decide for all rows."""
        if self._state is not None:
            initial = self._policy.initial_state(ROWS)
            assert initial is not None, "it had one"
            self._state = start_episodes(self._state, initial, self._is_idle)
            self._is_idle[:] = [row is None for row in self._rows]
        if self._chance.is_alone:
            return self._decide_alone()
        if self._use_generator is not None:
            self._use_generator(self._rng)
        before = self._chance.read(self._rng) if self._chance.watches(self._has_new_episode) else None
        self._has_new_episode = False
        decision = self._act(self._layout.nest(self._arrays), self._state, self._masks)
        if before is not None:
            self._chance.compare(before, self._rng)
            if self._chance.is_alone:
                return self._decide_alone()
        self._state = decision.state
        return self._choices.split(self._choices.check(decision))

    def _decide_alone(self) -> list[Any]:
        """Let the policy decide for one episode at a time, each with its own random numbers."""
        actions: list[Any] = [None] * ROWS
        state = None if self._state is None else {name: array.copy() for name, array in self._state.items()}
        for row, playing in enumerate(self._rows):
            if playing is None:
                continue
            here = slice(row, row + 1)
            obs = self._layout.nest([array[here] for array in self._arrays if array is not None])
            masks = None if self._masks is None else self._masks[here]
            own = None if self._state is None else {name: array[here] for name, array in self._state.items()}
            with self._chance.of_episode(playing.task.seed, playing.length):
                decision = self._act(obs, own, masks)
            (actions[row],) = self._choices_of_one.split(self._choices_of_one.check(decision))
            if state is not None and decision.state is not None:
                for name, array in decision.state.items():
                    state[name][row] = array[0]
        self._state = state
        return actions

    def _act(self, obs: Any, state: State | None, masks: NDArray[Any] | None) -> Decision:
        return self._policy.act(obs, state, self._values if masks is None else {NAME: masks, **self._values})

    def step(self, actions: Any, finished: list[list[Any]]) -> list[_Seat]:
        """Step the episodes under way, append those that are over to `finished`, and return the seats set free."""
        rows, put, max_steps, free = self._rows, self._put, self._max_steps, list[_Seat]()
        for row, action in enumerate(actions):
            playing = rows[row]
            if playing is None:
                continue
            try:
                observation, reward, terminated, truncated, info = playing.seat.env.step(action)
                put(row, observation)
            except BaseException as error:
                if not playing.budget.forgive(0, error):
                    _name(error, playing.task)
                    raise
                playing.seat.is_broken = True
                reward, terminated, truncated, info = 0.0, False, True, {"env_error": playing.budget.text}
            playing.total += float(reward)
            playing.length += 1
            if self._takes_masks:
                self._note_mask(row, info)
            if terminated or truncated or playing.length >= max_steps:
                was_cut = not (terminated or truncated)
                ending = bool(terminated), bool(truncated) or was_cut, was_cut, self._chance.is_mixed
                # Encoded right away, because environments may change an info after returning it.
                finished.append([playing.task.index, playing.total, playing.length, *ending, values.dumps(info)])
                free.append(playing.seat)
                rows[row] = None
                self._is_idle[row] = True
                self.num_under_way -= 1
        return free

    def _reset(self, playing: _UnderWay) -> tuple[Any, dict[str, Any]]:
        seat, task = playing.seat, playing.task
        while True:
            try:
                if seat.is_broken:
                    _close(seat.env)
                    seat.env = make_env(self._factory)
                    check_spaces(seat.env.observation_space, seat.env.action_space, self._spaces)
                    seat.is_broken = False
                options = None if task.options is None else dict(task.options)
                return seat.env.reset(seed=task.seed, options=options)
            except BaseException as error:
                if not playing.budget.forgive(0, error):
                    raise
                seat.is_broken = True

    def _note_mask(self, row: int, info: Mapping[str, Any]) -> None:
        mask = info.get(NAME)
        if self._masks is None:
            if not (isinstance(mask, np.ndarray) and mask.ndim and mask.dtype.kind in "biu"):
                return
            self._masks = np.ones((ROWS, *mask.shape), mask.dtype)
        self._masks[row] = mask if isinstance(mask, np.ndarray) and mask.shape == self._masks.shape[1:] else 1


@contextlib.contextmanager
def _naming(task: Task) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _name(error, task)
        raise


def _name(error: BaseException, task: Task) -> None:
    """Add a note that says in which episode an exception was raised."""
    error.add_note(f"(In episode {task.index} of an evaluation, with seed {task.seed}.)")


def _close(env: Env[Any, Any]) -> None:
    try:
        env.close()
    except Exception:
        log.warning("an environment of an evaluation could not be closed", exc_info=True)
