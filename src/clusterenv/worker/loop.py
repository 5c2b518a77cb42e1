"""The worker's loop: receives a request, lets the shard handle it, and sends the reply."""

from __future__ import annotations

import gc
import logging
import os
import socket as sockets
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from numpy.typing import NDArray

from clusterenv.wire import messages, values
from clusterenv.wire.arrays import allocate, shared_allocator
from clusterenv.wire.assignment import Assignment, RunSpaces
from clusterenv.wire.board import Board, describe_machine
from clusterenv.wire.buffers import StepBuffers
from clusterenv.wire.compatibility import imported_packages, installed_versions
from clusterenv.wire.layout import Layout
from clusterenv.wire.shared import BELL_BYTES, WorkerMailbox, open_offer
from clusterenv.wire.ticket import Ticket
from clusterenv.wire.zeromq import Keys, WorkerSocket
from clusterenv.worker.channel import Channel
from clusterenv.worker.failure_report import culprit_of, describe_failure
from clusterenv.worker.guardian import Guardian, name_process
from clusterenv.worker.handler import Handler, ShardRequest
from clusterenv.worker.head_watch import HeadWatch, Link
from clusterenv.worker.host import Pair
from clusterenv.worker.leave import Leave, Left
from clusterenv.worker.making import describe_envs, for_travel
from clusterenv.worker.progress import LoopProgress
from clusterenv.worker.shard import Shard, unpickle
from clusterenv.worker.wanted import Wanted

log = logging.getLogger(__name__)

_LOOK_UP_S = 1.0  # How often an idle worker checks that its head still lives.
_LOOK_AGAIN_S = 0.002  # How often a worker looks for weights that another one on this machine is receiving.

ActingRequest: TypeAlias = messages.Adopt | messages.Collect | messages.Decide


def run_worker(ticket: Ticket, worker_index: int, leave: Leave, guardian: Guardian | None) -> None:
    """Join the head and serve it until it says stop or is gone, or this worker is asked to leave.

    The head knows a worker by its connection. If the connection is lost while the head lives on, so are the worker's
    environments: the worker discards them and joins again, as if new, but with the same key.
    """
    keys = Keys.make()
    while _serve_once(ticket, keys, worker_index, leave, guardian):
        log.warning("the connection to the head was lost: worker %d joins again, as a new worker", worker_index)


def _serve_once(ticket: Ticket, keys: Keys, worker_index: int, leave: Leave, guardian: Guardian | None) -> bool:
    """Serve as long as one connection lasts; returns whether to try another."""
    socket = WorkerSocket(ticket)
    progress = LoopProgress()
    head_watch = HeadWatch(Link(socket.events, ticket), ticket, guardian, progress, socket.end_events)
    board = _make_board()
    channel = Channel(socket, ticket.hang_s, board)
    wanted = Wanted(board, ticket.silence_s, ticket.hang_s)
    worker = _Worker(
        head_watch, progress, channel, board, wanted, worker_index, leave, on_registered=lambda: socket.use(keys)
    )
    try:
        channel.send(messages.Register(messages.PROTOCOL, worker_index, keys.public))
        worker.serve()
    finally:
        try:
            worker.close()
        finally:
            head_watch.stop()
            socket.close(linger_s=1.0)
            if board is not None:
                board.close()
    return worker.was_cut_off


def _make_board() -> Board | None:
    """Make this worker's board; None if that is impossible, so that it gets its weights over the network only."""
    try:
        return Board()
    except OSError:
        return None


class _Worker:
    def __init__(
        self,
        head_watch: HeadWatch,
        progress: LoopProgress,
        channel: Channel,
        board: Board | None,
        wanted: Wanted,
        worker_index: int,
        leave: Leave,
        on_registered: Callable[[], None],
    ) -> None:
        self.was_cut_off = False
        self._board = board
        self._wanted = wanted
        self._held: ActingRequest | None = None  # A request that waits for its weights.
        self._on_registered = on_registered
        self._leave = leave
        self._head_watch = head_watch
        self._progress = progress
        self._channel = channel
        self._assignment: Assignment | None = None
        self._shard: Shard | None = None
        self._handler: Handler | None = None
        self._worker_index = worker_index
        self._told_modules = set(sys.modules)  # Modules whose versions the head knows, or need not know.

    def _join(self) -> None:
        self._on_registered()
        hostname, board = sockets.gethostname(), None if self._board is None else self._board.address
        self._channel.send(
            messages.Join(
                *(messages.PROTOCOL, self._worker_index, os.getpid(), hostname),
                *(installed_versions(), describe_machine(), board),
            )
        )

    def serve(self) -> None:
        while not self._leave.is_wanted:
            request = self._channel.receive(_LOOK_UP_S if self._held is None else _LOOK_AGAIN_S)
            if isinstance(request, messages.Step):  # First: it comes most often.
                self._answer(request)
            elif request is None:
                if self._head_watch.head_is_gone:
                    return
                if self._head_watch.connection_was_lost:
                    self.was_cut_off = True
                    return
                if self._held is not None:
                    self._act(self._held, None)
            elif isinstance(request, messages.Stop):
                return
            elif isinstance(request, messages.Refused):
                raise SystemExit(f"The head refused this worker: {request.reason}")
            elif isinstance(request, messages.Registered):
                self._join()
            elif isinstance(request, messages.Assign):
                self._make(request)
            elif isinstance(request, messages.Serve):
                self._begin_service(request)
            elif isinstance(request, messages.Cancel):
                self._channel.send(messages.Returned(request.call, values.dumps([])))
            elif isinstance(request, messages.Load):
                self._load(request)
            elif isinstance(request, ActingRequest):
                self._act(request, self._channel.weights)
            elif not isinstance(request, messages.Ping):
                self._answer(request)

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()
        if self._shard is not None:
            try:
                self._shard.close()
            except Exception as error:  # noqa: BLE001 - whatever an environment raises, the worker ends in order
                # To standard error, like the environments' own output, because it is for the user to fix.
                sys.stderr.write(f"An environment's close() raised {type(error).__name__}: {error}\n")

    def _make(self, request: messages.Assign) -> None:
        self._progress.is_busy = True
        try:
            self._assignment = assignment = unpickle(request.code)
            self._shard = Shard(assignment)
            description = values.dumps(for_travel(describe_envs(self._shard.make())))
        except Left:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's constructor may raise anything; it is reported
            self._send_failure(request.call, error, "factory")
        else:
            self._channel.send(messages.Made(request.call, description, self._new_packages()))
        finally:
            self._progress.is_busy = False

    def _begin_service(self, request: messages.Serve) -> None:
        """Lay out the buffers, and only then switch to shared memory: until then, errors go over the socket."""
        assignment, shard, channel = self._assignment, self._shard, self._channel
        assert assignment is not None, "the head assigns before it asks"
        assert shard is not None, "as above"
        try:
            spaces: RunSpaces = unpickle(request.spaces)
            memory = None if request.memory is None else open_offer(request.memory)
            mailbox_memory = None if request.mailbox is None or memory is None else open_offer(request.mailbox)
            if mailbox_memory is None:
                memory = None
            pair = _lay_buffers(assignment, spaces, memory)
            shard.serve(spaces, pair, self._tick)
            mailbox = None
            if memory is not None and mailbox_memory is not None:
                mailbox = WorkerMailbox(mailbox_memory, memory)
            names = None if mailbox is None else mailbox.names
            neighbour, board = request.neighbour, self._board
            has_neighbour = neighbour is not None and board is not None and board.reaches(neighbour)
            self._handler = Handler(assignment, shard, channel.send, self._tick, self._new_packages, names=names)
        except Exception as error:  # noqa: BLE001 - a user's space may raise anything; it is reported
            self._send_failure(request.call, error, "factory")
            return
        # Objects that exist now live as long as the worker, so the garbage collector can ignore them.
        gc.collect()
        gc.freeze()
        name_process("ce-worker")
        channel.send(messages.Ready(request.call, mailbox is not None, has_neighbour))
        channel.use(pair[0].actions, mailbox)

    def _load(self, request: messages.Load) -> None:
        """Load weights for the next rollout, or for the held request; or look for them on another worker's board."""
        assert self._handler is not None, "the head assigns before it asks"
        weights, held = self._channel.weights, self._held
        if weights is None and request.copy is not None:
            self._wanted.set(request.version, request.copy, time.monotonic())
            self._find_wanted()
            return
        self._wanted.clear()
        if weights is None:
            return  # The head no longer has them: a held request continues with the current weights.
        if held is not None and held.version == request.version:
            self._held = None
            self._channel.go_on_with(held.call)
            self._answer(held, weights)
        else:
            self._handler.load_for_next(request.version, weights)

    def _act(self, request: ActingRequest, weights: memoryview | None) -> None:
        """Handle a request once its weights are here; a rollout of a stream does not wait for them."""
        self._held = None
        if request.version is not None:
            if request.copy is not None and weights is None:
                self._wanted.set(request.version, request.copy, time.monotonic())
            else:
                self._wanted.clear()
        if self._wanted.version is not None:
            found = self._find_wanted(request)
            if found is not None and request.version is not None:
                weights = found
            elif self._wanted.version is not None and not _goes_on(request):
                self._held = request
                return
        self._answer(request, weights)

    def _find_wanted(self, request: ActingRequest | None = None) -> memoryview | None:
        """Look for wanted weights, and load them unless they belong to this request, which loads them itself.

        If the weights cannot be found on this machine, the head is told and sends them. A call waits for them; a
        rollout of a stream continues with the current weights.
        """
        wanted, handler = self._wanted, self._handler
        assert handler is not None, "the head assigns before it asks"
        assert wanted.version is not None, "something is wanted"
        is_for_request = request is not None and request.version is not None
        was_told = wanted.must_ask
        found = wanted.look(time.monotonic())
        if found is not None:
            version = wanted.version
            wanted.clear()
            if not is_for_request:
                handler.load_for_next(version, found)
        elif wanted.must_ask and not was_told:
            self._channel.send(messages.Missing(wanted.version, handler.policy_version))
            if request is None or _goes_on(request):
                wanted.clear()
        return found

    def _answer(self, request: ShardRequest, weights: memoryview | None = None) -> None:
        handler, progress = self._handler, self._progress
        assert handler is not None, "the head assigns before it asks"
        progress.is_busy = True
        try:
            reply, arrays = handler.answer(request, weights)
        except Left:
            raise
        except BaseException as error:  # noqa: BLE001 - a user's environment may raise anything; it is reported
            self._report(request, error)
        else:
            self._channel.send(reply, arrays)
        finally:
            progress.is_busy = False
            progress.count += 1

    def _new_packages(self) -> dict[str, str]:
        packages = imported_packages(self._told_modules)
        self._told_modules.update(sys.modules)
        return packages

    def _report(self, request: ShardRequest, error: BaseException) -> None:
        """Report an exception to the head; after a step, along with every environment's current results."""
        assert self._shard is not None, "the head assigns before it asks"
        if isinstance(request, messages.Evaluate):
            # An evaluation's environments are not the run's, so they have no index.
            where = culprit_of(request, is_stepping=self._shard.is_playing)
            self._channel.send(describe_failure(error, request.call, env_index=None, where=where))
            return
        where = culprit_of(request, is_stepping=self._shard.is_stepping)
        host = self._shard.host
        if isinstance(request, messages.Step | messages.Decide):
            host.show_again(request.buffer)
        is_step = isinstance(request, messages.Step | messages.Decide | messages.Collect)
        self._send_failure(request.call, error, where, host.buffers.results if is_step else ())

    def _send_failure(
        self, call: int, error: BaseException, where: messages.Where, arrays: Iterable[NDArray[Any]] = ()
    ) -> None:
        row = None if self._shard is None or where == "policy" else self._shard.failed_row
        start = 0 if self._assignment is None else self._assignment.start
        env_index = None if row is None else start + row
        self._channel.send(describe_failure(error, call, env_index=env_index, where=where), arrays)

    def _tick(self) -> None:
        self._progress.count += 1
        self._channel.tick()


def _goes_on(request: ActingRequest) -> bool:
    """Whether a request does not wait for weights that are still to come: it is a rollout of a stream."""
    return isinstance(request, messages.Collect) and request.is_own


def _lay_buffers(assignment: Assignment, spaces: RunSpaces, memory: memoryview | None) -> Pair:
    layouts = Layout(spaces.action_space), Layout(spaces.observation_space)
    if memory is None:
        return StepBuffers.make_pair(*layouts, assignment.num_rows, allocate)
    start, stop = assignment.start, assignment.start + assignment.num_rows
    first, second = StepBuffers.make_pair(*layouts, assignment.num_envs, shared_allocator(memory[BELL_BYTES:]))
    return first.rows(start, stop), second.rows(start, stop)
