"""What somebody found who meant harm to the core: each was wrong once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from clusterenv import ClusterEnv, NativeVector, Timeouts
from clusterenv.head.liveness import Liveness
from clusterenv.head.worker import Worker
from clusterenv.ownership import Ownership
from clusterenv.wire.shared import SharedMemory, WorkerProcess
from clusterenv.wire.zeromq import HeadSocket, WorkerSocket
from tests.conftest import Backend, wait_until_gone


class RecordingSocket:
    """Stands for a head's socket: connections end when the test says so, and everything can be sent."""

    def __init__(self) -> None:
        self.hangups: set[int] = set()
        self.sent: list[bytes] = []

    def take_hangups(self) -> set[int]:
        hangups, self.hangups = self.hangups, set()
        return hangups

    def send(self, peer: bytes, frames: Sequence[Any], *, waits: bool = True) -> bool:
        self.sent.append(peer)
        return True


class IdleFleet:
    """Nobody of it ends."""

    def exits(self) -> dict[int, str]:
        return {}


def test_only_the_worker_whose_connection_may_have_ended_is_asked_and_seldom() -> None:
    # Messages that a worker does not read add up, and after a thousand ZeroMQ reads nothing from it any more.
    workers = [Worker(index, index, index + 1) for index in range(3)]
    for worker in workers:
        worker.peer, worker.descriptor = bytes([worker.index]), 20 + worker.index
    socket: Any = RecordingSocket()
    fleet: Any = IdleFleet()
    liveness = Liveness(socket, fleet, workers, Timeouts())
    for number in range(2000):  # A stranger comes and goes without end.
        socket.hangups = {99}
        liveness.look(number / 100)
    assert socket.sent == []
    socket.hangups = {21}
    for number in range(2000):
        liveness.look(100 + number / 1000)
    assert set(socket.sent) == {bytes([1])}
    assert len(socket.sent) <= 40


def test_the_descriptor_of_a_connection_that_has_ended_is_that_of_its_messages() -> None:
    head = HeadSocket(None, silence_s=30.0)
    sockets = [WorkerSocket(head.ticket) for _ in range(2)]
    try:
        peers = []
        for socket in sockets:
            socket.send([b"hello"])
            while (received := head.receive(10.0)) is None:
                pass
            peers.append(head.find_peer(received[0]))
        assert head.take_hangups() == set()
        sockets.pop().close()
        hangups: set[int] = set()
        while not hangups:
            head.receive(1.0)
            hangups = head.take_hangups()
        assert hangups == {peers[1].descriptor} != {peers[0].descriptor}
    finally:
        for socket in sockets:
            socket.close()
        head.close()


def test_nobody_is_taken_for_a_worker_who_does_not_map_its_mailbox() -> None:
    memory = SharedMemory(4096)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for pid in (os.getpid(), other.pid):  # Else the head would end them when the worker is lost.
            with pytest.raises(OSError):  # noqa: PT011 - which one, the kernel decides
                WorkerProcess(pid, memory)
    finally:
        other.communicate()
        memory.close()


class Ticking(gym.vector.VectorEnv[Any, Any, Any]):
    """Shows how many steps each episode has; an action of 1 ends it."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium wants it so

    def __init__(self, num_envs: int, mode: AutoresetMode) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 1e6, (1,), np.float64)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._counts = np.zeros(num_envs)
        self._ended = np.zeros(num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        self._counts[mask], self._ended[mask] = 0, False
        return self._counts[:, None].copy(), {}

    def step(self, actions: Any) -> Any:
        begins = self._ended if self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP else np.False_
        self._counts = np.where(begins, 0.0, self._counts + 1)
        self._ended = (np.asarray(actions) == 1) & ~begins
        return (
            self._counts[:, None].copy(),
            np.ones(self.num_envs),
            self._ended.copy(),
            np.zeros(self.num_envs, bool),
            {},
        )


def lose(envs: ClusterEnv, index: int) -> None:
    pid = envs.workers[index].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []


def test_a_reset_of_some_native_environments_does_not_hide_that_the_others_were_lost(remote: Backend) -> None:
    mode = AutoresetMode.DISABLED
    vector = NativeVector(lambda num_envs: Ticking(num_envs, mode))
    with ClusterEnv(vector, 4, autoreset_mode=mode, **remote) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.zeros(4, np.int64))
        seen, _, terminated, *_ = envs.step(np.array([0, 1, 0, 0]))
        lose(envs, 0)
        shown, _ = envs.reset(options={"reset_mask": terminated})
        np.testing.assert_array_equal(shown[[0, 2, 3]], seen[[0, 2, 3]])
        shown, _, _, truncated, infos = envs.step(np.zeros(4, np.int64))
        assert truncated.tolist() == [True, False, False, False]
        assert infos["worker_lost"].tolist() == [True, False, False, False]
        np.testing.assert_array_equal(shown[0], seen[0])


def test_an_episode_that_ends_in_its_first_step_after_a_loss_is_told(remote: Backend) -> None:
    vector = NativeVector(lambda num_envs: Ticking(num_envs, AutoresetMode.NEXT_STEP))
    with ClusterEnv(vector, 4, **remote) as envs:
        envs.reset(seed=0)
        envs.step(np.array([0, 1, 0, 0]))  # Environment 1 has ended; 0 goes on.
        lose(envs, 0)
        *_, truncated, _ = envs.step(np.zeros(4, np.int64))
        assert truncated.tolist() == [True, False, False, False]
        _, _, terminated, _, _ = envs.step(np.array([1, 0, 0, 0]))
        assert terminated.tolist() == [True, False, False, False]


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


def test_a_lock_that_an_interrupt_left_taken_is_no_longer_in_the_way_of_other_threads() -> None:
    owner = Ownership()
    owner.__enter__()  # Ctrl-C came right here, before the block began.
    entered: list[bool] = []

    def enter() -> None:
        with owner:
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]
    with owner:
        pass


@pytest.mark.parametrize("seed", [2**70, [0, 2**70]])
def test_a_seed_that_is_too_large_is_refused_in_a_sentence(seed: Any, backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        with pytest.raises(ValueError, match="64 bits"):
            envs.reset(seed=seed)
        envs.reset(seed=1)
