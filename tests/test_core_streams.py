"""Streams: however one starts, ends or loses workers, every worker goes on, and so does whatever comes next."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from clusterenv import BasePolicy, ClusterEnv, Decision, EveryUpdate, Timeouts
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import Ticket
from tests import elsewhere
from tests.conftest import Backend, wait_until_gone
from tests.launchers import OwnLauncher, start_module
from tests.lockstep import Follower
from tests.policies import Hashing, Linear
from tests.worlds import make_factories

Stopwatch = Callable[[], float]


class SuccessorsElsewhere(OwnLauncher):
    """Starts workers here, and those that replace them where they cannot reach the head's memory."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        started: Counter[int] = Counter()

        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            started[worker_index] += 1
            module = "clusterenv.worker" if started[worker_index] == 1 else "tests.elsewhere"
            return start_module(module, ticket, worker_index, log)

        return ProcessFleet(start, num_workers)


@pytest.mark.skipif(not elsewhere.is_possible(), reason="unshare is missing, or not allowed")
def test_a_successor_that_cannot_share_memory_delivers_like_the_others(seconds: Stopwatch) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=SuccessorsElsewhere()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 16) as stream:
            seen = Counter(int(next(stream).env_indices[0]) for _ in range(4))
            victim = envs.worker_pids[1]
            os.kill(victim, signal.SIGKILL)
            while not envs.losses:
                next(stream)
            assert wait_until_gone([victim]) == []
            seen.clear()
            began = seconds()
            while seen[2] < 5:
                rollout = next(stream)
                seen[int(rollout.env_indices[0])] += 1
                agent.nudge()
                assert seconds() - began < 60, f"rollouts by their first environment: {seen}"
        assert envs.rollout(agent, 8).num_envs == 4
        assert [loss.worker_index for loss in envs.losses] == [1]


def stream_a_lock(envs: ClusterEnv, agent: Any, *, at_start: bool) -> None:
    """Give the policy a value that cannot be sent to it."""
    stream = envs.stream(agent, 4, values={"lock": threading.Lock()} if at_start else {})
    next(stream)
    stream.values["lock"] = threading.Lock()
    for _ in range(9):
        next(stream)


@pytest.mark.parametrize("where", ["at the start", "later"])
def test_a_value_that_cannot_be_sent_is_an_error_after_which_everything_works(remote: Backend, where: str) -> None:
    factories = make_factories(3)
    agent = Hashing(spaces.Discrete(4))
    theirs = SyncVectorEnv(factories)
    with ClusterEnv(factories, **remote, timeouts=Timeouts(call_s=5)) as envs:
        follower = Follower(envs, theirs, agent)
        envs.reset(seed=1)
        for number in range(2):
            with pytest.raises((TypeError, ValueError), match="lock"):  # Ours are ValueErrors where it is an argument.
                stream_a_lock(envs, agent, at_start=where == "at the start")
            follower.check_steps(seed=number)
            follower.check_rollout(seed=number)
            follower.check_stream(seed=number)
        assert envs.losses == ()
    theirs.close()


class Fragile(BasePolicy):
    """A policy that cannot load its third version."""

    def __init__(self) -> None:
        self.version = 1

    def act(self, obs: Any, state: Any = None, values: Any = None) -> Decision:
        return Decision(np.zeros(len(obs), np.int64), {})

    def weights(self) -> dict[str, Any]:
        return {"version": np.array([self.version])}

    def load(self, weights: Any) -> None:
        if weights["version"][0] > 2:
            raise ArithmeticError("no third version")

    def stamp(self) -> int:
        return self.version


def test_weights_that_cannot_be_loaded_are_an_error_of_the_policy_and_cost_no_worker(remote: Backend) -> None:
    agent = Fragile()
    with ClusterEnv("CartPole-v1", 4, **remote, sync=EveryUpdate()) as envs:
        stream = envs.stream(agent, 4)

        def learn() -> None:
            for _ in itertools.islice(stream, 200):
                agent.version += 1

        with pytest.raises(ArithmeticError, match="no third version"):
            learn()
        assert envs.losses == ()
        agent.version = 1
        assert envs.rollout(agent, 4).num_steps == 4


class Unsendable(gym.Env[Any, Any]):
    """Its infos hold what cannot travel, once an episode ends: with its third step."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        return np.ones(1), 0.0, self._count == 3, False, {"lock": threading.Lock()}


def choose(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


def test_an_exception_while_answers_are_taken_ends_a_stream_and_wedges_nothing(remote: Backend) -> None:
    with ClusterEnv([Unsendable] * 2, timeouts=Timeouts(call_s=20), **remote) as envs:
        envs.reset(seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            stream = envs.stream(choose, 8)
            with pytest.raises(RuntimeWarning, match="cannot be sent"):
                list(itertools.islice(stream, 10))
            assert list(stream) == [], "it has ended"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert envs.rollout(choose, 4).rewards.shape == (4, 2)


class Lazy(gym.Env[Any, Any]):
    """Each of its steps takes so many times as long as it takes to sort some numbers."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, times: int) -> None:
        self._times = times

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        for _ in range(self._times):
            sorted(range(5000), key=lambda number: -number)
        return np.ones(1), 0.0, False, False, {}


class Changing(BasePolicy):
    """An agent whose structure is another with every class that it is given."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        return Decision(np.zeros(len(obs), np.int64), self.kind.extras(len(obs)))


def test_rollouts_of_two_structures_are_never_put_together(remote: Backend) -> None:
    class Alpha:
        @staticmethod
        def extras(count: int) -> dict[str, Any]:
            return {"alpha": np.full(count, 1.0)}

    class BetaAndGamma:
        @staticmethod
        def extras(count: int) -> dict[str, Any]:
            return {"beta": np.full(count, 2.0), "gamma": np.full(count, 3.0)}

    agent = Changing(Alpha)
    with ClusterEnv([lambda: Lazy(0), lambda: Lazy(20)], **remote) as envs:
        envs.reset(seed=1)
        stream = envs.stream(agent, 5, min_envs=2, in_flight=6)
        next(stream)
        for number in range(8):
            agent.kind = Alpha if number % 2 else BetaAndGamma
            for rollout in itertools.islice(stream, 3):
                assert rollout.extras.keys() == agent.kind.extras(1).keys()
                for name, value in agent.kind.extras(1).items():
                    assert (rollout.extras[name] == value).all()
        assert envs.losses == ()


def test_without_workers_too_an_exception_ends_a_stream() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs:
        envs.reset(seed=0)
        stream = envs.stream(lambda obs: 1 / 0, 4)
        with pytest.raises(ZeroDivisionError):
            next(stream)
        assert not stream.is_open
        assert list(stream) == []
