"""Gymnasium's vector infos split by environment, for learners that expect a dict per environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from clusterenv.errors import ConfigError


def split_infos(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return one info per environment, with the keys that the environment gave according to their `_key` masks.

    Numbers are numpy scalars, whatever type the environment returned.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if not isinstance(mask, np.ndarray):
            continue  # The key is itself a mask.
        parts = split_infos(value, num_envs) if isinstance(value, dict) else value
        for row in np.flatnonzero(mask).tolist():
            rows[row][key] = parts[row]
    return rows


def split_endings(infos: dict[str, Any], num_envs: int) -> tuple[list[dict[str, Any]], dict[int, tuple[Any, Any]]]:
    """Split the infos of a step in SAME_STEP mode.

    Returns:
        One info per environment, which is the new episode's first if the last one has ended; and, by environment, the
        last observation and info of each episode that has ended.
    """
    if "final_obs" not in infos:
        return split_infos(infos, num_envs), {}
    others = {key: value for key, value in infos.items() if key not in ("final_obs", "final_info")}
    last_infos = split_infos(infos["final_info"], num_envs)
    ended = np.flatnonzero(infos["_final_obs"]).tolist()
    return split_infos(others, num_envs), {row: (infos["final_obs"][row], last_infos[row]) for row in ended}


def check_same_step(envs: object, adapter: str) -> None:
    """Raise ConfigError unless a vector environment resets in the same step and returns arrays that do not change."""
    if not isinstance(envs, VectorEnv):
        raise ConfigError(f"{adapter} takes a ClusterEnv, got {type(envs)}.")
    mode = envs.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.SAME_STEP:
        raise ConfigError(
            f"{adapter} needs environments that reset in the step that ends an episode, but the mode is {mode}. "
            'Make them with ClusterEnv(..., autoreset_mode="SameStep").'
        )
    if not getattr(envs, "copy", True):
        raise ConfigError(f"{adapter} keeps observations across steps: leave out ClusterEnv(copy=False).")
