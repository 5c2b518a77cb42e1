"""A worker's channel: what lies in the socket while calls come by the mailbox."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clusterenv.wire import messages
from clusterenv.wire.messages import PROTOCOL, Ping, Register, Step
from clusterenv.wire.shared import (
    BELL_BYTES,
    MAILBOX_BYTES,
    AllMailboxes,
    Bell,
    HeadMailbox,
    SharedMemory,
    WorkerMailbox,
)
from clusterenv.wire.zeromq import HeadSocket, WorkerSocket
from clusterenv.worker.channel import Channel

NUM_PINGS = 300


@pytest.fixture
def ends() -> Iterator[tuple[HeadSocket, WorkerSocket, bytes]]:
    """A head's socket, a worker's, and the worker's address."""
    head = HeadSocket(None, silence_s=30.0)
    worker = WorkerSocket(head.ticket)
    try:
        worker.send([messages.encode(Register(PROTOCOL, 0, "key"))])
        while (received := head.receive(10.0)) is None:
            pass
        yield head, worker, received[0]
    finally:
        worker.close()
        head.close()


def is_unread(worker: WorkerSocket) -> bool:
    """Tell whether something lies in the worker's socket; the last ping is on its way for a moment at most."""
    return worker.receive(0.5) is not None


def test_pings_do_not_pile_up_while_steps_come_by_the_mailbox(ends: tuple[HeadSocket, WorkerSocket, bytes]) -> None:
    # ZeroMQ reads no more, heartbeats included, once a thousand messages lie there: the worker would count as dead.
    head, worker, peer = ends
    memory, mailbox_memory = SharedMemory(BELL_BYTES), SharedMemory(MAILBOX_BYTES)
    try:
        bell = Bell(memory.memory, initialise=True)
        mailboxes = AllMailboxes(bell, [HeadMailbox(mailbox_memory.memory)])
        channel = Channel(worker)
        channel.use((), WorkerMailbox(mailbox_memory.memory, memory.memory))
        for call in range(1, NUM_PINGS + 1):
            assert head.send(peer, [messages.encode(Ping())])
            mailboxes.start_plain(call, 0)
            assert isinstance(channel.receive(10.0), Step)
        assert channel.receive(0.01) is None, "nothing was asked for"
        assert not is_unread(worker)
    finally:
        memory.close()
        mailbox_memory.close()
