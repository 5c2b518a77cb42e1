"""Remote: the environments on the workers, and the policies beside them: requests out, one result back."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.config import Timeouts
from clusterenv.errors import CallTimeout, ClusterEnvError, LaunchError, PolicyError, WireError
from clusterenv.head.calls import Answered, Calls, Gone, Joined, Landing, log_of, no_landing
from clusterenv.head.failure import blame, failure_of
from clusterenv.head.infos import (
    InfoReader,
    ShardInfos,
    checked_dict,
    checked_errors,
    expect,
    merge_infos,
    read_objects,
    read_results,
)
from clusterenv.head.outcome import Collection, Outcome
from clusterenv.head.packages import Packages
from clusterenv.head.pending import Arrays, Make, PendingCall, Place
from clusterenv.head.supervisor import GiveUp, Loss, Prepare, Restart, Supervisor
from clusterenv.head.worker import Process, Stage, State, StreamWork, Worker
from clusterenv.launchers.base import Fleet
from clusterenv.policy.policy import Policy
from clusterenv.policy.sketch import Measurement, Sketch
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import values
from clusterenv.wire.arrays import ArrayMaker, allocate, carver, size_of
from clusterenv.wire.assignment import RunSpaces
from clusterenv.wire.buffers import RolloutBuffers, RolloutLayout, StepBuffers, check_specs
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import (
    Adopt,
    Adopted,
    Apply,
    ArraySpec,
    Assign,
    Cancel,
    Collect,
    Collected,
    Decide,
    Failed,
    Invoke,
    Made,
    Measure,
    Measured,
    Part,
    Ready,
    Reply,
    Request,
    Reset,
    Resume,
    Returned,
    Serve,
    SetAttribute,
    Show,
    Step,
    Stepped,
)
from clusterenv.wire.shared import BELL_BYTES, MAILBOX_BYTES, HeadMailbox, SharedMemory
from clusterenv.wire.zeromq import Frames, cut

log = logging.getLogger(__name__)

_WAIT_S = 0.1
_REMIND_S = 30.0  # How often to say again what is waited for.


class StreamUser(Protocol):
    """Who must hear of workers that come and go while a stream is open."""

    def on_lost(self, worker: Worker) -> None:
        """Note that a worker is lost, with what it was asked for."""

    def on_ready(self, worker: Worker) -> None:
        """Note that a worker can be asked."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RemotePlan:
    """What the workers of a run are to do.

    Attributes:
        code: A worker's assignment, by the index of its first environment.
        autoreset_mode: How environments are reset.
        shares_memory: Whether to offer shared memory; a worker that cannot reach it uses the socket.
        timeouts: How long to wait.
    """

    code: Callable[[int], bytes]
    autoreset_mode: AutoresetMode
    shares_memory: bool
    timeouts: Timeouts


@dataclass(eq=False, repr=False)
class _Weights:
    """Where a version's weights lie for all workers to read: shared memory, or a block to send."""

    memory: SharedMemory | None
    block: NDArray[Any]

    @cached_property
    def frames(self) -> Frames:
        """The block for those who do not share memory, cut once for all of them."""
        return cut(self.block)


class PlainStep:
    """Stands for a step that all workers make in shared memory, until somebody needs to know more of it."""


PLAIN = PlainStep()
Handle = PendingCall | PlainStep


class Remote:
    """The workers of one run. `reset`, `step`, `decide`, `invoke`, `set_attr`, `apply` start a call that `finish` ends.

    Attributes:
        workers: One record each, in the order of their environments.
        buffers: The two step buffers, once the spaces are known.
        rollout_layout: What rollouts look like, once a policy was adopted.
        on_adopted: Told of each worker that was given the policy while it was prepared.
        weights_now: Returns the newest version and its weights, encoded and cut, for such a worker.
        stream: The stream that is open, if any.
    """

    buffers: tuple[StepBuffers, StepBuffers]

    def __init__(
        self, calls: Calls, fleet: Fleet, workers: list[Worker], supervisor: Supervisor, plan: RemotePlan
    ) -> None:
        self.calls = calls
        self.workers = workers
        self.supervisor = supervisor
        self.timeouts = plan.timeouts
        self.rollout_layout: RolloutLayout | None = None
        self.on_adopted: Callable[[Worker, int], None] = lambda worker, version: None
        self.weights_now: Callable[[], tuple[int, Frames]] = lambda: (0, [])
        self.stream: StreamUser | None = None
        calls.upkeep = self._do_upkeep
        self._fleet = fleet
        self._plan = plan
        self._owner_pid = os.getpid()
        self._num_envs = workers[-1].stop
        self._memories: list[SharedMemory] = []
        self._memory: SharedMemory | None = None  # The bell and the step buffers.
        self._under_way: list[PendingCall] = []
        self._waits_for_late = True
        self._said, self._said_at = "", 0.0
        self._packages = Packages()
        self._is_uneven = False  # Whether workers may show different ones of the two step buffers.
        self._was_reset = False
        self._plain_buffer = 0
        self._attributes: dict[str, Make] = {}
        self._weights: _Weights | None = None
        self._adoption: Callable[..., Adopt] | None = None
        self._rollout: tuple[int, SharedMemory | None, RolloutBuffers] | None = None

    # From starting workers to environments that can be reset.

    def gather(self, at_least: int) -> list[dict[str, Any]]:
        """Wait until so many workers have made their environments; returns what these are like, in order.

        Raises:
            LaunchError: A worker ended instead, or they took too long.
            WorkerFailed: A factory raised.
        """
        self._await_workers(lambda worker: worker.description is not None, at_least)
        return [worker.description for worker in self.workers if worker.description is not None]

    def open(self, spaces: RunSpaces, at_least: int) -> None:
        """Lay out the buffers, and wait until so many workers can use them; the others are late."""
        self._spaces = cloudpickle.dumps(spaces)
        layouts = Layout(spaces.action_space), Layout(spaces.observation_space)
        self.action_layout, self.observation_layout = layouts
        self._num_object_leaves = sum(leaf.dtype is None for leaf in layouts[1].leaves)

        def make_buffers(make: ArrayMaker) -> tuple[StepBuffers, StepBuffers]:
            return StepBuffers.make_pair(*layouts, self._num_envs, make)

        if self._plan.shares_memory:
            self._memory = memory = self.share(BELL_BYTES + size_of(make_buffers))
            self.buffers = make_buffers(carver(memory.memory[BELL_BYTES:]))
            self.calls.mailboxes.share(memory)
        else:
            self.buffers = make_buffers(allocate)
        first, second = self.buffers
        for worker in self.workers:
            worker.rows = first.rows(worker.start, worker.stop), second.rows(worker.start, worker.stop)
        self._infos = InfoReader(self.workers, first)
        self.supervisor.last_stage = Stage.ADOPT
        self._await_workers(lambda worker: worker.is_ready, at_least)
        self._packages.tell()
        for worker in self.workers:
            if worker.peer is None:
                self.supervisor.begin_without(worker)

    @property
    def losses(self) -> list[Loss]:
        """The workers that were lost, and replaced."""
        return self.supervisor.losses

    @property
    def newest(self) -> StepBuffers:
        """The step buffers that hold what the learner sees now."""
        return self.buffers[self.workers[0].shown]

    # Calls of all workers.

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Handle:
        """Start resetting the environments, or those in the mask."""
        self.settle()
        pickled = None if options is None else cloudpickle.dumps(options)
        if mask is None:
            self.supervisor.seed(seeds[0])

        def ask(call: int, worker: Worker, buffer: int) -> Reset:
            part = None if mask is None else list(mask[worker.start : worker.stop])
            chosen = list(seeds[worker.start : worker.stop])
            num_plain = self.calls.num_plain_steps - worker.num_plain_steps
            if worker.num_losses and not worker.num_answers and not num_plain:  # They keep the recorded seeds.
                chosen = [new if seed is None else seed for seed, new in zip(chosen, worker.seeds, strict=True)]
            return Reset(call, buffer, chosen, part, pickled)

        return self._start(ask, place=self._place_step, read=self._read_steps, asks_newcomers=mask is None)

    def step(self, actions: Any | None) -> Handle:
        """Start a step.

        Args:
            actions: Anything that can be sliced by environment index; None if they are in the buffers already.
        """
        mailboxes = self.calls.mailboxes.all
        if mailboxes is not None and actions is None and not (self._under_way or self._is_uneven or self.stream):
            if mailboxes.under_way:
                self.settle()
            self._plain_buffer = buffer = 1 - self.workers[0].shown
            self.calls.start_plain_step(mailboxes, buffer)
            return PLAIN
        self.settle()
        if actions is None:
            return self._start(
                _plain_request,
                arrays=_actions_of,
                place=self._place_step,
                fills=True,
                read=self._read_steps,
                is_same=True,
            )
        return self._start(
            lambda call, w, buffer: Step(call, buffer, pickle.dumps(actions[w.start : w.stop])),
            place=self._place_step,
            fills=True,
            read=self._read_steps,
        )

    def decide(self, version: int, pulls: set[Worker], arguments: Mapping[str, Any]) -> Handle:
        """Start a step in which the workers choose the actions; these workers take the weights that were loaded."""
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        self.settle()
        return self._start(
            lambda call, w, buffer: Decide(call, buffer, version if w in pulls else None, pickled),
            arrays=lambda worker: self._weights_for(worker, pulls),
            place=self._place_step,
            fills=True,
            read=self._read_steps,
        )

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle:
        """Start calling a method, or reading an attribute, of every environment."""
        arguments = cloudpickle.dumps((args, kwargs))
        self.settle()
        return self._start(
            lambda call, worker, buffer: Invoke(call, name, arguments),
            read=lambda pending: self._read_results(pending, lambda worker: worker.num_envs),
        )

    def set_attr(self, name: str, items: Sequence[Any]) -> Handle:
        """Start setting an attribute of every environment."""
        # Pickled now: what the caller does to the values later is no business of a worker that comes later.
        pickled = {worker: cloudpickle.dumps(list(items[worker.start : worker.stop])) for worker in self.workers}
        self.settle()

        def ask(call: int, worker: Worker, _buffer: int) -> SetAttribute:
            return SetAttribute(call, name, pickled[worker])

        def note(_: PendingCall) -> Outcome:
            self._attributes.pop(name, None)  # The newest last, as they were set.
            self._attributes[name] = ask
            return Outcome({}, [], [], [])

        return self._start(ask, read=note, asks_newcomers=True)

    def apply(self, function: Callable[[Any], Any], env_indices: Sequence[int]) -> Handle:
        """Start running a function on these environments, given in ascending order."""
        code, chosen = cloudpickle.dumps(function), set(env_indices)
        self.settle()

        def rows(worker: Worker) -> list[int]:
            return [index - worker.start for index in worker.env_indices if index in chosen]

        return self._start(
            lambda call, worker, buffer: Apply(call, rows(worker), code),
            read=lambda pending: self._read_results(pending, lambda worker: len(rows(worker))),
        )

    def step_shard(self, worker: Worker) -> PendingCall:
        """Start a step of one worker's environments, with the actions in the buffers; `read_step` reads the result."""
        self._is_uneven = True
        pending = PendingCall(
            self.calls, [worker], _plain_request, arrays=_actions_of, place=self._place_step, fills=True
        )
        self._under_way.append(pending)
        pending.start()
        return pending

    def finish(self, handle: Handle, timeout_s: float | None = None) -> Outcome:
        """Wait for a call, and return what it brought.

        Raises:
            CallTimeout: A worker has not answered in time; `finish` may be called again.
            WorkerLost: A worker is lost, and not replaced.
            WorkerFailed: An environment or policy raised.
        """
        if isinstance(handle, PlainStep):
            mailboxes = self.calls.mailboxes.all
            if mailboxes is not None and mailboxes.under_way:
                started_at = time.monotonic()
                if mailboxes.wait(_WAIT_S if timeout_s is None else min(_WAIT_S, timeout_s)):
                    generations = mailboxes.find_plain(self.calls.number)
                    if generations is not None:
                        for worker in self.workers:
                            worker.shown = self._plain_buffer
                        mailboxes.under_way.clear()
                        return Outcome(self._infos.read_plain(generations), [], [], [])
                    self.calls.mailboxes.has_rung = True
                self._note_plain(started_at)
            handle = self._under_way[-1]
        self.wait_for(handle, timeout_s)
        if handle.failed:
            raise failure_of(*min(handle.failed, key=lambda item: item[0].index))
        return handle.read(handle)

    def wait_for(self, pending: PendingCall, timeout_s: float | None = None) -> None:
        """Wait until a call is answered; then it is not under way any more.

        Raises:
            CallTimeout: A worker has not answered in time; it may be waited for again.
            WorkerLost: A worker is lost, and not replaced.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        started = time.monotonic()
        while pending.waiting:
            self.raise_fatal(pending.waiting)
            left = _WAIT_S if deadline is None else deadline - time.monotonic()
            if left <= 0 and timeout_s is not None:
                self.advance(0.0)
                if pending.waiting:
                    raise self._timeout(list(pending.waiting), timeout_s)
                break
            self.advance(left)
            if any(self._may_never_come(worker) for worker in pending.waiting):
                self._await_missing(started)
        if pending in self._under_way:
            self._under_way.remove(pending)

    def read_step(self, worker: Worker, reply: Reply) -> Outcome:
        """Return what one worker's step or reset brought; errors by its own rows."""
        with blame(worker):
            stepped = expect(Stepped, reply)
            infos = self._infos.read(worker, stepped)
            objects = read_objects(stepped, self._num_object_leaves, worker.num_envs)
            errors = checked_errors(stepped.errors, worker.num_envs, 8 * worker.num_envs)
        worker.objects = objects
        return Outcome(infos, objects, [], errors)

    def note_reset(self) -> None:
        """Note that the learner has seen its environments: from now on a worker that takes over resets its own."""
        self._was_reset = True

    # Policies.

    def adopt(
        self, policy: Policy, spec: WeightsSpec, version: int, num_probes: int, arguments: Mapping[str, Any]
    ) -> None:
        """Send every worker the policy's structure and weights, and learn what it returns beside actions.

        Raises:
            PolicyError: The policy cannot be sent, or does not return the same on all workers.
        """
        try:
            code = cloudpickle.dumps((policy, spec))
        except Exception as error:
            raise PolicyError(f"The agent cannot be sent to workers: {type(error).__name__}: {error}.") from error
        self.settle()
        self._adoption = None  # Should this fail halfway, no worker is trusted to hold any policy.
        if self._weights is not None:
            self.unshare(self._weights.memory)
        if self._rollout is not None:
            self.unshare(self._rollout[1])
        self._weights = self._rollout = None
        memory = self.share(spec.size_bytes) if self._plan.shares_memory else None
        target = None if memory is None else np.frombuffer(memory.memory, np.uint8, spec.size_bytes)
        self._weights = weights = _Weights(memory, spec.encode(policy.weights(), target))
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        adoption = partial(Adopt, code=code, weights=offer, num_probes=num_probes, arguments=pickled)
        pending = self._start(
            lambda call, worker, buffer: adoption(call=call, version=version),
            arrays=lambda worker: weights.frames,
            asks_newcomers=True,
        )
        self.finish(pending)
        self._adoption = adoption
        schemas: dict[Worker, tuple[tuple[ArraySpec, ...], tuple[ArraySpec, ...]]] = {}
        for worker, reply in pending.in_order():
            with blame(worker):
                adopted = expect(Adopted, reply)
                check_specs([*adopted.extras, *adopted.states])
                schemas[worker] = tuple(adopted.extras), tuple(adopted.states)
            self._packages.note(worker, adopted.packages)
        self._packages.tell()
        first, (extras, states) = next(iter(schemas.items()))
        for worker, schema in schemas.items():
            if schema != (extras, states):
                raise PolicyError(
                    f"The policy returns different extras or states on different workers: worker {first.index} "
                    f"{repr((extras, states))[:300]}, worker {worker.index} {repr(schema)[:300]}."
                )
        self.rollout_layout = RolloutLayout(self.action_layout, self.observation_layout, extras, states)

    def forget_policy(self) -> None:
        """Do not trust any worker to hold a policy."""
        self._adoption = None

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]]) -> None:
        """Encode the newest weights once, for all workers that will be told to take them."""
        assert self._weights is not None, "a policy was adopted"
        if self._weights.memory is None:
            # A new block: the socket may still be sending the old one.
            self._weights = _Weights(None, spec.encode(weights))
        else:
            spec.encode(weights, self._weights.block)
            self._weights = _Weights(self._weights.memory, self._weights.block)

    def measure(self, sketches: Mapping[Worker, tuple[int, Sketch]]) -> dict[Worker, Measurement]:
        """Let workers compare their policy with a sketch of the newest, on the probes of a rollout of this number."""

        def ask(call: int, worker: Worker, _buffer: int) -> Measure:
            number, sketch = sketches[worker]
            return Measure(call, number, sketch.version, sketch.family, values.dumps(sketch.arrays))

        self.settle()
        pending = self._start(ask, workers=list(sketches), asks_again=False)
        self.finish(pending)
        measurements = {}
        for worker, reply in pending.in_order():
            with blame(worker):
                measured = expect(Measured, reply)
            measurements[worker] = Measurement(measured.divergence, measured.standard_error)
        return measurements

    def collect(
        self, num_steps: int, number: int, version: int, pulls: set[Worker], arguments: Mapping[str, Any]
    ) -> Collection:
        """Let every worker make its part of a rollout, and wait for it.

        Args:
            num_steps: How long.
            number: Of the rollout: with it, head and worker choose the same probes.
            version: Of the weights that `load` encoded last.
            pulls: Which workers take them.
            arguments: Per-call values for the policy.

        Returns:
            The buffers, which the next rollout will overwrite, and each shard's summary.
        """
        self.settle()
        memory, buffers = self._rollout_buffers(num_steps)
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        pending = self._start(
            lambda call, w, _: Collect(call, number, num_steps, version if w in pulls else None, pickled, offer),
            arrays=lambda worker: self._weights_for(worker, pulls),
            place=lambda worker, _: self.land_rollout(worker, buffers.columns(worker.start, worker.stop)),
        )
        self.finish(pending)
        summaries: list[Mapping[str, Any]] = []
        busy_s: list[float] = []
        for worker, reply in pending.in_order():
            with blame(worker):
                collected = expect(Collected, reply)
                summaries.append(checked_dict(values.loads(collected.summary)))
            if worker.mailbox is None:
                self.note_last_step(worker, buffers.columns(worker.start, worker.stop))
            busy_s.append(collected.busy_s)
        return Collection(buffers, summaries, busy_s)

    def note_last_step(self, worker: Worker, columns: RolloutBuffers) -> None:
        """Keep what a rollout ended with as what the learner saw last, where its worker does not write that here."""
        rows = worker.buffers[worker.shown]
        for row, column in zip(rows.observations, columns.observations, strict=True):
            assert row is not None, "rollouts have leaves of fixed size only"
            row[...] = column[-1]
        rows.terminations[:] = columns.terminations[-1]
        rows.truncations[:] = columns.truncations[-1]

    # What goes on whoever waits for what.

    def advance(self, timeout_s: float) -> bool:
        """Let things happen: take what comes, and do what the supervisor decides; for a moment at most.

        Returns:
            Whether anything came.
        """
        with self.calls.deferred:
            events = self.calls.poll(timeout_s)
            for event in events:
                worker = event.worker
                if isinstance(event, Joined):
                    self.supervisor.joined(worker, time.monotonic())
                elif worker.state is State.LOST:
                    continue  # It was given up for what it sent before.
                elif isinstance(event, Gone):
                    self._lose(worker, event.reason)
                else:
                    self._accept(event)
            for decision in self.supervisor.advance(time.monotonic()):
                if isinstance(decision, Restart):
                    self._restart(decision.worker)
                elif isinstance(decision, GiveUp):
                    self._lose(decision.worker, f"{decision.reason}. {log_of(self._fleet, decision.worker)}")
                else:
                    self._prepare(decision)
            if missing := self.supervisor.missing:
                self._say_what_is_awaited(missing)
            self._check_budget()
        return bool(events)

    def settle(self) -> None:
        """Come to rest: wait for calls that were abandoned, cancel rollouts that were asked for ahead."""
        mailboxes = self.calls.mailboxes.all
        if mailboxes is not None and mailboxes.under_way:
            self._note_plain(time.monotonic())
        if self._under_way or self.stream is not None:
            if any(pending.waiting for pending in self._under_way):
                log.warning("waiting for a call that was interrupted, before the next one")
            for pending in self._under_way:
                pending.abandon()
            for worker in self.workers:
                if worker.is_ready and worker.stream.asked and not any(owed.cancels for owed in worker.owed):
                    call = self.calls.next_number()
                    self.calls.send(worker, Cancel(call), call, _forget_asked, cancels=True)
            while any(worker.is_ready and worker.owed for worker in self.workers):
                self.advance(_WAIT_S)
            with self.calls.deferred:
                self._under_way.clear()
                self.stream = None
                for worker in self.workers:
                    work, worker.stream = worker.stream, StreamWork()
                    for slot in work.free:
                        self.unshare(slot.memory)
        if len({worker.shown for worker in self.workers}) > 1:
            self._even_out()
        self._is_uneven = False

    @property
    def deferred(self) -> contextlib.AbstractContextManager[None]:
        """Puts Ctrl-C off until the end of a block."""
        return self.calls.deferred

    @contextlib.contextmanager
    def without_late(self) -> Iterator[None]:
        """Do not wait for workers that have not come yet, nor, if some are enough, for those that are to come back."""
        self._waits_for_late = False
        try:
            yield
        finally:
            self._waits_for_late = True

    def raise_fatal(self, workers: Iterable[Worker]) -> None:
        """Raise why nobody will be started any more in the place of one of these workers."""
        for worker in workers:
            if worker.fatal is not None:
                raise worker.fatal

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers and let go of the memory. May be called again if it was interrupted."""
        if self._owner_pid != os.getpid():
            return  # A forked copy of the head must not end its parent's workers.
        self.stream = None
        self._under_way.clear()
        self.supervisor.attendance.end(time.monotonic())
        self.calls.close(timeout_s, terminate=terminate)
        with self.calls.deferred:
            for memory in self._memories:
                memory.close()
            self._memories.clear()

    def share(self, size_bytes: int) -> SharedMemory:
        """Make memory that workers on this machine can open; `close` lets go of it."""
        with self.calls.deferred:
            memory = SharedMemory(size_bytes)
            self._memories.append(memory)
        return memory

    def unshare(self, memory: SharedMemory | None) -> None:
        """Let go of memory before the end."""
        if memory is not None and memory in self._memories:
            with self.calls.deferred:
                self._memories.remove(memory)
                memory.close()

    def _do_upkeep(self) -> None:
        self._check_budget()
        self.raise_fatal(self.workers)

    def _start(
        self,
        make: Make,
        *,
        workers: Sequence[Worker] | None = None,
        arrays: Arrays = lambda worker: (),
        place: Place = lambda worker, buffer: no_landing,
        fills: bool = False,
        asks_again: bool = True,
        asks_newcomers: bool = False,
        is_same: bool = False,
        read: Callable[[PendingCall], Outcome] = lambda pending: Outcome({}, [], [], []),
    ) -> PendingCall:
        workers = self.workers if workers is None else workers
        if not self._waits_for_late:
            served = [worker for worker in workers if worker.has_served]
            here = [worker for worker in served if worker.peer is not None]
            workers = here if here and self.supervisor.is_elastic else served
        self.raise_fatal(workers)
        pending = PendingCall(
            self.calls,
            workers,
            make,
            arrays=arrays,
            place=place,
            fills=fills,
            asks_again=asks_again,
            asks_newcomers=asks_newcomers,
            read=read,
        )
        self._under_way.append(pending)
        try:
            pending.start(is_same=is_same)
        except Exception:
            self._under_way.remove(pending)  # It could not be made: nothing was sent.
            raise
        return pending

    def _note_plain(self, started_at: float) -> PendingCall:
        """Make a plain step one like all others: it takes long, or was answered otherwise."""
        mailboxes = self.calls.mailboxes.all
        assert mailboxes is not None, "a plain step was started there"
        with self.calls.deferred:
            pending = PendingCall(
                self.calls,
                self.workers,
                _plain_request,
                arrays=_actions_of,
                place=self._place_step,
                fills=True,
                read=self._read_steps,
            )
            pending.waiting = dict.fromkeys(self.workers, self._plain_buffer)
            self._under_way.append(pending)
            self.calls.note_plain_step(pending.accept, started_at)
            mailboxes.under_way.clear()
        return pending

    def _accept(self, event: Answered) -> None:
        worker = event.worker
        try:
            event.owed.accept(worker, event.reply)
        except WireError as error:
            self._lose(worker, f"it sent a malformed answer: {error}")

    def _lose(self, worker: Worker, reason: str) -> None:
        worker.num_answers += self.calls.num_plain_steps - worker.num_plain_steps
        self.calls.strike_off(worker)
        if self.stream is not None:
            self.stream.on_lost(worker)
        for slot in [*worker.stream.free, *(asked.slot for asked in worker.stream.asked)]:
            self.unshare(slot.memory)
        worker.stream.free.clear()
        worker.stream.asked.clear()
        worker.stream.is_comparing, worker.stream.num_loads = False, 0
        self.unshare(worker.mailbox_memory)
        worker.mailbox_memory = None
        self.supervisor.lost(worker, reason, time.monotonic())

    def _restart(self, worker: Worker) -> None:
        if worker.peer is not None or self.calls.joining.is_coming(worker):
            return  # It has come back, or is about to.
        try:
            self._fleet.restart(worker.index)
        except LaunchError as error:
            self._lose(worker, f"it cannot be started again: {error}")

    def _prepare(self, decision: Prepare) -> None:
        """Send a worker what its stage is about."""
        worker, stage = decision
        requests: list[tuple[Callable[[int], Request], Callable[[Reply], None], Landing, Sequence[Any]]]
        if stage is Stage.ASSIGN:
            code = self._plan.code(worker.start)
            requests = [
                (
                    lambda call: Assign(call, worker.start, worker.stop, code),
                    partial(self._note_made, worker),
                    no_landing,
                    (),
                )
            ]
        elif stage is Stage.SERVE:
            requests = [self._invitation(worker)]
        elif stage is Stage.RESTORE:
            requests = [
                (partial(_numbered, make, worker), lambda reply: expect(Returned, reply), no_landing, ())
                for make in self._attributes.values()
            ]
            if self._was_reset:
                requests.append(self._resumption(worker))
        else:
            requests = self._adoption_of(worker)
        left = len(requests)

        def settle(then: Callable[[Reply], None], owner: Worker, reply: Reply) -> None:
            nonlocal left
            if isinstance(reply, Failed):
                self._note_failed_preparation(owner, reply)
                return
            then(reply)
            left -= 1
            if not left:
                self._prepared(owner)

        for make, then, landing, arrays in requests:
            call = self.calls.next_number()
            self.calls.send(worker, make(call), call, partial(settle, then), landing=landing, arrays=arrays)
        if not requests:
            self._prepared(worker)

    def _prepared(self, worker: Worker) -> None:
        self.supervisor.prepared(worker, time.monotonic())
        if worker.is_ready:
            worker.num_plain_steps = self.calls.num_plain_steps
            for pending in self._under_way:
                pending.ask_again(worker)
            if self.stream is not None:
                self.stream.on_ready(worker)

    def _note_failed_preparation(self, worker: Worker, failed: Failed) -> None:
        failure = failure_of(worker, failed)
        if worker.has_served or worker.lost_at is not None:
            self._lose(worker, f"its replacement could not be made ready: {failure}")
        else:
            self.calls.strike_off(worker)
            self.supervisor.attendance.change(-1, time.monotonic())
            worker.state, worker.fatal = State.LOST, failure

    def _note_made(self, worker: Worker, reply: Reply) -> None:
        made = expect(Made, reply)
        description = checked_dict(values.loads(made.description))
        self._packages.note(worker, made.packages)
        if not worker.has_served:
            worker.description = description
        if self.supervisor.last_stage is Stage.ADOPT:  # Else all are told of together.
            self._packages.tell()

    def _invitation(
        self, worker: Worker
    ) -> tuple[Callable[[int], Request], Callable[[Reply], None], Landing, Sequence[Any]]:
        """Offer a worker the run's memory, unless the one before it may still be writing there."""
        is_alone = not worker.may_linger and (worker.process is None or worker.process.has_ended)
        may_share = self._memory is not None and is_alone
        if self._memory is not None and not is_alone:
            log.warning("%s shares no memory: the one before it may still be writing there", worker)
        if worker.process is not None:
            worker.process.forget()
            worker.process = None
        memory = self._memory if may_share else None
        mailbox = self.share(MAILBOX_BYTES) if may_share else None
        # Its semaphore must be there before the worker waits for it.
        own_side = None if mailbox is None else HeadMailbox(mailbox.memory)

        def accept(reply: Reply) -> None:
            ready = expect(Ready, reply)
            if mailbox is None or memory is None or own_side is None:
                return
            if not ready.shares_memory:
                self.unshare(mailbox)
                return
            try:
                worker.process = Process(worker.pid or 0, memory)
            except OSError:
                worker.may_linger = True
            worker.mailbox_memory = mailbox
            self.calls.mailboxes.use(worker, own_side)

        def make(call: int) -> Serve:
            memory_offer = None if memory is None else memory.offer
            return Serve(call, self._spaces, memory_offer, None if mailbox is None else mailbox.offer)

        return make, accept, no_landing, ()

    def _resumption(
        self, worker: Worker
    ) -> tuple[Callable[[int], Request], Callable[[Reply], None], Landing, Sequence[Any]]:
        """Let a worker's environments begin new episodes, in the place of those that the learner has seen."""
        if not worker.has_served:
            seeds: list[int | None] = list(worker.seeds)
            return (
                lambda call: Reset(call, worker.shown, seeds, None, None),
                lambda reply: setattr(worker, "objects", self.read_step(worker, reply).columns),
                partial(self._land_step, worker, worker.shown),
                (),
            )
        rows = worker.buffers[worker.shown]
        objects = iter(worker.objects or [])
        seen = [next(objects, []) if array is None else array for array in rows.observations]
        ended = (rows.terminations | rows.truncations).tolist()
        if self._plan.autoreset_mode is AutoresetMode.SAME_STEP:
            ended = [False] * worker.num_envs  # The next ones had begun.
        data, first = values.dumps(seen), list(worker.seeds)
        return (
            lambda call: Resume(call, worker.shown, first, data, ended),
            lambda reply: expect(Returned, reply),
            no_landing,
            (),
        )

    def _adoption_of(
        self, worker: Worker
    ) -> list[tuple[Callable[[int], Request], Callable[[Reply], None], Landing, Sequence[Any]]]:
        adoption = self._adoption
        if adoption is None:
            return []
        version, frames = self.weights_now()

        def accept(reply: Reply) -> None:
            self._packages.note(worker, expect(Adopted, reply).packages)
            self._packages.tell()
            self.on_adopted(worker, version)

        return [(lambda call: adoption(call=call, version=version), accept, no_landing, frames)]

    def _weights_for(self, worker: Worker, pulls: set[Worker]) -> Sequence[Any]:
        """Return the weights as a worker gets them with a message, if it shares no memory."""
        assert self._weights is not None, "a policy was adopted"
        return self._weights.frames if worker in pulls else ()

    def _rollout_buffers(self, num_steps: int) -> tuple[SharedMemory | None, RolloutBuffers]:
        layout = self.rollout_layout
        assert layout is not None, "a policy was adopted"
        if self._rollout is None or self._rollout[0] != num_steps:
            if self._rollout is not None:
                self.unshare(self._rollout[1])
            if self._plan.shares_memory:
                memory = self.share(size_of(lambda make: layout.make(num_steps, self._num_envs, make)))
                self._rollout = num_steps, memory, layout.make(num_steps, self._num_envs, carver(memory.memory))
            else:
                self._rollout = num_steps, None, layout.make(num_steps, self._num_envs, allocate)
        return self._rollout[1], self._rollout[2]

    def _read_steps(self, pending: PendingCall) -> Outcome:
        """Put together what a step or reset of all brought."""
        shards: list[ShardInfos] = []
        columns: list[list[Any]] = [[] for _ in range(self._num_object_leaves)]
        errors: list[tuple[int, str]] = []
        for worker, reply in pending.in_order():
            outcome = self.read_step(worker, reply)
            if outcome.infos:
                shards.append(ShardInfos(worker.start, worker.stop, outcome.infos))
            for column, part in zip(columns, outcome.columns, strict=True):
                column.extend(part)
            errors += [(worker.start + row, text) for row, text in outcome.errors]
        infos = merge_infos(shards, self._num_envs) if shards else {}
        return Outcome(infos, columns, [], errors)

    def _read_results(self, pending: PendingCall, count: Callable[[Worker], int]) -> Outcome:
        results: list[Any] = []
        for worker, reply in pending.in_order():
            with blame(worker):
                results += read_results(reply, count(worker))
        return Outcome({}, [], results, [])

    def _place_step(self, worker: Worker, buffer: int) -> Landing:
        return partial(self._land_step, worker, buffer)

    def _land_step(self, worker: Worker, buffer: int, reply: Reply, _num_parts: int) -> Sequence[NDArray[Any]]:
        return list(worker.buffers[buffer].results()) if isinstance(reply, Stepped | Failed) else ()

    def land_rollout(self, worker: Worker, columns: RolloutBuffers) -> Landing:
        """Return where the parts of a rollout go, one after another."""
        num_steps = len(columns.rewards)

        def land(reply: Reply, done: int) -> Sequence[NDArray[Any]]:
            if isinstance(reply, Failed):
                return list(worker.buffers[worker.shown].results())
            if not isinstance(reply, Collected | Part):
                return ()
            stop = num_steps if isinstance(reply, Collected) else reply.first + reply.count
            if reply.first != done or not reply.first < stop <= num_steps:
                raise WireError(f"steps {reply.first} to {stop} of {num_steps} come after {done}")
            return list(columns.steps(reply.first, stop).arrays())

        return land

    def _even_out(self) -> None:
        """Let all workers show the same one of the two step buffers again."""
        wanted = self.workers[0].shown
        odd = [worker for worker in self.workers if worker.shown != wanted]
        for worker in odd:
            if worker.fatal is not None or not worker.has_served:  # There is nobody to ask.
                worker.buffers[wanted].copy_from(worker.buffers[worker.shown])
                worker.shown = wanted
        asked = [worker for worker in odd if worker.shown != wanted]
        if asked:
            show = self._start(
                lambda call, worker, buffer: Show(call, buffer), workers=asked, place=self._place_step, fills=True
            )
            self.wait_for(show)

    def _await_workers(self, has_come: Callable[[Worker], bool], at_least: int) -> None:
        """Wait for workers at the start of a run, saying now and then what is waited for."""
        started = time.monotonic()
        while sum(map(has_come, self.workers)) < at_least:
            self.advance(_WAIT_S)
            self.raise_fatal(self.workers)
            for index, reason in self.calls.joining.misfits.items():
                raise LaunchError(f"Worker {index} cannot join: {reason}.")
            self._await_missing(started)

    def _may_never_come(self, worker: Worker) -> bool:
        """Whether the supervisor does not give a worker up, however long it takes to join."""
        return worker.state is State.LATE or (worker.state is State.STARTING and self.supervisor.is_elastic)

    def _await_missing(self, started: float) -> None:
        """Say what workers that have not joined wait for.

        Raises:
            LaunchError: They took too long.
        """
        missing = [worker for worker in self.workers if worker.state in (State.STARTING, State.LATE)]
        if not missing:
            return
        self._say_what_is_awaited(missing)
        join_s, status = self.timeouts.join_s, self._fleet.status()
        if time.monotonic() - started > join_s:
            names = ", ".join(str(worker.index) for worker in missing)
            raise LaunchError(
                f"Only {len(self.workers) - len(missing)} of {len(self.workers)} workers joined within {join_s:g} s. "
                f"Missing: {names}. {f'{status}. ' if status else ''}{log_of(self._fleet, missing[0])} "
                f"Workers must reach {self.calls.endpoint}; if that address is not routable from them, pass "
                "ClusterEnv(network=Network(listen=..., advertise=...)). Timeouts(join_s=...) gives them longer."
            )

    def _say_what_is_awaited(self, missing: Sequence[Worker]) -> None:
        """Log what workers that have not joined wait for, when that has changed, and now and then."""
        now, status = time.monotonic(), self._fleet.status()
        if status and (status != self._said or now - self._said_at > _REMIND_S):
            self._said, self._said_at = status, now
            log.warning("waiting for %d of %d workers: %s", len(missing), len(self.workers), status)

    def _check_budget(self) -> None:
        """End the workers if they have been there for as long as they may."""
        error = self.supervisor.find_overspending(time.monotonic())
        if error is None or all(worker.fatal is not None for worker in self.workers):
            return
        self.calls.dismiss(self.timeouts.close_s)
        self.supervisor.attendance.end(time.monotonic())
        for worker in self.workers:
            self.calls.strike_off(worker)
            worker.state, worker.fatal = State.LOST, error

    def _timeout(self, missing: Sequence[Worker], timeout_s: float) -> ClusterEnvError:
        return CallTimeout(
            f"No answer within {timeout_s:g} s from {'; '.join(str(worker) for worker in missing)}. "
            "It may be slow or hang; the call is still pending, and may be waited for again. "
            f"{log_of(self._fleet, missing[0])}"
        )


def _plain_request(call: int, _worker: Worker, buffer: int) -> Step:
    return Step(call, buffer, None)


def _actions_of(worker: Worker) -> Sequence[Any]:
    return worker.buffers[0].actions


def _forget_asked(worker: Worker, _reply: Reply) -> None:
    """Note that a worker will not make the rollouts it was asked for and had not begun."""
    worker.stream.free += [asked.slot for asked in worker.stream.asked]
    worker.stream.asked.clear()


def _numbered(make: Make, worker: Worker, call: int) -> Request:
    return make(call, worker, worker.shown)
