"""Follower: whatever came before, from a reset on a ClusterEnv must equal a SyncVectorEnv again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv
from numpy.typing import NDArray

from clusterenv import ClusterEnv
from tests.worlds import assert_same

NUM_STEPS = 3


class Follower:
    """Compares the two in steps, rollouts and streams.

    Args:
        ours: May have been through anything.
        theirs: The same environments.
        agent: A function from observations to actions that looks at each row by itself.
    """

    def __init__(self, ours: ClusterEnv, theirs: SyncVectorEnv, agent: Callable[[Any], NDArray[Any]]) -> None:
        self._ours = ours
        self._theirs = theirs
        self._agent = agent

    def check_steps(self, seed: int) -> None:
        """Compare a reset and a step, infos included."""
        first = self._theirs.reset(seed=seed)
        assert_same(self._ours.reset(seed=seed), first)
        actions = self._agent(first[0])
        assert_same(self._ours.step(actions), self._theirs.step(actions))

    def check_rollout(self, seed: int) -> None:
        """Compare a rollout."""
        wanted = self._play(seed)
        self._ours.reset(seed=seed)
        rollout = self._ours.rollout(self._agent, NUM_STEPS)
        for name in ("obs", "rewards", "terminations", "truncations"):
            assert_same(getattr(rollout, name), wanted[name], name)

    def check_stream(self, seed: int) -> None:
        """Compare the first rollout that a stream brings of each environment."""
        wanted = self._play(seed)
        self._ours.reset(seed=seed)
        missing = set(range(self._ours.num_envs))
        with self._ours.stream(self._agent, NUM_STEPS) as stream:
            while missing:
                rollout = next(stream)
                columns = rollout.env_indices
                if set(columns.tolist()) <= missing:
                    missing -= set(columns.tolist())
                    for name in ("obs", "rewards", "terminations", "truncations"):
                        assert_same(getattr(rollout, name), np.ascontiguousarray(wanted[name][:, columns]), name)

    def _play(self, seed: int) -> dict[str, NDArray[Any]]:
        obs, _ = self._theirs.reset(seed=seed)
        columns: dict[str, list[Any]] = {"obs": [], "rewards": [], "terminations": [], "truncations": []}
        for _ in range(NUM_STEPS):
            following, rewards, terminations, truncations, _ = self._theirs.step(self._agent(obs))
            for column, part in zip(columns.values(), (obs, rewards, terminations, truncations), strict=True):
                column.append(part)
            obs = following
        return {name: np.stack(parts) for name, parts in columns.items()}
