"""Calls: sends requests to workers, and matches their answers to them. `send` a request, then `poll` for events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import zmq
from numpy.typing import NDArray

from clusterenv.config import Timeouts
from clusterenv.errors import WireError
from clusterenv.head.interrupts import DeferInterrupt
from clusterenv.head.joining import Joining
from clusterenv.head.liveness import Liveness
from clusterenv.head.mailboxes import Mailboxes
from clusterenv.head.worker import Owed, Worker
from clusterenv.launchers.base import Fleet
from clusterenv.wire import messages
from clusterenv.wire.arrays import fill
from clusterenv.wire.messages import (
    Collected,
    Evaluated,
    Failed,
    Join,
    Missing,
    Part,
    Progress,
    Register,
    Reply,
    Request,
    Stop,
)
from clusterenv.wire.rate_limited_log import RateLimitedLog
from clusterenv.wire.shared import AllMailboxes
from clusterenv.wire.zeromq import HeadSocket

log = logging.getLogger(__name__)

_FAREWELL_S = 0.5  # How long the last messages may take to be sent when the socket closes.
_LOOK_S = 0.1  # The longest wait before checking whether a worker is lost.
_UPKEEP_CALLS = 1024  # Calls between reads of the socket when all workers share memory: strangers' attempts pile up.
_ENOUGH = (
    64  # Messages to take in one poll: a peer that never stops sending must not keep the head from everything else.
)
_ROLLOUT_ANSWERS = 1000  # How many answers a rollout counts as, when deciding whether a worker has been useful.

Accept: TypeAlias = Callable[[Worker, Reply], None]
Destination: TypeAlias = Callable[[Reply, int], Sequence[NDArray[Any]]]


class Joined(NamedTuple):
    """A worker has joined."""

    worker: Worker


class Gone(NamedTuple):
    """A worker is lost."""

    worker: Worker
    reason: str


class Answered(NamedTuple):
    """A worker has answered; `owed.accept` takes the reply."""

    worker: Worker
    owed: Owed
    reply: Reply


class Missed(NamedTuple):
    """A worker did not find the weights that another worker on its machine should have kept for it."""

    worker: Worker
    missing: Missing


Event: TypeAlias = Joined | Gone | Answered | Missed


def no_arrays(_reply: Reply, _num_parts: int) -> Sequence[NDArray[Any]]:
    """Expect no arrays with a reply."""
    return ()


class Calls:
    """Talks to the workers of one run.

    Attributes:
        mailboxes: The mailboxes of workers that share memory.
        joining: Decides which workers may join.
        deferred: Defers Ctrl-C while several messages that belong together are sent or processed.
        last_call: The number of the most recent call.
        num_plain_steps: How many plain steps were started.
        upkeep: Called every so often during plain steps; may raise.
    """

    def __init__(self, socket: HeadSocket, fleet: Fleet, workers: Sequence[Worker], timeouts: Timeouts) -> None:
        self.mailboxes = Mailboxes(workers)
        self.joining = Joining(socket, workers)
        self.deferred = DeferInterrupt()
        self.last_call = 0
        self.num_plain_steps = 0
        self.upkeep: Callable[[], None] = lambda: None
        self._socket = socket
        self._fleet = fleet
        self._workers = workers
        self._timeouts = timeouts
        self._liveness = Liveness(socket, fleet, workers, timeouts)
        self._looked_at = 0.0
        self._early: list[Event] = []  # Events to return from the next `poll`.
        self._refusals = RateLimitedLog(log)

    @property
    def endpoint(self) -> str:
        """The address workers connect to."""
        return self._socket.ticket.endpoint

    def next_number(self) -> int:
        """Begin a call and return its number."""
        self.last_call += 1
        return self.last_call

    def send(
        self,
        worker: Worker,
        request: Request | bytes,
        call: int,
        accept: Accept,
        *,
        destination: Destination = no_arrays,
        arrays: Sequence[Any] = (),
        by_mailbox: bool = False,
        cancels: bool = False,
    ) -> None:
        """Send a worker a request, which it will answer through the same channel.

        Args:
            worker: The recipient.
            request: The request, or its encoded bytes.
            call: The request's number.
            accept: Takes the answer.
            destination: Returns the arrays to fill from the answer.
            arrays: Arrays to send along with a request that goes over the socket.
            by_mailbox: Whether to use the mailbox, if there is one. Call `Mailboxes.expect` first.
            cancels: Whether the answer settles everything that was requested before.
        """
        frame = request if isinstance(request, bytes) else messages.encode(request)
        mailbox = worker.mailbox
        with self.deferred:
            uses_mailbox = by_mailbox and mailbox is not None
            worker.owed.append(Owed(call, accept, destination, uses_mailbox, time.monotonic(), cancels))
            if mailbox is None:
                self._post(worker, [frame, *arrays])
            elif not uses_mailbox:
                self._post(worker, [frame, *arrays])
                mailbox.announce(None)
            elif not mailbox.post(frame, call):
                self._post(worker, [frame])
                mailbox.announce(call)

    def tell(self, worker: Worker, request: Request, arrays: Sequence[Any]) -> None:
        """Send a worker a message that it does not answer."""
        with self.deferred:
            self._post(worker, [messages.encode(request), *arrays])
            if worker.mailbox is not None:
                worker.mailbox.announce(None)

    def start_plain_step(self, mailboxes: AllMailboxes, buffer: int) -> None:
        """Start a step with the actions in the buffers, where all workers share memory.

        This is the hot path, so it skips all bookkeeping: owed answers are noted only if the step is slow or fails.
        """
        self.last_call = call = self.last_call + 1
        if not call % _UPKEEP_CALLS:
            with self.deferred:
                self._receive(0.0, self._early)
            self.upkeep()
        self.num_plain_steps += 1
        mailboxes.start_plain(call, buffer)

    def note_plain_step(self, accept: Accept, since: float) -> None:
        """Note the answers owed for a plain step that is slow, or had an answer that is not plain."""
        for worker in self._workers:
            worker.owed.append(Owed(self.last_call, accept, no_arrays, True, since))
        self.mailboxes.num_awaited += len(self._workers)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events, for a moment at most, and return them."""
        events, self._early = self._early, []
        timeout_s = min(timeout_s, _LOOK_S)
        if events:
            timeout_s = 0.0
        if self.mailboxes.num_awaited > 0:
            for worker, reply in self.mailboxes.wait(timeout_s):
                self._match_mailbox(worker, reply, events)
            timeout_s = 0.0
        self._receive(timeout_s, events)
        now = time.monotonic()
        if not events or now - self._looked_at > _LOOK_S:
            self._looked_at = now
            for worker, reason in self._liveness.look(now):
                heard_at = worker.progress_at
                self._hear_last_words(worker, events)
                if worker.progress_at != heard_at and worker.cut_at is None and not self._has_ended(worker):
                    continue  # It had been working; its messages had just not been read.
                events.append(Gone(worker, f"{reason}. {log_of(self._fleet, worker)}"))
        return events

    def put_back(self, events: Sequence[Event]) -> None:
        """Return these events again from the next `poll`."""
        self._early[:0] = events

    def strike_off(self, worker: Worker) -> None:
        """Drop a lost worker: messages it still sends are treated as a stranger's."""
        self.joining.strike_off(worker)
        self.mailboxes.drop(worker)
        worker.owed.clear()
        worker.cut_at = None
        if worker.process is not None:
            worker.process.kill()  # It may be suspended, and would write to shared memory once resumed.

    def dismiss(self, timeout_s: float) -> None:
        """End the workers: ask them to stop, wait, then kill them."""
        for worker in self._workers:
            if worker.mailbox is not None:
                worker.mailbox.stop()
            if worker.peer is not None:  # Over both channels: a worker may be reading either.
                self._socket.send(worker.peer, [messages.encode(Stop())], waits=False)
        self._fleet.stop(timeout_s)

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers and close the connections. May be called again after an interrupt."""
        self.dismiss(0.0 if terminate else self._timeouts.close_s if timeout_s is None else timeout_s)
        with self.deferred:
            for worker in self._workers:
                worker.peer = None
                if worker.process is not None:
                    worker.process.forget()
        self._socket.close(0.0 if terminate else _FAREWELL_S)

    def _post(self, worker: Worker, frames: Sequence[Any]) -> None:
        assert worker.peer is not None, "it is here"
        if not self._socket.send(worker.peer, frames):
            self._liveness.suspect(worker, time.monotonic())

    def _receive(self, timeout_s: float | None, events: list[Event]) -> None:
        """Read messages from the socket. Malformed ones, and those from strangers, are logged and ignored."""
        for _ in range(_ENOUGH):
            received = self._socket.receive(timeout_s)
            if received is None:
                return
            timeout_s = None  # Read the rest without polling.
            peer, frames = received
            worker = self.joining.by_peer.get(peer)
            try:
                self._deliver(peer, worker, frames, events)
            except WireError as error:
                # As text: a log handler that keeps the error would keep the head alive through its traceback.
                self._refusals.warn("refused a message from %s: %s", "a stranger" if worker is None else worker, error)

    def _deliver(self, peer: bytes, worker: Worker | None, frames: Sequence[zmq.Frame], events: list[Event]) -> None:
        if not frames:
            raise WireError("a message with too many frames")
        reply = messages.decode_reply(frames[0].buffer)
        if isinstance(reply, Register):
            self.joining.register(peer, reply)
        elif isinstance(reply, Join):
            joined = self.joining.welcome(peer, reply)
            if joined is not None:
                events.append(Joined(joined))
        elif worker is None:
            raise WireError(f"{type(reply).__name__} from a peer that has not joined")
        elif isinstance(reply, Missing):
            if not worker.may_miss:
                raise WireError("it reports missing weights that it was not told to look for")
            events.append(Missed(worker, reply))
        else:
            self._match(worker, reply, [frame.buffer for frame in frames[1:]], events)

    def _match_mailbox(self, worker: Worker, reply: Reply | WireError, events: list[Event]) -> None:
        """Take a reply from a mailbox, which nobody but its worker can have written."""
        try:
            if isinstance(reply, WireError):
                raise reply
            self._match(worker, reply, (), events)
        except WireError as error:
            events.append(Gone(worker, f"it put something malformed into its mailbox: {error}."))

    def _match(self, worker: Worker, reply: Reply, frames: Sequence[memoryview], events: list[Event]) -> None:
        """Match an answer with an owed one, and copy its arrays to their destination."""
        owed = self._find_owed(worker, reply)
        is_bare = worker.mailbox is not None or (isinstance(reply, Failed) and not frames)
        fill(() if is_bare else owed.destination(reply, owed.num_parts), frames)
        worker.progress_at = time.monotonic()
        if isinstance(reply, Progress):
            return
        if isinstance(reply, Part):
            owed.num_parts += reply.count
        else:
            while owed.cancels and worker.owed[0] is not owed:
                worker.owed.popleft()
            worker.owed.remove(owed)
            self.mailboxes.num_awaited -= owed.by_mailbox
            worker.num_answers += _ROLLOUT_ANSWERS if isinstance(reply, Collected | Evaluated) else 1
        events.append(Answered(worker, owed, reply))

    def _has_ended(self, worker: Worker) -> bool:
        return worker.index in self._fleet.exits()

    def _find_owed(self, worker: Worker, reply: Reply) -> Owed:
        if isinstance(reply, Register | Join | Missing):
            raise WireError(f"{type(reply).__name__} is not an answer")
        for owed in worker.owed:
            if owed.call == reply.call:
                return owed
        raise WireError(f"it answers call {reply.call} with {type(reply).__name__}, which it does not owe")

    def _hear_last_words(self, worker: Worker, events: list[Event]) -> None:
        """Read the messages that a worker sent before it ended."""
        for _, reply in self.mailboxes.take([worker]):
            self._match_mailbox(worker, reply, events)
        until = time.monotonic() + _LOOK_S
        while worker.owed and time.monotonic() < until:
            before = len(events)
            self._receive(0.0, events)
            if len(events) == before:
                return


def log_of(fleet: Fleet, worker: Worker) -> str:
    """Return the end of a worker's log, with a sentence to introduce it."""
    tail = fleet.log_tail(worker.index)
    return f"The last lines of its log are:\n{tail}\n" if tail else "Its log is empty."
