"""Fields of a worker's answer that a head might believe: refused or harmless, and the others never suffer."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, Faults, Network, Timeouts
from clusterenv.errors import WireError, WorkerLost
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests import hostile, hostile_answers
from tests.conftest import Backend
from tests.counted import Counted
from tests.launchers import OwnLauncher
from tests.policies import Linear
from tests.worlds import assert_same

NUM_ENVS = 4  # Two on each of two workers, of which the second means harm.
MANY = 40
Stopwatch = Callable[[], float]


def names_second(text: str) -> bool:
    """Whether an error says whose fault it is."""
    return "worker 1" in text.lower() or "environments 2 to 3" in text


class SecondMeansHarm(OwnLauncher):
    """Starts `tests.hostile_answers` in place of the second of two workers; what replaces it is honest."""

    def __init__(self, tricks: Sequence[str]) -> None:
        self._tricks = list(tricks)

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            module = "tests.hostile_answers" if worker_index == 1 and self._tricks else "clusterenv.worker"
            environment = os.environ | {
                TICKET_VARIABLE: ticket.encode(),
                WORKER_VARIABLE: str(worker_index),
                hostile.TRICKS_VARIABLE: ",".join(self._tricks),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            if worker_index == 1:
                self._tricks.clear()
            return subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=log, stderr=log)

        return ProcessFleet(start, num_workers)


def start(tricks: Sequence[str], transport: str, **options: Any) -> ClusterEnv:
    return ClusterEnv(
        "CartPole-v1",
        NUM_ENVS,
        num_workers=2,
        launcher=SecondMeansHarm(tricks),
        network=Network(transport=transport),
        **({"sync": EveryUpdate()} | options),
    )


def test_errors_that_a_worker_makes_up_are_refused_or_harmless(caplog: pytest.LogCaptureFixture) -> None:
    agent = Linear()
    names = list(hostile_answers.ERRORS)
    faults = Faults(on_loss="raise", on_env_error="reset")
    with start([f"errors: {name}" for name in names], "zmq", faults=faults) as envs:
        envs.reset(seed=1)
        for name in names:
            refusal = "worker 1"
            with caplog.at_level(logging.DEBUG, logger="clusterenv"):
                try:
                    envs.rollout(agent, 8)
                except WireError as error:
                    refusal = str(error)
            assert names_second(refusal), name
            assert len(refusal) < 1000, name
            messages = [record.getMessage() for record in caplog.records]
            assert len(messages) < MANY, name
            assert not any("\n" in message or "environment 0" in message for message in messages), (name, messages[:3])
            caplog.clear()
        assert envs.rollout(agent, 8).num_envs == NUM_ENVS
        assert envs.stats["env_errors"] < MANY


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_episodes_that_a_worker_makes_up_are_refused(transport: str) -> None:
    names = list(hostile_answers.EVALUATIONS)
    with start([f"evaluation: {name}" for name in names], transport) as envs:
        for name in names:
            with pytest.raises(WireError) as caught:
                envs.evaluate(Linear(), 40, max_steps=20)
            assert names_second(str(caught.value)), name
        assert envs.evaluate(Linear(), 40, max_steps=20).lengths.max() <= 20
        assert envs.losses == ()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("name", ["no summary", "errors: a number", "a rollout that begins at its end"])
def test_a_worker_whose_rollout_is_refused_in_a_stream_is_not_starved_in_silence(
    transport: str, name: str, seconds: Stopwatch
) -> None:
    with start([name], transport, timeouts=Timeouts(call_s=20)) as envs:
        envs.reset(seed=1)
        stream = envs.stream(Linear(), 8)
        began, seen, refusal = seconds(), [0, 0], "worker 1"
        try:
            while seen[1] < 5:
                seen[int(next(stream).env_indices[0]) // 2] += 1
                assert seconds() - began < 60, f"rollouts of each worker: {seen}"
        except (WireError, WorkerLost) as error:
            refusal = str(error)
        assert names_second(refusal)
        stream.close()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("name", hostile_answers.VERSIONS)
def test_a_version_that_nobody_has_published_labels_no_rollout(transport: str, name: str) -> None:
    with start([name] * 3, transport, timeouts=Timeouts(call_s=20)) as envs:
        envs.reset(seed=1)
        seen, refusal = [0, 0], "worker 1"
        try:
            with envs.stream(Linear(), 8, max_lag=3) as stream:
                while min(seen) < 10 and max(seen) < 2000:
                    rollout = next(stream)
                    seen[int(rollout.env_indices[0]) // 2] += 1
                    assert set(rollout.versions.tolist()) == {1}
                    assert set(rollout.ages.tolist()) == {0}
        except (WireError, WorkerLost) as error:
            refusal = str(error)
        assert names_second(refusal)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_rollout_that_took_no_time_that_can_be_is_refused_by_name(transport: str) -> None:
    tricks = [f"duration: {name}" for name in hostile_answers.DURATIONS]
    with start(tricks, transport) as envs:
        envs.reset(seed=1)
        for name in tricks:
            with pytest.raises(WireError, match="duration") as refused:
                envs.rollout(Linear(), 8)
            assert names_second(str(refused.value)), name
        assert 0 <= envs.rollout(Linear(), 8).stats["worker_idle_share"] <= 1
        assert np.isfinite(envs.stats["worker_idle_share"])


def test_what_a_worker_makes_up_about_its_policy_is_refused_by_name_and_harms_no_other() -> None:
    tricks = [f"probes: {name}" for name in [*hostile_answers.PROBES, "bytes that say nothing"]]
    agent = Linear()
    with start(tricks, "zmq", sync=AdaptiveSync(0.05), faults=Faults(on_loss="raise")) as envs:
        envs.reset(seed=1)
        for name in tricks:
            with pytest.raises(WireError) as refused:
                envs.rollout(agent, 8)
            assert names_second(str(refused.value)), name
            assert len(str(refused.value)) < 1500, name
            agent.nudge(0.01)
        assert np.isfinite(envs.rollout(agent, 8).divergences).all()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_worker_that_says_unasked_how_it_acts_is_refused(transport: str) -> None:
    with start(["probes that nobody asked for"], transport) as envs:
        envs.reset(seed=1)
        with pytest.raises(WireError, match="not asked for") as refused:
            envs.rollout(Linear(), 8)
        assert names_second(str(refused.value))
        assert envs.rollout(Linear(), 8).num_envs == NUM_ENVS


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_worker_that_says_unasked_how_it_acted_in_a_step_is_refused(transport: str) -> None:
    agent = Linear()
    with start(["probes that nobody asked for in a step"], transport) as envs:
        envs.reset(seed=1)
        with pytest.raises(WireError, match="not asked for") as refused:
            envs.step(agent)
        assert names_second(str(refused.value))
        assert envs.step(agent)[1].tolist() == [1.0] * NUM_ENVS


class Complaining(Counted):
    """Has infos of its own by names that a head might take for its own."""

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, length=3)
        self._name = name

    def reset(self, **options: Any) -> Any:
        observation, _ = super().reset(**options)
        return observation, self._complain()

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self._complain()

    def _complain(self) -> dict[str, Any]:
        return {self._name: f"of {self.index}"} if self.index % 2 else {}


@pytest.mark.parametrize(
    ("name", "on_env_error"),
    [("_env_error", "raise"), ("_env_error", "reset"), ("env_error", "raise"), ("worker_lost", "raise")],
)
def test_an_honest_environment_may_use_any_name_in_its_infos(backend: Backend, name: str, on_env_error: str) -> None:
    makers = [lambda i=i: Complaining(i, name) for i in range(NUM_ENVS)]
    theirs = SyncVectorEnv(makers)
    actions = np.zeros(NUM_ENVS, np.int64)
    with ClusterEnv(makers, **backend, faults=Faults(on_env_error=on_env_error)) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for _ in range(6):
            assert_same(ours.step(actions), theirs.step(actions))
        rollout = ours.rollout(lambda obs: np.zeros(len(obs), np.int64), 9)
        assert rollout.obs.shape[:2] == (9, NUM_ENVS)
        ours.step(lambda obs: np.zeros(len(obs), np.int64))
        assert ours.losses == ()
        assert ours.stats["env_errors"] == 0
    theirs.close()
