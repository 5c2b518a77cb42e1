"""Scalars: log `envs.stats` to TensorBoard, Weights & Biases or any function."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from clusterenv.errors import ConfigError

# TensorBoard and Weights & Biases show what precedes the slash as a section.
_SECTIONS = {
    "rollouts": ("env_steps", "rollouts", "env_steps_per_second", "collect_seconds", "worker_idle_share", "fast_path"),
    "workers": ("workers", "workers_mean", "worker_hours"),
    "faults": ("env_errors", "rollouts_discarded", "rollouts_lost", "env_steps_discarded"),
    "sync": ("updates", "checks", "pulls", "pulls_saved", "divergence", "threshold", "age"),
}


def log_stats(envs: Any, logger: Any, *, step: int | None = None) -> dict[str, float]:
    """Log `envs.stats` by section: `rollouts/env_steps_per_second`, `sync/pulls`, `bytes/weights`, `faults/env_errors`.

    Args:
        envs: A ClusterEnv, or a view of one that has its `stats`.
        logger: A TensorBoard `SummaryWriter`, a run of Weights & Biases (or the module `wandb`), or a function that
            takes a dict and the step.
        step: The x-axis; by default the number of environment steps so far.

    Returns:
        The values that were logged. Entries that are not numbers, or not known yet, are left out.

    Raises:
        ConfigError: The logger is none of the above.
    """
    stats = envs.stats
    step = int(stats["env_steps"]) if step is None else step
    scalars = {
        _name(key): float(value)
        for key, value in stats.items()
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }
    if hasattr(logger, "add_scalar"):
        for name, value in scalars.items():
            logger.add_scalar(name, value, step)
    elif hasattr(logger, "log"):
        logger.log(scalars, step=step)
    elif callable(logger):
        logger(scalars, step)
    else:
        raise ConfigError(
            "logger must be a SummaryWriter, a run of Weights & Biases, or a function of a dict and a step, "
            f"got {logger!r}."
        )
    return scalars


def _name(key: str) -> str:
    for section, keys in _SECTIONS.items():
        if key in keys:
            return f"{section}/{key}"
    for beginning, section in (("bytes_", "bytes"), ("pulls_", "sync")):
        if key.startswith(beginning):
            return f"{section}/{key.removeprefix('bytes_')}"
    return f"clusterenv/{key}"
