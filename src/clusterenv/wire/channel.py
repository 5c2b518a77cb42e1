"""Channel: a worker's way to the head, whichever transports it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire import messages
from clusterenv.wire.messages import Reply, Request, Step, Stepped, Stop
from clusterenv.wire.planes import Planes, fill
from clusterenv.wire.shared import WorkerDesk
from clusterenv.wire.zeromq import WorkerSocket


class Channel:
    """Receives requests and sends replies; `planes` hold the arrays that go with them."""

    def __init__(self, socket: WorkerSocket) -> None:
        self._socket = socket
        self._desk: WorkerDesk | None = None
        self._planes: Planes | None = None

    def use(self, planes: Planes, desk: WorkerDesk | None) -> None:
        """From now on keep arrays in these planes; with a desk they are shared, and messages go over it."""
        self._planes = planes
        self._desk = desk

    def receive(self, timeout_s: float) -> Request | None:
        """Return the head's next request, its arrays in place; None if nothing came in time."""
        if self._desk is not None:
            if not self._desk.wait(timeout_s):
                return None
            if self._desk.is_stopped:
                return Stop()
            frame = self._desk.take()
            if frame is not None:
                return messages.decode_request(frame)
            timeout_s = 60.0  # The head has said that it is sending it.
        frames = self._socket.receive(timeout_s)
        if frames is None:
            return None
        request = messages.decode_request(frames[0].buffer)
        self._fill(request, [frame.buffer for frame in frames[1:]])
        return request

    def send(self, reply: Reply) -> None:
        """Send a reply, and the filled planes with it where they are not shared."""
        frame = messages.encode(reply)
        if self._desk is not None:
            self._desk.post(frame, lambda large: self._socket.send([large]))
        elif isinstance(reply, Stepped):
            assert self._planes is not None
            self._socket.send([frame, *self._planes.results()])
        else:
            self._socket.send([frame])

    def _fill(self, request: Request, frames: Sequence[memoryview]) -> None:
        wanted: list[NDArray[Any]] = []
        if isinstance(request, Step) and request.actions is None and self._desk is None and self._planes is not None:
            wanted = self._planes.actions
        if len(frames) != len(wanted):
            raise WireError(f"Expected {len(wanted)} arrays with {type(request).__name__}, got {len(frames)}.")
        fill(wanted, frames)
