"""Who is not of this run cannot disturb it, and the run's keys stay where they belong."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import zmq
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv
from clusterenv.errors import ConfigError, WireError, WorkerFailed
from clusterenv.head.failure import rebuild
from clusterenv.head.roster import Roster
from clusterenv.wire import messages
from clusterenv.wire.address import Address
from clusterenv.wire.messages import PROTOCOL, Join
from clusterenv.wire.shared import SharedMemory
from clusterenv.wire.ticket import TICKET_VARIABLE, Ticket
from clusterenv.wire.versions import installed_versions
from clusterenv.wire.zeromq import HeadSocket, WorkerSocket
from tests.test_wire import KeepTicket, dealer
from tests.worlds import World, assert_same, make_factories

NUM_ENVS = 4
LOOPBACK = Address("127.0.0.1")
JOIN = messages.encode(Join(PROTOCOL, 0, 1, "stranger", installed_versions()))
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
Stranger = Callable[[Ticket], contextlib.AbstractContextManager[object]]


def door_of(ticket: Ticket) -> tuple[str, int]:
    host, _, port = ticket.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def knocking(ticket: Ticket, count: int, *words: bytes) -> Iterator[list[socket.socket]]:
    """Connect this often, say these words, and stay. Nothing is waited for: a full queue is the stranger's trouble."""
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(door_of(ticket))
        for caller in callers:
            for word in words:
                with contextlib.suppress(OSError):
                    caller.send(word)
        yield callers


@contextlib.contextmanager
def talking(ticket: Ticket, **keys: bytes) -> Iterator[None]:
    with dealer(ticket.endpoint, **keys) as caller:
        with contextlib.suppress(zmq.Again):
            caller.send(JOIN, zmq.NOBLOCK)
        yield


def pair(ticket: Ticket, head_key: bytes | None = None) -> dict[str, bytes]:
    public, secret = zmq.curve_keypair()
    return {
        "curve_serverkey": head_key or ticket.head_key.encode(),
        "curve_publickey": public,
        "curve_secretkey": secret,
    }


STRANGERS: dict[str, Stranger] = {
    "without CURVE": lambda ticket: talking(ticket),
    "with a password": lambda ticket: talking(ticket, plain_username=b"root", plain_password=b"root"),
    "with a key of its own": lambda ticket: talking(ticket, **pair(ticket)),
    "that takes another for the head": lambda ticket: talking(ticket, **pair(ticket, zmq.curve_keypair()[0])),
    "that talks garbage": lambda ticket: knocking(ticket, 50, np.random.default_rng(1).bytes(10_000)),
    "that talks HTTP": lambda ticket: knocking(ticket, 5, b"GET / HTTP/1.1\r\n\r\n"),
    "that greets by half": lambda ticket: knocking(ticket, 50, CURVE_GREETING[:11]),
    "that greets and hangs on": lambda ticket: knocking(ticket, 50, CURVE_GREETING),
    "with a message beyond all bounds": lambda ticket: knocking(
        ticket, 5, CURVE_GREETING, b"\x06" + struct.pack(">Q", 2**63 - 1), bytes(1000)
    ),
    "with a message of two gigabytes": lambda ticket: knocking(
        ticket, 5, CURVE_GREETING, b"\x06" + struct.pack(">Q", 2**31), bytes(1 << 16)
    ),
    "that says nothing, 300 times": lambda ticket: knocking(ticket, 300),
}


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_run_goes_on_unchanged_whoever_knocks(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    launcher = KeepTicket()
    factories = make_factories(NUM_ENVS)
    with ClusterEnv(factories, num_workers=2, launcher=launcher, transport=transport) as envs:
        true = SyncVectorEnv(factories)
        envs.action_space.seed(1)
        assert_same(envs.reset(seed=1), true.reset(seed=1))
        for name, stranger in STRANGERS.items():
            with stranger(launcher.ticket):
                for _ in range(5):
                    actions = envs.action_space.sample()
                    assert_same(envs.step(actions), true.step(actions), name)
                assert_same(envs.call("describe"), true.call("describe"), name)
        true.close()
        assert "pid 1 on stranger" not in caplog.text
        assert envs.losses == ()


def test_a_crowd_that_comes_and_goes_does_not_stop_the_heads_own_thread() -> None:
    with contextlib.ExitStack() as stack:
        head = HeadSocket(LOOPBACK, LOOPBACK, silence_s=10.0)
        stack.callback(head.close)
        worker = WorkerSocket(head.ticket)
        stack.callback(worker.close)
        worker.send([b"hello"])
        assert listen(head)[1] == b"hello"
        for _ in range(2500):  # ZeroMQ's queue of events holds 2,000.
            socket.create_connection(door_of(head.ticket), timeout=10.0).close()
        worker.send([b"still there"])
        assert listen(head)[1] == b"still there"


def test_a_worker_that_does_not_read_cannot_hold_up_the_head() -> None:
    with contextlib.ExitStack() as stack:
        head = HeadSocket(LOOPBACK, LOOPBACK, silence_s=2.0)
        stack.callback(head.close)
        worker = WorkerSocket(head.ticket)
        stack.callback(worker.close)
        worker.send([b"hello"])
        peer, _ = listen(head)
        letter = bytes(50_000)
        for _ in range(3000):
            assert head.send(peer, [letter], waits=False)
        while head.send(peer, [letter]):  # Until the queues are full, and it took nothing for `silence_s`.
            pass


def listen(head: HeadSocket) -> tuple[bytes, bytes]:
    while (received := head.receive(1.0)) is None:
        pass
    return received[0], bytes(received[1][0].buffer)


HEAD_WITH_FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
import numpy as np
from clusterenv import ClusterEnv
from tests.test_wire import KeepTicket
launcher = KeepTicket()
with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=launcher, transport="zmq") as envs:
    envs.reset(seed=1)
    print(launcher.ticket.endpoint, flush=True)
    sys.stdin.readline()
    for _ in range(20):
        observations, *_ = envs.step(np.ones(4, np.int64))
    print(observations.tobytes().hex(), flush=True)
"""


def test_more_strangers_than_the_head_has_descriptors_do_not_stop_it() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 400
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HEAD_WITH_FEW_DESCRIPTORS]
    true = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4)
    true.reset(seed=1)
    for _ in range(20):
        observations, *_ = true.step(np.ones(4, np.int64))
    true.close()
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        endpoint = head.stdout.readline().strip()
        ticket = Ticket(endpoint=endpoint, head_key="", public_key="", secret_key="")
        with knocking(ticket, 300):
            head.stdin.write("\n")
            head.stdin.flush()
            assert head.stdout.readline().strip() == observations.tobytes().hex()
        assert head.wait(30) == 0


def test_what_is_refused_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
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
        with dealer(ticket.endpoint, **keys) as caller:
            for _ in range(500):
                caller.send(JOIN)
            refusals = 0
            while refusals < 500:
                envs.step(np.zeros(2, np.int64))
                while caller.poll(0):
                    caller.recv()
                    refusals += 1
    assert 1 <= caplog.text.count("has joined already") <= 50


def test_one_connection_joins_once() -> None:
    roster = Roster([(0, 1), (1, 2)])
    roster.join(0, b"peer", 1, "here")
    with pytest.raises(WireError, match="joined already, as worker 0"):
        roster.join(1, b"peer", 1, "here")


def test_nobody_can_shrink_the_heads_memory() -> None:
    memory = SharedMemory(1 << 16)
    descriptor = os.open(memory.offer.address, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    memory.close()


class SnoopingWorld(World):
    """A World that looks for what it should not find."""

    def environment(self) -> list[str]:
        mine = [f"{name}={value}" for name, value in os.environ.items()]
        childs = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        return [*mine, *childs.splitlines()]

    def fail(self) -> None:
        raise RuntimeError("now the log is shown")


def test_the_secret_is_nowhere_but_in_the_ticket(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    launcher = KeepTicket()
    with ClusterEnv([SnoopingWorld] * 2, num_workers=2, launcher=launcher) as envs:
        envs.reset(seed=1)
        ticket = launcher.ticket
        with pytest.raises(WorkerFailed) as caught:
            envs.call("fail")
        shown = [repr(envs), str(envs.__dict__), repr(ticket), f"{ticket}", str(caught.value), launcher.render(2)]
        shown += [line for lines in envs.call("environment") for line in lines]
        shown += [Path(f"/proc/{pid}/cmdline").read_text() for pid in envs.worker_pids]
    shown += [caplog.text, str(dict(os.environ))]
    secrets = [ticket.secret_key, ticket.encode(), TICKET_VARIABLE]
    assert [text for text in shown for secret in secrets if secret in text] == []


def test_every_run_has_keys_and_a_port_of_its_own() -> None:
    heads = [HeadSocket(LOOPBACK, LOOPBACK, silence_s=1.0) for _ in range(2)]
    first, second = [head.ticket for head in heads]
    for head in heads:
        head.close()
    for name in ("endpoint", "head_key", "public_key", "secret_key"):
        assert getattr(first, name) != getattr(second, name)
        assert len({first.head_key, first.public_key, first.secret_key}) == 3


def test_a_damaged_ticket_is_refused_without_being_shown() -> None:
    text = Ticket(endpoint="tcp://10.0.0.1:1", head_key="h", public_key="p", secret_key="hush" * 10).encode()
    for damaged in (text[:-7], text[4:], text[: len(text) // 2]):
        with pytest.raises(ConfigError) as caught:
            Ticket.decode(damaged)
        assert "hush" not in str(caught.value)
        assert damaged[20:40] not in str(caught.value)


class LazyModule(type(os)):  # type: ignore[misc]  # the type of modules
    """A module that loads itself when asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"somebody asked for {name}")


def test_looking_for_an_errors_type_asks_no_module_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests.lazy", LazyModule("tests.lazy"))
    assert rebuild("tests.lazy", "Error", "text") is None


class EagerError(OSError):
    """An error whose making does something."""

    def __new__(cls, *args: object) -> EagerError:
        raise AssertionError("it was made")


def test_making_an_error_runs_nothing_of_its_type() -> None:
    error = rebuild(__name__, "EagerError", "text")
    assert type(error) is EagerError
    assert error.args == ("text",)


def test_the_security_page_names_only_tests_that_exist() -> None:
    tests = Path(__file__).parent
    named = set(re.findall(r"\btest_[a-z_0-9]+\b(?!\.py)", (tests.parent / "docs" / "security.md").read_text()))
    defined = {
        name for path in tests.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15
    assert named <= defined, named - defined
