"""Over real networks: delayed, narrow, lossy and cut links change how long it takes, and never what comes out."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from clusterenv import ClusterEnv, EveryUpdate, Network, NeverSync, Timeouts
from clusterenv.errors import LaunchError
from clusterenv.rollout import Rollout
from clusterenv.wire import messages
from clusterenv.wire.address import Address, choose_addresses
from clusterenv.wire.messages import Register
from clusterenv.wire.zeromq import HeadSocket
from tests.conftest import wait_until_gone
from tests.host_launcher import HostFleet, HostLauncher
from tests.hosts import Host, connected_hosts
from tests.policies import Linear
from tests.switch import Line, Switch, slow_network

CUT = Line(is_up=False)
PATIENT = Timeouts(join_s=60, call_s=60, close_s=2, silence_s=20)
BRISK = Timeouts(join_s=60, call_s=60, close_s=2, silence_s=2)


@dataclass(frozen=True)
class Net:
    """A head's host and two for workers, on a network that can be spoilt."""

    head: Host
    one: Host
    two: Host
    switch: Switch

    @contextlib.contextmanager
    def cut_for(self, seconds: float, *hosts: Host) -> Iterator[None]:
        """Cut links, and mend them after a while, whatever the test does meanwhile."""
        self.switch.set(CUT, *hosts)
        timer = threading.Timer(seconds, self.switch.set, (Line(), *hosts))
        timer.start()
        try:
            yield
        finally:
            timer.join()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    with (
        connected_hosts(["head", "one", "two"], tmp_path_factory.mktemp("hosts")) as hosts,
        slow_network(hosts) as switch,
    ):
        head, one, two = hosts
        yield Net(head, one, two, switch)


@pytest.fixture
def net(network: Net) -> Iterator[Net]:
    """The network, with perfect links; the test is on the head's host."""
    network.switch.set(Line())
    with network.head.entered():
        yield network


class Numbered(gym.Env[Any, Any]):
    """Says in each observation whose it is, in which episode, and at which step; episodes have 7 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._name = self._episode = self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._name, self._episode = seed % 2**20, 0
        self._episode += 1
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._observe(), float(self._step), self._step == 7, False, {}

    def _observe(self) -> Any:
        return np.array([self._name, self._episode, self._step, 0], np.float32)


@contextlib.contextmanager
def far_envs(net: Net, env: Any, num_envs: int, **options: Any) -> Iterator[tuple[ClusterEnv, HostFleet]]:
    """Environments on two workers, one a host."""
    launcher = HostLauncher([net.one, net.two], net.switch.address(net.one))
    options = {"network": Network(transport="zmq"), "timeouts": PATIENT, **options}
    with ClusterEnv(env, num_envs, num_workers=2, launcher=launcher, **options) as envs:
        yield envs, launcher.fleet


def columns(rollout: Rollout) -> list[Any]:
    """What a rollout holds."""
    return [
        *(rollout.obs, rollout.actions, rollout.rewards, rollout.terminations, rollout.truncations, rollout.valid),
        *(rollout.extras["logprob"], rollout.next_obs, rollout.env_indices, rollout.episodes.returns),
    ]


def live_through(envs: ClusterEnv, *, before_each: Any = contextlib.nullcontext) -> list[Any]:
    """Do everything once; returns all that came out, rollouts of the stream worker by worker."""
    agent = Linear()
    story: list[Any] = [envs.reset(seed=5)[0]]
    with before_each():
        for actions in np.random.default_rng(1).integers(0, 2, (8, envs.num_envs)):
            story += envs.step(actions)[:4]
    with before_each():
        for _ in range(3):
            story += columns(envs.rollout(agent, 32))
    made: dict[int, list[Any]] = {0: [], envs.num_envs // 2: []}
    with envs.stream(agent, 32) as stream, before_each():
        while min(len(rollouts) for rollouts in made.values()) < 3:
            rollout = next(stream)
            made[int(rollout.env_indices[0])].append(columns(rollout))
    return story + [array for rollouts in made.values() for rollout in rollouts[:3] for array in rollout]


def assert_same_story(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.fixture(scope="module")
def story_at_home() -> list[Any]:
    """What comes out where workers are on the head's own machine."""
    with ClusterEnv("CartPole-v1", 32, num_workers=2, network=Network(transport="zmq"), sync=NeverSync()) as envs:
        return live_through(envs)


@pytest.mark.parametrize(
    "line",
    [Line(), Line(delay_s=0.01, bits_per_s=1e8), Line(delay_s=0.01, bits_per_s=1e8, loss=0.03)],
    ids=["perfect", "delayed and narrow", "lossy"],
)
def test_a_network_changes_nothing_but_the_speed(net: Net, story_at_home: list[Any], line: Line) -> None:
    net.switch.set(line, net.one, net.two)
    with far_envs(net, "CartPole-v1", 32, sync=NeverSync()) as (envs, _):
        assert_same_story(live_through(envs), story_at_home)


def test_a_short_partition_is_ridden_out_and_nothing_is_lost(net: Net, story_at_home: list[Any]) -> None:
    with far_envs(net, "CartPole-v1", 32, sync=NeverSync()) as (envs, _):
        story = live_through(envs, before_each=lambda: net.cut_for(0.8, net.one))
        assert_same_story(story, story_at_home)
        assert envs.losses == ()


def test_a_worker_that_is_faster_than_its_link_does_not_overwrite_what_it_has_not_sent(net: Net) -> None:
    class Wide(Numbered):
        observation_space = spaces.Box(-np.inf, np.inf, (4096,), np.float32)

        def _observe(self) -> Any:
            return np.full(4096, 7 * self._episode + self._step, np.float32)

    class Indifferent(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.critic = np.zeros((4096, 2), np.float32), np.zeros(4096, np.float32)

    net.switch.set(Line(bits_per_s=4e7), net.one, net.two)
    with far_envs(net, Wide, 4, sync=NeverSync()) as (envs, _):
        envs.reset(seed=1)
        latest = {0: 7.0, 2: 7.0}
        for rollout in itertools.islice(envs.stream(Indifferent(), 32, in_flight=4), 8):
            numbers = rollout.obs[..., 0]
            np.testing.assert_array_equal(rollout.obs, np.repeat(numbers[..., None], 4096, axis=-1))
            first = int(rollout.env_indices[0])
            assert (numbers[0] == latest[first]).all()
            steps = np.diff(numbers, axis=0)
            assert set(np.unique(steps)) <= {0.0, 1.0}, "8, the end of one episode, is where the next begins"
            latest[first] = float(rollout.next_obs[0, 0])


class Witness:
    """Sees all that is delivered, and checks that no step of any life of an environment is missing or comes twice."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, float], tuple[float, float]] = {}
        self.lives: dict[int, list[float]] = {}

    def see(self, rollout: Rollout) -> None:
        for column, env_index in enumerate(rollout.env_indices.tolist()):
            for step in np.flatnonzero(rollout.valid[:, column]):
                name, episode, number, _ = rollout.obs[step, column].tolist()
                lives = self.lives.setdefault(env_index, [])
                if not lives or lives[-1] != name:
                    assert name not in lives, "a worker that was given up has delivered"
                    lives.append(name)
                due = self._next.get((env_index, name), (1.0, 0.0))
                assert (episode, number) == due, f"environment {env_index}: {(episode, number)} came, {due} was due"
                assert rollout.rewards[step, column] == number + 1
                ends = bool(rollout.terminations[step, column])
                assert ends == (number == 6)
                self._next[env_index, name] = (episode + 1, 0.0) if ends else (episode, number + 1)


def test_a_stream_goes_on_without_a_worker_that_is_cut_off_and_nothing_comes_twice(net: Net) -> None:
    with far_envs(net, Numbered, 4, sync=NeverSync(), timeouts=BRISK) as (envs, fleet):
        envs.reset(seed=1)
        witness, agent = Witness(), Linear()
        with envs.stream(agent, 16) as stream:
            for rollout in itertools.islice(stream, 6):
                witness.see(rollout)
            net.switch.set(CUT, net.one)
            cut_at = time.monotonic()
            fleet.next_host = 1
            seen = 0
            while not envs.losses:
                rollout = next(stream)
                witness.see(rollout)
                seen += int(rollout.env_indices[0]) == 2
            assert seen > 5, "the other worker went on"
            assert time.monotonic() - cut_at < 60
            assert "silent for 2 s" in envs.losses[0].reason
            net.switch.set(Line(), net.one)
            while wait_until_gone([fleet.started[0].pid], 0.0):  # The old worker comes back, and is sent away.
                witness.see(next(stream))
            for rollout in itertools.islice(stream, 10):
                witness.see(rollout)
        assert [len(witness.lives[env_index]) for env_index in range(4)] == [2, 2, 1, 1]
        assert len(envs.losses) == 1
        assert "has joined already" in fleet.log_tail(0)
        assert envs.rollout(agent, 16).num_envs == 4


def test_weights_do_not_pile_up_for_a_worker_that_is_cut_off(net: Net) -> None:
    agent = Linear()
    with far_envs(net, Numbered, 4, sync=EveryUpdate()) as (envs, _):
        envs.reset(seed=1)
        with envs.stream(agent, 16) as stream:
            while next(stream).env_indices[0] != 0:
                pass
            net.switch.set(CUT, net.one)
            before = envs.stats["pulls"]
            for _ in itertools.islice(stream, 100):
                agent.nudge()
            assert envs.stats["pulls"] - before < 120
            net.switch.set(Line(), net.one)
            while (rollout := next(stream)).env_indices[0] != 0 or rollout.ages[0] > 8:
                pass
        assert envs.losses == ()


def test_a_rollout_waits_for_a_link_to_be_mended_and_whoever_comes_first_takes_the_place(net: Net) -> None:
    with far_envs(net, Numbered, 4, sync=NeverSync(), timeouts=BRISK) as (envs, fleet):
        envs.reset(seed=1)
        witness, agent = Witness(), Linear()
        witness.see(envs.rollout(agent, 16))
        fleet.next_host = 0  # Behind the same cut link, so that the old one and the new race for the place.
        with net.cut_for(7.0, net.one):
            witness.see(envs.rollout(agent, 16))
        for _ in range(3):
            witness.see(envs.rollout(agent, 16))
        old, _, new = fleet.started
        while len(wait_until_gone([old.pid, new.pid], 0.1)) == 2:
            witness.see(envs.rollout(agent, 16))
        for _ in range(3):
            witness.see(envs.rollout(agent, 16))
        assert len(envs.losses) == 1, "the one that was sent away is not mourned as the one that stayed"
        assert [len(witness.lives[env_index]) for env_index in range(4)] == [2, 2, 1, 1]


def test_a_worker_is_not_taken_for_the_one_that_was_sent_away(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    with far_envs(net, Numbered, 4, sync=NeverSync()) as (envs, fleet):
        envs.reset(seed=1)
        witness = Witness()
        with envs.stream(Linear(), 16) as stream:
            witness.see(next(stream))
            fleet.restart(0)  # As a launcher may that cannot tell whether the old one still lives.
            while wait_until_gone([fleet.started[2].pid], 0.0):
                witness.see(next(stream))
            assert 0 in fleet.exits()
            ends_at = time.monotonic() + 1.0
            while time.monotonic() < ends_at:
                witness.see(next(stream))
        assert "is lost" not in caplog.text


def test_steps_of_a_worker_that_is_cut_off_are_truncated(net: Net) -> None:
    with far_envs(net, Numbered, 4, timeouts=BRISK) as (envs, fleet):
        envs.reset(seed=1)
        envs.step([0] * 4)
        fleet.next_host = 1
        net.switch.set(CUT, net.one)
        observations, _, _, truncations, infos = envs.step([0] * 4)
        assert truncations.tolist() == infos["worker_lost"].tolist() == [True, True, False, False]
        assert observations[:, 2].tolist() == [1, 1, 2, 2]
        net.switch.set(Line(), net.one)
        assert envs.step([0] * 4)[0][:, 2].tolist() == [0, 0, 3, 3]
        while wait_until_gone([fleet.started[0].pid], 0.0):  # The old worker comes back, and is sent away.
            envs.step([0] * 4)
        assert len(envs.losses) == 1


@pytest.mark.parametrize("end", ["closed", pytest.param("cut off", marks=pytest.mark.slow)])
def test_a_worker_ends_when_its_head_is_gone_for_good(net: Net, end: str) -> None:
    socket = HeadSocket(choose_addresses(None, None, net.switch.address(net.one)), silence_s=0.2)
    fleet = HostFleet(socket.ticket, [net.one], 1)
    try:
        joined = None
        while joined is None:
            joined = socket.receive(1.0)
        assert isinstance(messages.decode_reply(joined[1][0].buffer), Register)
        if end == "cut off":
            net.switch.set(CUT, net.one)
        else:
            socket.close()
        assert wait_until_gone([fleet.started[0].pid], 30.0) == []
        wanted = "nobody listens at" if end == "closed" else "cannot be reached from one"
        assert wanted in fleet.log_tail(0)
    finally:
        fleet.stop(0.0)
        if end == "cut off":
            socket.close()


def test_the_head_listens_where_a_route_leads_to_the_workers(net: Net) -> None:
    for near, far in (
        (net.switch.address(net.head), net.switch.address(net.one)),
        (net.head.address, net.one.address),
    ):
        assert choose_addresses(None, None, far) == (Address(near), Address(near))
    assert choose_addresses("0.0.0.0", None, net.one.address) == (Address("0.0.0.0"), Address(net.head.address))


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7"])
def test_behind_a_forwarded_port_the_head_listens_only_where_a_route_leads_to_the_workers(net: Net, host: str) -> None:
    addresses = choose_addresses(None, str(Address(host, 5555)), net.one.address)
    assert addresses == (Address(net.head.address, 5555), Address(host, 5555))


@pytest.mark.parametrize("wildcard", [True, False])
def test_the_address_can_be_chosen(net: Net, wildcard: bool) -> None:
    addresses = {"listen": "0.0.0.0", "advertise": net.head.address} if wildcard else {"listen": net.head.address}
    with far_envs(net, Numbered, 2, network=Network(transport="zmq", **addresses)) as (envs, fleet):
        assert fleet.ticket.endpoint.startswith(f"tcp://{net.head.address}:")
        envs.reset(seed=1)
        counts = [net.switch.count_bytes(net.one)]
        for _ in range(20):
            envs.step([0, 0])
            counts.append(net.switch.count_bytes(net.one))
        # Connections of tests before this one may still be saying farewell.
        assert 0 in np.diff(counts), "all goes by the other network"


def test_an_address_that_workers_cannot_reach_is_named_in_their_logs_and_in_the_error(net: Net) -> None:
    timeouts = Timeouts(join_s=12, close_s=1)
    with (
        pytest.raises(LaunchError, match=r"Workers must reach tcp://10\.89\.0\.77:5555") as caught,
        far_envs(net, Numbered, 2, network=Network(transport="zmq", advertise="10.89.0.77:5555"), timeouts=timeouts),
    ):
        pass
    assert str(caught.value).count("tcp://10.89.0.77:5555 cannot be reached from one") == 1
