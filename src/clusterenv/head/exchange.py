"""Exchange: sends actions for some environments, and receives results of whichever are ready, in any order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import CallTimeout, ConfigError
from clusterenv.head.backend import Backend
from clusterenv.head.outcome import Outcome
from clusterenv.head.worker import Worker
from clusterenv.wire.infos import ShardInfos, merge_infos
from clusterenv.wire.layout import Layout, Leaf

Received = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_WAIT_S = 0.1


class Exchange:
    """Steps a worker's environments as soon as all of them have an action."""

    def __init__(self, remote: Backend, actions: Layout, observations: Layout) -> None:
        self._remote = remote
        self._actions = actions
        self._observations = observations
        self._has_action = np.zeros(remote.workers[-1].stop, np.bool_)
        self._calls: list[tuple[Worker, Any]] = []  # With the pending call that `step_shard` returned.

    @property
    def is_idle(self) -> bool:
        """Whether no action awaits its result."""
        return not self._calls and not self._has_action.any()

    def forget(self) -> None:
        """Forget all actions, because another call was made."""
        self._calls.clear()
        self._has_action[:] = False

    def send(self, actions: Any, env_ids: NDArray[np.int64]) -> None:
        """Take actions, and step each worker whose environments now all have one.

        Raises:
            ConfigError: The actions do not fit the environments, or an environment has an action already.
        """
        parts = check_actions(self._actions, actions, env_ids, self._has_action)
        if self.is_idle:
            self._remote.settle()
        self._remote.raise_fatal(self._remote.workers)
        with self._remote.deferred:
            for array, part in zip(self._remote.buffers[0].actions, parts, strict=True):
                array[env_ids] = part
            self._has_action[env_ids] = True
            busy = {worker for worker, _ in self._calls}
            for worker in self._remote.workers:
                if worker not in busy and self._has_action[worker.start : worker.stop].all():
                    self._calls.append((worker, self._remote.step_shard(worker)))

    def recv(self, timeout_s: float | None) -> tuple[Received, list[tuple[int, str]]]:
        """Wait for the results of some environments; `info["env_id"]` says which.

        Returns:
            The results, and the forgiven exceptions of environments: the index, and the text.

        Raises:
            ConfigError: No step is under way.
            CallTimeout: No results were ready in time; `recv` may be called again.
            WorkerFailed: An environment raised. The actions of its worker's environments are used up; the results of
                other workers can still be received.
        """
        if not self._calls:
            hosted = ", ".join(f"{worker.start} to {worker.stop - 1}" for worker in self._remote.workers)
            raise ConfigError(
                "recv() has nothing to wait for: no worker's environments all have an action. "
                f"Workers host environments {hosted}: send() actions for all of one of them."
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while all(pending.waiting for _, pending in self._calls):
            self._remote.raise_fatal([worker for worker, _ in self._calls])
            left = _WAIT_S if deadline is None else deadline - time.monotonic()
            if left <= 0 and not self._remote.advance(0.0):
                names = "; ".join(str(worker) for worker, _ in self._calls)
                raise CallTimeout(f"No answer within {timeout_s:g} s from {names}. recv() may be called again.")
            self._remote.advance(max(0.0, left))
        finished = [(worker, pending) for worker, pending in self._calls if not pending.waiting]
        for worker, pending in finished:
            if pending.failed:
                finished = [(worker, pending)]  # The others are returned by the next call.
                break
        with self._remote.deferred:
            for worker, pending in finished:
                self._calls.remove((worker, pending))
                self._has_action[worker.start : worker.stop] = False
        for _, pending in finished:
            self._remote.wait_for(pending)
            if pending.failed:
                raise pending.failed.pop()[1]
        return self._gather([(worker, pending.replies[worker]) for worker, pending in finished])

    def _gather(self, finished: Sequence[tuple[Worker, Outcome]]) -> tuple[Received, list[tuple[int, str]]]:
        env_ids = np.concatenate([worker.env_indices for worker, _ in finished])
        shown = [worker.buffers[worker.shown] for worker, _ in finished]
        rows: list[ShardInfos] = []
        errors: list[tuple[int, str]] = []
        for worker, outcome in finished:
            start = rows[-1].stop if rows else 0
            rows.append(ShardInfos(start, start + worker.num_envs, outcome.infos))
            errors += [(worker.start + row, text) for row, text in outcome.errors]
        infos = merge_infos([part for part in rows if part.infos], len(env_ids))
        objects = iter(zip(*(outcome.columns for _, outcome in finished), strict=True))
        leaves = [
            tuple(item for column in next(objects) for item in column) if column[0] is None else np.concatenate(column)
            for column in zip(*(rows.observations for rows in shown), strict=True)
        ]
        infos["env_id"] = env_ids
        received = (
            self._observations.nest(leaves),
            np.concatenate([rows.rewards for rows in shown]),
            np.concatenate([rows.terminations for rows in shown]),
            np.concatenate([rows.truncations for rows in shown]),
            infos,
        )
        return received, errors


def check_actions(
    layout: Layout, actions: Any, env_ids: NDArray[np.int64], has_action: NDArray[np.bool_]
) -> list[NDArray[Any]]:
    """Check actions for some environments; returns one array per leaf of the action space.

    Args:
        layout: The layout of one action.
        actions: The actions as given by the user.
        env_ids: The environments they are for.
        has_action: Which environments have an action already.

    Raises:
        ConfigError: The actions do not fit the layout or the environments.
    """
    if not layout.is_fixed:
        raise ConfigError("send() needs actions of fixed size; use step(actions) for this action space.")
    num_envs = len(has_action)
    if env_ids.ndim != 1 or not np.issubdtype(env_ids.dtype, np.integer):
        raise ConfigError(f"env_ids must be a list of environment indices, got {env_ids!r}.")
    if len(set(env_ids.tolist())) != len(env_ids) or ((env_ids < 0) | (env_ids >= num_envs)).any():
        raise ConfigError(f"env_ids must be different indices below {num_envs}, got {env_ids.tolist()}.")
    if has_action[env_ids].any():
        busy = env_ids[has_action[env_ids]].tolist()
        raise ConfigError(f"Environments {busy} have an action already: recv() their results first.")
    parts = [np.asarray(part) for part in layout.flatten(actions)]
    for leaf, part in zip(layout.leaves, parts, strict=True):
        if part.shape != (len(env_ids), *leaf.shape):
            raise ConfigError(
                f"The actions{leaf} of {len(env_ids)} environments must have shape "
                f"{(len(env_ids), *leaf.shape)}, got {part.shape}."
            )
        if not _can_become(part, leaf):
            raise ConfigError(
                f"The actions{leaf} must be {leaf.dtype}, or numbers that can be cast to it without loss, got "
                f"{part.dtype}: cast them first. step(actions) passes actions on unchanged."
            )
    return parts


def _can_become(part: NDArray[Any], leaf: Leaf) -> bool:
    """Whether actions have the leaf's dtype or can be cast to it; floats may be rounded, integers must be exact."""
    dtype = leaf.dtype
    if part.dtype == dtype or not part.size:
        return True
    if dtype is not None and dtype.kind in "biu":
        return part.dtype.kind in "biu" and bool((part.astype(dtype) == part).all())
    return part.dtype.kind in "biuf"
