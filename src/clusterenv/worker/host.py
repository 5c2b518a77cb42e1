"""Host: the shard's environments, and the tight loop that steps them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import Env, Space
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from clusterenv.wire.assignment import Assignment, EnvFactory
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes
from clusterenv.worker.columns import Columns
from clusterenv.worker.infos import Gathering, Infos
from clusterenv.worker.making import make_env
from clusterenv.worker.mishaps import Mishaps

log = logging.getLogger(__name__)


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

    def step(self, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        """Step every environment once, filling the planes.

        Args:
            actions: One an environment; None takes those in the planes.
            for_rollout: Of the infos keep only those of episodes that end, and, without autoreset, leave finished
                environments alone instead of raising.
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

    def apply(self, function: Callable[[Any], Any], rows: Sequence[int]) -> list[Any]:
        """Run a function on the environments of these rows."""

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
        self._resting: dict[int, Any] = {}  # Without autoreset: the last observations of finished environments.
        self._attributes: dict[str, Sequence[Any]] = {}
        self._layout = Layout(assignment.observation_space)
        self._targets: Sequence[NDArray[Any] | None] = planes.observations
        # Where the observations lie that the last actions were chosen on.
        self._shown: Sequence[NDArray[Any] | None] = self._targets
        self._columns = Columns(self._layout, planes.observations, self._rows)
        self._actions = _ActionReader(assignment.action_space, planes.actions, self._rows)
        self._infos = Gathering(self._rows)
        self._waiting: list[Any] = [None] * self._rows
        forgives = assignment.on_env_error == "reset"
        self._mishaps = Mishaps(self._rows, assignment.start, forgives=forgives)
        self._waits = self._columns.waits and not forgives  # An observation that does not fit must show at its row.
        self._put = self._waiting.__setitem__ if self._waits else self._columns.put
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
            self._envs.append(make_env(factory, self._assignment))
        self.failed_row = None

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Infos:
        """Reset all environments, or those in the mask; rows that are not reset keep their observation."""
        add_info = self._infos.begin()
        if mask is None:
            self._seeds = seeds
        for row, (env, seed) in enumerate(zip(self._envs, self._choose(seeds), strict=True)):
            if mask is not None and not mask[row]:
                continue
            self.failed_row = row
            try:
                # Each environment may change its options: none may see another's changes, or change the caller's.
                observation, info = env.reset(seed=seed, options=None if options is None else dict(options))
                self._columns.put(row, observation)
            except BaseException as error:
                if not self._mishaps.forgive(row, error):
                    raise
                observation, info = self._make_again(row, seed=seed, options=options)
                self._columns.put(row, observation)
            self._pending[row], self._next_seeds[row] = False, None
            self._planes.terminations[row] = self._planes.truncations[row] = False
            if info:
                add_info(row, info)
        self.failed_row = None
        return self._infos.end()

    def step(self, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        """Step every environment once, resetting as the autoreset mode has it."""
        self._mishaps.step += 1
        return self._step(self._actions.read() if actions is None else actions, not for_rollout)

    def truncate(self) -> None:
        """Take all episodes for finished."""
        self._planes.truncations[:] = True
        self._next_seeds[:] = self._seeds
        for row in range(self._rows):
            self._pending[row] = True
            self._resting[row] = self._last_observation(row)

    def observe_into(self, arrays: Sequence[NDArray[Any] | None]) -> None:
        """From now on write observations into these arrays, one a leaf, instead of the planes'."""
        self._shown = arrays if arrays is self._planes.observations else self._targets
        self._targets = arrays
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
        self._attributes[name] = values
        self.failed_row = None

    def apply(self, function: Callable[[Any], Any], rows: Sequence[int]) -> list[Any]:
        """Run a function on the environments of these rows."""
        results = []
        for row in rows:
            self.failed_row = row
            results.append(function(self._envs[row]))
        self.failed_row = None
        return results

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
    # lists, flags are written only where they are true, and rewards once per step. After an exception that is
    # forgiven, the loop over `pairs` goes on with the next environment.

    def _step_next(self, actions: Iterable[Any], wants_all: bool) -> Infos:
        put, flat, slices, pending = self._put, self._columns.flat, self._columns.slices, self._pending
        add_info, rewards, seeds = self._infos.begin(), [0.0] * self._rows, self._next_seeds
        terminations, truncations = self._clear_flags()
        pairs, row = enumerate(zip(self._envs, actions, strict=True)), 0
        while True:
            try:
                for row, (env, action) in pairs:
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
                    if info and (wants_all or pending[row]):
                        add_info(row, info)
                break
            except BaseException as error:
                if not self._forgive(row, error):
                    raise
                if pending[row] and not (terminations[row] or truncations[row]):
                    observation, info = self._make_again(row)
                    pending[row], seeds[row] = False, None
                else:
                    observation, info = self._truncate_row(row, rewards)
                    pending[row] = True
                put(row, observation)
                add_info(row, info)
        self._planes.rewards[:] = rewards
        self._write_waiting()
        return self._infos.end()

    def _step_same(self, actions: Iterable[Any], wants_all: bool) -> Infos:
        put, add_info = self._put, self._infos.begin()
        rewards: list[Any] = [0.0] * self._rows
        terminations, truncations = self._clear_flags()
        pairs, row = enumerate(zip(self._envs, actions, strict=True)), 0
        while True:
            try:
                for row, (env, action) in pairs:
                    observation, rewards[row], terminated, truncated, info = env.step(action)
                    if terminated or truncated:
                        terminations[row], truncations[row] = terminated, truncated
                        # A copy: environments may write the next episode into the same buffer.
                        final = {"final_obs": copy.deepcopy(observation), "final_info": info}
                        add_info(row, final)
                        observation, info = env.reset()
                    put(row, observation)
                    if info and wants_all:
                        add_info(row, info)
                break
            except BaseException as error:
                if not self._forgive(row, error):
                    raise
                if not (terminations[row] or truncations[row]):
                    observation, info = self._truncate_row(row, rewards)
                    add_info(row, {"final_obs": observation, "final_info": info})
                observation, info = self._make_again(row)
                put(row, observation)
                add_info(row, info)
        self._planes.rewards[:] = rewards
        self._write_waiting()
        return self._infos.end()

    def _step_disabled(self, actions: Iterable[Any], wants_all: bool) -> Infos:
        put, pending, add_info = self._put, self._pending, self._infos.begin()
        rewards: list[Any] = [0.0] * self._rows
        if any(pending) and wants_all:
            self.failed_row = pending.index(True)
            raise ResetNeeded(
                "An environment that has finished was stepped with autoreset_mode=DISABLED. "
                "Reset it first: envs.reset(options={'reset_mask': terminated | truncated})."
            )
        terminations, truncations = self._clear_flags()
        pairs, row = enumerate(zip(self._envs, actions, strict=True)), 0
        while True:
            try:
                for row, (env, action) in pairs:
                    if pending[row]:
                        put(row, self._resting[row])
                        continue
                    observation, rewards[row], terminated, truncated, info = env.step(action)
                    if terminated or truncated:
                        self._resting[row] = copy.deepcopy(observation)
                        terminations[row], truncations[row], pending[row] = terminated, truncated, True
                    put(row, observation)
                    if info and (wants_all or pending[row]):
                        add_info(row, info)
                break
            except BaseException as error:
                if not self._forgive(row, error):
                    raise
                observation, info = self._truncate_row(row, rewards)
                self._resting[row], pending[row] = observation, True
                put(row, observation)
                add_info(row, info)
        self._planes.rewards[:] = rewards
        self._write_waiting()
        return self._infos.end()

    def _forgive(self, row: int, error: BaseException) -> bool:
        self.failed_row = row
        return self._mishaps.forgive(row, error)

    def _truncate_row(self, row: int, rewards: list[Any]) -> tuple[Any, Infos]:
        """Take an episode for truncated where its environment raised; returns the last observation, and an info."""
        rewards[row] = 0.0
        self._planes.terminations[row], self._planes.truncations[row] = False, True
        return self._last_observation(row), {"env_error": self._mishaps.text}

    def _make_again(
        self, row: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Reset an environment that raised; if it cannot be reset, make another in its place, and reset that."""
        text = self._mishaps.text
        while True:
            try:
                observation, info = self._envs[row].reset(
                    seed=self._next_seeds[row] if seed is None else seed,
                    options=None if options is None else {**options},
                )
            except BaseException as error:
                if not self._forgive(row, error):
                    raise
                self._remake(row)
            else:
                return observation, {**info, "env_error": text}

    def _remake(self, row: int) -> None:
        try:
            self._envs[row].close()
        except Exception:
            log.warning("an environment that is made again could not be closed", exc_info=True)
        self._envs[row] = make_env(self._factories[row], self._assignment)
        for name, values in self._attributes.items():
            self._envs[row].set_wrapper_attr(name, values[row])

    def _last_observation(self, row: int) -> Any:
        """Return a copy of what the last action was chosen on."""
        objects = iter(self._columns.objects())
        return self._layout.nest([next(objects)[row] if leaf is None else leaf[row].copy() for leaf in self._shown])

    def _choose(self, seeds: Sequence[int | None]) -> list[int | None]:
        return [nxt if seed is None else seed for seed, nxt in zip(seeds, self._next_seeds, strict=True)]

    def _put_slowly(self, row: int, observation: Any) -> None:
        """Write an observation that is not in the space's own dtype, and do so with all others from now on."""
        self._columns.put(row, observation)
        self._columns.do_without_flat()

    def _write_waiting(self) -> None:
        """Write the observations that were kept back, all at once or, if one does not fit, up to that one."""
        if self._waits and not self._columns.put_all(self._waiting):
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
