"""Exchange: actions for some environments out, results of those that are ready back, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ConfigError
from clusterenv.head.batch import ShardInfos, merge_infos
from clusterenv.head.outcome import Outcome
from clusterenv.head.remote import Remote
from clusterenv.wire.layout import Layout

if TYPE_CHECKING:
    from clusterenv.inline import Inline

Received = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class Exchange:
    """Steps a worker's environments as soon as all of them have an action."""

    def __init__(self, backend: Remote | Inline, actions: Layout, observations: Layout) -> None:
        self._backend = backend
        self._actions = actions
        self._observations = observations
        self._shards = backend.shards
        num_envs = self._shards[-1][1]
        self._has_action = np.zeros(num_envs, np.bool_)
        self._under_way: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no action is waiting to be answered."""
        return not self._under_way and not self._has_action.any()

    def send(self, actions: Any, env_ids: NDArray[np.int64]) -> None:
        """Take actions, and step the workers all of whose environments now have one.

        Raises:
            ConfigError: The actions do not fit the environments, or one of them has an action already.
        """
        if not self._actions.is_fixed:
            raise ConfigError("send() needs actions of fixed size; use step(actions) for this action space.")
        num_envs = len(self._has_action)
        if env_ids.ndim != 1 or not np.issubdtype(env_ids.dtype, np.integer):
            raise ConfigError(f"env_ids must be a list of environment indices, got {env_ids!r}.")
        if len(set(env_ids.tolist())) != len(env_ids) or ((env_ids < 0) | (env_ids >= num_envs)).any():
            raise ConfigError(f"env_ids must be different indices below {num_envs}, got {env_ids.tolist()}.")
        if self._has_action[env_ids].any():
            busy = env_ids[self._has_action[env_ids]].tolist()
            raise ConfigError(f"Environments {busy} have an action already: recv() their results first.")
        parts = [np.asarray(part) for part in self._actions.flatten(actions)]
        for leaf, part in zip(self._actions.leaves, parts, strict=True):
            if part.shape != (len(env_ids), *leaf.shape):
                raise ConfigError(
                    f"The actions{leaf} of {len(env_ids)} environments must have shape "
                    f"{(len(env_ids), *leaf.shape)}, got {part.shape}."
                )
        for plane, part in zip(self._backend.planes.actions, parts, strict=True):
            plane[env_ids] = part
        self._has_action[env_ids] = True
        for index, (start, stop) in enumerate(self._shards):
            if index not in self._under_way and self._has_action[start:stop].all():
                self._under_way.add(index)
                self._backend.step_shard(index)

    def recv(self, timeout_s: float | None) -> Received:
        """Wait for the results of some environments; `info["env_id"]` says which.

        Raises:
            ConfigError: Nothing is under way.
            CallTimeout: None was ready in time.
        """
        if not self._under_way:
            hosted = ", ".join(f"{start} to {stop - 1}" for start, stop in self._shards)
            raise ConfigError(
                "recv() has nothing to wait for: no worker's environments all have an action. "
                f"Workers host environments {hosted}: send() actions for all of one of them."
            )
        try:
            finished = self._backend.finish_some(timeout_s)
        except TimeoutError:
            raise  # All is as before: the same wait may be tried again.
        except BaseException:
            self._under_way.clear()
            self._has_action[:] = False
            raise
        for index, _ in finished:
            start, stop = self._shards[index]
            self._has_action[start:stop] = False
            self._under_way.discard(index)
        return self._gather(finished)

    def _gather(self, finished: Sequence[tuple[int, Outcome]]) -> Received:
        planes = self._backend.planes
        env_ids = np.concatenate([np.arange(*self._shards[index]) for index, _ in finished])
        rows: list[ShardInfos] = []
        for index, outcome in finished:
            start = rows[-1].stop if rows else 0
            rows.append(ShardInfos(start, start + self._shards[index][1] - self._shards[index][0], outcome.infos))
        infos = merge_infos([part for part in rows if part.infos], len(env_ids))
        objects = iter(zip(*(outcome.columns for _, outcome in finished), strict=True))
        leaves = [
            tuple(item for column in next(objects) for item in column) if plane is None else plane[env_ids]
            for plane in planes.observations
        ]
        infos["env_id"] = env_ids
        return (
            self._observations.nest(leaves),
            planes.rewards[env_ids],
            planes.terminations[env_ids],
            planes.truncations[env_ids],
            infos,
        )
