"""Mailboxes: calls to the workers that share the head's memory, and the bell that signals their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterenv.errors import WireError
from clusterenv.head.worker import Worker
from clusterenv.wire import messages
from clusterenv.wire.messages import Reply, Stepped
from clusterenv.wire.shared import AllMailboxes, Bell, HeadMailbox, SharedMemory

_SETTLE_S = 1e-3


class Mailboxes:
    """The mailboxes of the workers that have one.

    The bell only wakes the head: answers are found by looking into the mailboxes. So it does no harm if the bell rings
    too early or too late, as it may when a worker has died.

    Attributes:
        all: The mailboxes together, while every worker has one and is ready.
        num_awaited: How many answers are still to come through mailboxes.
        has_rung: Whether the bell's ring was already consumed elsewhere.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.all: AllMailboxes | None = None
        self.num_awaited = 0
        self.has_rung = False
        self._bell: Bell | None = None
        self._workers = workers

    def share(self, memory: SharedMemory) -> None:
        """Put the bell into the memory of the run."""
        self._bell = Bell(memory.memory, initialise=True)

    def use(self, worker: Worker, mailbox: HeadMailbox) -> None:
        """From now on use this mailbox to call a worker."""
        worker.mailbox = mailbox

    def note_ready(self) -> None:
        """Note that a worker is ready; before that, it must not be woken for a plain step."""
        mailboxes = [each.mailbox for each in self._workers if each.mailbox is not None and each.is_ready]
        if len(mailboxes) == len(self._workers):
            self.all = AllMailboxes(self._the_bell(), mailboxes)

    def drop(self, worker: Worker) -> None:
        """Stop using the mailbox of a worker, which is lost."""
        if worker.mailbox is not None:
            worker.mailbox = self.all = None
            self.num_awaited -= sum(owed.by_mailbox for owed in worker.owed)
            # It is unknown whether the bell counted its answer. The others' answers are found without the bell.
            self._the_bell().silence()

    def expect(self, num_answers: int) -> None:
        """Await this many more answers, to requests that are about to be posted."""
        if num_answers:
            self.num_awaited += num_answers
            self._the_bell().expect(num_answers)

    def wait(self, timeout_s: float) -> list[tuple[Worker, Reply | WireError]]:
        """Return the answers in the mailboxes; if there are none, wait for the bell, then look again in any case.

        Answers too large for a mailbox come over the socket.
        """
        has_rung, self.has_rung = self.has_rung, False
        replies = list(self.take(self._workers))
        if not replies:
            has_rung = self._the_bell().wait(timeout_s) or has_rung
            replies = list(self.take(self._workers))
        if not has_rung and replies and len(replies) == self.num_awaited:
            # All answers are here, so the bell is about to ring; the next call must not hear it.
            self._the_bell().wait(_SETTLE_S)
        return replies

    def take(self, workers: Sequence[Worker]) -> Iterator[tuple[Worker, Reply | WireError]]:
        """Yield the answers in these workers' mailboxes, or a WireError for each malformed one."""
        for worker in workers:
            mailbox, owed = worker.mailbox, worker.owed[0] if worker.owed else None
            if mailbox is None or owed is None or not owed.by_mailbox:
                continue
            try:
                found = mailbox.take(owed.call)
                if isinstance(found, int):
                    yield worker, Stepped(owed.call, None, None, found)
                elif found:
                    yield worker, messages.decode_reply(found)
            except WireError as error:
                yield worker, error

    def _the_bell(self) -> Bell:
        assert self._bell is not None, "there is one where there are mailboxes"
        return self._bell
