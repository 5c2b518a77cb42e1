"""What the runs of one experiment have in common: a learner and everything it is told, but for rule and seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every learner needs.

    Args:
        steps: Environment steps of a run, all environments together; rounded up to whole rollouts.
        num_steps: Of each environment in a rollout.
        max_lag: Of AdaptiveSync.
        plateau: Of AdaptiveSync.
    """

    task: str
    steps: int
    num_workers: int = 4
    num_envs: int
    num_steps: int
    learning_rate: float
    discount: float = 0.99
    max_lag: int = 20
    plateau: float | None = 0.5

    final_share: ClassVar[float] = 0.1  # The final return is that of the episodes that finished in this last share.

    @property
    def num_rollouts(self) -> int:
        """How many rollouts a run takes."""
        return -(-self.steps // (self.num_envs * self.num_steps))


@dataclass(frozen=True, kw_only=True)
class PpoSettings(Settings):
    """PPO with the decoupled objective, settings of examples/ppo.py; AdaptiveSync as it is by default."""

    task: str = "LunarLander-v3"
    steps: int = 1_000_000
    num_envs: int = 32
    num_steps: int = 256
    learning_rate: float = 1e-3
    epochs: int = 6
    minibatch_size: int = 256
    reward_scale: float = 0.05
    anneals: bool = True  # The learning rate falls to 0 over the run.


@dataclass(frozen=True, kw_only=True)
class CartPoleSettings(PpoSettings):
    """PPO on CartPole with CleanRL's learning rate, epochs and size of a minibatch, without its annealing."""

    task: str = "CartPole-v1"
    steps: int = 200_000
    num_envs: int = 64
    num_steps: int = 125
    learning_rate: float = 2.5e-4
    epochs: int = 4
    minibatch_size: int = 125
    reward_scale: float = 1.0
    anneals: bool = False


@dataclass(frozen=True, kw_only=True)
class DqnSettings(Settings):
    """Double DQN that makes gradient steps after every step of the environments, so that every step has a new version.

    Its learning rate falls to 0 over the run.

    The protections of AdaptiveSync are off: they are for learners that are held near the policy that made the data,
    and a learner from replay is not.
    """

    task: str = "CartPole-v1"
    steps: int = 30_000
    num_envs: int = 16
    num_steps: int = 1
    learning_rate: float = 2e-3
    discount: float = 0.98
    max_lag: int = 10**6
    plateau: float | None = None
    buffer_size: int = 50_000
    learning_starts: int = 1_000
    steps_per_gradient: float = 3.0
    batch_size: int = 128
    target_rate: float = 0.05
    first_epsilon: float = 1.0
    last_epsilon: float = 0.05
    exploration_fraction: float = 0.2

    # In the last tenth an environment makes fewer steps than a good episode has: mostly bad ones would finish there.
    final_share: ClassVar[float] = 1 / 3


LEARNERS: Mapping[str, type[PpoSettings] | type[DqnSettings]] = {
    "ppo": PpoSettings,
    "ppo-cartpole": CartPoleSettings,
    "dqn": DqnSettings,
}


def describe(settings: Settings) -> dict[str, object]:
    """Return everything as plain values, with the learner's name."""
    (name,) = (name for name, kind in LEARNERS.items() if type(settings) is kind)
    return {"learner": name, **asdict(settings)}


def write_settings(path: Path, settings: Settings) -> None:
    """Write settings that `read_settings` reads."""
    path.write_text(json.dumps(describe(settings), indent=2) + "\n")


def read_settings(path: Path) -> PpoSettings | DqnSettings:
    """Read what `write_settings` wrote."""
    values = json.loads(path.read_text())
    return LEARNERS[values.pop("learner")](**values)
