"""VectorHost: hosts one native vector environment (written as a vector, often in C++ or numpy) as the shard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from clusterenv.errors import ConfigError, SpaceMismatch
from clusterenv.wire.assignment import Assignment, RunSpaces
from clusterenv.wire.info_planes import FullInfos, fits
from clusterenv.wire.layout import Layout
from clusterenv.worker.host import Host, Pair
from clusterenv.worker.infos import Infos, complete
from clusterenv.worker.making import check_spaces, make_vector_env

log = logging.getLogger(__name__)


class VectorHost(Host):
    """Hosts a `VectorEnv` whose sub-environments are the shard's."""

    takes_batches = True

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        assignment: Assignment,
        spaces: RunSpaces,
        pair: Pair,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Host a vector environment; the other arguments are those of `Host`."""
        # Only the vector environment knows which of its environments raised, so all of them begin anew.
        super().__init__(assignment, spaces, pair, tick, num_budgets=1)
        self._assignment = assignment
        # Typed as Any because call and set_attr, which not every VectorEnv has, are used if present.
        self._env: Any = env
        self._observations = Layout(spaces.observation_space)
        self._actions = Layout(spaces.action_space)
        self._targets: Sequence[NDArray[Any] | None] = self.buffers.observations
        self._objects: list[list[Any]] = []
        self._shown = self._columns()  # The observations the last actions were based on, per leaf.
        self._seeds: Sequence[int | None] = [None] * self._num_rows
        # After an exception or the loss of another worker: rows whose episode counts as truncated, whether a step has
        # reported that, and the first observations and infos of the new episodes, if they have begun.
        self._truncated: NDArray[np.bool_] | None = None
        self._is_told = True
        self._first: tuple[list[Any], Infos] | None = None
        self._beginners: NDArray[np.bool_] | None = None  # Rows that begin an episode with the next step.
        check_spaces(env.single_observation_space, env.single_action_space, spaces)

    def reset(
        self, buffer: int, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None
    ) -> Infos:
        self._turn_to(buffer)
        self.errors.clear()
        options = None if options is None else dict(options)
        if mask is not None:
            if not any(mask):  # Only other shards' environments are reset.
                return {}
            options = {**(options or {}), "reset_mask": np.array(mask, dtype=np.bool_)}
        if self._truncated is not None and all(seed is None for seed in seeds):
            seeds = self._seeds
        elif mask is None:
            self._seeds = seeds
        seen = [_copied(column) for column in self._columns()]
        while True:
            try:
                observations, infos = self._env.reset(seed=self._seed(seeds), options=options)
                self._put(observations)
                break
            except Exception as error:
                if not self._budget.forgive(0, error):
                    raise
                self._remake()
        self._tick()
        rows = np.ones(self._num_rows, np.bool_) if mask is None else np.array(mask, np.bool_)
        untold = None if self._is_told or self._truncated is None else self._truncated & ~rows
        if untold is not None and untold.any():  # The next step still reports these.
            for row in np.flatnonzero(untold):
                for column, before in zip(self._columns(), seen, strict=True):
                    column[row] = before[row]
            self._truncated = untold
        else:
            self._truncated, self._first, self._is_told, self._beginners = None, None, True, None
        self.buffers.terminations[rows] = self.buffers.truncations[rows] = False
        self.reset_infos = _with_masks(infos, self._num_rows)
        return self.reset_infos

    def step(self, buffer: int | None, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        if buffer is not None:
            self._turn_to(buffer)
        self.errors.clear()
        try:
            if self._truncated is not None:
                return self._step_truncated()
            return self._step(actions, for_rollout=for_rollout)
        except BaseException:
            self._show_last()
            raise

    def pending_rows(self) -> list[bool] | None:
        return None  # A vector environment that raises counts as not stepped at all.

    def resume(self, buffer: int, seeds: Sequence[int], seen: Sequence[Any], ended: Sequence[bool]) -> None:
        # Into the other buffer: if this worker is lost as well, its replacement is given the contents of this one.
        infos = complete(self.reset(1 - buffer, seeds, None, None), self._num_rows)
        first = [_copied(column) for column in self._columns()], infos
        self._turn_to(buffer)
        self._first = first
        self._put_columns(seen)
        self._truncated, self._is_told = ~np.array(ended, np.bool_), False
        # Without shared memory, the flags are not in the buffer, and the learner may not have seen them yet.
        self.buffers.truncations |= np.array(ended, np.bool_) & ~self.buffers.terminations

    def start_over(self) -> bool:
        if self._truncated is None or self._is_told or self._first is None:
            return False
        self._put_columns(self._first[0])
        self._truncated, self._first, self._is_told = None, None, True
        self.buffers.terminations[:] = self.buffers.truncations[:] = False
        return True

    def observe_into(self, arrays: Sequence[NDArray[Any] | None] | None) -> None:
        self._shown = self._columns()
        self.buffers = self._aside.use(arrays is not None, self._pair[self._buffer])
        self._targets = self.buffers.observations if arrays is None else arrays

    def objects(self) -> list[list[Any]]:
        return self._objects

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of the vector environment; a single result is repeated for all its environments."""
        if name == "render":
            result = self._env.render()
        elif hasattr(self._env, "call"):
            result = self._env.call(name, *args, **kwargs)
        else:
            target = getattr(self._env, name)
            result = target(*args, **kwargs) if callable(target) else target
        is_per_env = isinstance(result, tuple | list) and len(result) == self._num_rows
        return list(result) if is_per_env else [result] * self._num_rows

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        if hasattr(self._env, "set_attr"):
            self._env.set_attr(name, list(values))
        elif any(value is not values[0] and value != values[0] for value in values):
            raise ConfigError(f"{self._env} has one {name!r} for all its environments; give one value, not a list.")
        else:
            setattr(self._env, name, values[0])
        self._attributes[name] = values

    def apply(self, function: Callable[[Any], Any], rows: Sequence[int]) -> list[Any]:
        """Run a function on the vector environment; its result is repeated for all rows."""
        return [function(self._env)] * len(rows)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _step(self, actions: Iterable[Any] | None, *, for_rollout: bool) -> Infos:
        batch: Any = actions
        if actions is None:
            batch = self._actions.nest([array.copy() for array in self.buffers.actions])
        elif isinstance(actions, list):
            batch = np.asarray(actions)
        self._budget.step += 1
        try:
            observations, rewards, terminations, truncations, infos = self._env.step(batch)
            self._put(observations)
        except Exception as error:
            if not self._budget.forgive(0, error):
                raise
            return self._truncate_all()
        self.buffers.rewards[:] = rewards
        self.buffers.terminations[:] = terminations
        self.buffers.truncations[:] = truncations
        if self._beginners is not None:
            self.buffers.rewards[self._beginners] = 0.0
            self._beginners = None
        if for_rollout and not (self.keeps_infos or np.any(terminations) or np.any(truncations)):
            return {}  # No episode ends here.
        return FullInfos(infos) if fits(infos, self._num_rows) else _with_masks(infos, self._num_rows)

    def _step_truncated(self) -> Infos:
        """Step after episodes were truncated without the environment's knowledge: report that, or begin new ones."""
        rows = self._truncated
        assert rows is not None
        mode = self._mode
        if not self._is_told:
            return self._tell_of_loss(rows, mode)
        if mode is AutoresetMode.DISABLED:
            raise ResetNeeded(
                "The episodes of these environments were truncated, since their worker was lost or one of them raised, "
                "and autoreset_mode is DISABLED. Reset them all first: envs.reset(options={'reset_mask': truncated})."
            )
        infos = self.reset(self._buffer, [None] * self._num_rows, None, None)
        self.buffers.rewards[:] = 0.0
        return infos

    def _tell_of_loss(self, rows: NDArray[np.bool_], mode: AutoresetMode) -> Infos:
        assert self._first is not None, "it has resumed"
        first, infos = self._first
        seen = [_copied(column) for column in self._shown]
        is_same = mode is AutoresetMode.SAME_STEP
        shown = [_copied(column) for column in (first if is_same else seen)]
        if mode is AutoresetMode.NEXT_STEP:  # Environments whose episode had ended begin their new one.
            for column, start in zip(shown, first, strict=True):
                for row in np.flatnonzero(~rows):
                    column[row] = start[row]
        self._put_columns(shown)
        self.buffers.rewards[:] = 0.0
        self.buffers.terminations[:] = False
        self.buffers.truncations[:] = rows
        told: Infos = {"worker_lost": rows.copy(), "_worker_lost": rows.copy()}
        self._is_told = True
        if is_same:
            self._truncated = self._first = None
            finals = [self._observations.nest([column[row] for column in seen]) for row in range(self._num_rows)]
            return {
                **infos,
                **told,
                **_with_masks({"final_obs": _as_objects(finals), "final_info": {"worker_lost": rows}}, self._num_rows),
            }
        if not rows.all() and mode is AutoresetMode.NEXT_STEP:
            # A vector environment steps as a whole: the next step is a real one, and environments whose episodes were
            # lost are already one step into their new ones.
            self._truncated, self._first, self._beginners = None, None, rows
        return told

    def _truncate_all(self) -> Infos:
        """Truncate all episodes after an exception, and begin new ones if the autoreset mode says so."""
        leaves = [_copied(column) for column in self._shown]
        text = self._budget.text
        self._seeds = [None] * self._num_rows
        infos: Infos = {}
        if self._mode is AutoresetMode.SAME_STEP:
            rows = [self._observations.nest([leaf[row] for leaf in leaves]) for row in range(self._num_rows)]
            errors = list(self.errors)
            infos = self.reset(self._buffer, self._seeds, None, None)
            self.errors[:0] = errors
            infos |= _with_masks({"final_obs": _as_objects(rows), "final_info": {"env_error": text}}, self._num_rows)
        else:
            self._put_columns(leaves)
            self._truncated = np.ones(self._num_rows, np.bool_)
        self.buffers.rewards[:] = 0.0
        self.buffers.terminations[:] = False
        self.buffers.truncations[:] = True
        return infos | _with_masks({"env_error": text}, self._num_rows)

    def _remake(self) -> None:
        try:
            self._env.close()
        except Exception:
            log.warning("a vector environment that is being replaced could not be closed", exc_info=True)
        self._env = make_vector_env(self._assignment)
        check_spaces(self._env.single_observation_space, self._env.single_action_space, self._spaces)
        for name, values in self._attributes.items():
            self.set_attr(name, values)

    def _turn_to(self, buffer: int) -> None:
        self._shown = self._columns()
        if buffer != self._buffer:  # If it is the same, a rollout may be being filled.
            self.buffers = self._pair[buffer]
            self._targets = self.buffers.observations
            self._buffer = buffer

    def _show_last(self) -> None:
        self._put_columns(self._shown)
        if self._targets is self.buffers.observations:  # Not during a rollout, which has flags of its own.
            other = self._pair[1 - self._buffer]
            self.buffers.terminations[:] = other.terminations
            self.buffers.truncations[:] = other.truncations

    def _columns(self) -> list[Any]:
        """Return where the newest observations are, one array or list per leaf."""
        objects = iter(self._objects)
        return [next(objects, []) if array is None else array for array in self._targets]

    def _put_columns(self, columns: Sequence[Any]) -> None:
        self._objects = [list(column) for column, array in zip(columns, self._targets, strict=True) if array is None]
        for array, column in zip(self._targets, columns, strict=True):
            if array is not None:
                array[...] = column

    def _seed(self, seeds: Sequence[int | None]) -> int | list[int | None] | None:
        """Return the seeds in a form the environment accepts: one number if consecutive, else a list."""
        first = seeds[0]
        if all(seed is None for seed in seeds):
            return None
        if first is not None and list(seeds) == list(range(first, first + self._num_rows)):
            return first
        return list(seeds)

    def _put(self, observations: Any) -> None:
        self._objects = []
        parts = self._observations.flatten(observations)
        for leaf, target, part in zip(self._observations.leaves, self._targets, parts, strict=True):
            if target is None:
                self._objects.append(list(part))
                continue
            array: NDArray[Any] = np.asarray(part)
            if array.shape != target.shape or not np.can_cast(array.dtype, target.dtype, "same_kind"):
                raise SpaceMismatch(
                    f"The vector environment's observation{leaf} does not fit its space: expected shape "
                    f"{target.shape} of {target.dtype}, got shape {array.shape} of {array.dtype}."
                )
            target[...] = array


def _with_masks(infos: Infos, num_rows: int) -> Infos:
    """Make every info an array with one value per environment, and add `_key` masks that are missing."""
    complete: Infos = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            complete[key] = _with_masks(value, num_rows)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (num_rows,):
            complete[key] = value
        elif isinstance(value, list | tuple) and len(value) == num_rows:
            complete[key] = _as_objects(value)
        else:
            complete[key] = _as_objects([value] * num_rows)
        if not key.startswith("_") and f"_{key}" not in infos:
            complete[f"_{key}"] = np.ones(num_rows, dtype=np.bool_)
    return complete


def _as_objects(values: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _copied(column: Any) -> Any:
    return column.copy()
