"""Hub: the head's side of the conversation: sends a call, awaits the answers, notices who is missing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import zmq
from numpy.typing import NDArray

from clusterenv.config import Timeouts
from clusterenv.errors import CallTimeout, LaunchError, WireError, WorkerFailed, WorkerLost
from clusterenv.head.failure import rebuild
from clusterenv.head.roster import Member, Roster
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import PROTOCOL, Failed, Join, Refused, Reply, Request, Stepped, Stop
from clusterenv.wire.shared import Bell, HeadDesk
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_SLICE_S = 0.1  # How long to sleep at most before looking whether a worker has died.

Landing = Callable[[Member, Reply], Sequence[NDArray[Any]]]


def _no_arrays(member: Member) -> Sequence[Any]:
    return ()


class Hub:
    """Talks to the workers of one run. One call is under way at a time.

    Attributes:
        members: The workers, in the order of their environments.
        bell: Rings when the last worker that shares memory has answered.
        landing: Says into which arrays the frames that come with a reply belong.
    """

    def __init__(self, socket: HeadSocket, fleet: Fleet, shards: list[tuple[int, int]], timeouts: Timeouts) -> None:
        self.bell: Bell | None = None
        self.landing: Landing = lambda member, reply: ()
        self._socket = socket
        self._fleet = fleet
        self._roster = Roster(shards)
        self.members = self._roster.members
        self._timeouts = timeouts
        self._desks: list[HeadDesk | None] = [None] * len(shards)
        self._replies: list[Reply | None] = [None] * len(shards)
        self._call = 0
        self._num_desks = 0
        self._is_plain = False
        self._is_open = False
        self._owner_pid = os.getpid()

    def shares_memory(self, member: Member) -> bool:
        """Whether this worker and the head see the same arrays."""
        return self._desks[member.index] is not None

    def use_desk(self, member: Member, desk: HeadDesk) -> None:
        """From now on talk to this worker over shared memory."""
        self._desks[member.index] = desk

    def gather_workers(self) -> None:
        """Wait until every worker has joined.

        Raises:
            LaunchError: A worker ended instead, or they took too long.
        """
        deadline = time.monotonic() + self._timeouts.join_s
        while missing := [member for member in self.members if member.peer is None]:
            self._pump(_SLICE_S)
            exits = self._fleet.exits()
            for member in missing:
                if member.peer is None and member.index in exits:
                    raise LaunchError(
                        f"Worker {member.index} ended ({exits[member.index]}) before it joined. {self._log_of(member)}"
                    )
            if time.monotonic() > deadline:
                names = ", ".join(str(member.index) for member in missing)
                raise LaunchError(
                    f"Only {len(self.members) - len(missing)} of {len(self.members)} workers joined within "
                    f"{self._timeouts.join_s:g} s. Missing: {names}. {self._log_of(missing[0])} "
                    f"Workers must reach {self._socket.ticket.endpoint}; Timeouts(join_s=...) gives them longer."
                )

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

    @property
    def all_share_memory(self) -> bool:
        """Whether every worker and the head see the same arrays."""
        return None not in self._desks

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

    def collect(self, timeout_s: float | None = None) -> list[tuple[Member, Reply]]:
        """Wait until every worker that owes an answer has given it.

        Plain answers to a plain step are left out.

        Raises:
            CallTimeout: One has not answered in time; `collect` may be called again.
            WorkerLost: One has died.
            WorkerFailed: An environment or policy raised.
        """
        answers = self._await_answers(self._timeouts.call_s if timeout_s is None else timeout_s)
        for member, reply in answers:
            if isinstance(reply, Failed):
                self._raise_failure(member, reply)
        return answers

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers: ask, wait, then insist. Never raises because one is dead or does not answer."""
        if self._owner_pid != os.getpid():
            return  # A forked copy of the head must not end its parent's workers.
        for member, desk in zip(self.members, self._desks, strict=True):
            if desk is not None:
                desk.stop()
            elif member.peer is not None:
                self._socket.send(member.peer, [messages.encode(Stop())])
        self._fleet.stop(0.0 if terminate else self._timeouts.close_s if timeout_s is None else timeout_s)
        self._socket.close()

    def _await_answers(self, timeout_s: float) -> list[tuple[Member, Reply]]:
        if self._is_plain and self._collect_plain(timeout_s):
            self._is_open = False
            return []
        deadline = time.monotonic() + timeout_s
        while self._num_desks:
            self._collect_desks(deadline, timeout_s)
        while self._roster.debtors():
            self._pump(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            if self._roster.debtors():
                self._check_missing(deadline, timeout_s)
        pairs = zip(self.members, self._replies, strict=True)
        answers = [(member, reply) for member, reply in pairs if reply is not None]
        self._replies = [None] * len(self.members)
        self._is_open = False
        return answers

    def _finish_abandoned(self) -> None:
        """Wait for the answers to a call that nobody waits for any more, after Ctrl-C or a timeout, and drop them."""
        log.warning("waiting for call %d, which was interrupted, before the next one", self._call)
        self._await_answers(self._timeouts.call_s)

    def _open_call(self, members: Sequence[Member]) -> None:
        """Number a call and note who owes its answer."""
        self._is_open = True
        self._call += 1
        self._roster.owe(self._call, members)
        self._num_desks = sum([self._desks[member.index] is not None for member in members])
        if self._num_desks:
            assert self.bell is not None, "there is one where there are desks"
            self.bell.expect(self._num_desks)

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
        self._num_desks = 0 if has_rung else len(self._desks)
        if has_rung:
            self._take_all()
        return False

    def _collect_desks(self, deadline: float, timeout_s: float) -> None:
        """Wait for the workers that share memory, and take the answers once all are there."""
        assert self.bell is not None, "there is one where there are desks"
        if not self.bell.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic()))):
            self._check_missing(deadline, timeout_s)
            return
        self._num_desks = 0
        self._take_all()

    def _take_all(self) -> None:
        for member, desk in zip(self.members, self._desks, strict=True):
            if desk is not None and member.owes is not None:
                self._take(member, desk)

    def _send(self, member: Member, frame: bytes, arrays: Sequence[Any]) -> None:
        desk = self._desks[member.index]
        if desk is not None:
            if desk.post(frame, self._call):
                return
            arrays = ()
        assert member.peer is not None, "all workers have joined"
        # If it is gone, its exit says so when its answer is waited for.
        self._socket.send(member.peer, [frame, *arrays])

    def _take(self, member: Member, desk: HeadDesk) -> None:
        """Take a worker's reply from its desk; one too large for that comes over the socket, as any other does."""
        assert member.owes is not None
        if desk.is_plain(member.owes):
            self._settle(member, Stepped(member.owes, None, None))
        elif frame := desk.take(member.owes):
            self._settle(member, messages.decode_reply(frame))

    def _pump(self, timeout_s: float) -> None:
        """Deal with one message from the socket, if one comes. Nonsense is logged and harms nobody."""
        received = self._socket.receive(timeout_s)
        if received is None:
            return
        peer, frames = received
        member = self._roster.find(peer)
        try:
            if not frames:
                raise WireError("an empty message")
            reply = messages.decode_reply(frames[0].buffer)
            if isinstance(reply, Join):
                self._welcome(peer, reply)
            elif member is None:
                raise WireError(f"{type(reply).__name__} from somebody who has not joined")
            else:
                self._accept(member, reply, frames[1:])
        except WireError as error:
            # As text: a log handler that keeps the error would keep the whole hub by its traceback.
            log.warning("refused a message from %s: %s", "a stranger" if member is None else member, str(error))

    def _welcome(self, peer: bytes, join: Join) -> None:
        if join.protocol != PROTOCOL:
            reason = f"it speaks protocol {join.protocol}, the head {PROTOCOL}: install the head's clusterenv there"
        else:
            try:
                member = self._roster.join(join.worker_index, peer, join.pid, join.hostname)
            except WireError as error:
                reason = str(error)
            else:
                log.info("%s joined", member)
                return
        log.warning("refused a worker (pid %d on %s): %s", join.pid, join.hostname, reason)
        self._socket.send(peer, [messages.encode(Refused(reason))])

    def _accept(self, member: Member, reply: Reply, frames: Sequence[zmq.Frame]) -> None:
        assert not isinstance(reply, Join)
        if member.owes != reply.call:
            raise WireError(f"it answers call {reply.call}, but owes {member.owes}")
        fill(() if self.shares_memory(member) else self.landing(member, reply), [frame.buffer for frame in frames])
        self._settle(member, reply)

    def _settle(self, member: Member, reply: Reply) -> None:
        if isinstance(reply, Join):
            raise WireError(f"worker {member.index} joins a second time")
        self._roster.settle(member, reply.call)
        self._replies[member.index] = reply

    def _check_missing(self, deadline: float, timeout_s: float) -> None:
        """Raise if a worker that owes an answer has died, or time is up."""
        exits = self._fleet.exits()
        for member in self._roster.debtors():
            if member.index not in exits:
                continue
            self._take_last_words(member)
            if member.owes is not None:
                raise WorkerLost(
                    f"{str(member).capitalize()}, ended ({exits[member.index]}) while the head waited for it. "
                    f"{self._log_of(member)}",
                    worker_index=member.index,
                    env_indices=member.env_indices,
                )
        if time.monotonic() >= deadline:
            # Answers are taken from the desks when the last is there; who has answered by now is not missing.
            missing = [member for member in self._roster.debtors() if not self._has_answered(member)]
            missing = missing or self._roster.debtors()
            raise CallTimeout(
                f"No answer within {timeout_s:g} s from {'; '.join(str(member) for member in missing)}. "
                "It may be slow or hang; the call is still pending, and whatever is called next waits for it. Give it "
                f"longer with Timeouts(call_s=...), or close(). {self._log_of(missing[0])}"
            )

    def _has_answered(self, member: Member) -> bool:
        desk = self._desks[member.index]
        return desk is not None and member.owes is not None and desk.has_answered(member.owes)

    def _take_last_words(self, member: Member) -> None:
        """Take the answer that a worker gave before it ended, if it did."""
        desk = self._desks[member.index]
        if desk is not None:
            self._take(member, desk)
        if member.owes is not None:
            self._pump(0.0)

    def _log_of(self, member: Member) -> str:
        tail = self._fleet.log_tail(member.index)
        return f"The last lines of its log are:\n{tail}\n" if tail else "Its log is empty."

    def _raise_failure(self, member: Member, failed: Failed) -> NoReturn:
        is_known = failed.env_index is not None and member.start <= failed.env_index < member.stop
        env_indices = (failed.env_index,) if is_known and failed.env_index is not None else member.env_indices
        name = f"Environment {failed.env_index}" if is_known else "An environment or the policy"
        raise WorkerFailed(
            f"{name} raised {failed.type_name}: {failed.text} (on {member}). "
            f"The traceback there was:\n\n{failed.traceback}",
            worker_index=member.index,
            env_indices=env_indices,
            remote_traceback=failed.traceback,
        ) from rebuild(failed.type_module, failed.type_name, failed.text)
