"""What somebody found who read the code for the first time: each was wrong once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from clusterenv import ClusterEnv, EveryUpdate, NativeVector, Timeouts
from clusterenv.errors import PolicyError, WorkerFailed
from clusterenv.setup.factories import resolve
from clusterenv.setup.start import make_assignment
from clusterenv.setup.trial import check_factory
from tests.conftest import Backend
from tests.policies import Linear

ACTIONS = np.zeros(2, np.int64)


class Pixels(gym.Env[Any, Any]):
    """Observes frames, whose bounds alone are larger than a pipe holds."""

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)


class Rolling(gym.vector.VectorEnv[Any, Any, Any]):
    """Counts its steps; all its episodes end with the second; leaves by an exception when it is told to."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium wants it so

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
        self.single_action_space = gym.spaces.Discrete(3)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._count = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._count = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        if (np.asarray(actions) == 2).any():
            raise SystemExit("told to leave")
        self._count += 1
        ended = np.full(self.num_envs, self._count == 2)
        return self._observe(), np.ones(self.num_envs), ended, np.zeros(self.num_envs, np.bool_), {}

    def _observe(self) -> Any:
        return np.full((self.num_envs, 1), float(self._count))


def test_a_factory_of_frames_is_tried_in_a_moment(caplog: pytest.LogCaptureFixture) -> None:
    assignment = make_assignment(resolve(Pixels, 1, None), (0, 1), AutoresetMode.NEXT_STEP, "raise", [])
    with caplog.at_level(logging.WARNING):
        check_factory(assignment, 60.0)
    assert caplog.records == [], "it was made in time"


def test_a_native_step_that_fails_leaves_all_rows_and_flags_as_they_were(remote: Backend) -> None:
    with ClusterEnv(NativeVector(Rolling), 4, **remote) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        seen, _, terminated, _, _ = envs.step(np.zeros(4, np.int64))
        assert terminated.all()
        with pytest.raises(WorkerFailed):
            envs.step(np.array([0, 0, 2, 0]))
        newest: Any = envs._backend.newest
        np.testing.assert_array_equal(newest.observations[0][2:], seen[2:])
        assert newest.terminations[2:].all()


class Gated(gym.Env[Any, Any]):
    """Terminates with its first step; its second waits until somebody opens the gate."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        if self._count == 2:
            with open(self._path, "rb") as gate:
                gate.read()
        return np.full(1, float(self._count)), 0.0, True, False, {}


def test_a_rollout_under_way_leaves_what_the_learner_saw_last_alone(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with ClusterEnv([lambda: Gated(str(gate))], num_workers=1) as envs:
        envs.reset(seed=0)
        before: Any = envs._backend.newest
        seen: list[Any] = []

        def look_and_open() -> None:
            with open(gate, "wb"):  # Opens when the environment waits there, a step and a reset into the rollout.
                seen.append((before.observations[0].copy(), before.terminations.copy()))

        opener = threading.Thread(target=look_and_open)
        opener.start()
        envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
        opener.join()
    observations, terminations = seen[0]
    assert not terminations.any()
    np.testing.assert_array_equal(observations, 0.0)


class Alarm(Exception):
    """What a signal handler of the user's raises."""


class Waiting(gym.Env[Any, Any]):
    """Waits at a gate once, in whatever it is told to; without a path it never does."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, path: str) -> None:
        self._path = path

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if options:
            self.wait()
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.wait()
        return np.ones(1), 0.0, False, False, {}

    def wait(self) -> None:
        path, self._path = self._path, ""
        if path:
            with open(path, "rb") as gate:
                gate.read()


@pytest.mark.parametrize("name", ["step", "reset", "call"])
def test_after_any_exception_of_a_signal_handler_other_calls_go_on(name: str, remote: Backend, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    has_raised = threading.Event()

    def ring(number: int, frame: Any) -> None:
        raise Alarm

    def interrupt() -> None:
        with open(gate, "wb"):  # Opens when the environment waits there.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            has_raised.wait(60)

    previous = signal.signal(signal.SIGUSR1, ring)
    thread = threading.Thread(target=interrupt)
    try:
        with ClusterEnv([lambda: Waiting(str(gate)), lambda: Waiting("")], **remote) as envs:
            envs.reset(seed=0)
            calls: dict[str, Callable[[], Any]] = {
                "step": lambda: envs.step(ACTIONS),
                "reset": lambda: envs.reset(options={"wait": True}),
                "call": lambda: envs.call("wait"),
            }
            thread.start()
            with pytest.raises(Alarm):
                calls[name]()
            has_raised.set()
            observations, _ = envs.reset(seed=0)
            np.testing.assert_array_equal(observations, 0.0)
    finally:
        signal.signal(signal.SIGUSR1, previous)
        thread.join()


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


def test_closed_environments_have_no_workers_that_are_ready() -> None:
    envs = ClusterEnv("CartPole-v1", 2, num_workers=1, timeouts=Timeouts())
    assert [worker.state for worker in envs.workers] == ["ready"]
    envs.close()
    assert [worker.state for worker in envs.workers] == ["closed"]
