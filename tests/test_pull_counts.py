"""What a stream's pulls are compared with: those that pulling every version would have taken."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path
from typing import Any

import gymnasium as gym

from clusterenv import ClusterEnv, EveryUpdate
from tests.conftest import Backend
from tests.policies import Linear


class Gated(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose first step waits for a writer to come to and leave the named pipe `gate`."""

    def __init__(self, env: gym.Env[Any, Any], gate: str) -> None:
        super().__init__(env)
        self._gate = gate

    def step(self, action: Any) -> Any:
        if self._gate:
            with open(self._gate, "rb") as gate:
                gate.read()
            self._gate = ""
        return super().step(action)


def test_pulls_on_their_way_to_a_busy_worker_do_not_exceed_those_of_every_update(
    remote: Backend, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    agent = Linear()
    makers = [lambda: gym.make("CartPole-v1"), lambda: Gated(gym.make("CartPole-v1"), gate)]
    saved = []
    with ClusterEnv(makers, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, max_lag=math.inf) as stream:
            with open(gate, "wb"):  # From when the second worker has begun.
                for _ in itertools.islice(stream, 20):
                    agent.nudge()
                    saved.append(envs.stats["pulls_saved"])
            for _ in itertools.islice(stream, 20):
                agent.nudge()
                saved.append(envs.stats["pulls_saved"])
    assert min(saved) >= 0
