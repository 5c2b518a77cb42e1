"""Environments that know where they are, and tell when they are closed there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym


class Located(gym.Wrapper[Any, Any, Any, Any]):
    """Knows its host, and the variables of its process."""

    @property
    def host(self) -> str:
        return os.uname().nodename

    def variable(self, name: str) -> str:
        return os.environ[name]


def make_located() -> Located:
    return Located(gym.make("CartPole-v1"))


class Farewell(gym.Wrapper[Any, Any, Any, Any]):
    """Leaves a note when a worker of Slurm's closes it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._directory = directory

    def close(self) -> None:
        if "SLURM_PROCID" in os.environ:
            (self._directory / str(os.getpid())).touch()
