"""Succession: how a new worker takes a lost one's place in a stream, step by step, while the others go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from clusterenv.head.crew import Make
from clusterenv.head.hub import NOT_HERE
from clusterenv.head.lane import Lane, Task
from clusterenv.head.outcome import Lost
from clusterenv.head.publisher import Publisher
from clusterenv.head.remote import Remote
from clusterenv.head.roster import Member
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import Adopt, Reply, Request, Reset, Stepped
from clusterenv.wire.zeromq import Frames


class Succession:
    """Starts new workers, and gives them what the others have."""

    def __init__(self, remote: Remote, publisher: Publisher, weights: Callable[[], Frames]) -> None:
        """Serve a stream.

        Args:
            remote: Its workers.
            publisher: Knows the newest version.
            weights: That version's, encoded.
        """
        self._remote = remote
        self._hub = remote.hub
        self._crew = remote.crew
        self._publisher = publisher
        self._weights = weights

    def expect(self, lane: Lane, now: float) -> None:
        """Be ready for a worker that has not come yet."""
        lane.lose(NOT_HERE, now)
        self._crew.allow(lane.member, NOT_HERE)
        lane.tasks = self._tasks_for(lane)

    def begin(self, lane: Lane, loss: Lost, now: float) -> None:
        """Give a lost worker up, and decide when to start its successor.

        Raises:
            WorkerLost: There shall be none.
        """
        lane.member.is_late = False
        self._hub.give_up(lane.member, loss)
        lane.lose(loss, now)
        # Calls say little here: those of the others go on.
        lane.restart_at = now + self._crew.allow(lane.member, loss, by_calls=False)

    def go_on(self, lane: Lane, now: float) -> None:
        """Take the next step, if it is time for it: start the worker, let it join, give it what it needs.

        Raises:
            LaunchError: It cannot be started.
            WorkerLost: It took too long once too often.
        """
        member = lane.member
        if lane.restart_at is not None:
            if now >= lane.restart_at:
                lane.restart_at = None
                if member.peer is None:  # Else it has come back by itself.
                    self._hub.restart_soon(member)
                lane.tasks = self._tasks_for(lane)
        elif member.peer is None:
            if now - lane.lost_at > self._hub.timeouts.join_s:
                self.begin(lane, Lost(f"its replacement did not join within {self._hub.timeouts.join_s:g} s"), now)
        elif not lane.tasks:
            assert lane.loss is not None, "it is a successor"
            self._crew.note_replaced(member, lane.loss, now - lane.lost_at)
            self._publisher.note_replaced(member.index, lane.version)
            lane.loss, lane.lost_at = None, 0.0
        elif lane.tasks[0].call is None:
            task = lane.tasks[0]
            task.call = self._hub.post(member, task.make, task.arrays())

    def accept(self, lane: Lane, reply: Reply, frames: Sequence[zmq.Frame]) -> None:
        """Take the answer to the step that is under way."""
        if isinstance(reply, Stepped) and not self._hub.shares_memory(lane.member):
            fill(list(self._remote.rows(lane.member).results()), [frame.buffer for frame in frames])
        lane.tasks.popleft().then(reply)

    def _tasks_for(self, lane: Lane) -> deque[Task]:
        """Return what a new worker needs: its shard, attributes that were set, a reset, the policy."""
        member, desk = lane.member, self._crew.make_desk(lane.member)

        def adopt(call: int) -> Adopt:
            lane.version = self._publisher.version
            return self._remote.adoption(call, lane.version)

        tasks = deque(
            [
                Task(
                    lambda call: self._crew.assignment(call, member, streams=True),
                    then=lambda reply: self._crew.note_ready(member, reply, desk),
                )
            ]
        )
        tasks += [Task(partial(_request, make, member)) for make in self._remote.attribute_requests()]
        tasks.append(Task(lambda call: Reset(call, list(self._crew.seeds_of(member)), None, None)))
        tasks.append(Task(adopt, self._weights))
        return tasks


def _request(make: Make, member: Member, call: int) -> Request:
    return make(call, member)
