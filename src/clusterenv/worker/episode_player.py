"""EpisodePlayer: plays the episodes of an evaluation, in environments and with a policy of its own."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Env
from numpy.typing import NDArray

from clusterenv.policy.episode_generator import EpisodeGenerator
from clusterenv.policy.policy import Policy, State, start_episodes
from clusterenv.wire import values
from clusterenv.wire.assignment import EnvFactory, EvaluationPlan, RunSpaces
from clusterenv.wire.layout import Layout
from clusterenv.worker.choices import Choices, checked_state
from clusterenv.worker.error_budget import ErrorBudget
from clusterenv.worker.making import check_spaces, make_env
from clusterenv.worker.masks import NAME
from clusterenv.worker.observation_writer import ObservationWriter

log = logging.getLogger(__name__)

ROWS = 8
"""How many rows the policy decides for at a time, always: what a row's result is may depend on their number."""


@dataclass(frozen=True)
class Task:
    """An episode to play.

    Attributes:
        index: In the evaluation's table.
        options: For `reset`.
    """

    index: int
    seed: int
    options: dict[str, Any] | None


class EpisodePlayer:
    """Plays the episodes it is dealt: as many at a time as it has environments, each from its seed to its end.

    Nothing of the shard beside it is touched, nor are the process's own random generators.

    Attributes:
        is_stepping: Whether the environments are at work, and not the policy; left as it was when something raises.
    """

    is_stepping = True

    def __init__(self, spaces: RunSpaces, *, forgives: bool, tick: Callable[[], None]) -> None:
        """Play in environments with these spaces.

        Args:
            spaces: Of the run.
            forgives: Whether an episode whose environment raises is truncated, and the others go on.
            tick: Told of each environment that was made or reset, and of each step.
        """
        self._spaces = spaces
        self._forgives = forgives
        self._tick = tick
        self._batches: list[_Batch] = []

    def begin(self, plan: EvaluationPlan, num_envs: int) -> None:
        """Begin another evaluation, with as many environments; those of the last one are used again.

        What was under way is forgotten.
        """
        with self._closing_after_errors(), _own_chance():
            policy: Policy = plan.policy
            policy.load(plan.weights_spec.decode(plan.weights))
            policy.seed(plan.seed)
            envs = [env for batch in self._batches for env in batch.usable_envs()]
            # In one batch, for now, so that all are closed should one of them fail to be made.
            self._batches = [_Batch(envs, self._spaces, self._forgives, self._tick)]
            for env in envs[num_envs:]:
                env.close()
            del envs[num_envs:]
            self.is_stepping = True
            while len(envs) < num_envs:
                envs.append(make_env(plan.factory))
                self._tick()
                check_spaces(envs[-1].observation_space, envs[-1].action_space, self._spaces)
            self._batches = [
                _Batch(envs[start : start + ROWS], self._spaces, self._forgives, self._tick)
                for start in range(0, num_envs, ROWS)
            ]
            for batch in self._batches:
                batch.begin(plan)

    def play(self, tasks: Sequence[Task], limit_s: float) -> tuple[list[list[Any]], list[int]]:
        """Play until the time is up, or an environment is free and there is something to report.

        Args:
            tasks: To play besides those that are under way.
            limit_s: How long; then the step under way is finished.

        Returns:
            What is over: `[index, return, length, terminated, truncated, whether it was cut at max_steps, info]`, the
            last encoded as a value. And the indices of the tasks that were not begun.
        """
        queue, finished = deque(tasks), list[list[Any]]()
        deadline = time.monotonic() + limit_s
        with self._closing_after_errors(), _own_chance():
            while True:
                for batch in self._batches:
                    self.is_stepping = True
                    while queue and batch.has_room:
                        batch.start(queue.popleft())
                    if batch.num_under_way:
                        self.is_stepping = False
                        actions = batch.decide()
                        self.is_stepping = True
                        batch.step(actions, finished)
                        self._tick()
                has_room = any(batch.has_room for batch in self._batches)
                is_idle = not any(batch.num_under_way for batch in self._batches)
                if time.monotonic() >= deadline or (not queue and has_room and (finished or is_idle)):
                    break
        return finished, [task.index for task in queue]

    def close(self) -> None:
        """Close the environments, even if one of them fails to."""
        batches, self._batches = self._batches, []
        for batch in batches:
            for env in batch.envs:
                _close(env)

    @contextlib.contextmanager
    def _closing_after_errors(self) -> Iterator[None]:
        """Use no environment again that something has raised in, or that was left in the middle of something."""
        try:
            yield
        except BaseException:
            self.close()
            raise


@dataclass(eq=False)
class _UnderWay:
    task: Task
    total: float = 0.0
    length: int = 0


class _Batch:
    """Up to `ROWS` environments, for which the policy decides at once.

    Rows in which nothing is under way show what they showed last, or what another one shows.
    """

    def __init__(self, envs: list[Env[Any, Any]], spaces: RunSpaces, forgives: bool, tick: Callable[[], None]) -> None:
        self.envs = envs
        self.num_under_way = 0
        self._spaces = spaces
        self._tick = tick
        self._layout = Layout(spaces.observation_space)
        self._arrays: list[NDArray[Any] | None] = [
            np.zeros((ROWS, *leaf.shape), leaf.dtype) for leaf in self._layout.leaves
        ]
        self._put = ObservationWriter(self._layout, self._arrays, ROWS).put
        self._choices = Choices(spaces.action_space, ROWS)
        self._budget = ErrorBudget(ROWS, 0, forgives=forgives)
        self._rng = EpisodeGenerator(ROWS)
        self._is_broken = [False] * len(envs)

    def usable_envs(self) -> list[Env[Any, Any]]:
        """Return the environments, without those that have raised: these are closed."""
        for env, is_broken in zip(self.envs, self._is_broken, strict=True):
            if is_broken:
                _close(env)
        return [env for env, is_broken in zip(self.envs, self._is_broken, strict=True) if not is_broken]

    @property
    def has_room(self) -> bool:
        return self.num_under_way < len(self.envs)

    def begin(self, plan: EvaluationPlan) -> None:
        self._policy: Policy = plan.policy
        self._use_generator = getattr(plan.policy, "use_generator", None)
        self._values: Mapping[str, Any] = plan.values
        self._takes_masks = NAME in getattr(plan.policy, "takes", ())
        self._factory: EnvFactory = plan.factory
        self._max_steps = plan.max_steps
        self._rows: list[_UnderWay | None] = [None] * ROWS
        self._is_idle = np.ones(ROWS, np.bool_)  # Where nothing is under way, or was not when the policy last decided.
        self._state: State | None = checked_state(self._policy.initial_state(ROWS))
        self._masks: NDArray[Any] | None = None
        self._has_begun = False

    def start(self, task: Task) -> None:
        """Reset a free environment for an episode."""
        row = next(row for row in range(len(self.envs)) if self._rows[row] is None)
        with _naming(task):
            observation, info = self._reset(row, task)
            self._put(row, observation)
        self._tick()
        if not self._has_begun:  # The policy must not be shown what no environment has.
            self._has_begun = True
            for array in self._arrays:
                array[:] = array[row]  # type: ignore[index]  # evaluations have leaves of fixed size only
            mask = info.get(NAME)
            if isinstance(mask, np.ndarray) and mask.ndim and mask.dtype.kind in "biu":
                self._masks = np.ones((ROWS, *mask.shape), mask.dtype)
        if self._masks is not None:
            self._note_mask(self._masks, row, info)
        self._rng.restart(row, task.seed)
        self._rows[row] = _UnderWay(task)
        self.num_under_way += 1

    def decide(self) -> Any:
        """Let the policy decide for all rows."""
        if self._use_generator is not None:
            self._use_generator(self._rng)
        if self._state is not None:
            initial = self._policy.initial_state(ROWS)
            assert initial is not None, "it had one"
            self._state = start_episodes(self._state, initial, self._is_idle)
            self._is_idle[:] = [row is None for row in self._rows]
        given = self._values
        if self._takes_masks and self._masks is not None:
            given = {NAME: self._masks, **given}
        decision = self._policy.act(self._layout.nest(self._arrays), self._state, given)
        self._state = decision.state
        return self._choices.split(self._choices.check(decision))

    def step(self, actions: Any, finished: list[list[Any]]) -> None:
        """Step those that are under way, and add what is over to the list."""
        self._budget.step += 1
        rows, envs, put, max_steps = self._rows, self.envs, self._put, self._max_steps
        for row, action in enumerate(actions):
            playing = rows[row]
            if playing is None:
                continue
            try:
                observation, reward, terminated, truncated, info = envs[row].step(action)
                put(row, observation)
            except BaseException as error:
                if not self._budget.forgive(row, error):
                    _name(error, playing.task)
                    raise
                self._is_broken[row] = True
                reward, terminated, truncated, info = 0.0, False, True, {"env_error": self._budget.text}
            playing.total += float(reward)
            playing.length += 1
            if self._masks is not None:
                self._note_mask(self._masks, row, info)
            if terminated or truncated or playing.length >= max_steps:
                was_cut = not (terminated or truncated)
                ending = bool(terminated), bool(truncated) or was_cut, was_cut
                # Encoded at once: environments may change an info that they have returned.
                finished.append([playing.task.index, playing.total, playing.length, *ending, values.dumps(info)])
                rows[row] = None
                self._is_idle[row] = True
                self.num_under_way -= 1

    def _reset(self, row: int, task: Task) -> tuple[Any, dict[str, Any]]:
        while True:
            try:
                if self._is_broken[row]:
                    _close(self.envs[row])
                    self.envs[row] = make_env(self._factory)
                    check_spaces(self.envs[row].observation_space, self.envs[row].action_space, self._spaces)
                    self._is_broken[row] = False
                options = None if task.options is None else dict(task.options)
                return self.envs[row].reset(seed=task.seed, options=options)
            except BaseException as error:
                if not self._budget.forgive(row, error):
                    raise
                self._is_broken[row] = True

    def _note_mask(self, masks: NDArray[Any], row: int, info: Mapping[str, Any]) -> None:
        mask = info.get(NAME)
        masks[row] = mask if isinstance(mask, np.ndarray) and mask.shape == masks.shape[1:] else 1


@contextlib.contextmanager
def _own_chance() -> Iterator[None]:
    """Leave the process's own generators as they were: environments may draw from them, and so may those beside."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _naming(task: Task) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _name(error, task)
        raise


def _name(error: BaseException, task: Task) -> None:
    """Say in which episode something was raised."""
    error.add_note(f"(In episode {task.index} of an evaluation, with seed {task.seed}.)")


def _close(env: Env[Any, Any]) -> None:
    try:
        env.close()
    except Exception:
        log.warning("an environment of an evaluation could not be closed", exc_info=True)
