"""Desks: the head's conversation with the workers that share its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterenv.errors import WireError
from clusterenv.head.roster import Member
from clusterenv.wire import messages
from clusterenv.wire.messages import Reply, Stepped
from clusterenv.wire.shared import AllDesks, Bell, HeadDesk

_SETTLE_S = 1e-3


class Desks:
    """The desks of the workers that have one, and the bell that wakes the head when the last of them has answered.

    The bell only wakes: whether somebody has answered is seen on the desk. So it does no harm if it rings too early or
    too late, as it may when a worker has died.

    Attributes:
        bell: Must be set before the first desk is used.
        all: The desks together, while every worker has one.
        are_awaited: Whether an answer is still to come by a desk.
    """

    def __init__(self, num_workers: int) -> None:
        self.bell: Bell | None = None
        self.all: AllDesks | None = None
        self.are_awaited = False
        self._desks: list[HeadDesk | None] = [None] * num_workers

    def use(self, member: Member, desk: HeadDesk) -> None:
        """From now on talk to this worker over its desk."""
        self._desks[member.index] = desk
        desks = [each for each in self._desks if each is not None]
        if len(desks) == len(self._desks):
            self.all = AllDesks(self._the_bell(), desks)

    def drop(self, member: Member) -> None:
        """No longer talk to this worker over its desk: it is lost."""
        if self._desks[member.index] is not None:
            self._desks[member.index] = self.all = None
            # Nobody knows whether it has been counted. The others' answers are found without the bell, if need be.
            self._the_bell().silence()

    def has(self, member: Member) -> bool:
        """Whether this worker has a desk."""
        return self._desks[member.index] is not None

    def find_names(self, index: int) -> memoryview:
        """Return where a worker that has a desk writes what its infos are called."""
        desk = self._desks[index]
        if desk is None:
            raise WireError("Infos are said to be in shared memory by a worker that shares none.")
        return desk.names

    @property
    def are_in_use(self) -> bool:
        """Whether any worker has one."""
        return any(desk is not None for desk in self._desks)

    def expect(self, members: Sequence[Member]) -> None:
        """Await the answers of those of these workers that have a desk."""
        count = sum([self._desks[member.index] is not None for member in members])
        self.are_awaited = count > 0
        if count:
            self._the_bell().expect(count)

    def post(self, member: Member, frame: bytes, call: int) -> bool:
        """Hand over a request; False if it is too large, and must follow over the socket."""
        desk = self._desks[member.index]
        assert desk is not None, "it has one"
        return desk.post(frame, call)

    def stop(self, member: Member) -> None:
        """Tell a worker that has a desk to end."""
        desk = self._desks[member.index]
        if desk is not None:
            desk.stop()

    def listen(
        self, members: Sequence[Member], timeout_s: float
    ) -> tuple[bool, list[tuple[Member, Reply | WireError]]]:
        """Wait for the bell, and take the answers on the desks whether it has rung or not."""
        has_rung = self._the_bell().wait(timeout_s)
        replies = list(self.take(members))
        if not has_rung and not self.are_awaited:
            # The answers are here, so it is about to ring; the next call must not hear that.
            self._the_bell().wait(_SETTLE_S)
        return has_rung, replies

    def take(self, members: Sequence[Member]) -> Iterator[tuple[Member, Reply | WireError]]:
        """Yield the answers that lie on the desks, or what is wrong with them.

        One too large for a desk comes over the socket, as any other does.
        """
        self.are_awaited = False
        for member in members:
            desk = self._desks[member.index]
            if desk is None or member.owes is None:
                continue
            if (generation := desk.find_plain(member.owes)) is not None:
                yield member, Stepped(member.owes, None, None, generation)
                continue
            try:
                frame = desk.take(member.owes)
                if frame is None:
                    self.are_awaited = True
                elif frame:
                    yield member, messages.decode_reply(frame)
            except WireError as error:
                yield member, error

    def _the_bell(self) -> Bell:
        assert self.bell is not None, "there is one where there are desks"
        return self.bell
