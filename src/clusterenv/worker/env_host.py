"""EnvHost: the shard's environments, and the tight loops that step them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import Env, Space
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from clusterenv.errors import ConfigError
from clusterenv.wire.assignment import Assignment, EnvFactory, RunSpaces
from clusterenv.wire.layout import Layout
from clusterenv.worker.host import Host, Pair
from clusterenv.worker.infos import Gathering, Infos, complete, info_row
from clusterenv.worker.making import check_spaces, make_env
from clusterenv.worker.observation_writer import ObservationWriter

log = logging.getLogger(__name__)


class _Lost:
    """Stands in for an environment whose episode was lost with another worker, until a step has reported that."""

    def __init__(self, seen: Any, first: tuple[Any, Infos]) -> None:
        self._seen = seen
        self._first = first

    def step(self, _action: Any) -> tuple[Any, float, bool, bool, Infos]:
        return self._seen, 0.0, False, True, {"worker_lost": True}

    def reset(self, **_: Any) -> tuple[Any, Infos]:
        observation, info = self._first  # The real environment was reset already.
        return observation, {**info, "worker_lost": True}


class EnvHost(Host):
    """Hosts plain environments, one after another in this process."""

    takes_batches = False

    def __init__(
        self,
        envs: list[Env[Any, Any]],
        assignment: Assignment,
        spaces: RunSpaces,
        pair: Pair,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Host environments, given in index order; the other arguments are those of `Host`."""
        assert isinstance(assignment.factories, list)
        super().__init__(assignment, spaces, pair, tick, num_budgets=len(envs))
        self._first: tuple[list[NDArray[Any] | None], list[list[Any]]] = [], []  # First observations, after `resume`.
        self._factories: list[EnvFactory] = assignment.factories
        self._envs = envs
        self._acting: list[Any] = envs  # What is stepped: the environments, or their stand-ins.
        self._pending = [False] * self._num_rows
        self._next_seeds: list[int | None] = [None] * self._num_rows  # For the next automatic resets.
        self._resting: dict[int, Any] = {}  # Without autoreset: the last observations of finished environments.
        self._layout = Layout(spaces.observation_space)
        self._writers = [ObservationWriter(self._layout, side.observations, self._num_rows) for side in pair]
        self._writer = self._writers[0]
        self._shown = self._writer.shown()  # The observations the last actions were based on: arrays, and objects.
        self._actions = _ActionReader(spaces.action_space, pair[0].actions, self._num_rows)
        self._infos = Gathering(self._num_rows)
        self._waiting: list[Any] = [None] * self._num_rows
        self._waits = self._writer.waits and not self._forgives  # To forgive, an error must surface at its row.
        self._step = {
            AutoresetMode.NEXT_STEP: self._step_next,
            AutoresetMode.SAME_STEP: self._step_same,
            AutoresetMode.DISABLED: self._step_disabled,
        }[self._mode]
        for row, env in enumerate(envs):
            self.failed_row = row
            check_spaces(env.observation_space, env.action_space, spaces)
        self.failed_row = None

    def reset(
        self, buffer: int, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None
    ) -> Infos:
        self._turn_to(buffer)
        self.errors.clear()
        add_info = self._infos.begin()
        for row, (env, seed) in enumerate(zip(self._envs, self._choose(seeds), strict=True)):
            if mask is not None and not mask[row]:
                continue
            self.failed_row = row
            try:
                # Copied, because an environment may change its options, which others must not see.
                observation, info = env.reset(seed=seed, options=None if options is None else dict(options))
                self._writer.put(row, observation)
            except BaseException as error:
                if not self._budget.forgive(row, error):
                    raise
                observation, info = self._make_again(row, seed=seed, options=options)
                self._writer.put(row, observation)
            self._tick()
            self._pending[row], self._next_seeds[row] = False, None
            if self._acting is not self._envs:
                self._acting[row] = self._envs[row]
            self.buffers.terminations[row] = self.buffers.truncations[row] = False
            if info:
                add_info(row, info)
        self.failed_row = None
        self.reset_infos = self._infos.end()
        return self.reset_infos

    def step(self, buffer: int | None, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        if buffer is not None:
            self._turn_to(buffer)
        budget = self._budget
        budget.step += 1
        if self.errors:
            self.errors.clear()
        self.failed_row, is_begun = None, False
        try:
            if self._mode is AutoresetMode.DISABLED and not for_rollout and any(self._pending):
                raise self._reset_needed()
            is_begun = True
            wants_all = not for_rollout or self.keeps_infos
            infos = self._step(self._actions.read() if actions is None else actions, wants_all)
        except BaseException:
            self._keep_rows(self.failed_row if is_begun and self.failed_row is not None else 0)
            raise
        if self._acting is not self._envs:
            self._acting = self._envs
        return infos

    def pending_rows(self) -> list[bool] | None:
        return self._pending

    def resume(self, buffer: int, seeds: Sequence[int], seen: Sequence[Any], ended: Sequence[bool]) -> None:
        # Into the other buffer: if this worker is lost as well, its replacement is given the contents of this one.
        infos = complete(self.reset(1 - buffer, seeds, None, None), self._num_rows)
        arrays, objects = self._writer.shown()
        self._first = [None if array is None else array.copy() for array in arrays], [list(part) for part in objects]
        self._turn_to(buffer)
        arrays, objects = self._writer.shown()
        firsts = [(self._observation(self._first, row), info_row(infos, row)) for row in range(self._num_rows)]
        self._writer.put_columns(seen)
        self._acting = []
        for row, has_ended in enumerate(ended):
            self._pending[row] = has_ended
            self._next_seeds[row] = None if self._mode is AutoresetMode.SAME_STEP else seeds[row]
            if has_ended and not self.buffers.terminations[row]:
                # Without shared memory, the flags are not in the buffer, and the learner may not have seen them yet.
                self.buffers.truncations[row] = True
            last = self._observation((arrays, objects), row)
            self._resting[row] = last
            self._acting.append(self._envs[row] if has_ended else _Lost(last, firsts[row]))

    def start_over(self) -> bool:
        if self._acting is self._envs:
            return False
        for row, acting in enumerate(self._acting):
            if isinstance(acting, _Lost) or self._pending[row]:  # The others have been reset since.
                self._writer.put(row, self._observation(self._first, row))
        self._acting = self._envs
        self._pending[:] = [False] * self._num_rows
        self._next_seeds[:] = [None] * self._num_rows
        self.buffers.terminations[:] = self.buffers.truncations[:] = False
        return True

    def observe_into(self, arrays: Sequence[NDArray[Any] | None] | None) -> None:
        self._shown = self._writer.shown()
        self.buffers = self._aside.use(arrays is not None, self._pair[self._buffer])
        self._writer.retarget(self.buffers.observations if arrays is None else arrays)

    def objects(self) -> list[list[Any]]:
        return self._writer.objects()

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        results = []
        for row, env in enumerate(self._envs):
            self.failed_row = row
            target = env.get_wrapper_attr(name)
            results.append(target(*args, **kwargs) if callable(target) else target)
        self.failed_row = None
        return results

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        for row, (env, value) in enumerate(zip(self._envs, values, strict=True)):
            self.failed_row = row
            env.set_wrapper_attr(name, value)
        self._attributes[name] = values
        self.failed_row = None

    def apply(self, function: Callable[[Any], Any], rows: Sequence[int]) -> list[Any]:
        results = []
        for row in rows:
            self.failed_row = row
            results.append(function(self._envs[row]))
        self.failed_row = None
        return results

    def close(self) -> None:
        """Close every environment, even if one raises; the first error is raised at the end."""
        envs, self._envs = self._envs, []
        first: Exception | None = None
        for env in envs:
            try:
                env.close()
            except Exception as error:  # noqa: BLE001 - whatever one close raises, the others must still be closed
                first = first or error
        if first is not None:
            raise first

    # The three loops below are the hot path: per-environment work uses local names and plain lists, flags are
    # written only where they are true, and rewards once per step. After a forgiven exception, the loop over
    # `pairs` continues with the next environment.

    def _step_next(self, actions: Iterable[Any], wants_all: bool) -> Infos:
        put, flat, slices, pending = self._putter(), self._writer.flat, self._writer.slices, self._pending
        add_info, rewards, seeds = self._infos.begin(), [0.0] * self._num_rows, self._next_seeds
        terminations, truncations = self._clear_flags()
        pairs, row = enumerate(zip(self._acting, actions, strict=True)), 0
        while True:
            try:
                for row, (env, action) in pairs:
                    if pending[row]:
                        observation, info = env.reset(seed=seeds[row])
                        pending[row], seeds[row] = False, None
                    else:
                        observation, rewards[row], terminated, truncated, info = env.step(action)
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
                    _refuse_old_results(error)
                    raise
                if pending[row] and not (terminations[row] or truncations[row]):
                    observation, info = self._make_again(row)
                    pending[row], seeds[row] = False, None
                else:
                    observation, info = self._truncate_row(row, rewards)
                    pending[row] = True
                put(row, observation)
                add_info(row, info)
        self.buffers.rewards[:] = rewards
        self._write_waiting()
        return self._infos.end()

    def _step_same(self, actions: Iterable[Any], wants_all: bool) -> Infos:
        put, add_info = self._putter(), self._infos.begin()
        rewards: list[Any] = [0.0] * self._num_rows
        terminations, truncations = self._clear_flags()
        pairs, row = enumerate(zip(self._acting, actions, strict=True)), 0
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
                    _refuse_old_results(error)
                    raise
                if not (terminations[row] or truncations[row]):
                    observation, info = self._truncate_row(row, rewards)
                    add_info(row, {"final_obs": observation, "final_info": info})
                observation, info = self._make_again(row)
                put(row, observation)
                add_info(row, info)
        self.buffers.rewards[:] = rewards
        self._write_waiting()
        return self._infos.end()

    def _step_disabled(self, actions: Iterable[Any], wants_all: bool) -> Infos:
        put, pending, add_info = self._putter(), self._pending, self._infos.begin()
        rewards: list[Any] = [0.0] * self._num_rows
        terminations, truncations = self._clear_flags()
        pairs, row = enumerate(zip(self._acting, actions, strict=True)), 0
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
                    _refuse_old_results(error)
                    raise
                observation, info = self._truncate_row(row, rewards)
                self._resting[row], pending[row] = observation, True
                put(row, observation)
                add_info(row, info)
        self.buffers.rewards[:] = rewards
        self._write_waiting()
        return self._infos.end()

    def _turn_to(self, buffer: int) -> None:
        if buffer != self._buffer:
            self._shown = self._writer.shown()
            self._buffer = buffer
            self.buffers = self._pair[buffer]
            self._writer = self._writers[buffer]

    def _putter(self) -> Callable[[int, Any], None]:
        return self._waiting.__setitem__ if self._waits else self._writer.put

    def _show_last(self) -> None:
        self._keep_rows(0)

    def _keep_rows(self, first: int) -> None:
        """After an exception, let the rows from `first` on, which were not stepped, show what they showed before."""
        if self._waits and first:
            for row in range(first):
                self._writer.put(row, self._waiting[row])
        arrays, objects = self._shown
        self._writer.keep(first, arrays, objects)
        other = self._pair[1 - self._buffer]
        if arrays is other.observations:  # Not during a rollout, which has flags of its own.
            self.buffers.terminations[first:] = other.terminations[first:]
            self.buffers.truncations[first:] = other.truncations[first:]

    def _reset_needed(self) -> ResetNeeded:
        self.failed_row = self._pending.index(True)
        return ResetNeeded(
            "An environment that has finished was stepped with autoreset_mode=DISABLED. "
            "Reset it first: envs.reset(options={'reset_mask': terminated | truncated})."
        )

    def _forgive(self, row: int, error: BaseException) -> bool:
        self.failed_row = row
        return self._budget.forgive(row, error)

    def _truncate_row(self, row: int, rewards: list[Any]) -> tuple[Any, Infos]:
        """Truncate the episode of an environment that raised; returns its last observation, and an info."""
        rewards[row] = 0.0
        self.buffers.terminations[row], self.buffers.truncations[row] = False, True
        return self._last_observation(row), {"env_error": self._budget.text}

    def _make_again(
        self, row: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Reset an environment that raised; if that fails, make a new one in its place, and reset that."""
        text = self._budget.text
        while True:
            try:
                observation, info = self._envs[row].reset(
                    seed=self._next_seeds[row] if seed is None else seed,
                    options=None if options is None else {**options},
                )
            except BaseException as error:
                if not self._forgive(row, error):
                    _refuse_old_results(error)
                    raise
                self._remake(row)
            else:
                return observation, {**info, "env_error": text}

    def _remake(self, row: int) -> None:
        try:
            self._envs[row].close()
        except Exception:
            log.warning("an environment that is being replaced could not be closed", exc_info=True)
        env = make_env(self._factories[row])
        check_spaces(env.observation_space, env.action_space, self._spaces)
        self._envs[row] = env
        for name, values in self._attributes.items():
            self._envs[row].set_wrapper_attr(name, values[row])

    def _last_observation(self, row: int) -> Any:
        """Return a copy of the observation that the last action was based on."""
        return self._observation(self._shown, row)

    def _observation(self, shown: tuple[Sequence[NDArray[Any] | None], list[list[Any]]], row: int) -> Any:
        arrays, objects = shown
        parts = iter(objects)
        return self._layout.nest([next(parts)[row] if leaf is None else leaf[row].copy() for leaf in arrays])

    def _choose(self, seeds: Sequence[int | None]) -> list[int | None]:
        return [nxt if seed is None else seed for seed, nxt in zip(seeds, self._next_seeds, strict=True)]

    def _put_slowly(self, row: int, observation: Any) -> None:
        """Write an observation whose dtype is not the space's, and stop using the fast path from now on."""
        self._writer.put(row, observation)
        for writer in self._writers:
            writer.do_without_flat()

    def _write_waiting(self) -> None:
        """Write the observations that were held back, all at once or, if one does not fit, up to that one."""
        if self._waits and not self._writer.put_all(self._waiting):
            for row, observation in enumerate(self._waiting):
                self.failed_row = row
                self._writer.put(row, observation)
            self.failed_row = None

    def _clear_flags(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        self.failed_row = None
        terminations, truncations = self.buffers.terminations, self.buffers.truncations
        terminations[:] = False
        truncations[:] = False
        return terminations, truncations


class _ActionReader:
    """Reads the shard's actions out of the step buffers."""

    def __init__(self, space: Space[Any], arrays: list[NDArray[Any]], num_rows: int) -> None:
        self._layout = Layout(space)
        self._arrays = arrays
        self._batched = batch_space(space, num_rows)

    def read(self) -> Iterable[Any]:
        # Copies, because an environment may keep its action, and the next step overwrites the buffers.
        if self._layout.is_single:
            return self._arrays[0].copy()
        return iterate(self._batched, self._layout.nest([array.copy() for array in self._arrays]))


def _refuse_old_results(error: BaseException) -> None:
    """Explain the error of an environment whose step() returns nothing, or four values as in the old Gym.

    Raises:
        ConfigError: The error came from unpacking such a result, not from the environment's own code.
    """
    own = error.__traceback__
    if (
        isinstance(error, ValueError | TypeError)
        and own is not None
        and own.tb_next is None
        and ("values to unpack" in str(error) or "cannot unpack" in str(error))
    ):
        raise ConfigError(
            "step() must return 5 values (observation, reward, terminated, truncated, info), and reset() 2 "
            f"(observation, info): {error}. An environment of the old Gym can be wrapped, for instance by "
            "shimmy.GymV21CompatibilityV0."
        ) from None
