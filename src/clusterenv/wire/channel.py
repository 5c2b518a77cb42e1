"""Channel: a worker's way to the head, whichever transports it is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import Adopt, Collect, Decide, Join, Load, Ping, Reply, Request, Step, Stepped, Stop
from clusterenv.wire.shared import WorkerDesk
from clusterenv.wire.zeromq import WorkerSocket

_LARGE_S = 60.0  # How long a request may take that is too large for its mailbox: the head is sending it.

Message: TypeAlias = tuple[Request, list[memoryview]]


class Channel:
    """Receives requests and sends replies, with the arrays that go with them where these are not shared.

    Attributes:
        weights: The new weights that came with the last request, if any did.
    """

    def __init__(self, socket: WorkerSocket) -> None:
        self.weights: memoryview | None = None
        self._socket = socket
        self._desk: WorkerDesk | None = None
        self._actions: Sequence[NDArray[Any]] = ()
        self._is_streaming = False
        self._backlog: deque[Message] = deque()

    def use(self, actions: Sequence[NDArray[Any]], desk: WorkerDesk | None) -> None:
        """From now on expect actions in these arrays; with a desk all arrays are shared, and messages go over it."""
        self._actions = actions
        self._desk = desk

    @property
    def shares_memory(self) -> bool:
        """Whether head and worker see the same arrays."""
        return self._desk is not None

    def stream(self, is_streaming: bool) -> None:
        """Take requests from the socket, even if there is a desk; or no longer. Then those not begun are forgotten."""
        self._is_streaming = is_streaming
        self._backlog.clear()

    def receive(self, timeout_s: float) -> Request | None:
        """Return the head's next request, its arrays in place; None if nothing came in time."""
        if self._is_streaming:
            message = self._most_urgent(timeout_s)
        elif self._desk is not None:
            if not self._desk.wait(timeout_s):
                return None
            if self._desk.is_stopped:
                return Stop()
            frame = self._desk.take()
            if isinstance(frame, int):
                return Step(frame, None)
            if frame:
                return messages.decode_request(frame)
            message = self._next_message(_LARGE_S)
            while message is not None and isinstance(message[0], Ping):  # They may lie here from long ago.
                message = self._next_message(_LARGE_S)
        else:
            message = self._next_message(timeout_s)
        if message is None:
            return None
        self._take_arrays(*message)
        return message[0]

    def send(self, reply: Reply, arrays: Iterable[NDArray[Any]] = ()) -> None:
        """Send a reply, and arrays with it where they are not shared."""
        if self._desk is None:
            self._socket.send([messages.encode(reply), *arrays])
        elif self._is_streaming:
            self._socket.send([messages.encode(reply)])
        elif isinstance(reply, Stepped) and reply.infos is None and reply.columns is None:
            self._desk.post_plain(reply.call, reply.generation)
        else:
            assert not isinstance(reply, Join), "a worker joins before it shares memory"
            self._desk.post(messages.encode(reply), reply.call, lambda large: self._socket.send([large]))

    def _next_message(self, timeout_s: float) -> Message | None:
        frames = self._socket.receive(timeout_s)
        if frames is None:
            return None
        return messages.decode_request(frames[0].buffer), [frame.buffer for frame in frames[1:]]

    def _most_urgent(self, timeout_s: float) -> Message | None:
        """Return what was asked for first, but rollouts last: new weights must not wait behind them."""
        if self._desk is not None and self._desk.is_stopped:
            return Stop(), []
        while message := self._next_message(0.0 if self._backlog else timeout_s):
            self._backlog.append(message)
        for message in self._backlog:
            if not isinstance(message[0], Collect):
                self._backlog.remove(message)
                return message
        return self._backlog.popleft() if self._backlog else None

    def _take_arrays(self, request: Request, frames: Sequence[memoryview]) -> None:
        self.weights = None
        comes_by_socket = self._desk is None or self._is_streaming
        if isinstance(request, Adopt | Collect | Decide | Load) and request.version is not None and comes_by_socket:
            if not frames:
                raise WireError(f"Expected weights with {type(request).__name__}, got none.")
            self.weights = frames[0] if len(frames) == 1 else memoryview(b"".join(frames))
        elif isinstance(request, Step) and request.actions is None and self._desk is None:
            fill(self._actions, frames)
        elif frames:
            raise WireError(f"{len(frames)} unexpected arrays with {type(request).__name__}.")
