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
from clusterenv.wire.assignment import Assignment, VectorFactory
from clusterenv.wire.info_planes import FullInfos, fits
from clusterenv.wire.layout import Layout
from clusterenv.wire.planes import Planes
from clusterenv.worker.host import EnvHost, Host
from clusterenv.worker.infos import Infos
from clusterenv.worker.making import check_spaces
from clusterenv.worker.mishaps import Mishaps

log = logging.getLogger(__name__)


class VectorHost:
    """Hosts a `VectorEnv` whose sub-environments are the shard's."""

    takes_batches = True

    def __init__(self, factory: VectorFactory, assignment: Assignment, planes: Planes) -> None:
        self.failed_row: int | None = None
        self._factory = factory
        self._assignment = assignment
        self._planes = planes
        self._targets: Sequence[NDArray[Any] | None] = planes.observations
        self._rows = len(planes.rewards)
        self._env: Any = None  # A VectorEnv, and more than VectorEnv promises: call and set_attr where it has them.
        self._observations = Layout(assignment.observation_space)
        self._actions = Layout(assignment.action_space)
        self._objects: list[list[Any]] = []
        self._is_truncated = False
        self._seeds: Sequence[int | None] = [None] * self._rows
        self._attributes: dict[str, Sequence[Any]] = {}
        self._shown: Sequence[NDArray[Any] | None] = planes.observations
        # Which of its environments raised, only the vector environment knows: they all begin anew.
        self._mishaps = Mishaps(1, assignment.start, forgives=assignment.on_env_error == "reset")

    def open(self) -> None:
        """Make the vector environment."""
        self._env = self._factory(self._rows)
        self._check(self._env, self._assignment)

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Infos:
        """Reset the vector environment, passing the mask on if there is one."""
        options = None if options is None else dict(options)
        if mask is not None:
            if not any(mask):  # Another shard's environments are meant.
                return {}
            options = {**(options or {}), "reset_mask": np.array(mask, dtype=np.bool_)}
        if self._is_truncated and all(seed is None for seed in seeds):
            seeds = self._seeds
        elif mask is None:
            self._seeds = seeds
        while True:
            try:
                observations, infos = self._env.reset(seed=self._seed(seeds), options=options)
                self._put(observations)
                break
            except Exception as error:
                if not self._mishaps.forgive(0, error):
                    raise
                self._remake()
        self._is_truncated = False
        if mask is None:
            self._planes.terminations[:] = self._planes.truncations[:] = False
        else:
            self._planes.terminations[mask] = self._planes.truncations[mask] = False
        return _with_masks(infos, self._rows)

    def step(self, actions: Iterable[Any] | None, *, for_rollout: bool = False) -> Infos:
        """Step the vector environment once; it resets finished episodes by itself."""
        if self._is_truncated:
            return self._begin_again()
        batch: Any = actions
        if actions is None:
            batch = self._actions.nest([plane.copy() for plane in self._planes.actions])
        elif isinstance(actions, list):
            batch = np.asarray(actions)
        self._mishaps.step += 1
        try:
            observations, rewards, terminations, truncations, infos = self._env.step(batch)
            self._put(observations)
        except Exception as error:
            if not self._mishaps.forgive(0, error):
                raise
            return self._truncate_all()
        self._planes.rewards[:] = rewards
        self._planes.terminations[:] = terminations
        self._planes.truncations[:] = truncations
        if for_rollout and not (np.any(terminations) or np.any(truncations)):
            return {}  # No episode ends here.
        return FullInfos(infos) if fits(infos, self._rows) else _with_masks(infos, self._rows)

    def truncate(self) -> None:
        """Take all episodes for finished: the environment itself knows nothing of it."""
        self._is_truncated = True
        self._planes.truncations[:] = True

    def observe_into(self, arrays: Sequence[NDArray[Any] | None]) -> None:
        """From now on write observations into these arrays, one a leaf, instead of the planes'."""
        self._shown = arrays if arrays is self._planes.observations else self._targets
        self._targets = arrays

    def objects(self) -> list[list[Any]]:
        """Return the newest observations' leaves that have no fixed size."""
        return self._objects

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method of the vector environment; one result is taken for all its environments."""
        if name == "render":
            result = self._env.render()
        elif hasattr(self._env, "call"):
            result = self._env.call(name, *args, **kwargs)
        else:
            target = getattr(self._env, name)
            result = target(*args, **kwargs) if callable(target) else target
        is_per_env = isinstance(result, tuple | list) and len(result) == self._rows
        return list(result) if is_per_env else [result] * self._rows

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of the vector environment, which must be the same for all its environments."""
        if hasattr(self._env, "set_attr"):
            self._env.set_attr(name, list(values))
        elif any(value is not values[0] and value != values[0] for value in values):
            raise ConfigError(f"{self._env} has one {name!r} for all its environments; give one value, not a list.")
        else:
            setattr(self._env, name, values[0])
        self._attributes[name] = values

    def apply(self, function: Callable[[Any], Any], rows: Sequence[int]) -> list[Any]:
        """Run a function on the vector environment; its result is taken for all rows."""
        return [function(self._env)] * len(rows)

    def close(self) -> None:
        """Close the vector environment."""
        if self._env is not None:
            self._env.close()

    def _truncate_all(self) -> Infos:
        """Take all episodes for truncated after an exception; by the autoreset mode, begin new ones."""
        objects = iter(self._objects)
        leaves = [next(objects) if leaf is None else leaf.copy() for leaf in self._shown]
        text = self._mishaps.text
        self._seeds = [None] * self._rows
        infos: Infos = {}
        if self._assignment.autoreset_mode is AutoresetMode.SAME_STEP:
            rows = [self._observations.nest([leaf[row] for leaf in leaves]) for row in range(self._rows)]
            infos = self.reset(self._seeds, None, None)
            infos |= _with_masks({"final_obs": _as_objects(rows), "final_info": {"env_error": text}}, self._rows)
        else:
            self._put(self._observations.nest(leaves))
            self._is_truncated = True
        self._planes.rewards[:] = 0.0
        self._planes.terminations[:] = False
        self._planes.truncations[:] = True
        return infos | _with_masks({"env_error": text}, self._rows)

    def _remake(self) -> None:
        try:
            self._env.close()
        except Exception:
            log.warning("a vector environment that is made again could not be closed", exc_info=True)
        self.open()
        for name, values in self._attributes.items():
            self.set_attr(name, values)

    def _begin_again(self) -> Infos:
        if self._assignment.autoreset_mode is AutoresetMode.DISABLED:
            raise ResetNeeded(
                "The episodes of these environments were truncated, since their worker was lost or one of them raised, "
                "and autoreset_mode is DISABLED. Reset them all first: envs.reset(options={'reset_mask': truncated})."
            )
        infos = self.reset([None] * self._rows, None, None)
        self._planes.rewards[:] = 0.0
        return infos

    def _check(self, env: VectorEnv[Any, Any, Any], assignment: Assignment) -> None:
        if not isinstance(env, VectorEnv):
            raise ConfigError(f"A NativeVector's callable must return a gymnasium.vector.VectorEnv, got {type(env)}.")
        if env.num_envs != self._rows:
            raise ConfigError(
                f"The vector environment has {env.num_envs} environments where this worker hosts {self._rows}. "
                "Its callable is given that number and must use it."
            )
        mode = env.metadata.get("autoreset_mode")
        if mode is not None and mode != assignment.autoreset_mode:
            raise ConfigError(
                f"{env} resets in mode {mode}, not {assignment.autoreset_mode}: pass ClusterEnv(autoreset_mode={mode})."
            )
        check_spaces(env.single_observation_space, env.single_action_space, assignment)

    def _seed(self, seeds: Sequence[int | None]) -> int | list[int | None] | None:
        """Seed as the environment can be seeded: consecutive seeds are one number, others must be a list."""
        first = seeds[0]
        if all(seed is None for seed in seeds):
            return None
        if first is not None and list(seeds) == list(range(first, first + self._rows)):
            return first
        return list(seeds)

    def _put(self, observations: Any) -> None:
        self._objects = []
        parts = self._observations.flatten(observations)
        for leaf, plane, part in zip(self._observations.leaves, self._targets, parts, strict=True):
            if plane is None:
                self._objects.append(list(part))
                continue
            array: NDArray[Any] = np.asarray(part)
            if array.shape != plane.shape or not np.can_cast(array.dtype, plane.dtype, "same_kind"):
                raise SpaceMismatch(
                    f"The vector environment's observation{leaf} does not fit its space: expected shape "
                    f"{plane.shape} of {plane.dtype}, got shape {array.shape} of {array.dtype}."
                )
            plane[...] = array


def _with_masks(infos: Infos, num_rows: int) -> Infos:
    """Give every info that has a value per environment its `_key` mask, where the environment left it out."""
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


def make_host(assignment: Assignment, planes: Planes) -> Host:
    """Return the host that fits what is to be hosted; it has not made its environments yet."""
    factories = assignment.factories
    if isinstance(factories, list):
        return EnvHost(factories, assignment, planes)
    return VectorHost(factories, assignment, planes)
