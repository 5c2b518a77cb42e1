"""Remote: calls to the environments on all workers, each with one merged result."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle

from clusterenv.head.backend import Instructions
from clusterenv.head.evaluating import Evaluating
from clusterenv.head.failure import naming
from clusterenv.head.infos import read_results
from clusterenv.head.outcome import Outcome
from clusterenv.head.pending import PendingCall, Replies, step_destination
from clusterenv.head.worker import Worker
from clusterenv.head.workers import PLAIN, Handle
from clusterenv.wire import values
from clusterenv.wire.messages import Apply, Decide, Invoke, Record, Reset, SetAttribute, Step


class Remote(Evaluating):
    """Calls to all workers' environments: each method starts one, and `finish` waits for its result."""

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> Handle:
        """Start resetting all environments, or those in the mask."""
        self.settle()
        pickled = None if options is None else cloudpickle.dumps(options)
        if mask is None:
            self.supervisor.seed(seeds[0])

        def ask(call: int, worker: Worker, buffer: int) -> Reset:
            part = None if mask is None else list(mask[worker.start : worker.stop])
            chosen = list(seeds[worker.start : worker.stop])
            num_plain = self.calls.num_plain_steps - worker.num_plain_steps
            if worker.num_losses and not worker.num_answers and not num_plain:  # Keep the seeds recorded in its `Loss`.
                chosen = [new if seed is None else seed for seed, new in zip(chosen, worker.seeds, strict=True)]
            return Reset(call, buffer, chosen, part, pickled)

        return self._start(
            PendingCall(
                self.calls,
                ask,
                destination=step_destination,
                asks_newcomers=mask is None,
                take=self._reader.take,
                read=self._reader.merge,
            )
        )

    def note_reset(self) -> None:
        """Note that the learner has reset its environments: from now on, a replacement worker resets its own."""
        self.preparation.was_reset = True

    def step(self, actions: Any | None) -> Handle:
        """Start a step.

        Args:
            actions: A sequence indexed by environment; None if the actions are in the buffers already.
        """
        mailboxes = self.calls.mailboxes.all
        if mailboxes is not None and actions is None and not (self._under_way or self._is_uneven or self.stream):
            if mailboxes.woken:
                self.settle()
            self._plain_buffer = buffer = 1 - self.workers[0].shown
            self.calls.start_plain_step(mailboxes, buffer)
            return PLAIN
        self.settle()
        if actions is None:
            return self._start(self._make_step())

        def ask(call: int, worker: Worker, buffer: int) -> Step:
            return Step(call, buffer, pickle.dumps(actions[worker.start : worker.stop]))

        take, read = self._reader.take, self._reader.merge
        return self._start(PendingCall(self.calls, ask, destination=step_destination, fills=True, take=take, read=read))

    def decide(self, instructions: Instructions) -> Handle:
        """Start a step in which the workers choose the actions."""
        told = self._acting_fields(instructions)
        self.settle()
        return self._start(
            PendingCall(
                self.calls,
                lambda call, worker, buffer: Decide(call, buffer, **told(worker)),
                arrays=lambda worker: self._weights_for(worker, instructions),
                destination=step_destination,
                fills=True,
                take=self._reader.take,
                read=self._reader.merge,
            )
        )

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle:
        """Start calling a method, or reading an attribute, of every environment."""
        arguments = cloudpickle.dumps((args, kwargs))
        self.settle()
        read = partial(_read_results, lambda worker: worker.num_envs)
        return self._start(PendingCall(self.calls, lambda call, *_: Invoke(call, name, arguments), read=read))

    def set_attr(self, name: str, items: Sequence[Any]) -> Handle:
        """Start setting an attribute of every environment."""
        # Pickled now, so that a worker that joins later gets the values as they are now.
        pickled = {worker: cloudpickle.dumps(list(items[worker.start : worker.stop])) for worker in self.workers}
        self.settle()

        def ask(call: int, worker: Worker, _buffer: int) -> SetAttribute:
            return SetAttribute(call, name, pickled[worker])

        def note(_: Replies) -> Outcome:
            self.preparation.attributes.pop(name, None)  # Re-inserted last, to keep the order of setting.
            self.preparation.attributes[name] = ask
            return Outcome({}, [], [], [])

        return self._start(PendingCall(self.calls, ask, asks_newcomers=True, read=note))

    def apply(self, function: Callable[[Any], Any], env_indices: Sequence[int]) -> Handle:
        """Start running a function on these environments, given in ascending order."""
        code, chosen = cloudpickle.dumps(function), set(env_indices)
        self.settle()

        def rows(worker: Worker) -> list[int]:
            return [index - worker.start for index in worker.env_indices if index in chosen]

        read = partial(_read_results, lambda worker: len(rows(worker)))
        return self._start(PendingCall(self.calls, lambda call, w, _: Apply(call, rows(w), code), read=read))

    def record(self, directory: str, about: Mapping[str, Any]) -> Handle:
        """Start recording on the workers, each to a file in this directory on its machine.

        The results are one text per worker, in the order of the environments: why it cannot record, or "" if it can.

        Args:
            directory: The directory of the dataset.
            about: A description of the run, stored with the recording.
        """
        said = values.dumps(dict(about))
        self.settle()

        def ask(call: int, worker: Worker, _buffer: int) -> Record:
            return Record(call, directory, said, worker.incarnation)

        def note(replies: Replies) -> Outcome:
            self.preparation.recording = ask
            return _read_results(lambda worker: 1, replies)

        return self._start(PendingCall(self.calls, ask, asks_newcomers=True, read=note))

    def end_recording(self) -> Handle:
        """Start ending the recording on the workers."""
        self.settle()
        self.preparation.recording = None
        return self._start(PendingCall(self.calls, lambda call, *_: Record(call, None, b"", 0)))

    def step_shard(self, worker: Worker) -> PendingCall:
        """Start a step of one worker's environments, with the actions in the buffers."""
        self._is_uneven = True
        pending = self._make_step()
        self._under_way.append(pending)
        pending.start([worker])
        return pending


def _read_results(count: Callable[[Worker], int], replies: Replies) -> Outcome:
    results: list[Any] = []
    for worker, reply in replies:
        with naming(worker):
            results += read_results(reply, count(worker))
    return Outcome({}, [], results, [])
