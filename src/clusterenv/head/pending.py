"""PendingCall: one request to several workers, until each of them has answered it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from clusterenv.errors import ClusterEnvError, WireError
from clusterenv.head.calls import Calls, Destination, no_arrays
from clusterenv.head.failure import failure_of, malformed
from clusterenv.head.outcome import Outcome
from clusterenv.head.worker import Worker
from clusterenv.wire import messages
from clusterenv.wire.messages import Failed, Part, Reply, Request, Stepped

Make: TypeAlias = Callable[[int, Worker, int], Request]
Arrays: TypeAlias = Callable[[Worker], Sequence[Any]]
Take: TypeAlias = Callable[[Worker, Reply], Any]
Replies: TypeAlias = Sequence[tuple[Worker, Any]]


def step_destination(worker: Worker, buffer: int) -> Destination:
    """Return the destination of a step's or reset's results: the worker's rows of this step buffer."""

    def destination(reply: Reply, _num_parts: int) -> Sequence[NDArray[Any]]:
        return worker.buffers[buffer].results if isinstance(reply, Stepped | Failed) else ()

    return destination


class PendingCall:
    """One request to several workers, and the answers so far.

    If a worker is lost before it has answered, its replacement is asked again.

    Attributes:
        waiting: The workers that have not answered, and which of the two step buffers each answer fills.
        read: Turns the answers, in the order of the environments, into the result for the caller.
        replies: The answers so far, as returned by `take`.
        failed: The workers whose environments or policy raised, or whose answer is malformed, with the error.
    """

    def __init__(
        self,
        calls: Calls,
        make: Make,
        *,
        arrays: Arrays = lambda worker: (),
        destination: Callable[[Worker, int], Destination] = lambda worker, buffer: no_arrays,
        fills: bool = False,
        is_same: bool = False,
        asks_again: bool = True,
        asks_newcomers: bool = False,
        take: Take = lambda worker, reply: reply,
        read: Callable[[Replies], Outcome] = lambda replies: Outcome({}, [], [], []),
    ) -> None:
        """Prepare a call; `start` sends it.

        Args:
            calls: Sends the requests.
            make: Makes the request from the call's number, the worker and the step buffer.
            arrays: Arrays to send along to a worker that shares no memory.
            destination: Where arrays that come with a worker's answer are stored, given the step buffer.
            fills: Whether the answer fills the worker's other step buffer, rather than the one it shows.
            is_same: Whether the request is the same for all workers, so that it is encoded only once.
            asks_again: Whether to ask the replacement of a worker that was lost before it answered.
            asks_newcomers: Whether to ask every worker that becomes ready meanwhile, even the replacement of one that
                has answered, since it would otherwise lack what the others were given.
            take: Reads a worker's answer, and records what the learner is to see. Called as soon as the answer comes,
                because the worker may be lost and replaced a moment later. May raise WireError.
            read: Turns the answers, in the order of the environments, into the result for the caller.
        """
        self.waiting: dict[Worker, int] = {}
        self.read = read
        self.replies: dict[Worker, Any] = {}
        self.failed: list[tuple[Worker, ClusterEnvError]] = []
        self._calls = calls
        self._make = make
        self._arrays = arrays
        self._destination = destination
        self._fills = fills
        self._is_same = is_same
        self._asks_again = asks_again
        self._asks_newcomers = asks_newcomers
        self._take = take

    def start(self, workers: Sequence[Worker]) -> None:
        """Ask the workers that are ready; the others are asked once they are.

        All requests are built before the first is sent, so that one that cannot be built leaves nothing half begun.
        """
        fills = self._fills
        self.waiting = {worker: 1 - worker.shown if fills else worker.shown for worker in workers}
        present = [worker for worker in self.waiting if worker.is_ready]
        call = self._calls.next_number()
        if self._is_same:
            frames = [self._encode(call, present[0])] * len(present) if present else []
        else:
            frames = [self._encode(call, worker) for worker in present]
        with self._calls.deferred:
            self._calls.mailboxes.expect(sum(worker.mailbox is not None for worker in present))
            for worker, frame in zip(present, frames, strict=True):
                self._send(worker, frame, call)

    def ask_again(self, worker: Worker) -> None:
        """Ask a worker that has become ready."""
        if self._asks_newcomers and worker not in self.waiting:
            self.replies.pop(worker, None)
            self.waiting[worker] = worker.shown
        if worker not in self.waiting:
            return
        if not self._asks_again:
            del self.waiting[worker]
            return
        call = self._calls.next_number()
        frame = self._encode(call, worker)
        self._calls.mailboxes.expect(worker.mailbox is not None)
        self._send(worker, frame, call)

    def accept(self, worker: Worker, reply: Reply) -> None:
        """Take an answer."""
        if worker not in self.waiting:
            raise WireError("it has answered this call already")
        if isinstance(reply, Part):
            return
        worker.shown = self.waiting.pop(worker)
        if isinstance(reply, Failed):
            self.failed.append((worker, failure_of(worker, reply)))
            return
        try:
            self.replies[worker] = self._take(worker, reply)
        except WireError as error:
            self.failed.append((worker, malformed(worker, error)))

    def raise_failure(self) -> None:
        """Raise the error of the first worker that failed, if any."""
        if self.failed:
            self.failed.sort(key=lambda item: item[0].index, reverse=True)
            raise self.failed.pop()[1]  # Not kept here: its traceback would refer back to this call.

    def in_order(self) -> list[tuple[Worker, Any]]:
        """Return the answers, in the order of the environments."""
        return sorted(self.replies.items(), key=lambda item: item[0].index)

    def abandon(self) -> None:
        """Stop asking replacements and newcomers, since nobody waits for the answers."""
        self._asks_again = self._asks_newcomers = False

    def _encode(self, call: int, worker: Worker) -> bytes:
        return messages.encode(self._make(call, worker, self.waiting[worker]))

    def _send(self, worker: Worker, frame: bytes, call: int) -> None:
        arrays = () if worker.mailbox is not None else self._arrays(worker)
        destination = self._destination(worker, self.waiting[worker])
        self._calls.send(worker, frame, call, self.accept, destination=destination, arrays=arrays, by_mailbox=True)
