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
from clusterenv.wire.messages import PROTOCOL, Failed, Join, Refused, Reply, Request, Stop
from clusterenv.wire.shared import HeadDesk
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_SLICE_S = 0.1  # How long to sleep at most before looking whether a worker has died.

Landing = Callable[[Member, Reply], Sequence[NDArray[Any]]]


def _no_arrays(member: Member) -> Sequence[Any]:
    return ()


class Hub:
    """Talks to the workers of one run. One call is under way at a time.

    Attributes:
        landing: Says into which arrays the frames that come with a reply belong.
    """

    def __init__(self, socket: HeadSocket, fleet: Fleet, shards: list[tuple[int, int]], timeouts: Timeouts) -> None:
        self.landing: Landing = lambda member, reply: ()
        self._socket = socket
        self._fleet = fleet
        self._roster = Roster(shards)
        self._timeouts = timeouts
        self._desks: list[HeadDesk | None] = [None] * len(shards)
        self._replies: list[Reply | None] = [None] * len(shards)
        self._call = 0
        self._owner_pid = os.getpid()

    @property
    def members(self) -> list[Member]:
        """The workers, in the order of their environments."""
        return self._roster.members

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
        members = self.members if members is None else members
        frames = [messages.encode(make(self._call + 1, member)) for member in members]
        self._call += 1
        self._roster.owe(self._call, members)
        for member, frame in zip(members, frames, strict=True):
            self._send(member, frame, arrays(member))

    def broadcast(self, make: Callable[[int], Request], arrays: Callable[[Member], Sequence[Any]] = _no_arrays) -> None:
        """Start a call with the same request for every worker, encoded once."""
        self._call += 1
        frame = messages.encode(make(self._call))
        self._roster.owe(self._call, self.members)
        for member in self.members:
            self._send(member, frame, arrays(member))

    def collect(self, timeout_s: float | None = None) -> list[tuple[Member, Reply]]:
        """Wait until every worker that owes an answer has given it.

        Raises:
            CallTimeout: One has not answered in time; `collect` may be called again.
            WorkerLost: One has died.
            WorkerFailed: An environment or policy raised.
        """
        timeout_s = self._timeouts.call_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        for member, desk in zip(self.members, self._desks, strict=True):
            while member.owes is not None:
                if desk is not None and desk.wait(_SLICE_S):
                    self._take(member, desk, deadline)
                elif desk is None:
                    self._pump(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
                if member.owes is not None:
                    self._check_missing(deadline, timeout_s)
        answers = [
            (member, reply) for member, reply in zip(self.members, self._replies, strict=True) if reply is not None
        ]
        self._replies = [None] * len(self.members)
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

    def _send(self, member: Member, frame: bytes, arrays: Sequence[Any]) -> None:
        desk = self._desks[member.index]
        if desk is not None:
            if desk.post(frame):
                return
            arrays = ()
        assert member.peer is not None, "all workers have joined"
        # If it is gone, its exit says so when its answer is waited for.
        self._socket.send(member.peer, [frame, *arrays])

    def _take(self, member: Member, desk: HeadDesk, deadline: float) -> None:
        """Take a worker's reply from its desk, or, if it was too large for that, from the socket."""
        frame = desk.take()
        if frame is not None:
            self._settle(member, messages.decode_reply(frame))
        while member.owes is not None:
            self._pump(_SLICE_S)
            if time.monotonic() >= deadline or member.index in self._fleet.exits():
                return

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
        assert not isinstance(reply, Join)
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
            missing = self._roster.debtors()
            raise CallTimeout(
                f"No answer within {timeout_s:g} s from {'; '.join(str(member) for member in missing)}. "
                "It may be slow or hang; the call is still pending. Wait again with the same *_wait(), give it longer "
                f"with Timeouts(call_s=...), or close(). {self._log_of(missing[0])}"
            )

    def _take_last_words(self, member: Member) -> None:
        """Take the answer that a worker gave before it ended, if it did."""
        desk = self._desks[member.index]
        if desk is None:
            self._pump(0.0)
        elif desk.wait(0.0):
            self._take(member, desk, deadline=0.0)

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
