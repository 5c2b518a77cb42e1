"""Hub: the head's side of the conversation: sends a call, awaits the answers, notices who is missing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from numpy.typing import NDArray

from clusterenv.config import Timeouts
from clusterenv.errors import CallTimeout, WireError
from clusterenv.head.door import Door, log_of
from clusterenv.head.failure import failure_of
from clusterenv.head.outcome import Lost
from clusterenv.head.roster import Member, Roster
from clusterenv.head.vigil import Vigil
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import Failed, Join, Part, Reply, Request, Stepped, Stop
from clusterenv.wire.shared import Bell, HeadDesk
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_SLICE_S = 0.1  # How long to sleep at most before looking whether a worker has died.
_SETTLE_S = 1e-3

Landing = Callable[[Member, Reply], Sequence[NDArray[Any]]]
Accept = Callable[[Member, Reply, Sequence[zmq.Frame]], None]
Answer = tuple[Member, "Reply | Lost"]


def _no_arrays(member: Member) -> Sequence[Any]:
    return ()


class Hub:
    """Talks to the workers of one run. One call is under way at a time.

    Attributes:
        members: The workers, in the order of their environments.
        bell: Rings when the last worker that shares memory has answered. It wakes the head; what it says is checked.
        landing: Says into which arrays the frames that come with a reply belong.
    """

    def __init__(self, socket: HeadSocket, fleet: Fleet, shards: list[tuple[int, int]], timeouts: Timeouts) -> None:
        self.bell: Bell | None = None
        self.landing: Landing = lambda member, reply: ()
        self._socket = socket
        self._fleet = fleet
        self._roster = Roster(shards)
        self._door = Door(socket, fleet, self._roster)
        self._vigil = Vigil(socket, fleet, timeouts.silence_s)
        self.members = self._roster.members
        self._timeouts = timeouts
        self._desks: list[HeadDesk | None] = [None] * len(shards)
        self._replies: list[Reply | Lost | None] = [None] * len(shards)
        self._losses: dict[int, Lost] = {}
        self._call = 0
        self._is_plain = False
        self._is_open = False
        self._awaits_bell = False
        self._owner_pid = os.getpid()

    def shares_memory(self, member: Member) -> bool:
        """Whether this worker and the head see the same arrays."""
        return self._desks[member.index] is not None

    def use_desk(self, member: Member, desk: HeadDesk) -> None:
        """From now on talk to this worker over shared memory."""
        self._desks[member.index] = desk

    @property
    def all_share_memory(self) -> bool:
        """Whether every worker is here, and sees the same arrays as the head."""
        return None not in self._desks

    def gather_workers(self) -> None:
        """Wait until every worker has joined.

        Raises:
            LaunchError: A worker ended instead, or they took too long.
        """
        self._door.await_members(self._pump, self.members, self._timeouts.join_s)

    @property
    def call_s(self) -> float:
        """How long to wait for an answer before giving up."""
        return self._timeouts.call_s

    @property
    def join_s(self) -> float:
        """How long to wait for a worker to join before giving up."""
        return self._timeouts.join_s

    @property
    def call(self) -> int:
        """The number of the last call."""
        return self._call

    def restart(self, members: Sequence[Member]) -> None:
        """Start workers that were lost once more, and wait until they have joined.

        Raises:
            LaunchError: One cannot be started, ended again, or took too long.
        """
        for member in members:
            if member.peer is None:  # Else it has come back by itself.
                self._fleet.restart(member.index)
        self._door.await_members(self._pump, members, self._timeouts.join_s)

    def rest(self, seconds: float) -> None:
        """Let time pass, and let in who comes."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._pump(left)

    def start(
        self,
        make: Callable[[int, Member], Request],
        members: Sequence[Member] | None = None,
        arrays: Callable[[Member], Sequence[Any]] = _no_arrays,
    ) -> None:
        """Start a call: send each worker (or each of these) its own request.

        All requests are made before the first is sent, so that one that cannot be made leaves nothing half begun.

        Args:
            make: Makes the request from the call's number.
            members: To whom; by default to all.
            arrays: What a worker that does not share memory gets with it.
        """
        if self._is_open:
            self._finish_abandoned()
        members = self.members if members is None else members
        frames = [messages.encode(make(self._call + 1, member)) for member in members]
        self._open_call(members)
        for member, frame in zip(members, frames, strict=True):
            self._send(member, frame, arrays(member))

    def broadcast(self, make: Callable[[int], Request], arrays: Callable[[Member], Sequence[Any]] = _no_arrays) -> None:
        """Start a call with the same request for every worker, encoded once."""
        if self._is_open:
            self._finish_abandoned()
        frame = messages.encode(make(self._call + 1))
        self._open_call(self.members)
        for member in self.members:
            self._send(member, frame, arrays(member))

    def start_plain_step(self) -> None:
        """Start a step with the actions in the planes, where all workers share memory.

        This is the hot path, and everything that can be left out is: who owes what is noted only if somebody fails.
        """
        if self._is_open:
            self._finish_abandoned()
        self._call = call = self._call + 1
        self._is_plain = self._is_open = True
        assert self.bell is not None, "there is one where there are desks"
        self.bell.expect(len(self._desks))
        for desk in self._desks:
            desk.post_plain(call)  # type: ignore[union-attr]  # all have one

    def collect(self, timeout_s: float | None = None) -> list[Answer]:
        """Wait until every worker that owes an answer has given it, or is lost.

        Plain answers to a plain step are left out.

        Raises:
            CallTimeout: One has not answered in time; `collect` may be called again.
            WorkerFailed: An environment or policy raised.
        """
        answers = self._await_answers(self._timeouts.call_s if timeout_s is None else timeout_s)
        for member, reply in answers:
            if isinstance(reply, Failed):
                raise failure_of(member, reply)
        return answers

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers: ask, wait, then insist. Never raises because one is dead or does not answer."""
        if self._owner_pid != os.getpid():
            return  # A forked copy of the head must not end its parent's workers.
        for member, desk in zip(self.members, self._desks, strict=True):
            if desk is not None:
                desk.stop()
            if member.peer is not None:  # By both ways: a worker that streams listens to the socket.
                self._socket.send(member.peer, [messages.encode(Stop())])
        self._fleet.stop(0.0 if terminate else self._timeouts.close_s if timeout_s is None else timeout_s)
        self._socket.close()

    def _await_answers(self, timeout_s: float) -> list[Answer]:
        if self._is_plain and self._collect_plain(timeout_s):
            self._is_open = False
            return []
        deadline = time.monotonic() + timeout_s
        while self._roster.debtors():
            slice_s = min(_SLICE_S, max(0.0, deadline - time.monotonic()))
            if self._awaits_bell:
                has_news = self._listen(slice_s)
                self._pump(0.0)
            else:
                has_news = self._pump(slice_s)
            if not has_news:
                self._check_missing(deadline, timeout_s)
        answers = [
            (member, reply) for member, reply in zip(self.members, self._replies, strict=True) if reply is not None
        ]
        self._replies = [None] * len(self.members)
        self._is_open = False
        return answers

    def _collect_plain(self, timeout_s: float) -> bool:
        """Wait for plain answers to a plain step; False if not all are there and plain: then it is an ordinary call."""
        assert self.bell is not None, "there is one where there are desks"
        has_rung = self.bell.wait(min(_SLICE_S, timeout_s))
        self._is_plain = False
        if has_rung:
            for desk in self._desks:
                if not desk.is_plain(self._call):  # type: ignore[union-attr]  # all have one
                    break
            else:
                return True
        self._roster.owe(self._call, self.members)
        self._awaits_bell = True
        if has_rung:
            self._take_desks()
        return False

    def _listen(self, timeout_s: float) -> bool:
        """Wait for the bell, and take what lies on the desks, whether it has rung or not."""
        assert self.bell is not None, "there is one where there are desks"
        has_rung = self.bell.wait(timeout_s)
        self._take_desks()
        if not has_rung and not self._awaits_bell:
            self.bell.wait(_SETTLE_S)  # The answers are here, so it is about to ring; the next call must not hear that.
        return has_rung

    def _finish_abandoned(self) -> None:
        """Wait for the answers to a call that nobody waits for any more, after Ctrl-C or a timeout, and drop them."""
        log.warning("waiting for call %d, which was interrupted, before the next one", self._call)
        self._await_answers(self._timeouts.call_s)

    def _open_call(self, members: Sequence[Member]) -> None:
        """Number a call and note who owes its answer; a worker that is not here has given it already."""
        self._is_open = True
        self._call += 1
        present = [member for member in members if member.peer is not None]
        self._roster.owe(self._call, present)
        for member in members:
            if member.peer is None:
                self._replies[member.index] = self._losses[member.index]
        num_desks = sum([self._desks[member.index] is not None for member in present])
        self._awaits_bell = num_desks > 0
        if num_desks:
            assert self.bell is not None, "there is one where there are desks"
            self.bell.expect(num_desks)

    def _send(self, member: Member, frame: bytes, arrays: Sequence[Any]) -> None:
        if member.peer is None:
            return
        desk = self._desks[member.index]
        if desk is not None:
            if desk.post(frame, self._call):
                return
            arrays = ()
        if not self._socket.send(member.peer, [frame, *arrays]):
            self._vigil.suspect(time.monotonic())

    def _take_desks(self) -> None:
        """Take the replies that lie on desks; one too large for that comes over the socket, as any other does."""
        self._awaits_bell = False
        for member, desk in zip(self.members, self._desks, strict=True):
            if desk is None or member.owes is None:
                continue
            if desk.is_plain(member.owes):
                self._settle(member, Stepped(member.owes, None, None))
                continue
            frame = desk.take(member.owes)
            if frame is None:
                self._awaits_bell = True
            elif frame:
                self._settle(member, messages.decode_reply(frame))

    def _pump(self, timeout_s: float) -> bool:
        """Deal with one message from the socket, if one comes."""
        return self.listen(timeout_s, self._accept)

    def listen(self, timeout_s: float, accept: Accept) -> bool:
        """Wait for one message from the socket. Nonsense is logged and harms nobody.

        Args:
            timeout_s: How long.
            accept: Deals with a worker's reply and the frames that came with it; may raise WireError.

        Returns:
            Whether one came.
        """
        received = self._socket.receive(timeout_s)
        if received is None:
            return False
        peer, frames = received
        member = self._roster.find(peer)
        try:
            if not frames:
                raise WireError("an empty message")
            reply = messages.decode_reply(frames[0].buffer)
            if isinstance(reply, Join):
                self._door.welcome(peer, reply)
            elif member is None:
                raise WireError(f"{type(reply).__name__} from somebody who has not joined")
            else:
                accept(member, reply, frames[1:])
        except WireError as error:
            # As text: a log handler that keeps the error would keep the whole hub by its traceback.
            log.warning("refused a message from %s: %s", "a stranger" if member is None else member, str(error))
        return True

    def post(self, member: Member, make: Callable[[int], Request], arrays: Sequence[Any] = ()) -> int:
        """Send one worker a request over its socket, outside any call of all; returns the request's number."""
        self._call += 1
        assert member.peer is not None, "it is here"
        if not self._socket.send(member.peer, [messages.encode(make(self._call)), *arrays]):
            self._vigil.suspect(time.monotonic())
        return self._call

    def look_for_losses(self, members: Sequence[Member]) -> list[tuple[Member, Lost]]:
        """Return those of these workers that are lost; the caller gives them up."""
        return [
            (member, Lost(f"{reason}. {log_of(self._fleet, member)}"))
            for member, reason in self._vigil.look(members, time.monotonic())
        ]

    def restart_soon(self, member: Member) -> None:
        """Start a worker that was given up once more, without waiting for it to join."""
        self._fleet.restart(member.index)

    def _accept(self, member: Member, reply: Reply, frames: Sequence[zmq.Frame]) -> None:
        assert not isinstance(reply, Join)
        if member.owes != reply.call:
            raise WireError(f"it answers call {reply.call}, but owes {member.owes}")
        fill(() if self.shares_memory(member) else self.landing(member, reply), [frame.buffer for frame in frames])
        if isinstance(reply, Part):
            member.num_parts += reply.count
        else:
            self._settle(member, reply)

    def _settle(self, member: Member, reply: Reply) -> None:
        if isinstance(reply, Join | Part):
            raise WireError(f"{type(reply).__name__} is no answer")
        self._roster.settle(member, reply.call)
        self._replies[member.index] = reply

    def _check_missing(self, deadline: float, timeout_s: float) -> None:
        """Note the workers that owe an answer and are lost; raise if time is up for the others."""
        now = time.monotonic()
        for member, reason in self._vigil.look(self._roster.debtors(), now):
            self._lose(member, reason)
        if now >= deadline and (missing := self._roster.debtors()):
            raise CallTimeout(
                f"No answer within {timeout_s:g} s from {'; '.join(str(member) for member in missing)}. "
                "It may be slow or hang; the call is still pending, and whatever is called next waits for it. Give it "
                f"longer with Timeouts(call_s=...), or close(). {log_of(self._fleet, missing[0])}"
            )

    def _lose(self, member: Member, reason: str) -> None:
        """Give a worker up, unless it has left its answer behind."""
        self._take_desks()
        while member.owes is not None and self._pump(0.0):
            pass
        if member.owes is None:
            return
        loss = Lost(f"{reason} while the head waited for it. {log_of(self._fleet, member)}")
        self._replies[member.index] = loss
        self.give_up(member, loss)

    def give_up(self, member: Member, loss: Lost) -> None:
        """Strike a worker off: whatever still comes from it is a stranger's."""
        self._roster.lose(member)
        self._losses[member.index] = loss
        self._vigil.forget(member)
        if self._desks[member.index] is not None and self.bell is not None:
            self._desks[member.index] = None
            # Nobody knows whether it has been counted. The others' answers are found without the bell, if need be.
            self.bell.silence()
