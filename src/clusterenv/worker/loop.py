"""The worker's loop: receive a request, let the shard do it, send the reply."""

from __future__ import annotations

import gc
import logging
import os
import socket as sockets
import traceback

import gymnasium as gym

from clusterenv.wire import values
from clusterenv.wire.arrays import allocate, carver
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.channel import Channel
from clusterenv.wire.layout import Layout
from clusterenv.wire.link import Link
from clusterenv.wire.messages import (
    PROTOCOL,
    Assign,
    EndStream,
    Failed,
    Join,
    Load,
    Ping,
    Ready,
    Refused,
    Returned,
    Step,
    Stop,
    Stream,
)
from clusterenv.wire.planes import Planes
from clusterenv.wire.shared import WorkerDesk, open_offer, planes_memory
from clusterenv.wire.ticket import Ticket
from clusterenv.wire.versions import installed_versions
from clusterenv.wire.zeromq import WorkerSocket
from clusterenv.worker.answers import Answers, ShardRequest, unpickle
from clusterenv.worker.leave import Leave
from clusterenv.worker.shard import Shard
from clusterenv.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

_LOOK_UP_S = 1.0  # How often an idle worker checks that its head still lives.


def run_worker(ticket: Ticket, worker_index: int, leave: Leave) -> None:
    """Join the head and serve it until it says stop or is gone, or this worker is asked to leave.

    The head knows a worker by its connection. If that is lost while the head lives on, the worker's environments are
    lost to the head too: the worker throws them away and joins again, as if new.
    """
    while _serve_once(ticket, worker_index, leave):
        log.warning("the connection to the head was lost: worker %d joins again, as a new one", worker_index)


def _serve_once(ticket: Ticket, worker_index: int, leave: Leave) -> bool:
    """Serve as long as one connection lasts; returns whether to try another."""
    socket = WorkerSocket(ticket)
    watchdog = Watchdog(Link(socket.events, ticket), ticket.parent_pid, socket.end_events)
    worker = _Worker(watchdog, Channel(socket), worker_index, leave)
    try:
        worker.join()
        worker.serve()
    finally:
        try:
            worker.close()
        finally:
            watchdog.stop()
            socket.close(linger_s=1.0)
    return worker.was_cut_off


class _Worker:
    def __init__(self, watchdog: Watchdog, channel: Channel, worker_index: int, leave: Leave) -> None:
        self.was_cut_off = False
        self._leave = leave
        self._watchdog = watchdog
        self._channel = channel
        self._shard: Shard | None = None
        self._answers: Answers | None = None
        self._start = 0
        self._worker_index = worker_index

    def join(self) -> None:
        self._channel.send(Join(PROTOCOL, self._worker_index, os.getpid(), sockets.gethostname(), installed_versions()))

    def serve(self) -> None:
        while not self._leave.is_wanted:
            request = self._channel.receive(_LOOK_UP_S)
            if isinstance(request, Step):  # First: it comes most often.
                self._answer(request)
            elif request is None:
                if self._watchdog.head_is_gone:
                    return
                if self._watchdog.connection_was_lost:
                    self.was_cut_off = True
                    return
            elif isinstance(request, Stop):
                return
            elif isinstance(request, Refused):
                raise SystemExit(f"The head refused this worker: {request.reason}")
            elif isinstance(request, Assign):
                self._take(request)
            elif isinstance(request, Stream):
                self._channel.send(Returned(request.call, values.dumps([])))
                self._channel.stream(True)
            elif isinstance(request, EndStream):
                self._channel.send(Returned(request.call, values.dumps([])))
                self._channel.stream(False)
            elif isinstance(request, Load):
                assert self._answers is not None, "the head assigns before it asks"
                self._answers.load(request.version, self._channel.weights)
            elif not isinstance(request, Ping):
                self._answer(request)

    def close(self) -> None:
        if self._shard is not None:
            self._shard.host.close()

    def _take(self, request: Assign) -> None:
        """Make the shard's environments, and only then switch to shared memory: errors come over the socket."""
        self._start = request.start
        try:
            assignment: Assignment = unpickle(request.code)
            _register(assignment.registry)
            memory = None if request.memory is None else open_offer(request.memory)
            planes = _lay_planes(assignment, memory, request.start, request.stop)
            self._shard = Shard(assignment, planes)
            desk = None if memory is None else WorkerDesk(memory, self._worker_index)
            names = None if desk is None else desk.names
            self._answers = Answers(assignment, self._shard, planes, self._channel.send, names=names)
            self._shard.host.open()
        except Exception as error:  # noqa: BLE001 - a user's constructor may raise anything; it is reported
            self._channel.send(self._failure(request.call, error))
            return
        # What lives now lives as long as the worker: the collector need not walk it at every generation.
        gc.collect()
        gc.freeze()
        self._channel.send(Ready(request.call, shares_memory=memory is not None))
        self._channel.use(planes.actions, desk)
        self._channel.stream(request.streams)

    def _answer(self, request: ShardRequest) -> None:
        assert self._answers is not None, "the head assigns before it asks"
        try:
            reply, arrays = self._answers.answer(request, self._channel.weights)
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; it is reported
            self._channel.send(self._failure(request.call, error))
        else:
            self._channel.send(reply, arrays)

    def _failure(self, call: int, error: Exception) -> Failed:
        row = None if self._shard is None else self._shard.host.failed_row
        return Failed(
            call=call,
            env_index=None if row is None else self._start + row,
            type_module=type(error).__module__,
            type_name=type(error).__qualname__,
            text=str(error),
            traceback="".join(traceback.format_exception(error)),
        )


def _register(registry: list[bytes]) -> None:
    """Make known the environments that were registered on the head only."""
    for pickled in registry:
        try:
            spec = unpickle(pickled)
        except Exception:
            log.debug("an environment registered on the head cannot be registered here", exc_info=True)
        else:
            gym.registry.setdefault(spec.id, spec)


def _lay_planes(assignment: Assignment, memory: memoryview | None, start: int, stop: int) -> Planes:
    actions, observations = Layout(assignment.action_space), Layout(assignment.observation_space)
    if memory is None:
        return Planes.make(actions, observations, stop - start, allocate)
    make = carver(planes_memory(memory, assignment.num_workers))
    return Planes.make(actions, observations, assignment.num_envs, make).rows(start, stop)
