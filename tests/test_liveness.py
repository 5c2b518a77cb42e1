"""Liveness: who is asked whether it still lives, and by what a connection that has ended is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterenv import Timeouts
from clusterenv.head.liveness import Liveness
from clusterenv.head.worker import Worker
from clusterenv.wire.zeromq import HeadSocket, WorkerSocket


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
