"""One run, in a process of its own: `python -m experiments.training TASKS TASK RULE SEED RECORD`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from clusterenv import ClusterEnv, Rollout
from experiments.ppo import PpoTraining
from experiments.record import Record
from experiments.rules import Rule, read_rule
from experiments.tasks import AnySettings, DqnSettings, PpoSettings, read_task

# Environment i is reset with 1000 times the run's seed, plus i: runs share no environment unless they share a seed. An
# evaluation's seeds begin here, so that no training has seen its episodes, and all rules have the same ones.
FIRST_EVALUATION_SEED = 10**9


class Training(Protocol):
    """An agent that learns from rollouts."""

    @property
    def agent(self) -> torch.nn.Module:
        """What acts on the workers."""

    def values(self, progress: float) -> Mapping[str, Any] | None:
        """Return what the agent is told with each call, after this share of the run."""

    def learn(self, rollout: Rollout, progress: float) -> None:
        """Learn from a rollout, after this share of the run."""


def main(argv: Sequence[str]) -> None:
    """Train once; the record is at its place if, and only if, the run came to its end."""
    # End as with Ctrl-C, workers closed: a job in the background of a shell is deaf to Ctrl-C itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tasks_path, task, rule, seed, record_path = argv
    torch.set_num_threads(1)  # More only slow networks as small as these.
    settings = read_task(Path(tasks_path), task)
    with Record(Path(record_path), settings) as record:
        train(settings, read_rule(rule), int(seed), record)


def train(settings: AnySettings, rule: Rule, seed: int, record: Record) -> None:
    """Train, and evaluate the learner's own newest policy before and after."""
    with ClusterEnv(
        settings.env, settings.num_envs, num_workers=settings.num_workers, sync=rule.make(settings)
    ) as envs:
        training = make_training(settings, rule, envs, seed)

        def evaluate() -> float:
            return envs.evaluate(training.agent, settings.eval_episodes, seed=FIRST_EVALUATION_SEED + 1000 * seed).mean

        record.begin(evaluate())
        envs.reset(seed=1000 * seed)
        for number in range(settings.num_rollouts):
            progress = number / settings.num_rollouts
            rollout = envs.rollout(training.agent, settings.num_steps, values=training.values(progress))
            record.add(rollout, envs.stats)
            training.learn(rollout, progress)
        record.finish(evaluate())


def make_training(settings: AnySettings, rule: Rule, envs: ClusterEnv, seed: int) -> Training:
    """Make the learner that the settings are for."""
    if isinstance(settings, PpoSettings):
        return PpoTraining(settings, envs, seed, is_decoupled=not rule.is_plain)
    if isinstance(settings, DqnSettings):
        from experiments.dqn import DqnTraining  # Needs what the examples need.

        return DqnTraining(settings, envs, seed)
    from experiments.sac import SacTraining

    return SacTraining(settings, envs, seed)


if __name__ == "__main__":
    main(sys.argv[1:])
