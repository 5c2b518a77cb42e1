"""Host: the shard's environments, and the tight loop that steps them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import Env, Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from clusterenv.errors import ConfigError
from clusterenv.wire.assignment import Assignment, EnvFactory
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes
from clusterenv.worker.columns import Columns
from clusterenv.worker.infos import Infos, add_info


class Host(Protocol):
    """What a worker's loop, or a head without workers, needs of the environments it runs.

    Attributes:
        failed_row: The row of the environment that raised last, if that is known.
        takes_batches: Whether `step` takes actions as the batched space has them, rather than one an environment.
    """

    failed_row: int | None
    takes_batches: bool

    def open(self) -> None:
        """Make the environments."""

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Infos:
        """Reset all environments, or those in the mask, filling the planes."""

    def step(self, actions: Iterable[Any] | None, *, skips_finished: bool = False) -> Infos:
        """Step every environment once, filling the planes.

        Args:
            actions: One an environment; None takes those in the planes.
            skips_finished: Without autoreset, leave finished environments alone instead of raising.
        """

    def truncate(self) -> None:
        """Take all episodes for finished, as the next step or a reset will find them; not for SAME_STEP.

        The new episodes begin with the seeds of the last reset of all, as if it had not happened yet.
        """

    def observe_into(self, arrays: Sequence[NDArray[Any] | None]) -> None:
        """From now on write observations into these arrays, one a leaf, instead of the planes'."""

    def objects(self) -> list[list[Any]]:
        """Return the newest observations' leaves that have no fixed size, one list a leaf."""

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method, or read an attribute, of every environment."""

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""

    def close(self) -> None:
        """Close the environments."""


class EnvHost:
    """Hosts plain environments, one after another in this process."""

    takes_batches = False

    def __init__(self, factories: Sequence[EnvFactory], assignment: Assignment, planes: Planes) -> None:
        self.failed_row: int | None = None
        self._factories = factories
        self._assignment = assignment
        self._planes = planes
        self._envs: list[Env[Any, Any]] = []
        self._rows = len(factories)
        self._pending = [False] * self._rows
        self._seeds: Sequence[int | None] = [None] * self._rows  # Of the last reset of all.
        self._next_seeds: list[int | None] = [None] * self._rows  # Of the next resets by themselves.
        self._skips_finished = False
        self._resting: dict[int, Any] = {}  # Without autoreset: the last observations of finished environments.
        self._columns = Columns(Layout(assignment.observation_space), planes.observations, self._rows)
        self._actions = _ActionReader(assignment.action_space, planes.actions, self._rows)
        self._waiting: list[Any] = [None] * self._rows
        self._put = self._waiting.__setitem__ if self._columns.waits else self._columns.put
        self.objects = self._columns.objects
        self._step = {
            AutoresetMode.NEXT_STEP: self._step_next,
            AutoresetMode.SAME_STEP: self._step_same,
            AutoresetMode.DISABLED: self._step_disabled,
        }[assignment.autoreset_mode]

    def open(self) -> None:
        """Make the environments, in the order of their index."""
        for row, factory in enumerate(self._factories):
            self.failed_row = row
            self._envs.append(_make(factory, self._assignment))
        self.failed_row = None

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Infos:
        """Reset all environments, or those in the mask; rows that are not reset keep their observation."""
        infos: Infos = {}
        if mask is None:
            self._seeds = seeds
        for row, (env, seed) in enumerate(zip(self._envs, self._choose(seeds), strict=True)):
            if mask is not None and not mask[row]:
                continue
            self.failed_row = row
            # Each environment may change its options: none may see another's changes, or change the caller's.
            observation, info = env.reset(seed=seed, options=None if options is None else dict(options))
            self._columns.put(row, observation)
            self._pending[row], self._next_seeds[row] = False, None
            self._planes.terminations[row] = self._planes.truncations[row] = False
            if info:
                add_info(infos, info, row, self._rows)
        self.failed_row = None
        return infos

    def step(self, actions: Iterable[Any] | None, *, skips_finished: bool = False) -> Infos:
        """Step every environment once, resetting as the autoreset mode has it."""
        self._skips_finished = skips_finished
        return self._step(self._actions.read() if actions is None else actions)

    def truncate(self) -> None:
        """Take all episodes for finished."""
        layout, planes = Layout(self._assignment.observation_space), self._planes.observations
        self._planes.truncations[:] = True
        self._next_seeds[:] = self._seeds
        for row in range(self._rows):
            self._pending[row] = True
            self._resting[row] = layout.nest([None if plane is None else plane[row].copy() for plane in planes])

    def observe_into(self, arrays: Sequence[NDArray[Any] | None]) -> None:
        """From now on write observations into these arrays, one a leaf, instead of the planes'."""
        self._columns.retarget(arrays)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method, or read an attribute, of every environment, looking through its wrappers."""
        results = []
        for row, env in enumerate(self._envs):
            self.failed_row = row
            target = env.get_wrapper_attr(name)
            results.append(target(*args, **kwargs) if callable(target) else target)
        self.failed_row = None
        return results

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment, on the wrapper that has it."""
        for row, (env, value) in enumerate(zip(self._envs, values, strict=True)):
            self.failed_row = row
            env.set_wrapper_attr(name, value)
        self.failed_row = None

    def close(self) -> None:
        """Close every environment, also when one of them fails to; the first error is raised at the end."""
        envs, self._envs = self._envs, []
        first: Exception | None = None
        for env in envs:
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - whatever one close raises, the others must still be closed
                first = first or error
        if first is not None:
            raise first

    # The three loops below are the hot path: everything per environment is done with local names and plain
    # lists, flags are written only where they are true, and rewards once per step.

    def _step_next(self, actions: Iterable[Any]) -> Infos:
        put, flat, slices, pending = self._put, self._columns.flat, self._columns.slices, self._pending
        infos, rewards, seeds = Infos(), [0.0] * self._rows, self._next_seeds
        terminations, truncations = self._clear_flags()
        row = 0
        try:
            for row, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
                if pending[row]:
                    observation, info = env.reset(seed=seeds[row])
                    pending[row], seeds[row] = False, None
                else:
                    observation, rewards[row], terminated, truncated, info = env.step(action)  # type: ignore[call-overload]
                    if terminated:
                        terminations[row] = pending[row] = True
                    if truncated:
                        truncations[row] = pending[row] = True
                if flat is None:
                    put(row, observation)
                else:
                    try:
                        flat[slices[row]] = observation
                    except (TypeError, ValueError):
                        self._put_slowly(row, observation)
                        flat = None
                if info:
                    add_info(infos, info, row, self._rows)
        except BaseException:
            self.failed_row = row
            raise
        self._planes.rewards[:] = rewards
        self._write_waiting()
        return infos

    def _step_same(self, actions: Iterable[Any]) -> Infos:
        put, infos = self._put, Infos()
        rewards: list[Any] = [0.0] * self._rows
        terminations, truncations = self._clear_flags()
        row = 0
        try:
            for row, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
                observation, rewards[row], terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    terminations[row], truncations[row] = terminated, truncated
                    # A copy: environments may write the next episode into the same buffer.
                    final = {"final_obs": copy.deepcopy(observation), "final_info": info}
                    add_info(infos, final, row, self._rows)
                    observation, info = env.reset()
                put(row, observation)
                if info:
                    add_info(infos, info, row, self._rows)
        except BaseException:
            self.failed_row = row
            raise
        self._planes.rewards[:] = rewards
        self._write_waiting()
        return infos

    def _step_disabled(self, actions: Iterable[Any]) -> Infos:
        put, pending, infos = self._put, self._pending, Infos()
        rewards: list[Any] = [0.0] * self._rows
        if any(pending) and not self._skips_finished:
            self.failed_row = pending.index(True)
            raise ResetNeeded(
                "An environment that has finished was stepped with autoreset_mode=DISABLED. "
                "Reset it first: envs.reset(options={'reset_mask': terminated | truncated})."
            )
        terminations, truncations = self._clear_flags()
        row = 0
        try:
            for row, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
                if pending[row]:
                    put(row, self._resting[row])
                    continue
                observation, rewards[row], terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    self._resting[row] = copy.deepcopy(observation)
                    terminations[row], truncations[row], pending[row] = terminated, truncated, True
                put(row, observation)
                if info:
                    add_info(infos, info, row, self._rows)
        except BaseException:
            self.failed_row = row
            raise
        self._planes.rewards[:] = rewards
        self._write_waiting()
        return infos

    def _choose(self, seeds: Sequence[int | None]) -> list[int | None]:
        return [nxt if seed is None else seed for seed, nxt in zip(seeds, self._next_seeds, strict=True)]

    def _put_slowly(self, row: int, observation: Any) -> None:
        """Write an observation that is not in the space's own dtype, and do so with all others from now on."""
        self._columns.put(row, observation)
        self._columns.do_without_flat()

    def _write_waiting(self) -> None:
        """Write the observations that were kept back, all at once or, if one does not fit, up to that one."""
        if self._columns.waits and not self._columns.put_all(self._waiting):
            for row, observation in enumerate(self._waiting):
                self.failed_row = row
                self._columns.put(row, observation)
            self.failed_row = None

    def _clear_flags(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        self.failed_row = None
        terminations, truncations = self._planes.terminations, self._planes.truncations
        terminations[:] = False
        truncations[:] = False
        return terminations, truncations


def _make(factory: EnvFactory, assignment: Assignment) -> Env[Any, Any]:
    env = factory()
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"The factory made a vector environment ({env}). To run vector environments on workers, wrap a callable "
            "that takes their size: ClusterEnv(NativeVector(lambda n: make(n)), num_envs=...)."
        )
    if not isinstance(env, Env):
        raise ConfigError(f"The factory must return a gymnasium.Env, got {type(env)}.")
    check_spaces(env.observation_space, env.action_space, assignment)
    return env


def check_spaces(observation_space: Space[Any], action_space: Space[Any], assignment: Assignment) -> None:
    """Check that an environment has the spaces the head expects.

    Raises:
        RuntimeError: It has not; worded as Gymnasium words it.
    """
    wanted = assignment.observation_space
    if assignment.must_equal and observation_space != wanted:
        raise RuntimeError(
            "ClusterEnv(..., observation_mode='same') however the sub-environments observation spaces are not "
            "equivalent. "
            f"single_observation_space={wanted}, sub-environment observation_space={observation_space}. "
            "If this is intentional, use `observation_mode='different'` instead."
        )
    if not assignment.must_equal and not is_space_dtype_shape_equiv(observation_space, wanted):
        raise RuntimeError(
            "ClusterEnv(..., observation_mode='different' or custom space) however the sub-environments observation "
            f"spaces do not share a common shape and dtype, single_observation_space={wanted}, "
            f"sub-environment observation_space={observation_space}"
        )
    if action_space != assignment.action_space:
        raise RuntimeError(
            "Sub-environment action space doesn't make the `single_action_space`, "
            f"action_space={action_space}, single_action_space={assignment.action_space}"
        )


class _ActionReader:
    """Reads the shard's actions out of the planes."""

    def __init__(self, space: Space[Any], planes: list[NDArray[Any]], num_rows: int) -> None:
        self._layout = Layout(space)
        self._planes = planes
        self._batched = batch_space(space, num_rows)

    def read(self) -> Iterable[Any]:
        # Copies: an environment may keep its action, and the planes are written again at the next step.
        if self._layout.is_single:
            return self._planes[0].copy()
        return iterate(self._batched, self._layout.nest([plane.copy() for plane in self._planes]))
