"""Workers: the workers of one run, the calls under way, and what happens when one joins, answers or is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from gymnasium.vector import AutoresetMode

from clusterenv.config import Timeouts
from clusterenv.errors import CallTimeout, ClusterEnvError, LaunchError, WireError
from clusterenv.head.calls import Calls, Event, Gone, Joined, Missed, log_of
from clusterenv.head.failure import failure_of
from clusterenv.head.infos import StepReader
from clusterenv.head.machines import Machines
from clusterenv.head.outcome import Outcome
from clusterenv.head.pending import PendingCall, step_destination
from clusterenv.head.preparation import Preparation, PreparationRequest
from clusterenv.head.supervisor import GiveUp, Loss, Prepare, Restart, Supervisor
from clusterenv.head.worker import StreamWork, Worker, WorkerState
from clusterenv.launchers.base import Fleet
from clusterenv.wire.arrays import ArrayMaker, allocate, shared_allocator, size_of
from clusterenv.wire.assignment import RunSpaces
from clusterenv.wire.buffers import StepBuffers
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import Cancel, Failed, Missing, Reply, Show, Step
from clusterenv.wire.shared import BELL_BYTES, SharedMemories

log = logging.getLogger(__name__)

WAIT_S = 0.1
_REMIND_S = 30.0  # How often to log again what the run is waiting for.


class StreamUser(Protocol):
    """An open stream, which must be notified when workers become ready or are lost."""

    def on_lost(self, worker: Worker) -> None:
        """Note that a worker is lost, along with the rollouts it was asked for."""

    def on_ready(self, worker: Worker) -> None:
        """Note that a worker can be asked for rollouts."""

    def on_end(self) -> None:
        """Note that another call ends the stream."""


class PlainStep:
    """Handle of a step that all workers make in shared memory; becomes a `PendingCall` only if it is slow or fails."""


PLAIN = PlainStep()
Handle = PendingCall | PlainStep


class Workers:
    """The workers of one run. Callers start a call, and then `finish` it.

    Attributes:
        workers: One record each, in the order of their environments.
        timeouts: How long to wait.
        memories: Memory shared with workers on this machine; `shares_memory` says whether any is.
        machines: Which workers share a machine.
        preparation: What a replacement worker is given.
        stream: The stream that is open, if any.
        buffers: The two step buffers, once the spaces are known.
    """

    buffers: tuple[StepBuffers, StepBuffers]

    def __init__(
        self,
        calls: Calls,
        fleet: Fleet,
        workers: list[Worker],
        supervisor: Supervisor,
        timeouts: Timeouts,
        *,
        assignments: Callable[[int], bytes],
        autoreset_mode: AutoresetMode,
        shares_memory: bool,
    ) -> None:
        """Take charge of started workers; `assignments` takes the index of a worker's first environment.

        With `shares_memory`, memory is offered to all workers; one that cannot reach it uses the socket.
        """
        self.calls = calls
        self.workers = workers
        self.supervisor = supervisor
        self.timeouts = timeouts
        self.memories = SharedMemories(calls.deferred)
        self.machines = Machines(workers)
        self.preparation = Preparation(calls, workers, self.memories, self.machines, assignments, autoreset_mode)
        self.stream: StreamUser | None = None
        self.shares_memory = shares_memory
        self.num_envs = workers[-1].stop
        self.fleet = fleet
        self._owner_pid = os.getpid()
        self._under_way: list[PendingCall] = []
        self._waits_for_late = True
        self._is_uneven = False  # Whether workers may differ in which of the two step buffers they show.
        self._plain_buffer = 0  # The step buffer that the plain step under way fills.
        self._said, self._said_at = "", 0.0  # The last logged status of workers that have not joined.
        calls.upkeep = self._do_upkeep

    def open(self, spaces: RunSpaces) -> None:
        """Lay out the buffers; from now on workers are prepared to use them."""
        layouts = Layout(spaces.action_space), Layout(spaces.observation_space)
        self.action_layout, self.observation_layout = layouts

        def make_buffers(make: ArrayMaker) -> tuple[StepBuffers, StepBuffers]:
            return StepBuffers.make_pair(*layouts, self.num_envs, make)

        memory = None
        if self.shares_memory:
            memory = self.memories.share(BELL_BYTES + size_of(make_buffers))
            self.buffers = make_buffers(shared_allocator(memory.memory[BELL_BYTES:]))
            self.calls.mailboxes.share(memory)
        else:
            self.buffers = make_buffers(allocate)
        first, second = self.buffers
        for worker in self.workers:
            worker.rows = first.rows(worker.start, worker.stop), second.rows(worker.start, worker.stop)
        self._reader = StepReader(self.workers, first)
        # A step with the actions in the buffers. A partial, which costs no more to call than the class itself.
        self._make_step = partial(
            PendingCall,
            self.calls,
            lambda call, _worker, buffer: Step(call, buffer, None),
            arrays=lambda worker: worker.buffers[0].actions,
            destination=step_destination,
            fills=True,
            is_same=True,
            take=self._reader.take,
            read=self._reader.merge,
        )
        self.preparation.open(spaces, memory, self._reader)
        self.supervisor.is_open = True

    @property
    def losses(self) -> list[Loss]:
        """The workers that were lost and replaced."""
        return self.supervisor.losses

    @property
    def newest(self) -> StepBuffers:
        """The step buffers that hold what the learner sees now."""
        return self.buffers[self.workers[0].shown]

    @property
    def deferred(self) -> contextlib.AbstractContextManager[None]:
        """Defers Ctrl-C until the end of a block."""
        return self.calls.deferred

    @contextlib.contextmanager
    def without_late(self) -> Iterator[None]:
        """Do not wait for workers that have never joined nor, in an elastic run, for ones being replaced."""
        self._waits_for_late = False
        try:
            yield
        finally:
            self._waits_for_late = True

    def finish(self, handle: Handle, timeout_s: float | None = None) -> Outcome:
        """Wait for a call, and return its outcome.

        Raises:
            CallTimeout: A worker has not answered in time; `finish` may be called again.
            WorkerLost: A worker is lost and will not be replaced.
            WorkerFailed: An environment or policy raised.
        """
        if isinstance(handle, PlainStep):
            mailboxes = self.calls.mailboxes.all
            if mailboxes is not None and mailboxes.woken:
                started_at = time.monotonic()
                if mailboxes.wait(WAIT_S if timeout_s is None else min(WAIT_S, timeout_s)):
                    generations = mailboxes.find_plain(self.calls.last_call)
                    if generations is not None:
                        for worker in self.workers:
                            worker.shown = self._plain_buffer
                        mailboxes.woken.clear()
                        return Outcome(self._reader.read_plain(generations), [], [], [])
                    self.calls.mailboxes.has_rung = True
                self._note_plain(started_at)
            handle = self._under_way[-1]
        self.wait_for(handle, timeout_s)
        handle.raise_failure()
        return handle.read(handle.in_order())

    def wait_for(self, pending: PendingCall, timeout_s: float | None = None) -> None:
        """Wait until a call is answered and no longer under way.

        Raises:
            CallTimeout: A worker has not answered in time; `wait_for` may be called again.
            WorkerLost: A worker is lost and will not be replaced.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch = None
        while pending.waiting:
            self.raise_fatal(pending.waiting)
            left = WAIT_S if deadline is None else deadline - time.monotonic()
            if left <= 0 and timeout_s is not None:
                self.advance(0.0)
                if pending.waiting:
                    raise self._timeout(list(pending.waiting), timeout_s)
                break
            self.advance(left)
            if any(self._may_never_come(worker) for worker in pending.waiting):
                watch = watch or JoinWatch(self)
                watch.look()
        if pending in self._under_way:
            self._under_way.remove(pending)

    def advance(self, timeout_s: float) -> bool:
        """Process incoming events and carry out the supervisor's decisions; waits for a moment at most.

        Returns:
            Whether there were any events.
        """
        with self.calls.deferred:
            events = self.calls.poll(timeout_s)
            num_done = 0
            try:
                for event in events:
                    num_done += 1
                    self._process(event)
            except BaseException:
                self.calls.put_back(events[num_done:])
                raise
            for action in self.supervisor.advance(time.monotonic()):
                if isinstance(action, Restart):
                    self._restart(action.worker)
                elif isinstance(action, GiveUp):
                    awaited = self.fleet.status() if action.worker.state is WorkerState.STARTING else ""
                    reason = f"{action.reason} ({awaited})" if awaited else action.reason
                    self._lose(action.worker, f"{reason}. {log_of(self.fleet, action.worker)}")
                else:
                    self._prepare(action)
            if missing := self.supervisor.missing:
                self.say_what_is_awaited(missing)
            self._check_budget()
        return bool(events)

    def _process(self, event: Event) -> None:
        worker = event.worker
        if isinstance(event, Joined):
            self.supervisor.joined(worker, time.monotonic())
        elif worker.state is WorkerState.LOST:
            return  # It was given up because of an earlier message.
        elif isinstance(event, Gone):
            self._lose(worker, event.reason)
        else:
            try:
                if isinstance(event, Missed):
                    self._supply(worker, event.missing)
                else:
                    event.owed.accept(worker, event.reply)
            except WireError as error:
                self._lose(worker, f"it sent a malformed answer: {error}")

    def settle(self) -> None:
        """Come to rest: wait for abandoned calls, and cancel rollouts that a stream requested ahead of time."""
        mailboxes = self.calls.mailboxes.all
        if mailboxes is not None and mailboxes.woken:
            self._note_plain(time.monotonic())
        if self._under_way or self.stream is not None:
            if any(worker.is_ready for pending in self._under_way for worker in pending.waiting):
                log.warning("waiting for an interrupted call to finish before the next one")
            for pending in self._under_way:
                pending.abandon()
            if self.stream is not None:
                self.stream.on_end()
            for worker in self.workers:
                if worker.is_ready and worker.stream.asked and not any(owed.cancels for owed in worker.owed):
                    call = self.calls.next_number()
                    self.calls.send(worker, Cancel(call), call, _forget_asked, cancels=True)
            while any(worker.is_ready and worker.owed for worker in self.workers):
                self.advance(WAIT_S)
            with self.calls.deferred:
                self._under_way.clear()
                self.stream = None
                for worker in self.workers:
                    work, worker.stream = worker.stream, StreamWork()
                    for slot in work.free:
                        self.memories.unshare(slot.memory)
        if len({worker.shown for worker in self.workers}) > 1:
            self._even_out()
        self._is_uneven = False

    def raise_fatal(self, workers: Iterable[Worker]) -> None:
        """Raise the error of the first of these workers that will not be restarted, if any."""
        for worker in workers:
            if worker.fatal is not None:
                raise worker.fatal

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers and release the shared memory. May be called again after an interrupt."""
        if self._owner_pid != os.getpid():
            return  # A forked copy of the head must not end its parent's workers.
        self.stream = None
        self._under_way.clear()
        self.supervisor.attendance.end(time.monotonic())
        self.calls.close(timeout_s, terminate=terminate)
        self.memories.close()

    def say_what_is_awaited(self, missing: Sequence[Worker]) -> None:
        """Log the launcher's status of workers that have not joined, when it changes and every so often."""
        now, status = time.monotonic(), self.fleet.status()
        if status and (status != self._said or now - self._said_at > _REMIND_S):
            self._said, self._said_at = status, now
            log.warning("waiting for %d of %d workers: %s", len(missing), len(self.workers), status)

    def _may_never_come(self, worker: Worker) -> bool:
        """Whether the supervisor will wait for a worker forever, however long it takes to join."""
        is_starting = worker.state is WorkerState.STARTING
        return worker.state is WorkerState.LATE or (is_starting and self.supervisor.is_elastic)

    def _do_upkeep(self) -> None:
        self._check_budget()
        self.raise_fatal(self.workers)

    def _check_budget(self) -> None:
        """End the workers if they have used up their worker hours."""
        error = self.supervisor.find_overspending(time.monotonic())
        if error is None or all(worker.fatal is not None for worker in self.workers):
            return
        self.calls.dismiss(self.timeouts.close_s)
        self.supervisor.attendance.end(time.monotonic())
        for worker in self.workers:
            self.calls.strike_off(worker)
            worker.state, worker.fatal = WorkerState.LOST, error

    def _start(self, pending: PendingCall, workers: Sequence[Worker] | None = None) -> PendingCall:
        """Send a call to these workers, by default to all that the run waits for."""
        workers = self.workers if workers is None else workers
        if not self._waits_for_late:
            served = [worker for worker in workers if worker.has_served]
            here = [worker for worker in served if worker.peer is not None]
            workers = here if here and self.supervisor.is_elastic else served
        self.raise_fatal(workers)
        self._under_way.append(pending)
        try:
            pending.start(workers)
        except Exception:
            self._under_way.remove(pending)  # The request could not be built, so nothing was sent.
            raise
        return pending

    def _note_plain(self, started_at: float) -> None:
        """Turn a plain step into an ordinary pending call, since it is slow or had an answer that is not plain."""
        mailboxes = self.calls.mailboxes.all
        assert mailboxes is not None, "a plain step was started there"
        with self.calls.deferred:
            pending = self._make_step()
            pending.waiting = dict.fromkeys(self.workers, self._plain_buffer)
            self._under_way.append(pending)
            self.calls.note_plain_step(pending.accept, started_at)
            mailboxes.woken.clear()

    def _supply(self, worker: Worker, missing: Missing) -> None:
        """Send a worker weights that it could not find; `Acting` overrides this."""
        raise WireError("It reports missing weights, but there are none.")

    def _lose(self, worker: Worker, reason: str) -> None:
        self.machines.note_lost(worker)
        worker.num_answers += self.calls.num_plain_steps - worker.num_plain_steps
        self.calls.strike_off(worker)
        if self.stream is not None:
            self.stream.on_lost(worker)
        for slot in [*worker.stream.free, *(asked.slot for asked in worker.stream.asked)]:
            self.memories.unshare(slot.memory)
        worker.stream.free.clear()
        worker.stream.asked.clear()
        worker.stream.num_loads = 0
        self.memories.unshare(worker.mailbox_memory)
        worker.mailbox_memory = None
        self.supervisor.lost(worker, reason, time.monotonic())

    def _restart(self, worker: Worker) -> None:
        if worker.place.key is not None:
            return  # A process has already registered in its place.
        try:
            self.fleet.restart(worker.index)
        except LaunchError as error:
            self._lose(worker, f"it cannot be started again: {error}")

    def _prepare(self, action: Prepare) -> None:
        """Send a worker the requests of a stage."""
        worker = action.worker
        left = 0

        def on_reply(request: PreparationRequest, _worker: Worker, reply: Reply) -> None:
            nonlocal left
            if isinstance(reply, Failed):
                self._note_failed_preparation(worker, failure_of(worker, reply))
                return
            request.accept(reply)
            left -= 1
            ask(request.then())

        def ask(requests: Sequence[PreparationRequest]) -> None:
            nonlocal left
            left += len(requests)
            for request in requests:
                call = self.calls.next_number()
                self.calls.send(
                    worker,
                    request.make(call),
                    call,
                    partial(on_reply, request),
                    destination=request.destination,
                    arrays=request.arrays,
                )
            if not left:
                self._note_prepared(worker)

        try:
            ask(self.preparation.requests(worker, action.stage))
        except OSError as error:  # Out of memory or of descriptors for what it would be given.
            self._note_failed_preparation(worker, LaunchError(f"It could not be given what it needs: {error}"))

    def _note_prepared(self, worker: Worker) -> None:
        self.supervisor.prepared(worker, time.monotonic())
        if worker.is_ready:
            worker.num_plain_steps = self.calls.num_plain_steps
            self.calls.mailboxes.note_ready()
            for pending in self._under_way:
                pending.ask_again(worker)
            if self.stream is not None:
                self.stream.on_ready(worker)

    def _note_failed_preparation(self, worker: Worker, failure: ClusterEnvError) -> None:
        if worker.has_served or worker.lost_at is not None:
            self._lose(worker, f"its replacement could not be prepared: {failure}")
        else:
            self.calls.strike_off(worker)
            self.supervisor.failed(worker, failure, time.monotonic())

    def _even_out(self) -> None:
        """Make all workers show the same one of the two step buffers again."""
        wanted = self.workers[0].shown
        odd = [worker for worker in self.workers if worker.shown != wanted]
        for worker in odd:
            if worker.fatal is not None or not worker.has_served:  # There is no process to ask.
                worker.buffers[wanted].copy_from(worker.buffers[worker.shown])
                worker.shown = wanted
        asked = [worker for worker in odd if worker.shown != wanted]
        if asked:
            show = PendingCall(
                self.calls,
                lambda call, worker, buffer: Show(call, buffer),
                destination=step_destination,
                fills=True,
            )
            self.wait_for(self._start(show, asked))

    def _timeout(self, missing: Sequence[Worker], timeout_s: float) -> CallTimeout:
        return CallTimeout(
            f"No answer within {timeout_s:g} s from {'; '.join(str(worker) for worker in missing)}. "
            "It may be slow or hung; the call is still pending, and can be waited for again. "
            f"{log_of(self.fleet, missing[0])}"
        )


class JoinWatch:
    """Logs every so often why workers have not joined, and raises once that has lasted too long."""

    def __init__(self, remote: Workers) -> None:
        self._remote = remote
        self._started_at = time.monotonic()

    def look(self) -> None:
        """Log what the run is waiting for, if that has changed.

        Raises:
            LaunchError: The wait took longer than `Timeouts.join_s`.
        """
        remote = self._remote
        missing = [worker for worker in remote.workers if worker.state in (WorkerState.STARTING, WorkerState.LATE)]
        if not missing:
            return
        remote.say_what_is_awaited(missing)
        status, join_s = remote.fleet.status(), remote.timeouts.join_s
        if time.monotonic() - self._started_at > join_s:
            names = ", ".join(str(worker.index) for worker in missing)
            raise LaunchError(
                f"Only {len(remote.workers) - len(missing)} of {len(remote.workers)} workers joined within "
                f"{join_s:g} s. Missing: {names}. {f'{status}. ' if status else ''}"
                f"{log_of(remote.fleet, missing[0])} Workers must reach {remote.calls.endpoint}; if that address is "
                "not routable from them, pass ClusterEnv(network=Network(listen=..., advertise=...)). "
                "Timeouts(join_s=...) gives them longer."
            )


def _forget_asked(worker: Worker, _reply: Reply) -> None:
    """Note that a worker will not make the rollouts it was asked for but had not begun."""
    worker.stream.free += [asked.slot for asked in worker.stream.asked]
    worker.stream.asked.clear()
