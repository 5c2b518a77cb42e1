"""Channel: a worker's connection to the head, over a socket and, with shared memory, a mailbox.

A reply takes the same way as its request: calls to all workers use the mailbox, if there is one, and requests to this
worker alone (such as its part of a stream) use the socket. So there is no mode on which head and worker could disagree.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.board import Board
from clusterenv.wire.messages import Reply, Request
from clusterenv.wire.shared import WorkerMailbox
from clusterenv.wire.zeromq import WorkerSocket

log = logging.getLogger(__name__)

_ON_ITS_WAY_S = 60.0  # How long a message may take to arrive after the head has announced it.
_PROGRESS_S = 0.5  # How often to report the progress of a long call to a head that shares no memory.
_LOOK_S = 0.02  # How often, during a long call, to check for weights that others on this machine wait for.

Message: TypeAlias = tuple[Request, list[memoryview]]


class Channel:
    """Receives requests and sends replies, along with their arrays unless these are in shared memory.

    Attributes:
        weights: The new weights that came with the last request, if any.
    """

    def __init__(self, socket: WorkerSocket, hang_s: float, board: Board | None = None) -> None:
        """Use a socket, until there is a mailbox as well.

        Args:
            socket: A socket connected to the head.
            hang_s: A call without progress for this long is considered hung.
            board: Where to keep weights that other workers on this machine need, too.
        """
        self.weights: memoryview | None = None
        self._socket = socket
        self._mailbox: WorkerMailbox | None = None
        self._actions: Sequence[NDArray[Any]] = ()
        self._backlog: deque[Message] = deque()  # Received over the socket, and not begun yet.
        self._num_received = 0  # Counts the same messages as the head's counter in the mailbox.
        self._came_by_mailbox = False
        self._call = 0
        self._hang_s = hang_s
        self._began_at = self._tell_at = 0.0
        self._board = board
        self._has_kept = False  # Whether this worker has ever received weights for others.
        self._look_at = 0.0

    def use(self, actions: Sequence[NDArray[Any]], mailbox: WorkerMailbox | None) -> None:
        """From now on put actions into these arrays; with a mailbox, arrays are shared and calls come through it."""
        self._actions = actions
        self._mailbox = mailbox
        self._num_received = 0

    def receive(self, timeout_s: float) -> Request | None:
        """Return the head's next request, its arrays in place; None if nothing came in time."""
        mailbox = self._mailbox
        if mailbox is None:
            self._read_socket(0.0 if self._backlog else timeout_s)
        else:
            if mailbox.wait(0.0 if self._backlog else timeout_s) and (request := self._look(mailbox)) is not None:
                return request
            if mailbox.is_stopped:
                return messages.Stop()
        self._came_by_mailbox = False
        return self._take_most_urgent()

    def send(self, reply: Reply, arrays: Iterable[NDArray[Any]] = ()) -> None:
        """Send a reply the same way as its request came, along with arrays unless they are shared."""
        mailbox = self._mailbox
        if mailbox is None:
            self._socket.send([messages.encode(reply), *arrays])
        elif not self._came_by_mailbox:
            self._socket.send([messages.encode(reply)])
        elif isinstance(reply, messages.Stepped) and reply.is_plain:
            mailbox.post_plain(reply.call, reply.generation)
        else:
            assert not isinstance(reply, messages.Register | messages.Join | messages.Missing), "not by mailbox"
            mailbox.post(messages.encode(reply), reply.call, lambda large: self._socket.send([large]))

    def tick(self) -> None:
        """Note that a step or reset of the current call is finished, so that the head does not consider it hung."""
        if self._mailbox is not None:
            self._mailbox.tick()
            return
        now = time.monotonic()
        if now > self._tell_at:
            # Less and less often: a busy learner does not read these messages, and ZeroMQ's queue is limited.
            self._tell_at = now + min(max(_PROGRESS_S, (now - self._began_at) / 8), self._hang_s / 4)
            self._socket.send([messages.encode(messages.Progress(self._call))])
        if self._has_kept and now > self._look_at:
            self._look_at = now + _LOOK_S
            self._read_socket(0.0)

    def _look(self, mailbox: WorkerMailbox) -> Request | None:
        """Take the call in the mailbox, or else read all messages that the head has sent over the socket."""
        found = mailbox.take()
        if isinstance(found, messages.Step):
            self._came_by_mailbox = True
            return found
        if mailbox.is_stopped:
            return messages.Stop()
        while self._num_received < mailbox.num_sent:
            if not self._read_socket(_ON_ITS_WAY_S, all_there_is=False):
                raise WireError(f"A message that the head has sent did not arrive within {_ON_ITS_WAY_S:g} s.")
        if found is None:
            return None
        self._came_by_mailbox = True
        if isinstance(found, bytes):
            self.weights = None
            return messages.decode_request(found)
        for message in self._backlog:
            if getattr(message[0], "call", None) == found:
                self._backlog.remove(message)
                self._take_arrays(*message)
                return message[0]
        raise WireError(f"The head announced call {found}, which did not arrive.")

    def _read_socket(self, timeout_s: float, *, all_there_is: bool = True) -> bool:
        """Read messages from the socket into the backlog; returns whether there were any."""
        has_come = False
        while (frames := self._socket.receive(timeout_s)) is not None:
            request = messages.decode_request(frames[0].buffer)
            if isinstance(request, messages.Ping):
                continue
            arrays = [frame.buffer for frame in frames[1:]]
            self._backlog.append((request, arrays))
            if arrays and isinstance(request, messages.Adopt | messages.Collect | messages.Decide | messages.Load):
                self._keep(request, arrays)
            self._num_received += not isinstance(request, messages.Stop | messages.Refused | messages.Registered)
            has_come, timeout_s = True, 0.0
            # A stream's rollouts are requested ahead of time, so more urgent messages may follow them. After any other
            # request, nothing more comes before it is answered.
            if not all_there_is or not isinstance(request, messages.Collect | messages.Load):
                break
        return has_come

    def _keep(
        self, request: messages.Adopt | messages.Collect | messages.Decide | messages.Load, arrays: list[memoryview]
    ) -> None:
        """Put weights on the board at once, if requested, so that others need not wait until they are loaded here."""
        copy, board = request.copy, self._board
        if copy is None or board is None or request.version is None or copy.board != board.address:
            return
        self._has_kept = True
        try:
            board.keep(request.version, arrays)
        except OSError as error:  # The other workers find nothing, and ask the head for the weights.
            log.warning("version %d of the policy cannot be kept for other workers: %s", request.version, error)

    def _take_most_urgent(self) -> Request | None:
        """Return the oldest request, but rollouts last: new weights and a stop must not wait behind them."""
        if not self._backlog:
            return None
        message = next((each for each in self._backlog if not isinstance(each[0], messages.Collect)), self._backlog[0])
        self._backlog.remove(message)
        request = message[0]
        if isinstance(request, messages.Cancel):
            begun = [
                each
                for each in self._backlog
                if not isinstance(each[0], messages.Collect) or each[0].call > request.call
            ]
            self._backlog = deque(begun)
        self._take_arrays(*message)
        return request

    def go_on_with(self, call: int) -> None:
        """From now on report the progress of a call that was held back while other messages came."""
        self._call, self._began_at = call, time.monotonic()
        self._tell_at = self._began_at + min(_PROGRESS_S, self._hang_s / 4)

    def _take_arrays(self, request: Request, frames: Sequence[memoryview]) -> None:
        self.weights = None
        self._call = getattr(request, "call", 0)
        if self._mailbox is None:
            self._began_at = time.monotonic()
            self._tell_at = self._began_at + min(_PROGRESS_S, self._hang_s / 4)
        if (
            isinstance(request, messages.Adopt | messages.Collect | messages.Decide | messages.Load)
            and request.version is not None
        ):
            if frames:
                self.weights = frames[0] if len(frames) == 1 else memoryview(b"".join(frames))
            elif self._mailbox is None and request.copy is None and not isinstance(request, messages.Load):
                raise WireError(f"Expected weights with {type(request).__name__}, got none.")
        elif isinstance(request, messages.Step) and request.actions is None and self._mailbox is None:
            fill(self._actions, frames)
        elif frames:
            raise WireError(f"{len(frames)} unexpected arrays with {type(request).__name__}.")
