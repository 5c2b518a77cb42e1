"""Hub: the head's side of the conversation: sends a call to all workers, awaits all answers, notices who is missing."""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import zmq

from clusterenv.config import Timeouts
from clusterenv.errors import CallTimeout, LaunchError, WireError, WorkerFailed, WorkerLost
from clusterenv.head.batch import ShardInfos, merge_infos
from clusterenv.head.failure import rebuild
from clusterenv.head.outcome import Outcome
from clusterenv.head.roster import Member, Roster
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages, values
from clusterenv.wire.messages import (
    PROTOCOL,
    Assign,
    Failed,
    Invoke,
    Join,
    Ready,
    Refused,
    Reply,
    Request,
    Reset,
    Returned,
    SetAttribute,
    Step,
    Stepped,
    Stop,
)
from clusterenv.wire.planes import Planes, fill
from clusterenv.wire.shared import HeadDesk, Segment
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_SLICE_S = 0.1  # How long to sleep at most before looking whether a worker has died.


class Hub:
    """Talks to the workers of one run.

    One call is under way at a time: `reset`, `step`, `invoke` or `set_attr` starts it, `finish` waits for it.
    """

    def __init__(self, socket: HeadSocket, fleet: Fleet, shards: list[tuple[int, int]], timeouts: Timeouts) -> None:
        self._socket = socket
        self._fleet = fleet
        self._roster = Roster(shards)
        self._timeouts = timeouts
        self._desks: list[HeadDesk | None] = [None] * len(shards)
        self._replies: list[Reply | None] = [None] * len(shards)
        self._segment: Segment | None = None
        self._planes: Planes | None = None
        self._rows: list[Planes] = []
        self._call = 0
        self._owner_pid = os.getpid()

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, on their own machines."""
        return tuple(member.pid or 0 for member in self._roster.members)

    def gather_workers(self) -> None:
        """Wait until every worker has joined.

        Raises:
            LaunchError: A worker ended instead, or they took too long.
        """
        deadline = time.monotonic() + self._timeouts.join_s
        while missing := [member for member in self._roster.members if member.peer is None]:
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
                    f"Only {len(self._desks) - len(missing)} of {len(self._desks)} workers joined within "
                    f"{self._timeouts.join_s:g} s. Missing: {names}. {self._log_of(missing[0])} "
                    f"Workers must reach {self._socket.ticket.endpoint}; Timeouts(join_s=...) gives them longer."
                )

    def assign(self, planes: Planes, segment: Segment | None, code: Callable[[int, int], bytes], nonce: bytes) -> None:
        """Give every worker its shard, and wait until its environments are made.

        Args:
            planes: The whole run's planes; they lie in the segment if there is one.
            segment: Shared memory, offered to every worker; a worker that cannot reach it uses the socket.
            code: Makes the pickled assignment of a shard.
            nonce: What the segment begins with.
        """
        self._planes, self._segment = planes, segment
        self._rows = [planes.rows(member.start, member.stop) for member in self._roster.members]
        address = None if segment is None else segment.address
        desks = [None if segment is None else HeadDesk(segment.desk(member.index)) for member in self._roster.members]
        self._start(
            lambda call, member: Assign(
                call, member.start, member.stop, code(member.start, member.stop), address, nonce
            )
        )
        replies = self._collect(self._timeouts.join_s)
        for index, reply in enumerate(replies):
            assert isinstance(reply, Ready)
            if reply.shares_memory:
                self._desks[index] = desks[index]

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> None:
        """Start resetting the environments, or those in the mask."""
        pickled = None if options is None else cloudpickle.dumps(options)
        self._start(
            lambda call, member: Reset(
                call,
                list(seeds[member.start : member.stop]),
                None if mask is None else list(mask[member.start : member.stop]),
                pickled,
            )
        )

    def step(self, actions: Any | None) -> None:
        """Start a step.

        Args:
            actions: Anything that can be sliced by environment index; None if they are in the planes already.
        """
        if actions is None:
            self._call += 1
            frame = messages.encode(Step(self._call, None))
            self._roster.owe(self._call)
            for member, rows in zip(self._roster.members, self._rows, strict=True):
                self._send(member, frame, rows.actions)
        else:
            self._start(lambda call, member: Step(call, pickle.dumps(actions[member.start : member.stop])))

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start calling a method, or reading an attribute, of every environment."""
        arguments = cloudpickle.dumps((args, kwargs))
        self._start(lambda call, _: Invoke(call, name, arguments))

    def set_attr(self, name: str, items: Sequence[Any]) -> None:
        """Start setting an attribute of every environment."""
        self._start(
            lambda call, member: SetAttribute(call, name, cloudpickle.dumps(list(items[member.start : member.stop])))
        )

    def finish(self, timeout_s: float | None) -> Outcome:
        """Wait for the call under way.

        Raises:
            CallTimeout: A worker has not answered in time; `finish` may be called again.
            WorkerLost: A worker has died.
            WorkerFailed: An environment raised.
        """
        replies = self._collect(self._timeouts.call_s if timeout_s is None else timeout_s)
        shards: list[ShardInfos] = []
        objects: list[list[list[Any]]] = []
        results: list[Any] = []
        for member, reply in zip(self._roster.members, replies, strict=True):
            if isinstance(reply, Returned):
                results += _result_list(values.loads(reply.values))
            elif isinstance(reply, Stepped):
                if reply.infos is not None:
                    shards.append(ShardInfos(member.start, member.stop, values.loads(reply.infos)))
                if reply.columns is not None:
                    objects.append(values.loads(reply.columns))
        infos = merge_infos(shards, self._roster.members[-1].stop) if shards else {}
        columns = [[item for part in parts for item in part] for parts in zip(*objects, strict=True)]
        return Outcome(infos, columns, results)

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers: ask, wait, then insist. Never raises because one is dead or does not answer."""
        if self._owner_pid != os.getpid():
            return  # A forked copy of the head must not end its parent's workers.
        for member, desk in zip(self._roster.members, self._desks, strict=True):
            if desk is not None:
                desk.stop()
            elif member.peer is not None:
                self._socket.send(member.peer, [messages.encode(Stop())])
        self._fleet.stop(0.0 if terminate else self._timeouts.close_s if timeout_s is None else timeout_s)
        self._socket.close()
        if self._segment is not None:
            self._segment.close()

    def _start(self, make: Callable[[int, Member], Request]) -> None:
        """Send every worker its part of a new call; all parts are made before the first is sent."""
        frames = [messages.encode(make(self._call + 1, member)) for member in self._roster.members]
        self._call += 1
        self._roster.owe(self._call)
        for member, frame in zip(self._roster.members, frames, strict=True):
            self._send(member, frame, [])

    def _send(self, member: Member, frame: bytes, arrays: Sequence[Any]) -> None:
        desk = self._desks[member.index]
        if desk is not None:
            if desk.post(frame):
                return
            arrays = []
        assert member.peer is not None, "all workers have joined"
        # If it is gone, its exit says so when its answer is waited for.
        self._socket.send(member.peer, [frame, *arrays])

    def _collect(self, timeout_s: float) -> list[Reply]:
        """Wait until every worker has answered, and raise what the first failing one says."""
        deadline = time.monotonic() + timeout_s
        for member, desk in zip(self._roster.members, self._desks, strict=True):
            while member.owes is not None:
                if desk is not None and desk.wait(_SLICE_S):
                    self._take(member, desk, deadline)
                elif desk is None:
                    self._pump(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
                if member.owes is not None:
                    self._check_missing(deadline, timeout_s)
        replies: list[Reply] = []
        for member in self._roster.members:
            reply, self._replies[member.index] = self._replies[member.index], None
            assert reply is not None, "a settled call has a reply"
            replies.append(reply)
        for member, reply in zip(self._roster.members, replies, strict=True):
            if isinstance(reply, Failed):
                self._raise_failure(member, reply)
        return replies

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
        if isinstance(reply, Stepped) and self._desks[member.index] is None:
            fill(list(self._rows[member.index].results()), [frame.buffer for frame in frames])
        elif frames:
            raise WireError(f"{len(frames)} unexpected arrays with {type(reply).__name__}")
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

    def _raise_failure(self, member: Member, failed: Failed) -> None:
        is_known = failed.env_index is not None and member.start <= failed.env_index < member.stop
        env_indices = (failed.env_index,) if is_known and failed.env_index is not None else member.env_indices
        name = f"Environment {failed.env_index}" if is_known else "An environment"
        raise WorkerFailed(
            f"{name} raised {failed.type_name}: {failed.text} (on {member}). "
            f"The traceback there was:\n\n{failed.traceback}",
            worker_index=member.index,
            env_indices=env_indices,
            remote_traceback=failed.traceback,
        ) from rebuild(failed.type_module, failed.type_name, failed.text)


def make_nonce() -> bytes:
    """Return random bytes that tell one run's shared memory from any other's."""
    return secrets.token_bytes(16)


def _result_list(results: Any) -> list[Any]:
    if not isinstance(results, list):
        raise WireError(f"A worker returned {type(results).__name__} where a list was expected.")
    return results
