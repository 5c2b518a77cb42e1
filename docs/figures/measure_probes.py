"""Measure how well a few probes estimate the divergence over a whole rollout: the table in docs/explanation/sync.md.

    python -m docs.figures.measure_probes

Trains a 64-64 agent on CartPole (decoupled PPO, `AdaptiveSync()`), and after each update compares the mean divergence
over every row of the worker's last rollout with the estimate from K of them, for many choices of the K.
"""

from __future__ import annotations

import copy
import sys

import numpy as np
import torch
from experiments.agents import MlpAgent
from experiments.ppo import Learner, PpoConfig
from numpy.typing import NDArray

from clusterenv import AdaptiveSync, ClusterEnv, Rollout
from clusterenv.adapters.torch import TorchPolicy
from clusterenv.policy import divergence
from clusterenv.policy.probes import spread

NUM_ENVS, NUM_STEPS, NUM_UPDATES, NUM_DRAWS = 64, 128, 24, 60
COUNTS = (64, 128, 256, 512)
CONFIG = PpoConfig(decoupled=True, learning_rate=1e-3, minibatch_size=500)


def gaps() -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Train, and return KL(own || newest) `[T, N]` of every update, with the mask of rows that count."""
    torch.manual_seed(1)
    agent = MlpAgent(4, 2)
    learner, versions = Learner(agent, CONFIG, seed=1), {1: copy.deepcopy(agent)}
    found = []
    with ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=0, sync=AdaptiveSync()) as envs:
        envs.reset(seed=1)
        for update in range(1, NUM_UPDATES + 1):
            rollout = envs.rollout(agent, NUM_STEPS)
            learner.update(rollout)
            versions[update + 1] = copy.deepcopy(agent)
            found.append((_gap(versions[int(rollout.versions[0])], agent, rollout), rollout.valid))
    return found


def _gap(own: MlpAgent, newest: MlpAgent, rollout: Rollout) -> NDArray[np.float64]:
    rows = rollout.obs.reshape(-1, 4)
    one, other = TorchPolicy(own).distribution(rows), TorchPolicy(newest).distribution(rows)
    assert one is not None
    assert other is not None
    return divergence(one, other).reshape(rollout.num_steps, rollout.num_envs)


def main() -> None:
    """Print the table."""
    found = gaps()
    truths = np.array([gap[valid].mean() for gap, valid in found])
    rng = np.random.default_rng(0)
    say = sys.stdout.write
    say(f"{len(found)} updates, true divergence {truths.min():.4f} to {truths.max():.4f} nats\n")
    say("probes | RMS error | the same, drawn at random | bias | RMS error where the truth is 0.02 to 0.1, in nats\n")
    near = (truths > 0.02) & (truths < 0.1)
    for count in COUNTS:
        even, loose = [], []
        for gap, valid in found:
            rows = gap[valid]  # In order of time, then environment, as a worker chooses among them.
            even.append([rows[spread(count, len(rows), rng)].mean() for _ in range(NUM_DRAWS)])
            loose.append(rng.choice(gap[valid], (NUM_DRAWS, count)).mean(axis=1))
        errors = np.array(even) / truths[:, None] - 1
        loose_errors = np.array(loose) / truths[:, None] - 1
        nats = (np.array(even) - truths[:, None])[near]
        say(
            f"{count:6d} | {_rms(errors):8.0%}  | {_rms(loose_errors):8.0%}                  | {errors.mean():+.1%} "
            f"| {_rms(nats):.4f} ({near.sum()} updates)\n"
        )


def _rms(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(errors**2)))


if __name__ == "__main__":
    main()
