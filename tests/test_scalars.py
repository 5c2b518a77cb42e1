"""`log_stats` gives loggers what they take, by names that say what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv import ClusterEnv, log_stats
from clusterenv.errors import ConfigError


class Run:
    """Takes what a run of Weights & Biases takes."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((data, step))


def act(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


@pytest.fixture(scope="module")
def envs() -> Any:
    with ClusterEnv("CartPole-v1", 4, num_workers=2) as envs:
        envs.rollout(act, 16)
        yield envs


def test_every_number_has_a_section_and_the_steps_are_the_axis(envs: ClusterEnv) -> None:
    run = Run()
    scalars = log_stats(envs, run)
    assert run.logged == [(scalars, 64)]
    assert scalars["rollouts/env_steps"] == 64.0
    for name in ("sync/pulls", "bytes/rollouts", "faults/env_errors", "rollouts/env_steps_per_second"):
        assert name in scalars
    assert not [name for name in scalars if name.startswith("clusterenv/")], "all have a section"
    assert "sync/divergence" not in scalars, "it was not measured"


def test_tensorboard_shows_them(envs: ClusterEnv, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        scalars = log_stats(envs, writer, step=7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(scalars)
    (event,) = events.Scalars("rollouts/env_steps")
    assert (event.step, event.value) == (7, 64.0)


def test_a_function_will_do_and_anything_else_is_refused(envs: ClusterEnv) -> None:
    taken: list[Any] = []
    log_stats(envs, lambda scalars, step: taken.append((len(scalars) > 9, step)))
    assert taken == [(True, 64)]
    with pytest.raises(ConfigError, match=r"logger must be a SummaryWriter.*, got 'tensorboard'"):
        log_stats(envs, "tensorboard")
