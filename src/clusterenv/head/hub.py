"""Hub: the head's side of the conversation: sends a call, awaits the answers, notices who is missing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq
from numpy.typing import NDArray

from clusterenv.config import Timeouts
from clusterenv.errors import CallTimeout, WireError, WorkerFailed
from clusterenv.head.calm import Calm
from clusterenv.head.desks import Desks
from clusterenv.head.door import Door, log_of
from clusterenv.head.failure import failure_of
from clusterenv.head.inbox import Inbox
from clusterenv.head.outcome import Lost
from clusterenv.head.roster import Member, Roster
from clusterenv.head.vigil import Vigil
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import Failed, Join, Part, Reply, Request, Stop
from clusterenv.wire.shared import AllDesks
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

NOT_HERE = Lost("it has not come yet")

_FAREWELL_S = 0.5  # What the last words to a worker get to leave, if nobody waits for it to end.
_SLICE_S = 0.1  # How long to sleep at most before looking whether a worker has died.
_UPKEEP_CALLS = 1024  # How often to read the socket where workers share memory: strangers' knocks pile up there.
_UPKEEP_S = 1e-3

Landing = Callable[[Member, Reply], Sequence[NDArray[Any]]]
Answer = tuple[Member, "Reply | Lost"]
Arrays = Callable[[Member], Sequence[Any]]


def _no_arrays(member: Member) -> Sequence[Any]:
    return ()


class Hub:
    """Talks to the workers of one run. One call is under way at a time.

    Attributes:
        members: The workers, in the order of their environments.
        desks: The conversation with those that share memory.
        generations: Of every worker's infos, after a plain step with plain answers.
        inbox: What comes by the socket.
        landing: Says into which arrays the frames that come with a reply belong.
        timeouts: How long to wait.
    """

    def __init__(self, socket: HeadSocket, fleet: Fleet, shards: list[tuple[int, int]], timeouts: Timeouts) -> None:
        self.desks = Desks(len(shards))
        self.landing: Landing = lambda member, reply: ()
        self._socket = socket
        self._fleet = fleet
        self._roster = Roster(shards)
        self._door = Door(socket, fleet, self._roster)
        self._vigil = Vigil(socket, fleet, self._roster.members, timeouts.silence_s)
        self.members = self._roster.members
        self.timeouts = timeouts
        self._replies: list[Reply | Lost | None] = [None] * len(shards)
        self._losses: dict[int, Lost] = {}
        self._call = 0
        self._is_open = False
        self._plain_desks: AllDesks | None = None
        self.generations: list[int] = []
        self._plain: list[None] = []  # Not empty while a plain step is under way there.
        self._awaited: Sequence[Member] = self.members
        self._looked_at = 0.0
        self._owner_pid = os.getpid()
        self._calm = Calm()
        self.inbox = Inbox(socket, self._roster, self._door, self._calm)

    def shares_memory(self, member: Member) -> bool:
        """Whether this worker and the head see the same arrays."""
        return self.desks.has(member)

    def gather_workers(self, at_least: int) -> None:
        """Wait until this many workers have joined; the others are late.

        Raises:
            LaunchError: A worker ended instead, or they took too long.
        """
        self._door.await_members(self._pump, self.members, self.timeouts.join_s, at_least)
        for member in self.members:
            member.is_late = member.peer is None

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
            if member.peer is None and not member.is_late:  # Else it has come back by itself, or is on its way.
                self._fleet.restart(member.index)
        self._door.await_members(self._pump, members, self.timeouts.join_s)

    def rest(self, seconds: float) -> None:
        """Let time pass, and let in who comes."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._pump(min(left, _SLICE_S))

    def start(
        self,
        make: Callable[[int, Member], Request],
        members: Sequence[Member] | None = None,
        arrays: Arrays = _no_arrays,
    ) -> None:
        """Start a call: send each worker (or each of these) its own request.

        All requests are made before the first is sent, so that one that cannot be made leaves nothing half begun.

        Args:
            make: Makes the request from the call's number.
            members: To whom; by default to all.
            arrays: What a worker that does not share memory gets with it.
        """
        if self._is_open or self._plain:
            self._finish_abandoned()
        # A worker that has come and has no environments yet takes part only in what is asked of it by name.
        present = (
            self._roster.present() if members is None else [member for member in members if member.peer is not None]
        )
        frames = [messages.encode(make(self._call + 1, member)) for member in present]
        self._start(self.members if members is None else members, present, frames, arrays)

    def broadcast(self, make: Callable[[int], Request], arrays: Arrays = _no_arrays) -> None:
        """Start a call with the same request for every worker, encoded once."""
        if self._is_open or self._plain:
            self._finish_abandoned()
        present = self._roster.present()
        self._start(self.members, present, [messages.encode(make(self._call + 1))] * len(present), arrays)

    def start_one(self, member: Member, make: Callable[[int], Request], arrays: Sequence[Any]) -> None:
        """Start a call of one worker, beside those of others; `collect_some` brings its answer."""
        self._call += 1
        self._roster.owe(self._call, [member])
        if not member.is_ready:
            self._replies[member.index] = self._losses.get(member.index, NOT_HERE)
            member.owes = None
            return
        with self._calm:
            self.desks.expect([member])
            self._send(member, messages.encode(make(self._call)), arrays)

    def collect_some(self, timeout_s: float | None = None) -> list[Answer]:
        """Wait until at least one of the calls that `start_one` started is answered; returns all that are.

        Raises:
            CallTimeout: None was in time; `collect_some` may be called again.
            WorkerFailed: An environment raised.
        """
        timeout_s = self.timeouts.call_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not any(self._replies):
            self._wait_for_news(deadline, timeout_s, has_desks=self.desks.are_in_use)
        return self._take_answers([member for member in self.members if self._replies[member.index] is not None])

    def start_plain_step(self, desks: AllDesks) -> None:
        """Start a step with the actions in the planes, where all workers share memory.

        This is the hot path, and everything that can be left out is: who owes what is noted only if somebody fails.
        """
        if self._is_open or self._plain:
            self._finish_abandoned()
        self._call = call = self._call + 1
        if not call % _UPKEEP_CALLS:
            self.rest(_UPKEEP_S)
        self._plain_desks = desks
        self._plain = desks.under_way
        desks.start_plain(call)

    def collect(self, timeout_s: float | None = None) -> list[Answer]:
        """Wait until every worker that owes an answer has given it, or is lost.

        Plain answers to a plain step are left out.

        Raises:
            CallTimeout: One has not answered in time; `collect` may be called again.
            WorkerFailed: An environment or policy raised.
        """
        if not self._await_answers(self.timeouts.call_s if timeout_s is None else timeout_s):
            return []
        return self._take_answers(self._awaited)

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers: ask, wait, then insist. Never raises because one is dead or does not answer."""
        if self._owner_pid != os.getpid():
            return  # A forked copy of the head must not end its parent's workers.
        for member in self.members:
            self.desks.stop(member)
            if member.peer is not None:  # By both ways: a worker that streams listens to the socket.
                self._socket.send(member.peer, [messages.encode(Stop())], waits=False)
        self._fleet.stop(0.0 if terminate else self.timeouts.close_s if timeout_s is None else timeout_s)
        self._socket.close(0.0 if terminate else _FAREWELL_S)

    def _await_answers(self, timeout_s: float) -> bool:
        """Wait until all have answered or are lost; False if it was a plain step, and all answers to it are plain."""
        if self._plain:
            desks = self._plain_desks
            assert desks is not None, "a plain step was started there"
            has_rung = desks.wait(min(_SLICE_S, timeout_s))
            generations = desks.find_plain(self._call) if has_rung else None
            if generations is not None:
                self.generations = generations
                self._plain.clear()
                return False
            self._roster.owe(self._call, self.members)
            self._awaited = self.members
            self.desks.are_awaited = self._is_open = True
            self._plain.clear()
            if has_rung:
                self._settle_all(self.desks.take(self.members))
        deadline = time.monotonic() + timeout_s
        for member in self._awaited:  # One after another: to look at all of them after every message takes long.
            while member.owes is not None:
                self._wait_for_news(deadline, timeout_s, has_desks=self.desks.are_awaited)
        self._is_open = False
        return True

    def _take_answers(self, members: Sequence[Member]) -> list[Answer]:
        answers: list[Answer] = []
        failure: WorkerFailed | None = None
        for member in members:
            reply, self._replies[member.index] = self._replies[member.index], None
            if isinstance(reply, Failed):
                failure = failure or failure_of(member, reply)
            elif reply is not None:
                answers.append((member, reply))
        if failure is not None:
            raise failure
        return answers

    def _wait_for_news(self, deadline: float, timeout_s: float, *, has_desks: bool) -> None:
        """Wait a little for answers; if none come, look whether a worker is lost or time is up."""
        slice_s = min(_SLICE_S, max(0.0, deadline - time.monotonic()))
        if has_desks:
            has_news, replies = self.desks.listen(self.members, slice_s)
            self._settle_all(replies)
            self._pump(0.0)
        else:
            has_news = self._pump(slice_s)
        # Also while there is news: a worker that talks without end must not keep the head from all else.
        if not has_news or time.monotonic() - self._looked_at > _SLICE_S:
            self._check_missing(deadline, timeout_s)

    def _finish_abandoned(self) -> None:
        """Wait for the answers to a call that nobody waits for any more, after Ctrl-C or a timeout, and drop them."""
        log.warning("waiting for call %d, which was interrupted, before the next one", self._call)
        self.desks.are_awaited = self.desks.are_in_use  # It may have been interrupted while it found that out.
        if self._await_answers(self.timeouts.call_s):
            for member in self._awaited:
                self._replies[member.index] = None

    def _start(
        self, members: Sequence[Member], present: Sequence[Member], frames: Sequence[bytes], arrays: Arrays
    ) -> None:
        """Number a call, note who owes its answer, and send; a worker that is not present has given it already."""
        with self._calm:
            self._is_open = True
            self._awaited = members
            self._call += 1
            self._roster.owe(self._call, present)
            for member in members:
                if member.owes is None:
                    self._replies[member.index] = self._losses.get(member.index, NOT_HERE)
            self.desks.expect(present)
            for member, frame in zip(present, frames, strict=True):
                self._send(member, frame, arrays(member))

    def _send(self, member: Member, frame: bytes, arrays: Sequence[Any]) -> None:
        assert member.peer is not None, "it is here"
        if self.desks.has(member):
            if self.desks.post(member, frame, self._call):
                return
            arrays = ()
        if not self._socket.send(member.peer, [frame, *arrays]):
            self._vigil.suspect(time.monotonic())

    def _settle_all(self, replies: Iterable[tuple[Member, Reply | WireError]]) -> None:
        for member, reply in replies:
            try:
                if isinstance(reply, WireError):
                    raise reply
                self._settle(member, reply)
            except WireError as error:
                self._replies[member.index] = loss = Lost(f"it put nonsense into its mailbox: {error}")
                self.give_up(member, loss)

    def _pump(self, timeout_s: float) -> bool:
        """Deal with one message from the socket, if one comes."""
        return self.inbox.listen(timeout_s, self._accept)

    def post(self, member: Member, make: Callable[[int], Request], arrays: Sequence[Any] = ()) -> int:
        """Send one worker a request over its socket, outside any call of all; returns the request's number."""
        self._call += 1
        assert member.peer is not None, "it is here"
        with self._calm:
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
        self._looked_at = now = time.monotonic()
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
        self._settle_all(self.desks.take([member]))
        until = time.monotonic() + _SLICE_S
        while member.owes is not None and time.monotonic() < until and self._pump(0.0):
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
        self.desks.drop(member)
        self._door.admit_heir(member)
