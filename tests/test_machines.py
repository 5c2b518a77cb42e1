"""One copy of the weights per machine: hosts with several workers each, and the loss of those who get it for others."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import AdaptiveSync, BasePolicy, ClusterEnv, Network, Timeouts
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.policy import Categorical
from clusterenv.rollout import Rollout
from clusterenv.wire.ticket import Ticket
from tests.forging import FORGERY_VARIABLE
from tests.host_launcher import HostLauncher
from tests.hosts import Host, connected_hosts
from tests.launchers import OwnLauncher, start_module
from tests.policies import Linear

BRISK = Timeouts(join_s=60, call_s=60, close_s=2, silence_s=2)
BALLAST = 1 << 18  # Floats: 1 MB of weights, four frames.


class Heavy(BasePolicy):
    """A policy whose choices depend on the first and the last of many numbers."""

    def __init__(self) -> None:
        self.ballast = np.random.default_rng(0).normal(size=BALLAST).astype(np.float32)

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        pull = self.ballast[0] + self.ballast[-1]
        return Categorical(np.stack([pull + obs[:, 0], -obs[:, 1]], axis=1).astype(np.float32))

    def weights(self) -> dict[str, Any]:
        return {"ballast": self.ballast}

    def learn(self, size: float = 0.05) -> None:
        self.ballast += np.float32(size)
        self.ballast[BALLAST // 2] = np.float32(size)


SIZE = 4 * BALLAST


def check(rollout: Rollout, pulls: dict[int, float]) -> None:
    """Recompute the log-probabilities from the weights of the versions that the labels name."""
    for column, version in enumerate(rollout.versions.tolist()):
        obs = rollout.obs[:, column]
        logits = np.stack([np.float32(pulls[version]) + obs[:, 0], -obs[:, 1]], axis=1).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = np.take_along_axis(logprobs, rollout.actions[:, column, None], axis=1)[:, 0]
        np.testing.assert_allclose(rollout.logprob[:, column], expected, rtol=1e-4, atol=1e-5)


class Run:
    """Environments, an agent, and what each of its versions does."""

    def __init__(self, envs: ClusterEnv) -> None:
        self.envs = envs
        self.agent = Heavy()
        self.pulls: dict[int, float] = {}
        self.note()

    def note(self) -> None:
        self.pulls[len(self.pulls) + 1] = float(self.agent.ballast[0] + self.agent.ballast[-1])

    def learn(self, size: float = 0.05) -> None:
        self.agent.learn(size)
        self.note()

    def roll(self) -> Rollout:
        rollout = self.envs.rollout(self.agent, 8)
        assert set(rollout.versions.tolist()) == {len(self.pulls)}
        check(rollout, self.pulls)
        return rollout

    def copies(self, action: Any) -> float:
        """Return how often weights are sent while something is done, as the run counts it."""
        before = self.envs.stats["bytes_weights"]
        action()
        return float(self.envs.stats["bytes_weights"] - before) / SIZE

    def pid(self, index: int) -> int:
        pid = self.envs.workers[index].pid
        assert pid is not None
        return pid

    def kill(self, index: int) -> None:
        os.kill(self.pid(index), signal.SIGKILL)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with connected_hosts(["head", "one", "two"], tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@contextlib.contextmanager
def spread(hosts: list[Host], num_workers: int, **options: Any) -> Iterator[Run]:
    """Workers on two hosts in turn: the first of each gets the weights for the others."""
    head, *others = hosts
    launcher = HostLauncher(others, others[0].address)
    options = {"network": Network(transport="zmq"), "timeouts": BRISK, **options}
    with (
        head.entered(),
        ClusterEnv("CartPole-v1", num_workers, num_workers=num_workers, launcher=launcher, **options) as envs,
    ):
        envs.reset(seed=1)
        yield Run(envs)


def sent_bytes() -> int:
    """Return what this host has sent, as its network device counts it."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:"))


def test_weights_cross_the_network_once_for_each_host(hosts: list[Host]) -> None:
    with spread(hosts, 6) as run:
        assert run.copies(run.roll) == 2
        for _ in range(4):
            run.learn()
            before = sent_bytes()
            assert run.copies(run.roll) == 2
            assert 2 * SIZE < sent_bytes() - before < 2.5 * SIZE
        run.learn()
        _, _, _, _, info = run.envs.step(run.agent)
        assert set(info["policy_version"].tolist()) == {len(run.pulls)}
        assert run.envs.stats["pulls"] == 6 * 6
        assert run.envs.stats["bytes_weights"] == 6 * 2 * SIZE
        assert "36 times, every version" in run.envs.summary()


def test_in_a_stream_too_and_labels_are_those_of_what_acted(hosts: list[Host]) -> None:
    with spread(hosts, 6, sync=AdaptiveSync(0.002, plateau=None)) as run:
        run.roll()
        versions: set[int] = set()
        before = sent_bytes()
        counted = run.envs.stats["bytes_weights"]
        with run.envs.stream(run.agent, 8, max_lag=1000) as stream:
            for rollout in itertools.islice(stream, 120):
                check(rollout, run.pulls)
                versions |= set(rollout.versions.tolist())
                if len(run.pulls) < 12:
                    run.learn()
        pulls = run.envs.stats["pulls"] - 6
        counted = run.envs.stats["bytes_weights"] - counted
        assert len(versions) > 3
        assert pulls > 12
        assert counted < 0.7 * pulls * SIZE
        assert counted < sent_bytes() - before < counted + 2 * SIZE


def test_when_one_that_gets_weights_for_others_is_killed_they_get_their_own(hosts: list[Host]) -> None:
    with spread(hosts, 6) as run:
        run.roll()
        for index in (0, 3, 0):
            run.learn()
            run.kill(index)
            run.roll()
        run.learn()
        assert run.copies(run.roll) == 2
        assert len(run.envs.losses) == 3


@pytest.mark.slow
def test_kills_in_a_stream_at_any_moment_mislabel_nothing(hosts: list[Host]) -> None:
    with spread(hosts, 6) as run:
        run.roll()
        with run.envs.stream(run.agent, 8, max_lag=1000) as stream:
            num_kills = 0
            for number, rollout in enumerate(stream):
                check(rollout, run.pulls)
                if num_kills == len(run.envs.losses):  # The last one has been replaced.
                    if num_kills == 4:
                        break
                    run.kill(num_kills % 2)
                    num_kills += 1
                if number % 3 == 0:  # Last: a version counts once a rollout is asked for, and there may be none.
                    run.learn(0.001)
        run.learn()
        run.roll()


class Counted(gym.Env[Any, Any]):
    """An endless environment that writes a byte into a named pipe with every step."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, path: Path) -> None:
        self._path = path

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self._path.write_bytes(b".")
        return np.zeros(4, np.float32), 0.0, False, False, {}


def test_a_rollout_after_a_stream_has_the_newest_weights_though_who_was_to_pass_them_on_is_gone(tmp_path: Path) -> None:
    paths = [tmp_path / str(index) for index in range(3)]
    for path in paths:
        os.mkfifo(path)
    patient = Timeouts(join_s=60, call_s=120, close_s=2, silence_s=30)
    with (
        contextlib.ExitStack() as stack,
        ClusterEnv(
            [partial(Counted, path) for path in paths],
            num_workers=3,
            network=Network(transport="zmq"),
            timeouts=patient,
        ) as envs,
    ):
        # Also for writing, which has it open at once.
        pipes = [stack.enter_context(path.open("r+b", buffering=0)) for path in paths]
        envs.reset(seed=1)
        run = Run(envs)
        run.roll()
        with envs.stream(run.agent, 8, in_flight=1, max_lag=1000) as stream:
            made = [1, 1, 1]
            while min(made) < 2:
                made[next(stream).env_indices[0]] += 1
            os.kill(run.pid(0), signal.SIGSTOP)  # It will get the weights for the others, and pass nothing on.
            run.learn()
            made[next(stream).env_indices[0]] += 1  # They all have been told of them.
            for index in (1, 2):
                for _ in range(8 * (made[index] + 1)):
                    assert select.select([pipes[index]], [], [], 60)[0], "it does not make what it was asked for"
                    pipes[index].read(1)
            os.kill(run.pid(0), signal.SIGKILL)
        run.roll()


def test_one_that_is_stopped_holds_up_nobody_for_long(hosts: list[Host]) -> None:
    with spread(hosts, 4) as run:
        run.roll()
        run.learn()
        stopped = run.pid(0)
        os.kill(stopped, signal.SIGSTOP)
        try:
            run.roll()
        finally:
            os.kill(stopped, signal.SIGKILL)
        assert [loss.worker_index for loss in run.envs.losses] == [0]
        run.learn()
        run.roll()


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose steps take their time until a file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._path = path

    def step(self, action: Any) -> Any:
        if not self._path.exists():
            time.sleep(0.01)
        return super().step(action)


def test_who_gets_weights_for_others_passes_them_on_while_it_is_at_work(tmp_path: Path) -> None:
    done = tmp_path / "done"
    plain = partial(gym.make, "CartPole-v1")
    makers: list[Callable[[], gym.Env[Any, Any]]] = [partial(Slow, done), plain, plain]
    with ClusterEnv(makers, num_workers=3, network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        run = Run(envs)
        run.roll()
        before = envs.stats["bytes_weights"]
        with envs.stream(run.agent, 2000) as stream:  # 20 s for the first worker, unless the others are done.
            check(next(stream), run.pulls)
            run.learn()
            newer: set[int] = set()
            while newer != {1, 2}:
                rollout = next(stream)
                check(rollout, run.pulls)
                assert rollout.env_indices.tolist() != [0]
                if rollout.versions[0] == 2:
                    newer |= set(rollout.env_indices.tolist())
            done.touch()
            while rollout.env_indices.tolist() != [0]:
                rollout = next(stream)
            check(rollout, run.pulls)
        assert envs.stats["bytes_weights"] - before == SIZE


def test_a_stream_that_begins_while_whoever_gets_the_weights_is_slow_gives_nobody_up() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=2, network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        run = Run(envs)
        with envs.stream(run.agent, 8) as stream:
            next(stream)
        run.learn()
        os.kill(run.pid(0), signal.SIGSTOP)
        with envs.stream(run.agent, 8) as stream:
            for _ in range(4):  # The other worker goes on with what it has.
                rollout = next(stream)
                assert rollout.env_indices.tolist() == [1]
                assert rollout.versions.tolist() == [1]
                check(rollout, run.pulls)
            os.kill(run.pid(0), signal.SIGCONT)
            newer: set[int] = set()
            while newer != {0, 1}:
                rollout = next(stream)
                check(rollout, run.pulls)
                newer |= {
                    index for index, version in zip(rollout.env_indices, rollout.versions, strict=True) if version == 2
                }
        assert envs.losses == ()


@pytest.mark.parametrize("forgery", ["other bytes", "a pipe", "nothing"])
def test_forged_weights_are_never_acted_with(forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forging(OwnLauncher):
        """The first worker is a forger, and the one that gets weights for the others."""

        def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
            def start(worker_index: int, log: Any) -> Any:
                module = "tests.forging" if worker_index == 0 else "clusterenv.worker"
                return start_module(module, ticket, worker_index, log)

            return ProcessFleet(start, num_workers)

    monkeypatch.setenv(FORGERY_VARIABLE, forgery)
    network, brisk = Network(transport="zmq"), Timeouts(join_s=60, call_s=60, close_s=2, silence_s=0.5)
    with ClusterEnv("CartPole-v1", 3, num_workers=3, launcher=Forging(), network=network, timeouts=brisk) as envs:
        envs.reset(seed=1)
        run = Run(envs)
        for _ in range(5):
            run.roll()
            run.learn()
        assert not envs.losses
        # After three times it is not asked to any more: one of the others gets weights for both of them.
        assert run.copies(run.roll) == 2


class Elsewhere(OwnLauncher):
    """Starts every worker where it sees no other process."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        def start(worker_index: int, log: Any) -> Any:
            before = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
            return start_module("clusterenv.worker", ticket, worker_index, log, before)

        return ProcessFleet(start, num_workers)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_in_another_namespace_of_processes_everybody_gets_weights_of_their_own() -> None:
    with ClusterEnv(
        "CartPole-v1", 3, num_workers=3, launcher=Elsewhere(), network=Network(transport="zmq"), timeouts=BRISK
    ) as envs:
        envs.reset(seed=1)
        run = Run(envs)
        assert run.copies(run.roll) == 3


def test_small_weights_go_to_everybody() -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, num_workers=4, network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, 8)
        assert envs.stats["bytes_weights"] == 4 * 128
