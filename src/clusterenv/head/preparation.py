"""Preparation: what a worker that has joined is given, stage by stage, until it can take part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
from gymnasium.vector import AutoresetMode

from clusterenv.head.calls import Calls, Destination, no_arrays
from clusterenv.head.infos import StepReader, checked_dict, expect
from clusterenv.head.machines import Machines
from clusterenv.head.packages import Packages
from clusterenv.head.pending import Make, step_destination
from clusterenv.head.worker import Stage, Worker
from clusterenv.wire import messages, values
from clusterenv.wire.assignment import RunSpaces
from clusterenv.wire.messages import Reply, Request
from clusterenv.wire.shared import MAILBOX_BYTES, HeadMailbox, SharedMemories, SharedMemory, WorkerProcess
from clusterenv.wire.zeromq import Frames

log = logging.getLogger(__name__)


class PreparationRequest(NamedTuple):
    """One of the requests of a stage.

    Attributes:
        make: Makes the request from the call's number.
        accept: Takes the answer, unless it is `Failed`; may raise WireError.
        destination: Where arrays that come with the answer are stored.
        arrays: Arrays to send along with the request.
        then: Returns the requests to send once this one is answered.
    """

    make: Callable[[int], Request]
    accept: Callable[[Reply], object]
    destination: Destination = no_arrays
    arrays: Sequence[Any] = ()
    then: Callable[[], Sequence[PreparationRequest]] = tuple


class Preparation:
    """Keeps what the workers of a run were given, so that a replacement can be given the same.

    Attributes:
        attributes: For each attribute that was set, in that order, a function that makes the request to set it.
        recording: Makes the request to record rollouts on the worker's machine, if there is a recording.
        was_reset: Whether the learner has reset its environments, so that a replacement must reset its own.
        adoption: Makes the request to adopt the policy, if there is one.
        on_adopted: Called with each worker that was given the policy during preparation, and the version.
        packages: The packages that workers have imported.
        weights_now: Returns the newest version and its weights, encoded and cut, for such a worker; None if the worker
            must wait for the next call that takes a policy.
    """

    def __init__(
        self,
        calls: Calls,
        workers: Sequence[Worker],
        memories: SharedMemories,
        machines: Machines,
        assignments: Callable[[int], bytes],
        autoreset_mode: AutoresetMode,
    ) -> None:
        self.attributes: dict[str, Make] = {}
        self.recording: Make | None = None
        self.was_reset = False
        self.adoption: Callable[..., messages.Adopt] | None = None
        self.on_adopted: Callable[[Worker, int], None] = lambda worker, version: None
        self.weights_now: Callable[[], tuple[int, Frames] | None] = lambda: None
        self.packages = Packages(workers)
        self._is_open = False
        self._calls = calls
        self._memories = memories
        self._machines = machines
        self._assignments = assignments  # Takes the index of a worker's first environment.
        self._autoreset_mode = autoreset_mode

    def open(self, spaces: RunSpaces, memory: SharedMemory | None, reader: StepReader) -> None:
        """Set what the stages after the first need; `memory`, if any, holds the bell and the step buffers."""
        self._is_open = True
        self._spaces = cloudpickle.dumps(spaces)
        self._memory = memory
        self._reader = reader

    def requests(self, worker: Worker, stage: Stage) -> list[PreparationRequest]:
        """Return the requests to send a worker in a stage."""
        if stage is Stage.ASSIGN:
            code = self._assignments(worker.start)
            return [PreparationRequest(lambda call: messages.Assign(call, code), partial(self._note_made, worker))]
        if stage is Stage.SERVE:
            return [self._invitation(worker)]
        if stage is Stage.ADOPT:
            return self._adoption_of(worker)
        requests = [
            PreparationRequest(partial(_numbered, make, worker), partial(expect, messages.Returned))
            # A worker that cannot record reports that with its first rollout.
            for make in (*self.attributes.values(), *([] if self.recording is None else [self.recording]))
        ]
        if self.was_reset:
            requests.append(self._resumption(worker))
        return requests

    def _note_made(self, worker: Worker, reply: Reply) -> None:
        made = expect(messages.Made, reply)
        description = checked_dict(values.loads(made.description))
        self.packages.note(worker, made.packages)
        if not worker.has_served:
            worker.description = description
        if self._is_open:  # Otherwise the differences of all workers are logged together, later.
            self.packages.tell()

    def _invitation(self, worker: Worker) -> PreparationRequest:
        """Offer a worker the run's memory, unless its predecessor may still be writing to it."""
        is_alone = not worker.may_linger and (worker.process is None or worker.process.has_ended)
        memory = self._memory if is_alone else None
        if not is_alone and self._memory is not None:
            log.warning("%s, will not share memory: its predecessor may still be writing to it", worker)
        if worker.process is not None:
            worker.process.forget()
            worker.process = None
        neighbour = self._machines.find_neighbour(worker)

        def read(reply: Reply) -> messages.Ready:
            ready: messages.Ready = expect(messages.Ready, reply)
            self._machines.note_trial(worker, neighbour, has_succeeded=ready.has_neighbour)
            return ready

        if memory is None:
            return PreparationRequest(lambda call: messages.Serve(call, self._spaces, None, None, neighbour), read)
        mailbox = self._memories.share(MAILBOX_BYTES)
        own_side = HeadMailbox(mailbox.memory)  # Its semaphore must exist before the worker waits for it.

        def accept(reply: Reply) -> None:
            if not read(reply).shares_memory:
                self._memories.unshare(mailbox)
                return
            try:
                worker.process = WorkerProcess(worker.pid or 0, mailbox)
            except OSError:
                worker.may_linger = True
            worker.mailbox_memory = mailbox
            self._calls.mailboxes.use(worker, own_side)

        return PreparationRequest(
            lambda call: messages.Serve(call, self._spaces, memory.offer, mailbox.offer, neighbour), accept
        )

    def _resumption(self, worker: Worker) -> PreparationRequest:
        """Let a replacement's environments begin new episodes, continuing from what the learner last saw."""
        seeds, shown = list(worker.seeds), worker.shown
        if not worker.has_served:
            return PreparationRequest(
                lambda call: messages.Reset(call, shown, [*seeds], None, None),
                partial(self._reader.take, worker),
                step_destination(worker, shown),
            )
        rows = worker.buffers[shown]
        objects = iter(worker.objects or [])
        seen = values.dumps([next(objects, []) if array is None else array for array in rows.observations])
        ended = (rows.terminations | rows.truncations).tolist()
        if self._autoreset_mode is AutoresetMode.SAME_STEP:
            ended = [False] * worker.num_envs  # The next episodes had begun already.
        return PreparationRequest(
            lambda call: messages.Resume(call, shown, seeds, seen, ended), partial(expect, messages.Returned)
        )

    def _adoption_of(self, worker: Worker, old: int = 0) -> list[PreparationRequest]:
        """Give a worker the policy, and again if there is a newer version by the time that is done.

        Twice is enough for weights, since newer ones are sent once the worker is ready. A policy of another structure
        must be adopted before that.

        Args:
            worker: The replacement.
            old: The version that it was given just now.
        """
        adoption = self.adoption
        weights = None if adoption is None else self.weights_now()
        if adoption is None or weights is None or weights[0] == old:
            return []
        version, frames = weights

        def accept(reply: Reply) -> None:
            self.packages.note(worker, expect(messages.Adopted, reply).packages)
            self.packages.tell()
            self.on_adopted(worker, version)

        def go_on() -> list[PreparationRequest]:
            is_enough = old and self.adoption is adoption
            return [] if is_enough else self._adoption_of(worker, version)

        return [
            PreparationRequest(
                lambda call: adoption(call=call, version=version),
                accept,
                arrays=frames,
                then=go_on,
            )
        ]


def _numbered(make: Make, worker: Worker, call: int) -> Request:
    return make(call, worker, worker.shown)
