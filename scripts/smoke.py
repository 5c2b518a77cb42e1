"""What must work on every system: environments in this process and on local workers, with the same results.

`python scripts/smoke.py` says so in a few seconds. CI runs it on macOS and Windows, and tests/test_other_platforms.py
on a Linux from which everything that only Linux has was taken away.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from clusterenv import ClusterEnv


def lean(obs: Any) -> Any:
    """Push to the side to which the pole leans."""
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


def play(num_workers: int) -> list[Any]:
    """Return what is seen in a reset, in steps, in a rollout and in an evaluation."""
    with ClusterEnv("CartPole-v1", num_envs=4, num_workers=num_workers) as envs:
        seen = [envs.reset(seed=1)[0]]
        seen += [envs.step(np.full(4, step % 2))[0] for step in range(30)]
        seen += [envs.rollout(lean, 50).obs, envs.evaluate(lean, 6).returns]
    return seen


def lose_a_worker() -> None:
    """Stream, kill a worker, and go on."""
    with ClusterEnv("CartPole-v1", num_envs=4, num_workers=2) as envs:
        with envs.stream(lean, 16) as stream:
            assert [next(stream).rewards.shape for _ in range(4)] == [(16, 2)] * 4
        os.kill(envs.worker_pids[0], 9)  # On Windows that is TerminateProcess.
        envs.step(np.zeros(4, np.int64))
        assert len(envs.losses) == 1, envs.losses
        assert envs.step(np.zeros(4, np.int64))[0].shape == (4, 4)


if __name__ == "__main__":
    assert all(np.array_equal(one, other) for one, other in zip(play(0), play(2), strict=True))
    lose_a_worker()
    print(f"All is well on {sys.platform}.")
