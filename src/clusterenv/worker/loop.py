"""The worker's loop: receive a request, let the host do it, send the reply."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import socket as sockets
import traceback
from typing import Any, assert_never

import gymnasium as gym

from clusterenv.wire import values
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.channel import Channel
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import (
    PROTOCOL,
    Assign,
    Failed,
    Invoke,
    Join,
    Ready,
    Refused,
    Reply,
    Reset,
    Returned,
    SetAttribute,
    Step,
    Stepped,
    Stop,
)
from clusterenv.wire.planes import Planes
from clusterenv.wire.shared import Segment, WorkerDesk
from clusterenv.wire.ticket import Ticket
from clusterenv.wire.zeromq import WorkerSocket
from clusterenv.worker.host import Host
from clusterenv.worker.native import make_host

log = logging.getLogger(__name__)

_LOOK_UP_S = 1.0  # How often an idle worker checks that its head still lives.


def run_worker(ticket: Ticket, worker_index: int) -> None:
    """Join the head and serve it until it says stop or is gone."""
    socket = WorkerSocket(ticket)
    worker = _Worker(ticket, Channel(socket))
    try:
        worker.join(worker_index)
        worker.serve()
    finally:
        worker.close()
        socket.close(linger_s=1.0)


class _Worker:
    def __init__(self, ticket: Ticket, channel: Channel) -> None:
        self._ticket = ticket
        self._channel = channel
        self._host: Host | None = None
        self._start = 0

    def join(self, worker_index: int) -> None:
        self._channel.send(
            Join(protocol=PROTOCOL, worker_index=worker_index, pid=os.getpid(), hostname=sockets.gethostname())
        )
        self._worker_index = worker_index

    def serve(self) -> None:
        while True:
            request = self._channel.receive(_LOOK_UP_S)
            if request is None:
                if self._is_orphaned():
                    log.info("the head is gone: worker %d ends", self._worker_index)
                    return
            elif isinstance(request, Stop):
                return
            elif isinstance(request, Refused):
                raise SystemExit(f"The head refused this worker: {request.reason}")
            elif isinstance(request, Assign):
                self._take(request)
            else:
                self._channel.send(self._answer(request))

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def _is_orphaned(self) -> bool:
        return self._ticket.parent_pid is not None and os.getppid() != self._ticket.parent_pid

    def _take(self, request: Assign) -> None:
        """Make the shard's environments, and only then switch to shared memory: errors come over the socket."""
        self._start = request.start
        try:
            assignment: Assignment = _unpickle(request.code)
            _register(assignment.registry)
            segment = None
            if request.segment is not None:
                segment = Segment.attach(request.segment, request.nonce, assignment.num_workers)
            planes = _lay_planes(assignment, segment, request.start, request.stop)
            self._host = make_host(assignment, planes)
            self._host.open()
        except Exception as error:  # noqa: BLE001 - a user's constructor may raise anything; it is reported
            self._channel.send(self._failure(request.call, error))
            return
        # What lives now lives as long as the worker: the collector need not walk it at every generation.
        gc.collect()
        gc.freeze()
        self._channel.send(Ready(call=request.call, shares_memory=segment is not None))
        self._channel.use(planes, None if segment is None else WorkerDesk(segment.desk(self._worker_index)))

    def _answer(self, request: Reset | Step | Invoke | SetAttribute) -> Reply:
        host = self._host
        assert host is not None, "the head assigns before it asks"
        try:
            match request:
                case Step():
                    infos = host.step(None if request.actions is None else _unpickle(request.actions))
                case Reset():
                    options = None if request.options is None else _unpickle(request.options)
                    infos = host.reset(request.seeds, request.mask, options)
                case Invoke():
                    args, kwargs = _unpickle(request.arguments)
                    return Returned(request.call, values.dumps(host.call(request.name, args, kwargs)))
                case SetAttribute():
                    host.set_attr(request.name, _unpickle(request.values))
                    return Returned(request.call, values.dumps([]))
                case _:
                    assert_never(request)
            objects = host.objects()
            return Stepped(
                request.call,
                values.dumps(infos) if infos else None,
                values.dumps(objects) if objects else None,
            )
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; it is reported
            return self._failure(request.call, error)

    def _failure(self, call: int, error: Exception) -> Failed:
        row = None if self._host is None else self._host.failed_row
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
            spec = _unpickle(pickled)
        except Exception:
            log.debug("an environment registered on the head cannot be registered here", exc_info=True)
        else:
            gym.registry.setdefault(spec.id, spec)


def _lay_planes(assignment: Assignment, segment: Segment | None, start: int, stop: int) -> Planes:
    actions, observations = Layout(assignment.action_space), Layout(assignment.observation_space)
    if segment is None:
        return Planes.allocate(actions, observations, stop - start)
    return Planes.over(segment.planes_memory, actions, observations, assignment.num_envs).rows(start, stop)


def _unpickle(data: bytes) -> Any:
    """Read code and arguments. Only a worker does this, and only with what its head sent over the encrypted channel."""
    return pickle.loads(data)  # noqa: S301 - see above
