"""Ctrl-C may come between any two lines of any call; what comes after it equals SyncVectorEnv as ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import SyncVectorEnv

from clusterenv import BasePolicy, ClusterEnv, Decision, Timeouts
from clusterenv.rollout import Rollout
from tests.conftest import Backend
from tests.interruption import count_lines, is_interrupted, spread_lines
from tests.lockstep import Follower
from tests.policies import Hashing, Linear
from tests.worlds import make_factories

NUM_ENVS = 3
MOST = 36  # Interruptions of each call.
ALL = list(range(NUM_ENVS))
AGENT = Hashing(spaces.Discrete(4))
Prepare = Callable[[ClusterEnv], Callable[[], Any]]


def prepare_next(envs: ClusterEnv) -> Callable[[], Any]:
    stream = envs.stream(AGENT, 4)
    return lambda: next(stream)


def prepare_stream_close(envs: ClusterEnv) -> Callable[[], Any]:
    stream = envs.stream(AGENT, 4)
    next(stream)
    return stream.close


def prepare_reset_in_stream(envs: ClusterEnv) -> Callable[[], Any]:
    next(envs.stream(AGENT, 4))
    return lambda: envs.reset(seed=3)


def prepare_recv(envs: ClusterEnv) -> Callable[[], Any]:
    envs.send(ALL, ALL)
    return envs.recv


def ready(envs: ClusterEnv, seed: int) -> None:
    """Reset, and take in first what a call before may have left to be received: that it did is its right."""
    for _ in range(NUM_ENVS):
        try:
            envs.reset(seed=seed)
        except AlreadyPendingCallError:
            envs.recv()
        else:
            return


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda envs: lambda: envs.reset(seed=3), id="reset"),
        pytest.param(lambda envs: lambda: envs.step([0, 1, 2]), id="step"),
        pytest.param(lambda envs: lambda: envs.step(AGENT), id="step(agent)"),
        pytest.param(lambda envs: lambda: envs.rollout(AGENT, 3), id="rollout"),
        pytest.param(lambda envs: lambda: envs.rollout(Hashing(spaces.Discrete(4)), 3), id="rollout of a new agent"),
        pytest.param(lambda envs: lambda: envs.stream(AGENT, 4), id="stream"),
        pytest.param(prepare_next, id="next(stream)"),
        pytest.param(prepare_stream_close, id="stream.close"),
        pytest.param(prepare_reset_in_stream, id="reset in a stream"),
        pytest.param(lambda envs: lambda: envs.send(ALL, ALL), id="send"),
        pytest.param(prepare_recv, id="recv"),
        pytest.param(lambda envs: lambda: envs.call("describe", "We are"), id="call"),
        pytest.param(lambda envs: lambda: envs.set_attr("label", ["a", "b", "c"]), id="set_attr"),
        pytest.param(lambda envs: lambda: envs.apply(lambda env: env.unwrapped.label, [2, 0]), id="apply"),
    ],
)
def test_an_interrupt_before_any_line_of_a_call_spoils_nothing_after_it(backend: Backend, prepare: Prepare) -> None:
    factories = make_factories(NUM_ENVS)
    theirs = SyncVectorEnv(factories)
    with ClusterEnv(factories, timeouts=Timeouts(call_s=5), **backend) as envs:
        follower = Follower(envs, theirs, AGENT)
        checks = [follower.check_steps, follower.check_rollout, follower.check_stream]
        ready(envs, 0)
        num_lines = count_lines(prepare(envs))
        num_interrupted = 0
        for number, line in enumerate(spread_lines(num_lines, MOST)):
            ready(envs, number)
            num_interrupted += is_interrupted(prepare(envs), line)
            ready(envs, number)
            checks[number % 3](number)
        ready(envs, 0)
        for check in checks:
            check(num_lines)
        assert num_interrupted > 0
        assert envs.losses == ()
    theirs.close()


class Numbered(BasePolicy):
    """Returns its only weight with every action."""

    def __init__(self) -> None:
        self.number = np.zeros(1, np.float32)

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        return Decision(np.zeros(len(obs), np.int64), {"number": np.full(len(obs), self.number[0])})

    def weights(self) -> dict[str, Any]:
        return {"number": self.number}


def test_an_interrupt_before_any_line_about_versions_leaves_each_number_with_its_weights(remote: Backend) -> None:
    agent = Numbered()
    weights: dict[int, float] = {}

    def take(stream: Iterator[Rollout]) -> float:
        rollout = next(stream)
        for version, number in zip(rollout.versions, rollout.extras["number"][0], strict=True):
            assert weights.setdefault(int(version), number) == number
        return float(rollout.extras["number"].max())

    with ClusterEnv("CartPole-v1", 2, **remote, timeouts=Timeouts(call_s=20)) as envs:
        envs.reset(seed=1)
        stream = envs.stream(agent, 3)
        take(stream)
        agent.number += 1
        num_lines = count_lines(lambda: take(stream), "head/versions")
        num_interrupted = 0
        for line in range(num_lines):
            agent.number += 1
            num_interrupted += is_interrupted(stream.__next__, line, places=("head/versions",))
            stream = stream if stream.is_open else envs.stream(agent, 3)
            assert any(take(stream) == agent.number for _ in range(20)), f"line {line}: the workers stay behind"
        assert num_interrupted > 5
        assert envs.losses == ()


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM])
def test_a_handler_that_raises_before_any_line_of_a_rollout_spoils_nothing_after_it(
    remote: Backend, number: int
) -> None:
    with ClusterEnv(make_factories(NUM_ENVS), timeouts=Timeouts(call_s=5), **remote) as envs:
        envs.rollout(AGENT, 3)
        handler = signal.getsignal(signal.SIGINT)
        for line in spread_lines(count_lines(lambda: envs.rollout(AGENT, 3)), 2 * MOST):
            is_interrupted(lambda: envs.rollout(AGENT, 3), line, number)
            assert envs.call("describe", "We are") is not None
            assert signal.getsignal(signal.SIGINT) is handler
        assert envs.losses == ()


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
                "step": lambda: envs.step([0, 0]),
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


def test_an_interrupted_step_spoils_no_comparison_of_policies(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, 4)
        for line in spread_lines(count_lines(lambda: envs.step([0] * 4)), 12):
            is_interrupted(lambda: envs.step([0] * 4), line)
            agent.nudge()
            assert envs.rollout(agent, 4).num_steps == 4
        assert envs.losses == ()
