"""A workload for `benchmarks/chaos.py`: PPO learns CartPole while its workers suffer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.agents import MlpAgent
from benchmarks.numbered import expect
from benchmarks.ppo import Learner, PpoConfig
from clusterenv import ClusterEnv, Rollout, Timeouts


class Ppo:
    """Trains CartPole."""

    NUM_STEPS = 125
    rounds_apart = 1
    max_growth_bytes = 16e6  # Torch's allocator keeps some.

    def make(self, arguments: argparse.Namespace, options: Mapping[str, Any]) -> ClusterEnv:
        torch.set_num_threads(1)
        torch.manual_seed(arguments.seed)
        self._agent = MlpAgent(4, 2)
        self._learner = Learner(self._agent, PpoConfig(decoupled=True), arguments.seed)
        self._returns: list[float] = []
        envs = ClusterEnv(
            "CartPole-v1",
            16 * arguments.workers,
            num_workers=arguments.workers,
            timeouts=Timeouts(silence_s=arguments.silence),
            **options,
        )
        envs.reset(seed=arguments.seed)
        return envs

    def advance(self, envs: ClusterEnv) -> int:
        rollout = envs.rollout(self._agent, self.NUM_STEPS)
        self._check(rollout)
        self._returns += rollout.episodes.returns.tolist()
        self._learner.update(rollout)
        return self.NUM_STEPS

    def finish(self, envs: ClusterEnv) -> dict[str, Any]:
        recent = self._returns[-100:]
        stats = envs.stats
        return {
            "updates": stats["updates"],
            "env steps": stats["env_steps"],
            "episodes": len(self._returns),
            "return": round(float(np.mean(recent)), 1) if recent else 0.0,
        }

    def _check(self, rollout: Rollout) -> None:
        """CartPole rewards every step with 1: the returns must equal the lengths, and nothing may be missing."""
        expect((rollout.rewards[rollout.valid] == 1.0).all(), "a transition without its reward")
        expect((rollout.episodes.returns == rollout.episodes.lengths).all(), "a return that is not its length")
        expect(np.isfinite(rollout.obs).all() and np.isfinite(rollout.logprob).all(), "numbers that are none")
        expect((rollout.ages >= 0).all(), "a version of the future")
