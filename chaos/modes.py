"""Modes: the four ways in which a learner works, each with a check of everything that it is given."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from tests.numbered import NUM_ACTIONS, Checker, expect

from clusterenv import BasePolicy, ClusterEnv, Decision

NUM_STEPS = 16


class Shifted(BasePolicy):
    """Chooses by the numbers and by weights that its learner changes; most of them are there to be carried."""

    def __init__(self) -> None:
        self.shift = np.zeros(1, np.int64)
        self.ballast = np.zeros(2**14, np.float32)

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        """Choose."""
        return Decision((np.asarray(obs).sum(axis=1) + self.shift) % NUM_ACTIONS, {})

    def weights(self) -> dict[str, Any]:
        """Return what the learner changes, and the ballast."""
        return {"shift": self.shift, "ballast": self.ballast}

    def learn(self) -> None:
        """Become another version."""
        self.shift += 1


class Calls:
    """Marks the learner's calls: Ctrl-C comes in one of them, and not while their results are checked.

    As a context manager it surrounds a call.
    """

    def __init__(self) -> None:
        self._is_inside = False
        self._is_wanted = False
        self._has_arrived = threading.Event()

    def __enter__(self) -> None:
        self._is_inside = True

    def __exit__(self, *exception: object) -> None:
        self._is_inside = False

    def install(self) -> None:
        """Take over SIGINT; call it in the main thread."""
        signal.signal(signal.SIGINT, self._handle)

    def interrupt(self, source: np.random.Generator) -> None:
        """Interrupt a call, from another thread: returns when it has arrived, or is not wanted any more."""
        main = threading.main_thread().ident
        assert main is not None
        self._has_arrived.clear()
        while not self._has_arrived.is_set():
            self._is_wanted = True
            while self._is_wanted:
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(float(source.uniform(0.0, 0.003)))
            # Python drops what is raised in a destructor: then another one has to come.
            self._has_arrived.wait(1.0)

    def note_arrival(self) -> None:
        """Take note that the learner got it, or let none come any more."""
        self._is_wanted = False
        self._has_arrived.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_wanted and self._is_inside:
            self._is_wanted = False
            raise KeyboardInterrupt


class Learner(Protocol):
    """One way to work, taken up for a while."""

    def __init__(
        self, envs: ClusterEnv, agent: Shifted, checker: Checker, calls: Calls, rng: np.random.Generator
    ) -> None: ...

    def begin(self) -> None:
        """Take it up; what went before it was left as `end` leaves it, or reset."""

    def advance(self) -> None:
        """Do some of it, and check what came."""

    def end(self) -> None:
        """Leave it, so that any other call may follow."""


class Stepping:
    """`step`, with actions from the head and, now and then, with a policy."""

    def __init__(
        self, envs: ClusterEnv, agent: Shifted, checker: Checker, calls: Calls, rng: np.random.Generator
    ) -> None:
        self._envs = envs
        self._agent = agent
        self._checker = checker
        self._calls = calls
        self._rng = rng

    def begin(self) -> None:
        """Nothing is to be done."""

    def advance(self) -> None:
        """Make a few steps."""
        for _ in range(4):
            has_agent = self._rng.random() < 0.25
            actions: Any = self._agent if has_agent else self._rng.integers(NUM_ACTIONS, size=self._envs.num_envs)
            with self._calls:
                answer = self._envs.step(actions)
            self._checker.step(answer[4]["action"] if has_agent else actions, answer)

    def end(self) -> None:
        """Nothing is to be done."""


class Rolling(Stepping):
    """`rollout`."""

    def advance(self) -> None:
        """Collect one."""
        self._agent.learn()
        with self._calls:
            rollout = self._envs.rollout(self._agent, NUM_STEPS)
        self._checker.rollout(rollout)


class Streaming(Stepping):
    """`stream`: opened, left, and what was made ahead thrown away."""

    def begin(self) -> None:
        """Open a stream."""
        with self._calls:
            self._stream = self._envs.stream(self._agent, NUM_STEPS, max_lag=math.inf)

    def advance(self) -> None:
        """Take a rollout, and learn."""
        self._agent.learn()
        with self._calls:
            rollout = next(self._stream)
        self._checker.rollout(rollout)

    def end(self) -> None:
        """Close it, and begin anew: episodes have gone on unseen."""
        with self._calls:
            self._stream.close()
        reset(self._envs, self._checker, self._calls)


class Exchanging(Stepping):
    """`send` and `recv`."""

    def begin(self) -> None:
        """Give every environment an action."""
        self._actions = np.zeros(self._envs.num_envs, np.int64)
        self._under_way: set[int] = set()
        self._send(np.arange(self._envs.num_envs))

    def advance(self) -> None:
        """Take what is ready, and send those environments on."""
        self._send(self._receive())

    def end(self) -> None:
        """Take what is under way."""
        while self._under_way:
            self._receive()

    def _send(self, env_indices: Any) -> None:
        self._actions[env_indices] = self._rng.integers(NUM_ACTIONS, size=len(env_indices))
        with self._calls:
            self._envs.send(self._actions[env_indices], env_indices)
        self._under_way |= set(env_indices.tolist())

    def _receive(self) -> Any:
        with self._calls:
            answer = self._envs.recv()
        env_indices = answer[4]["env_id"]
        received = set(env_indices.tolist())
        expect(received <= self._under_way, f"{received - self._under_way} came, and nobody had sent them anything")
        self._under_way -= received
        self._checker.step(self._actions[env_indices], answer, env_indices)
        return env_indices


MODES: Mapping[str, type[Learner]] = {
    "step": Stepping,
    "rollout": Rolling,
    "stream": Streaming,
    "send/recv": Exchanging,
}


def reset(envs: ClusterEnv, checker: Checker, calls: Calls) -> None:
    """Reset all environments, whatever was under way."""
    while True:
        try:
            with calls:
                observations, _ = envs.reset()
            break
        except AlreadyPendingCallError:  # An interrupted `send` or `recv` may have left some under way.
            with calls:
                envs.recv()
    checker.reset(observations, may_skip=True)
