"""What comes over the wire is checked: strangers stay out, nonsense is refused with a reason and harms nobody."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import gymnasium as gym
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterenv import ClusterEnv, LocalLauncher, Network, Timeouts
from clusterenv.errors import ConfigError, LaunchError, WireError
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire import messages
from clusterenv.wire.address import Address
from clusterenv.wire.arrays import CHUNK_BYTES, fill
from clusterenv.wire.compatibility import installed_versions
from clusterenv.wire.messages import PROTOCOL, Join, Register, Stepped
from clusterenv.wire.semaphore import SIZE_BYTES, Chain, Semaphore
from clusterenv.wire.ticket import Ticket
from clusterenv.wire.zeromq import HeadSocket, WorkerSocket
from tests.launchers import OwnLauncher, start_module
from tests.tally import Tally


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
        "This is not a reply",
        "has joined already",
        "answers call",
        "Expected 4 frames for 4 arrays, got 0",
        "Expected 4 frames for 4 arrays, got 5",
        "bytes for float32(2, 4), got 16",
    ):
        assert reason in caplog.text, reason


def test_a_connection_without_the_runs_key_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    launcher = KeepTicket()
    with ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, network=Network(transport="zmq")) as envs:
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
        ClusterEnv("CartPole-v1", 2, num_workers=1, launcher=launcher, network=Network(transport="zmq")) as envs,
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
    ("message", "reason"),
    [
        (Register(PROTOCOL, 0, "k" * 40), "worker 0 has joined already"),
        (Register(PROTOCOL, 7, "k" * 40), "there is no worker 7"),
        (Register(PROTOCOL + 1, 0, "k" * 40), "install the head's clusterenv there"),
        (Join(PROTOCOL, 0, 1, "twin", installed_versions()), "worker 0 has joined already"),
        (Join(PROTOCOL, 7, 1, "surplus", installed_versions()), "there is no worker 7"),
        (Join(PROTOCOL - 1, 0, 1, "older", installed_versions()), "install the head's clusterenv there"),
    ],
    ids=["a twin", "a number too high", "another protocol", "a twin joins", "a surplus joins", "an older one joins"],
)
def test_a_worker_that_cannot_join_is_told_why(
    message: Register | Join, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
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
        with dealer(ticket.endpoint, **keys) as socket:
            socket.send(messages.encode(message))
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


def bytes_of(array: Any) -> list[memoryview]:
    """An array's bytes as they travel."""
    whole = array.tobytes()
    return [memoryview(whole[start : start + CHUNK_BYTES]) for start in range(0, max(1, len(whole)), CHUNK_BYTES)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((CHUNK_BYTES // 8,), np.float64),  # one whole chunk
        ((2 * CHUNK_BYTES,), np.uint8),  # two
        ((300_001,), np.bool_),
        ((3, 100_003), "S3"),  # no chunk ends where a value does
        ((40, 8, 3, 1000), np.int16),
        ((2000, 8, 5), np.float64),  # many rows in a chunk
        ((3, 8, 300, 300), np.uint8),  # many chunks in a row
    ],
)
def test_large_arrays_arrive_whole_in_rows_and_in_columns(shape: tuple[int, ...], dtype: Any) -> None:
    sent = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    other = np.arange(5)
    rows, others = np.zeros_like(sent), np.zeros_like(other)
    fill([rows, others], [*bytes_of(sent), *bytes_of(other)])
    assert (rows == sent).all()
    assert (others == other).all()
    if len(shape) > 2:
        whole = np.full((shape[0], 12, *shape[2:]), 9, dtype)
        fill([whole[:, 2:10]], bytes_of(sent))
        assert (whole[:, 2:10] == sent).all()
        assert (whole[:, :2] == 9).all()
        assert (whole[:, 10:] == 9).all()


def test_bytes_that_are_not_bools_become_true_in_large_arrays_too() -> None:
    flags = np.zeros(CHUNK_BYTES + 3, np.bool_)
    fill([flags], [memoryview(b"\x07" * CHUNK_BYTES), memoryview(b"\x00\x02\xff")])
    assert flags.view(np.uint8).tolist() == [1] * CHUNK_BYTES + [0, 1, 1]


@pytest.mark.parametrize("sizes", [[], [8], [CHUNK_BYTES], [8, CHUNK_BYTES], [CHUNK_BYTES, 9], [CHUNK_BYTES, 8, 0]])
def test_frames_that_do_not_fit_a_large_array_change_nothing(sizes: list[int]) -> None:
    before, large = np.ones(2), np.ones(CHUNK_BYTES // 8 + 1)
    with pytest.raises(WireError, match="Expected"):
        fill([before, large], [memoryview(bytes(size)) for size in [16, *sizes]])
    assert (before == 1).all()
    assert (large == 1).all()


@pytest.mark.parametrize("header_bytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_message_arrives_as_it_was_sent_however_large_it_is(header_bytes: int) -> None:
    header = np.random.default_rng(1).bytes(header_bytes)
    arrays = [np.arange(size, dtype=np.float64) for size in (3, 0, CHUNK_BYTES // 8, CHUNK_BYTES)]
    with contextlib.ExitStack() as stack:
        head = HeadSocket((Address("127.0.0.1"), Address("127.0.0.1")), silence_s=10.0)
        stack.callback(head.close)
        worker = WorkerSocket(head.ticket)
        stack.callback(worker.close)
        worker.send([header, *arrays])
        while (received := head.receive(1.0)) is None:
            pass
        peer, there = received
        assert head.send(peer, [header, *arrays])
        back = worker.receive(10.0)
        assert back is not None
        for frames in (there, back):
            assert frames[0].bytes == header
            assert max(len(frame) for frame in frames[1:]) <= CHUNK_BYTES
            copies = [np.zeros_like(array) for array in arrays]
            fill(copies, [frame.buffer for frame in frames[1:]])
            assert all((copy == array).all() for copy, array in zip(copies, arrays, strict=True))


class Scenery(gym.Env[Any, Any]):
    """Shows pictures as large as Atari's and renders larger ones; every picture says whose it is, and when."""

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._picture(self.observation_space.shape), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._picture(self.observation_space.shape), 1.0, False, False, {}

    def render(self) -> Any:
        return self._picture((720, 1280, 3))

    @property
    def load(self) -> bytes:
        return self.np_random.bytes(100_000_000)

    def _picture(self, shape: Any) -> Any:
        picture = np.full(shape, (self.np_random_seed + self.count) % 256, np.uint8)
        picture[-1, -1, -1] = self.count
        return picture


TCP = Network(transport="zmq", listen="127.0.0.1")


def test_256_pictures_a_step_come_over_tcp() -> None:
    with ClusterEnv([Scenery] * 256, num_workers=2, network=TCP) as envs:
        pictures, _ = envs.reset(seed=0)
        for count in range(3):
            expected = (np.arange(256) + count).astype(np.uint8)
            assert (pictures[:, 0, 0, 0] == expected).all()
            assert (pictures.reshape(256, -1)[:, :-1] == expected[:, None]).all()
            assert (pictures[:, -1, -1, -1] == count).all()
            pictures = envs.step(np.zeros(256, np.int64))[0]


def test_64_large_renders_come_over_tcp() -> None:
    with ClusterEnv([Scenery] * 64, num_workers=2, network=TCP) as envs:
        envs.reset(seed=0)
        renders = envs.call("render")
        assert len(renders) == 64
        for index, render in enumerate(renders):
            assert render.shape == (720, 1280, 3)
            assert (render.reshape(-1)[:-1] == index).all()


def test_an_attribute_of_100_megabytes_comes_over_tcp() -> None:
    with ClusterEnv([Scenery], num_workers=1, network=TCP) as envs:
        envs.reset(seed=5)
        (load,) = envs.get_attr("load")
    assert load == gym.utils.seeding.np_random(5)[0].bytes(100_000_000)


@pytest.mark.parametrize("more", [{"infos": b"x"}, {"columns": b"x"}, {"errors": [(0, "x")]}, {"probes": b"x"}])
def test_an_answer_that_says_more_than_two_numbers_is_not_plain(more: dict[str, Any]) -> None:
    nothing: dict[str, Any] = {"infos": None, "columns": None}
    assert Stepped(1, **nothing, generation=3).is_plain
    assert not Stepped(1, **nothing | more).is_plain


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
    with pytest.raises(ConfigError, match="This is not a ticket"):
        Ticket.decode(text)


def test_no_answer_of_a_worker_that_shares_memory_is_waited_for_in_vain() -> None:
    # The head looks into the mailboxes ten times a second whether the bell has rung or not: a wake-up that is lost
    # costs a tenth of a second, and nothing else tells of it.
    with ClusterEnv("CartPole-v1", 4, num_workers=2, network=Network(transport="shm")) as envs:
        envs.reset(seed=1)
        actions = np.zeros(4, np.int64)

        def count_slow() -> int:
            slow = 0
            for _ in range(500):
                began = time.monotonic()
                envs.step(actions)
                slow += time.monotonic() - began > 0.09
            return slow

        # Others may keep the cores for as long once, but not time and again.
        assert any(count_slow() < 10 for _ in range(5))


def test_infos_that_are_not_numbers_cost_no_tenth_of_a_second() -> None:
    with ClusterEnv(Tally, 4, num_workers=2, network=Network(transport="shm")) as envs:
        envs.reset(seed=1)
        took_s = []
        for _ in range(100):
            began = time.monotonic()
            envs.step(np.zeros(4, np.int64))
            took_s.append(time.monotonic() - began)
        assert sorted(took_s)[50] < 0.09, "half of them, at least: the others may have waited for a core"
