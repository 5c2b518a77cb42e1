"""Boards: what one worker keeps for others is read as it is or not at all, whatever lies there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import msgspec
import pytest

from clusterenv.wire.board import Board, Unreachable, describe_machine, digest_of
from clusterenv.wire.messages import BoardAddress, Copy
from clusterenv.worker.wanted import Wanted

WEIGHTS = bytes(range(256)) * 4096


def copy_of(board: Board, data: bytes = WEIGHTS) -> Copy:
    return Copy(board.address, len(data), digest_of([data]))


@pytest.fixture
def carrier() -> Iterator[Board]:
    board = Board()
    yield board
    board.close()


@pytest.fixture
def reader() -> Iterator[Board]:
    board = Board()
    yield board
    board.close()


def test_what_is_kept_is_read_and_the_one_before_it_too(carrier: Board, reader: Board) -> None:
    assert reader.reaches(carrier.address)
    assert reader.read(copy_of(carrier), 1) is None
    pieces = [memoryview(WEIGHTS)[:100_000], memoryview(WEIGHTS)[100_000:]]
    for version in (1, 2, 3):
        carrier.keep(version, pieces)
    found = reader.read(copy_of(carrier), 3)
    assert found is not None
    assert bytes(found) == WEIGHTS
    assert reader.read(copy_of(carrier), 2) is not None
    assert reader.read(copy_of(carrier), 4) is None
    with pytest.raises(Unreachable, match="newer versions only"):
        reader.read(copy_of(carrier), 1)


def test_weights_that_are_followed_by_newer_ones_all_the_time_are_not_waited_for_forever(
    carrier: Board, reader: Board
) -> None:
    wanted = Wanted(reader, silence_s=10, hang_s=300)
    for number in range(1, 30):
        wanted.set(number, copy_of(carrier), float(number))
        assert wanted.look(float(number)) is None
        if wanted.must_ask:
            break
    assert 10 < number < 15


def test_a_board_that_is_gone_is_not_waited_for(carrier: Board, reader: Board) -> None:
    carrier.keep(1, [memoryview(WEIGHTS)])
    carrier.close()
    carrier.close()
    assert not reader.reaches(carrier.address)
    with pytest.raises(Unreachable):
        reader.read(copy_of(carrier), 1)


def test_nothing_of_a_process_that_was_killed_is_left(reader: Board) -> None:
    script = (
        "import sys, msgspec; from clusterenv.wire.board import Board; board = Board()\n"
        "board.keep(1, [memoryview(bytes(1 << 20))])\n"
        "print(msgspec.msgpack.encode(board.address).hex(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline().decode()), type=BoardAddress)
        assert address.pid == process.pid
        assert reader.reaches(address)
        process.kill()
    assert not reader.reaches(address)


def test_another_token_is_another_board(carrier: Board, reader: Board) -> None:
    assert not reader.reaches(msgspec.structs.replace(carrier.address, token=bytes(16)))


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: data[:-1], lambda data: data + b"x"])
def test_bytes_that_the_head_did_not_send_are_refused(
    carrier: Board, reader: Board, change: Callable[[bytes], bytes]
) -> None:
    carrier.keep(1, [memoryview(change(WEIGHTS))])
    with pytest.raises(Unreachable):
        reader.read(copy_of(carrier), 1)


def test_what_is_no_memory_is_neither_opened_nor_read(carrier: Board, reader: Board) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(WEIGHTS)
        file.flush()
        ends = os.pipe()
        zero = os.open("/dev/zero", os.O_RDONLY)
        try:
            for descriptor in (file.fileno(), ends[0], zero, 10**6):
                carrier.keep(1, [memoryview(WEIGHTS)])
                kept = carrier._kept[-1][1]
                if descriptor < 10**6:
                    os.dup2(descriptor, kept)
                else:
                    os.close(kept)
                try:
                    with pytest.raises(Unreachable):
                        reader.read(copy_of(carrier), 1)
                    assert not reader.reaches(BoardAddress(os.getpid(), kept, bytes(16)))
                finally:
                    os.dup2(zero, kept)  # `close` closes it.
        finally:
            for descriptor in (*ends, zero):
                os.close(descriptor)


def test_what_was_read_does_not_change_any_more(carrier: Board, reader: Board) -> None:
    carrier.keep(1, [memoryview(WEIGHTS)])
    found = reader.read(copy_of(carrier), 1)
    assert found is not None
    with pytest.raises(PermissionError):
        os.pwrite(carrier._kept[-1][1], b"other", 0)  # It is sealed.
    with pytest.raises(PermissionError):
        os.ftruncate(carrier._kept[-1][1], 10)
    carrier.close()
    assert bytes(found) == WEIGHTS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_nothing(carrier: Board) -> None:
    carrier.keep(1, [memoryview(WEIGHTS)])
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            board = Board()
            os._exit(0 if not board.reaches(carrier.address) and describe_machine() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_users_and_namespaces_tell_machines_apart() -> None:
    machine = describe_machine()
    assert str(os.getuid()) in machine.split()
    assert machine == describe_machine()
    assert len(machine) < 255
