"""Workloads: what a learner does while its workers suffer, and how it checks what it is given.

Those here are over environments that number their own steps. Their workers need no torch, and start the sooner; the
learner that does is in `benchmarks/trainee.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from benchmarks.numbered import NUM_ACTIONS, Checker, expect, make_numbered
from clusterenv import BasePolicy, ClusterEnv, Decision, EveryUpdate, Timeouts


class Workload(Protocol):
    """What a learner does while its workers suffer.

    Attributes:
        rounds_apart: How many rounds a worker must serve to have been of use, so that the next fault is no crash loop.
        max_growth_bytes: By how much more memory a process may hold in the end, and still be called flat.
    """

    rounds_apart: int
    max_growth_bytes: float

    def make(self, arguments: argparse.Namespace, options: Mapping[str, Any]) -> ClusterEnv:
        """Make the environments where the options say, and reset them."""

    def advance(self, envs: ClusterEnv) -> int:
        """Do one round; returns how many steps of an environment are thrown away if its worker is lost over it."""

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        """Return what was reached; raise `Inconsistent` if something cannot be."""


class Numbering:
    """All calls in a random order, over environments that number their own steps."""

    rounds_apart = 9
    max_growth_bytes = 4e6

    def make(self, arguments: argparse.Namespace, options: Mapping[str, Any]) -> ClusterEnv:
        self._rng = np.random.default_rng(arguments.seed)
        self._agent: Any = choose
        num_envs = 4 * arguments.workers
        envs = ClusterEnv(
            make_numbered(num_envs),
            num_workers=arguments.workers,
            timeouts=Timeouts(silence_s=arguments.silence),
            **options,
        )
        self._checker = Checker(num_envs)
        self._checker.reset(envs.reset(seed=arguments.seed)[0])
        self._checker.rollout(envs.rollout(self._agent, 32))  # Its memory is made once, and kept.
        return envs

    def advance(self, envs: ClusterEnv) -> int:
        match self._rng.integers(8):
            case 0:
                self._checker.rollout(envs.rollout(self._agent, 32))
                return 32
            case 1:
                expect([index for index, _ in envs.call("method")] == list(range(envs.num_envs)), "calls are mixed up")
                return 0
            case 2:
                for _ in range(8):
                    answer = envs.step(self._agent)
                    self._checker.step(answer[4]["action"], answer)
            case _:
                for _ in range(8):
                    actions = self._rng.integers(NUM_ACTIONS, size=envs.num_envs)
                    self._checker.step(actions, envs.step(actions))
        return 1

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        self._checker.step(actions := np.zeros(envs.num_envs, np.int64), envs.step(actions))
        self._checker.finish(envs.losses)
        return {"transitions checked": self._checker.num_steps}


class Streaming(Numbering):
    """Streams of rollouts over the same environments, left and taken up again."""

    rounds_apart = 1

    def advance(self, envs: ClusterEnv) -> int:
        with envs.stream(self._agent, 32) as stream:
            for _, rollout in zip(range(50), stream, strict=False):
                self._checker.rollout(rollout)
        self._checker.reset(envs.reset()[0], may_skip=True)  # What was made ahead is thrown away: begin anew.
        return 64  # One on the way, and one ahead.


class Shifted(BasePolicy):
    """Chooses by the numbers and by weights that its learner changes; most of them are there to be carried."""

    def __init__(self) -> None:
        self.shift = np.zeros(1, np.int64)
        self.ballast = np.zeros(2**16, np.float32)

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        return Decision((np.asarray(obs).sum(axis=1) + self.shift) % NUM_ACTIONS, {})

    def weights(self) -> dict[str, Any]:
        return {"shift": self.shift, "ballast": self.ballast}

    def learn(self) -> None:
        """Become another version."""
        self.shift += 1


class Soaking(Streaming):
    """Steps, rollouts and a stream in turn, with new weights every time, for as long as one likes."""

    def make(self, arguments: argparse.Namespace, options: Mapping[str, Any]) -> ClusterEnv:
        envs = super().make(arguments, {"sync": EveryUpdate(), **options})
        self._agent = Shifted()
        return envs

    def advance(self, envs: ClusterEnv) -> int:
        for _ in range(16):
            Numbering.advance(self, envs)
            self._agent.learn()
        with envs.stream(self._agent, 32) as stream:
            for _, rollout in zip(range(50), stream, strict=False):
                self._checker.rollout(rollout, may_skip=True)  # What is too old is thrown away.
                self._agent.learn()
        self._checker.reset(envs.reset()[0], may_skip=True)
        return 64

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        stats = envs.stats
        return super().finish(envs) | {"updates": stats["updates"], "pulls": stats["pulls"]}


def choose(observations: Any) -> Any:
    """A policy whose actions follow from the numbers."""
    return np.asarray(observations).sum(axis=1) % NUM_ACTIONS
