"""What comes over the wire is checked: strangers stay out, nonsense is refused with a reason and harms nobody."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv import ClusterEnv, LocalLauncher, Timeouts
from clusterenv.errors import ConfigError, LaunchError, WireError
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import PROTOCOL, Join
from clusterenv.wire.semaphore import SIZE_BYTES, Chain, Semaphore
from clusterenv.wire.ticket import Ticket
from clusterenv.wire.versions import installed_versions
from tests.launchers import OwnLauncher, start_module


class KeepTicket(OwnLauncher):
    """A launcher that starts local workers and remembers their ticket."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        self.ticket = ticket
        return LocalLauncher().launch(ticket, num_workers)


class OneRogue(OwnLauncher):
    """A launcher that starts `tests.rogue` in place of the last worker."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            module = "tests.rogue" if worker_index == num_workers - 1 else "clusterenv.worker"
            return start_module(module, ticket, worker_index, log)

        return ProcessFleet(start, num_workers)


class Program(OwnLauncher):
    """A launcher that starts this command in place of each worker."""

    def __init__(self, *command: str) -> None:
        self.command = command

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        return ProcessFleet(lambda _, log: subprocess.Popen(self.command, stdout=log, stderr=log), num_workers)


@contextlib.contextmanager
def dealer(endpoint: str, **keys: bytes) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for name, key in keys.items():
            setattr(socket, name, key)
        socket.connect(endpoint)
        yield socket


def step_until_logged(envs: ClusterEnv, caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Keep the head busy until it has logged something; the test's deadline bounds it."""
    while text not in caplog.text:
        envs.step(np.zeros(envs.num_envs, dtype=np.int64))


def test_nonsense_from_a_worker_is_refused_with_a_reason_and_the_truth_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=OneRogue()) as envs:
        for _ in range(3):
            observations, _ = envs.reset(seed=1)
            assert (observations[2:] == 7).all()
            assert (np.abs(observations[:2]) < 0.1).all()
            observations, rewards, *_ = envs.step(np.zeros(4, dtype=np.int64))
            assert (observations[2:] == 7).all()
            assert rewards.tolist() == [1, 1, 0, 0]
    for reason in (
        "This is no reply",
        "has joined already",
        "answers call",
        "Expected 4 arrays, got 0",
        "Expected 4 arrays, got 5",
        "bytes for float32(2, 4), got 16",
    ):
        assert reason in caplog.text, reason


def test_a_connection_without_the_runs_key_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    launcher = KeepTicket()
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, transport="zmq") as envs:
        envs.reset(seed=1)
        public, secret = zmq.curve_keypair()
        ticket = launcher.ticket
        keys = {"curve_serverkey": ticket.head_key.encode(), "curve_publickey": public, "curve_secretkey": secret}
        with dealer(ticket.endpoint, **keys) as socket:
            socket.send(messages.encode(Join(PROTOCOL, 0, 1, "stranger", installed_versions())), zmq.NOBLOCK)
            step_until_logged(envs, caplog, "does not hold this run's key")
        assert "stranger" not in caplog.text


def test_a_plain_connection_is_never_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    launcher = KeepTicket()
    with (
        ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, transport="zmq") as envs,
        dealer(launcher.ticket.endpoint) as socket,
    ):
        # Once the head has hung up there is nobody to send to, and a plain `send` would wait for ever.
        with contextlib.suppress(zmq.Again):
            socket.send(messages.encode(Join(PROTOCOL, 0, 1, "stranger", installed_versions())), zmq.NOBLOCK)
        envs.reset(seed=1)
        for _ in range(50):
            envs.step(np.zeros(2, dtype=np.int64))
        assert "stranger" not in caplog.text


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (Join(PROTOCOL, 0, 1, "twin", installed_versions()), "has joined already"),
        (Join(PROTOCOL, 7, 1, "surplus", installed_versions()), "there is no worker 7"),
        (Join(PROTOCOL + 1, 0, 1, "newer", installed_versions()), "install the head's clusterenv there"),
    ],
    ids=["a twin", "a number too high", "another protocol"],
)
def test_a_worker_that_cannot_join_is_told_why(join: Join, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    launcher = KeepTicket()
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, transport="zmq") as envs:
        envs.reset(seed=1)
        ticket = launcher.ticket
        keys = {
            "curve_serverkey": ticket.head_key.encode(),
            "curve_publickey": ticket.public_key.encode(),
            "curve_secretkey": ticket.secret_key.encode(),
        }
        with dealer(ticket.endpoint, **keys) as socket:
            socket.send(messages.encode(join))
            step_until_logged(envs, caplog, reason)
            assert socket.poll(10_000)
            refusal = messages.decode_request(socket.recv())
            assert isinstance(refusal, messages.Refused)
            assert reason in refusal.reason


def test_workers_that_end_before_they_join_are_a_launch_error_with_their_log() -> None:
    impatient = Program(sys.executable, "-c", "import sys; print('no such module here'); sys.exit(3)")
    with pytest.raises(LaunchError, match=r"exit status 3.*(?s:.)*no such module here"):
        ClusterEnv("CartPole-v1", 2, num_workers=2, launcher=impatient)


def test_workers_that_never_join_are_a_launch_error_in_time() -> None:
    with pytest.raises(LaunchError, match=r"Only 0 of 1 workers joined within 0\.5 s"):
        ClusterEnv("CartPole-v1", 1, num_workers=1, launcher=Program("sleep", "60"), timeouts=Timeouts(join_s=0.5))


@given(st.binary(max_size=300))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_random_bytes_are_a_message_or_refused(data: bytes) -> None:
    for decode in (messages.decode_reply, messages.decode_request):
        with contextlib.suppress(WireError):
            decode(data)


@given(st.lists(st.binary(max_size=40), max_size=3))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_frames_fill_planes_completely_or_not_at_all(frames: list[bytes]) -> None:
    planes: list[Any] = [np.full((2, 2), 5, np.float32), np.zeros(2, np.bool_)]
    sizes = [len(frame) for frame in frames]
    try:
        fill(planes, [memoryview(frame) for frame in frames])
    except WireError:
        assert sizes != [16, 2]
        assert (planes[0] == 5).all()
        assert not planes[1].any()
    else:
        assert sizes == [16, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="no semaphores in shared memory elsewhere")
def test_a_semaphore_that_a_worker_has_filled_keeps_no_other_from_being_posted() -> None:
    memory = memoryview(bytearray(3 * SIZE_BYTES))
    semaphores = [Semaphore(memory[index * SIZE_BYTES :], initialise=True) for index in range(3)]
    memory[SIZE_BYTES : SIZE_BYTES + 4] = (2**31 - 1).to_bytes(4, sys.byteorder)
    semaphores[1].post()
    Chain(semaphores).post()
    assert [each.try_wait() for each in semaphores] == [True, True, True]
    assert [each.wait(0.0) for each in semaphores] == [False, True, False]


def test_a_ticket_survives_the_way_through_an_environment_variable() -> None:
    ticket = Ticket(endpoint="tcp://10.0.0.1:1", head_key="h", public_key="p", secret_key="s", parent_pid=3)
    assert Ticket.decode(ticket.encode()) == ticket


def test_a_ticket_does_not_show_its_secret() -> None:
    ticket = Ticket(endpoint="tcp://10.0.0.1:1", head_key="h", public_key="p", secret_key="hush")
    assert "hush" not in repr(ticket)


@pytest.mark.parametrize("text", ["", "nonsense", "AAAA", "é"])
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="This is no ticket"):
        Ticket.decode(text)
