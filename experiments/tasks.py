"""The six tasks: what is learned, by whom, and everything the learner is told; PREREGISTRATION.md says why."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym

from clusterenv import AdaptiveSync


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every learner needs.

    Args:
        steps: Environment steps of a run, all environments together; rounded up to whole rollouts.
        num_steps: Of each environment in a rollout. Every rollout is followed by an update.
        learning_rate: At first; it falls to 0 over the run.
        eval_episodes: Episodes that the learner's own policy is evaluated on, before the first update and after the
            last.
        expected_s: About how long a run takes on one core. Tells the time that is left, and nothing else.
    """

    env_id: str
    steps: int
    num_workers: int = 4
    num_envs: int
    num_steps: int
    learning_rate: float
    discount: float = 0.99
    eval_episodes: int = 100
    expected_s: float

    @property
    def num_rollouts(self) -> int:
        """How many rollouts a run takes."""
        return -(-self.steps // (self.num_envs * self.num_steps))

    @property
    def env(self) -> str | Callable[[], gym.Env[Any, Any]]:
        """What ClusterEnv makes its environments of."""
        return self.env_id


@dataclass(frozen=True, kw_only=True)
class PpoSettings(Settings):
    """PPO, clipping and trace as in CleanRL.

    Args:
        reward_scale: What rewards are multiplied by, so that the critic learns easily; None: divided by the running
            deviation of the discounted return.
        is_normalised: Whether the agent brings observations to a mean of 0 and a deviation of 1, as all workers have
            seen them so far.
    """

    epochs: int
    minibatch_size: int
    entropy_weight: float
    reward_scale: float | None = 1.0
    is_normalised: bool = False

    @property
    def env(self) -> str | Callable[[], gym.Env[Any, Any]]:
        """What ClusterEnv makes its environments of; a Gaussian knows no bounds, so its actions are clipped there."""
        return functools.partial(make_clipped, self.env_id) if self.is_normalised else self.env_id


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """What learners from replay need.

    Args:
        learning_starts: Environment steps before the first gradient step.
        steps_per_gradient: Environment steps for each gradient step.
        target_rate: How far target networks move towards the newest with each gradient step.
    """

    buffer_size: int = 50_000
    learning_starts: int = 1_000
    steps_per_gradient: float
    batch_size: int
    target_rate: float


@dataclass(frozen=True, kw_only=True)
class DqnSettings(ReplaySettings):
    """Double DQN."""

    first_epsilon: float = 1.0
    last_epsilon: float = 0.05
    exploration_fraction: float = 0.2


@dataclass(frozen=True, kw_only=True)
class SacSettings(ReplaySettings):
    """SAC with a tuned entropy."""

    hidden: int = 64


AnySettings: TypeAlias = PpoSettings | DqnSettings | SacSettings

TASKS: Mapping[str, AnySettings] = {
    "ppo-cartpole": PpoSettings(
        env_id="CartPole-v1",
        steps=200_000,
        num_envs=16,
        num_steps=128,
        learning_rate=1e-3,
        epochs=4,
        minibatch_size=256,
        entropy_weight=0.01,
        expected_s=35,
    ),
    "ppo-acrobot": PpoSettings(
        env_id="Acrobot-v1",
        steps=200_000,
        num_envs=16,
        num_steps=256,
        learning_rate=1e-3,
        epochs=4,
        minibatch_size=256,
        entropy_weight=0.01,
        reward_scale=0.1,
        expected_s=40,
    ),
    "ppo-lunarlander": PpoSettings(
        env_id="LunarLander-v3",
        steps=500_000,
        num_envs=16,
        num_steps=256,
        learning_rate=1e-3,
        epochs=6,
        minibatch_size=256,
        entropy_weight=0.01,
        reward_scale=0.05,
        expected_s=100,
    ),
    "ppo-halfcheetah": PpoSettings(
        env_id="HalfCheetah-v5",
        steps=300_000,
        num_envs=16,
        num_steps=256,
        learning_rate=5e-4,
        epochs=10,
        minibatch_size=256,
        entropy_weight=0.0,
        reward_scale=None,
        is_normalised=True,
        eval_episodes=20,
        expected_s=75,
    ),
    "sac-pendulum": SacSettings(
        env_id="Pendulum-v1",
        steps=20_000,
        num_envs=8,
        num_steps=2,
        learning_rate=1e-3,
        steps_per_gradient=2.0,
        batch_size=256,
        target_rate=0.01,
        expected_s=80,
    ),
    "dqn-cartpole": DqnSettings(
        env_id="CartPole-v1",
        steps=50_000,
        num_envs=16,
        num_steps=2,
        learning_rate=1e-3,
        discount=0.98,
        steps_per_gradient=2.5,
        batch_size=128,
        target_rate=0.02,
        expected_s=60,
    ),
}


def make_clipped(env_id: str) -> gym.Env[Any, Any]:
    """Make an environment that clips actions to its bounds."""
    return gym.wrappers.ClipAction(gym.make(env_id))


def shorten(tasks: Mapping[str, AnySettings], share: float) -> dict[str, AnySettings]:
    """Return the tasks with so much less to do: to try the machinery, not to learn anything."""
    return {
        name: replace(
            each,
            steps=max(1, round(share * each.steps)),
            num_workers=2,
            eval_episodes=max(2, round(share * each.eval_episodes)),
            expected_s=share * each.expected_s,
        )
        for name, each in tasks.items()
    }


def describe(tasks: Mapping[str, AnySettings]) -> dict[str, dict[str, object]]:
    """Return all that runs must have in common to be compared: the settings, and the rule as it is shipped."""
    return {**{name: asdict(each) for name, each in tasks.items()}, "rule": {"shipped": repr(AdaptiveSync())}}


def write_tasks(path: Path, tasks: Mapping[str, AnySettings]) -> None:
    """Write what `read_task` reads."""
    path.write_text(json.dumps(describe(tasks), indent=2) + "\n")


def read_task(path: Path, name: str) -> AnySettings:
    """Read the settings of a task."""
    return type(TASKS[name])(**json.loads(path.read_text())[name])
