"""Channel: a worker's way to the head, whichever transports it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import Adopt, Collect, Decide, Join, Ping, Reply, Request, Step, Stepped, Stop
from clusterenv.wire.shared import WorkerDesk
from clusterenv.wire.zeromq import WorkerSocket


class Channel:
    """Receives requests and sends replies, with the arrays that go with them where these are not shared.

    Attributes:
        weights: The frame with new weights that came with the last request, if one did.
    """

    def __init__(self, socket: WorkerSocket) -> None:
        self.weights: memoryview | None = None
        self._socket = socket
        self._desk: WorkerDesk | None = None
        self._actions: Sequence[NDArray[Any]] = ()

    def use(self, actions: Sequence[NDArray[Any]], desk: WorkerDesk | None) -> None:
        """From now on expect actions in these arrays; with a desk all arrays are shared, and messages go over it."""
        self._actions = actions
        self._desk = desk

    @property
    def shares_memory(self) -> bool:
        """Whether head and worker see the same arrays."""
        return self._desk is not None

    def receive(self, timeout_s: float) -> Request | None:
        """Return the head's next request, its arrays in place; None if nothing came in time."""
        if self._desk is not None:
            if not self._desk.wait(timeout_s):
                return None
            if self._desk.is_stopped:
                return Stop()
            frame = self._desk.take()
            if isinstance(frame, int):
                return Step(frame, None)
            if frame:
                return messages.decode_request(frame)
            timeout_s = 60.0  # The head has said that it is sending it.
        while True:
            frames = self._socket.receive(timeout_s)
            if frames is None:
                return None
            request = messages.decode_request(frames[0].buffer)
            if self._desk is None or not isinstance(request, Ping):  # Pings may lie here from long ago.
                break
        self._take_arrays(request, [frame.buffer for frame in frames[1:]])
        return request

    def send(self, reply: Reply, arrays: Iterable[NDArray[Any]] = ()) -> None:
        """Send a reply, and arrays with it where they are not shared."""
        if self._desk is None:
            self._socket.send([messages.encode(reply), *arrays])
        elif isinstance(reply, Stepped) and reply.infos is None and reply.columns is None:
            self._desk.post_plain(reply.call)
        else:
            assert not isinstance(reply, Join), "a worker joins before it shares memory"
            self._desk.post(messages.encode(reply), reply.call, lambda large: self._socket.send([large]))

    def _take_arrays(self, request: Request, frames: Sequence[memoryview]) -> None:
        self.weights = None
        if isinstance(request, Adopt | Collect | Decide) and request.version is not None and self._desk is None:
            if len(frames) != 1:
                raise WireError(f"Expected weights with {type(request).__name__}, got {len(frames)} arrays.")
            self.weights = frames[0]
        elif isinstance(request, Step) and request.actions is None and self._desk is None:
            fill(self._actions, frames)
        elif frames:
            raise WireError(f"{len(frames)} unexpected arrays with {type(request).__name__}.")
