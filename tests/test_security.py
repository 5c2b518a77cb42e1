"""Who is not of this run cannot disturb it, and the run's keys stay where they belong."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import zmq
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Network
from clusterenv.errors import ConfigError, WorkerFailed
from clusterenv.head.failure import rebuild
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire import messages
from clusterenv.wire.address import Address, choose_addresses
from clusterenv.wire.arrays import CHUNK_BYTES
from clusterenv.wire.compatibility import installed_versions
from clusterenv.wire.messages import PROTOCOL, Join, Refused, Register
from clusterenv.wire.shared import SharedMemory, WorkerProcess
from clusterenv.wire.ticket import TICKET_VARIABLE, Ticket
from clusterenv.wire.zeromq import HeadSocket, Keys, WorkerSocket
from clusterenv.worker.head_watch import Link
from tests.conftest import wait_until_gone
from tests.launchers import start_module
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
    network = Network(transport=transport, listen="127.0.0.1")
    with ClusterEnv(factories, num_workers=2, launcher=launcher, network=network) as envs:
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
        head = HeadSocket((LOOPBACK, LOOPBACK), silence_s=10.0)
        stack.callback(head.close)
        worker = WorkerSocket(head.ticket)
        stack.callback(worker.close)
        worker.send([b"hello"])
        assert listen(head)[1] == b"hello"
        for _ in range(2500):  # ZeroMQ's queue of events holds 2,000.
            socket.create_connection(door_of(head.ticket), timeout=10.0).close()
        worker.send([b"still there"])
        assert listen(head)[1] == b"still there"


@pytest.mark.parametrize("claim", [CHUNK_BYTES, 1 << 19, 10**8], ids=["a frame", "too large a frame", "100 MB"])
def test_a_hundred_strangers_cost_the_head_little_memory(claim: int) -> None:
    head = HeadSocket((LOOPBACK, LOOPBACK), silence_s=10.0)
    word = bytes(1 << 17)
    before = peak = resident_bytes()
    begun_at = time.monotonic()
    with knocking(head.ticket, 100, CURVE_GREETING, b"\x06" + struct.pack(">Q", claim)) as callers:
        sent = dict.fromkeys(callers, 0)
        # Until the head has sent all of them away: for their size, or because they do not say who they are.
        while sent:
            assert time.monotonic() - begun_at < 30.0
            poller = select.poll()
            for caller in sent:
                poller.register(caller, select.POLLOUT if sent[caller] < min(claim - 1, 1 << 23) else select.POLLIN)
            by_number = {caller.fileno(): caller for caller in sent}
            for number, _ in poller.poll(100):
                caller = by_number[number]
                try:
                    left = min(claim - 1, 1 << 23) - sent[caller]
                    if left:
                        sent[caller] += caller.send(word[:left])
                    elif not caller.recv(4096):
                        del sent[caller]
                except ConnectionError:
                    del sent[caller]
            peak = max(peak, resident_bytes())
    head.close()
    assert peak - before < 64e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_message_of_countless_frames_is_read_little_by_little_and_refused() -> None:
    with contextlib.ExitStack() as stack:
        head = HeadSocket((LOOPBACK, LOOPBACK), silence_s=60.0)
        stack.callback(head.close)
        worker = WorkerSocket(head.ticket)
        stack.callback(worker.close)
        worker.send([b"hello", *[b""] * 300_000])
        worker.send([b"sorry"])
        num_looks, received = 0, None
        while received is None:
            received = head.receive(1.0)
            num_looks += 1
        assert received[1] == []
        assert num_looks > 50, "in between the head can look at its deadlines, and at others"
        assert listen(head)[1] == b"sorry"


def test_the_ticket_is_good_for_registering_and_for_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    launcher = KeepTicket()
    with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=launcher, network=Network(transport="zmq")) as envs:
        observations, _ = envs.reset(seed=1)
        worker = WorkerSocket(launcher.ticket)
        own = Keys.make()
        for message, reason in (
            (Join(PROTOCOL, 0, 1, "intruder", installed_versions()), "worker 0 has joined already"),
            (Register(PROTOCOL, 1, own.public), "worker 1 has joined already"),
        ):
            worker.send([messages.encode(message)])
            refusal = answer(envs, worker)
            assert isinstance(refusal, Refused)
            assert refusal.reason == reason
        worker.send([messages.encode(messages.Stepped(2, None, None)), *observations])
        while "Stepped from a peer that has not joined" not in caplog.text:
            envs.step(np.zeros(4, np.int64))
        worker.use(own)  # It was not registered, so it is not let in.
        while "does not hold this run's key" not in caplog.text:
            envs.step(np.zeros(4, np.int64))
        worker.close()
        assert envs.losses == ()


def answer(envs: ClusterEnv, worker: WorkerSocket) -> messages.Request:
    """Keep the head busy until it has answered; the test's deadline bounds it."""
    while (frames := worker.receive(0.0)) is None:
        envs.step(np.zeros(envs.num_envs, np.int64))
    return messages.decode_request(frames[0].buffer)


def test_a_key_that_is_registered_is_known_until_it_is_revoked() -> None:
    with contextlib.ExitStack() as stack:
        head = HeadSocket((LOOPBACK, LOOPBACK), silence_s=10.0)
        stack.callback(head.close)
        keys: set[str] = set()
        head.authorised = keys
        worker = WorkerSocket(head.ticket)
        stack.callback(worker.close)
        worker.send([b"register"])
        peer, _ = listen(head)
        assert head.find_peer(peer).key == head.ticket.public_key
        own = Keys.make()
        keys.add(own.public)
        worker.use(own)
        worker.send([b"join"])
        second, word = listen(head)
        assert (word, second != peer) == (b"join", True)
        assert head.find_peer(second).key == own.public
        keys.clear()
        late = WorkerSocket(head.ticket)
        stack.callback(late.close)
        late.use(own)
        late.send([b"join again"])
        worker.send([b"still connected"])
        assert listen(head)[1] == b"still connected"
        link = Link(late.events, head.ticket)
        while not link.verdict and not link.was_lost:  # It may have been let in by the ticket's key before.
            assert head.receive(0.01) is None
            link.watch(0.01)


def test_whoever_comes_for_a_place_that_a_replacement_has_taken_is_told_so() -> None:
    launcher = KeepTicket()
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        envs.step(np.zeros(2, np.int64))
        assert len(envs.losses) == 1
        with tempfile.TemporaryFile() as log:
            late = start_module("clusterenv.worker", launcher.ticket, 0, log)
            while late.poll() is None:
                envs.step(np.zeros(2, np.int64))
            log.seek(0)
            assert b"The head refused this worker: worker 0 has joined already" in log.read()
        assert len(envs.losses) == 1


def test_local_workers_need_no_port() -> None:
    launcher = KeepTicket()
    before = listening_ports()
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        assert listening_ports() == before
        path = Path(launcher.ticket.endpoint.removeprefix("ipc://"))
        assert path.is_socket()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


def listening_ports() -> set[str]:
    """The TCP sockets on which this process listens."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(f"/proc/self/fd/{number}").removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in own}


def test_where_paths_are_too_long_for_sockets_local_workers_use_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    launcher = KeepTicket()
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, network=Network(transport="zmq")) as envs:
        envs.reset(seed=1)
        assert launcher.ticket.endpoint.startswith("tcp://127.0.0.1:")
    assert list(deep.iterdir()) == []


DOOMED_HEAD = """
import sys
from clusterenv import ClusterEnv, Network
from tests.test_security import ForsakenLauncher
from tests.test_wire import KeepTicket
launcher = {"child": KeepTicket, "no child": ForsakenLauncher}[sys.argv[1]]()
envs = ClusterEnv("CartPole-v1", 2, num_workers=2, launcher=launcher, network=Network(transport="zmq"))
print(launcher.ticket.endpoint, *envs.worker_pids, flush=True)
sys.stdin.read()
"""


class ForsakenLauncher(KeepTicket):
    """Starts workers that do not know the head for their parent, as somebody does by hand."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        self.ticket = ticket
        return ProcessFleet(partial(start_module, "clusterenv.worker", ticket), num_workers)


@pytest.mark.parametrize("kind", ["child", "no child"])
def test_the_socket_file_of_a_head_that_was_killed_goes_with_its_workers(kind: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DOOMED_HEAD, kind]
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as head:
        assert head.stdout is not None
        endpoint, *pids = head.stdout.readline().split()
        path = Path(endpoint.removeprefix("ipc://"))
        assert path.is_socket()
        head.kill()
    assert wait_until_gone([int(pid) for pid in pids], 30.0) == []
    assert not path.parent.exists()


def test_an_address_of_another_machine_does_not_open_all_interfaces() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7.*listen=") as caught:
        choose_addresses(None, "192.0.2.7:5555", None)
    assert "0.0.0.0" in str(caught.value)
    assert choose_addresses("127.0.0.1:5555", "192.0.2.7:80", None) == (
        Address("127.0.0.1", 5555),
        Address("192.0.2.7", 80),
    )
    assert choose_addresses(None, "127.0.0.1:5555", None) == (Address("127.0.0.1", 5555),) * 2
    assert choose_addresses(None, None, None) is None


def test_a_worker_that_does_not_read_cannot_hold_up_the_head() -> None:
    with contextlib.ExitStack() as stack:
        head = HeadSocket((LOOPBACK, LOOPBACK), silence_s=2.0)
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
from clusterenv import ClusterEnv, Network
from tests.test_wire import KeepTicket
launcher = KeepTicket()
network = Network(transport="zmq", listen="127.0.0.1")
with ClusterEnv("CartPole-v1", 4, num_workers=2, launcher=launcher, network=network) as envs:
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
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, network=Network(transport="zmq")) as envs:
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
    heads = [HeadSocket((LOOPBACK, LOOPBACK), silence_s=1.0) for _ in range(2)]
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
    page = (tests.parent / "docs" / "explanation" / "security.md").read_text()
    named = set(re.findall(r"\btest_[a-z_0-9]+\b(?!\.py)", page))
    defined = {
        name for path in tests.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15
    assert named <= defined, named - defined


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


@pytest.mark.parametrize("size_bytes", [1 << 60, 1 << 63])
def test_memory_that_is_not_to_be_had_leaves_no_descriptor(size_bytes: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises((OSError, OverflowError)):  # The first cannot be mapped, the second is no file's size.
        SharedMemory(size_bytes)
    assert os.listdir("/proc/self/fd") == before
