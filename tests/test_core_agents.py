"""Workers may be lost before, while and after an agent comes to them; steps by agents go on, honestly labelled."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv import ClusterEnv, Decision, EveryUpdate
from clusterenv.errors import PolicyError, WorkerFailed
from tests.conftest import Backend, wait_until_gone
from tests.policies import Linear

NUM_ENVS = 4  # Two on each of two workers.
LOST = [False, False, True, True]


class Deadly(Linear):
    """Kills, with its first decision, the process whose id is in a file."""

    def __init__(self, victim: Path, seed: int = 0) -> None:
        super().__init__(seed)
        self._victim = victim

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        if self._victim.exists() and self._victim.read_text() == str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().act(obs, state, call)


def kill_second(envs: ClusterEnv) -> None:
    pid = envs.worker_pids[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []


def check_step(envs: ClusterEnv, agent: Linear, *, lost: bool) -> int:
    """Step by an agent; returns the version that made the decisions, which is the same for all."""
    infos = envs.step(agent)[4]
    flags = infos.get("_worker_lost", np.zeros(NUM_ENVS, np.bool_))
    assert flags.tolist() == (LOST if lost else [False] * NUM_ENVS)
    assert infos["action"].shape == infos["logprob"].shape == infos["policy_version"].shape == (NUM_ENVS,)
    (version,) = set(infos["policy_version"][~flags].tolist())
    assert set(infos["policy_version"][flags].tolist()) <= {0, version}, "nobody else's version"
    return int(version)


@pytest.mark.parametrize("noticed_by", ["the agent", "another call", "a step"])
def test_a_worker_may_be_lost_before_the_first_agent_comes(remote: Backend, noticed_by: str) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", NUM_ENVS, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        kill_second(envs)
        if noticed_by == "another call":
            envs.call("spec")
        elif noticed_by == "a step":
            envs.step(np.zeros(NUM_ENVS, np.int64))
        assert check_step(envs, agent, lost=noticed_by != "a step") == 1
        assert check_step(envs, agent, lost=False) == 1
        agent.nudge()
        assert check_step(envs, agent, lost=False) == 2
        assert len(envs.losses) == 1


@pytest.mark.parametrize("steps", [True, False], ids=["step", "rollout"])
def test_a_worker_may_be_lost_while_it_adopts_an_agent(remote: Backend, steps: bool, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    agent = Deadly(victim)
    with ClusterEnv("CartPole-v1", NUM_ENVS, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        victim.write_text(str(envs.worker_pids[1]))
        if steps:
            check_step(envs, agent, lost=True)
        else:
            assert set(envs.rollout(agent, 4).versions.tolist()) == {1}
        assert len(envs.losses) == 1
        assert check_step(envs, agent, lost=False) == 1


def test_after_a_change_of_agents_no_row_has_a_version_of_the_agent_before(remote: Backend, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    first, second = Linear(1), Deadly(victim, 2)
    with ClusterEnv("CartPole-v1", NUM_ENVS, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        check_step(envs, first, lost=False)
        first.nudge()
        kill_second(envs)
        version = check_step(envs, first, lost=True)
        check_step(envs, first, lost=False)
        victim.write_text(str(envs.worker_pids[1]))
        assert check_step(envs, second, lost=True) > version
        assert check_step(envs, second, lost=False) > version
        assert len(envs.losses) == 2


class Refusing(Linear):
    """Does not load its second version."""

    def load(self, weights: Any) -> None:
        super().load(weights)
        if float(next(iter(weights.values())).flat[0]) == 1.0:
            raise ValueError("not this one")


def test_a_worker_that_could_not_load_is_not_believed_to_hold_the_newest(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, sync=EveryUpdate(), **remote) as envs:
        envs.reset(seed=0)
        agent = Refusing()
        envs.step(agent)
        agent.matrix.flat[0] = 1.0
        for _ in range(2):  # The second time as well: else its old weights would count as the newest.
            with pytest.raises((WorkerFailed, PolicyError), match="not this one"):
                envs.step(agent)
        agent.matrix.flat[0] = 2.0
        *_, info = envs.step(agent)
        assert (info["policy_version"] == max(info["policy_version"])).all()
