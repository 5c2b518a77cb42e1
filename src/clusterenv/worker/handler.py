"""Handler: turns each request into calls on the shard, and the results into a reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, assert_never

from numpy.typing import NDArray

from clusterenv.errors import PolicyError
from clusterenv.policy.contents import read_values
from clusterenv.policy.probes import Probes, pack
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import values
from clusterenv.wire.arrays import allocate, shared_allocator
from clusterenv.wire.assignment import Assignment
from clusterenv.wire.buffers import RolloutBuffers
from clusterenv.wire.info_planes import FullInfos, SlotWriter
from clusterenv.wire.messages import (
    Adopt,
    Adopted,
    Apply,
    Collect,
    Collected,
    Decide,
    Evaluate,
    Evaluated,
    Invoke,
    Offer,
    Part,
    Record,
    Reply,
    Reset,
    Resume,
    Returned,
    SetAttribute,
    Show,
    Step,
    Stepped,
)
from clusterenv.wire.shared import open_memory, open_offer
from clusterenv.worker.episode_player import Task
from clusterenv.worker.infos import complete
from clusterenv.worker.recording import ShardRecorder
from clusterenv.worker.shard import Shard, unpickle

ShardRequest: TypeAlias = (
    Reset | Step | Invoke | SetAttribute | Apply | Adopt | Collect | Decide | Record | Resume | Show | Evaluate
)
Answer: TypeAlias = tuple[Reply, Iterable[NDArray[Any]]]
Send: TypeAlias = Callable[[Reply, Iterable[NDArray[Any]]], None]

_MAX_BLOCKS = 8  # Streams alternate between several.
_PART_SHARE = 4  # A part is 1/4 of what is left: few messages, and little to send once the last step is made.
_PART_BYTES = 1 << 14  # Smaller parts are not worth a message.


class Handler:
    """Handles the head's requests to a shard."""

    def __init__(
        self,
        assignment: Assignment,
        shard: Shard,
        send: Send,
        tick: Callable[[], None],
        new_packages: Callable[[], dict[str, str]],
        *,
        names: memoryview | None,
    ) -> None:
        """Handle requests to a shard.

        Args:
            assignment: What the shard hosts.
            shard: Does the work; `serve` was called already.
            send: Sends parts of an answer ahead of the answer.
            tick: Called after each step of a rollout.
            new_packages: Returns the versions of packages imported since its last call.
            names: Where to write the names of infos; None if the step buffers are not shared with the head.
        """
        self._assignment = assignment
        self._shard = shard
        self._send = send
        self._tick = tick
        self._new_packages = new_packages
        self._shares_memory = names is not None
        self._slot_writer = None if names is None else SlotWriter(shard.host.buffers.info_slots, names)
        self._weights_spec = WeightsSpec(())
        self._weights_memory: memoryview | None = None
        self._load_error: Exception | None = None
        self._blocks: dict[tuple[Offer | None, int], RolloutBuffers] = {}
        self._kept: RolloutBuffers | None = None  # For rollouts that are recorded on this machine.
        self._recorder = ShardRecorder(assignment.start)

    @property
    def policy_version(self) -> int:
        """The version of the weights that the policy holds; 0 if there is none."""
        return self._shard.policy_version if self._shard.rollout_layout is not None else 0

    def answer(self, request: ShardRequest, weights: memoryview | None) -> Answer:
        """Handle a request.

        Args:
            request: The head's request.
            weights: The new weights for it, unless they are in shared memory.

        Returns:
            The reply, and the arrays to send along with it unless they are shared.
        """
        shard, call = self._shard, request.call
        match request:
            case Step():
                return self._stepped(call, shard.step(request.buffer, _unpickled(request.actions)))
            case Reset():
                options = _unpickled(request.options)
                return self._stepped(call, shard.reset(request.buffer, request.seeds, request.mask, options))
            case Resume():
                shard.resume(request.buffer, request.seeds, values.loads(request.seen), request.ended)
                return _returned(call, [])
            case Show():
                shard.host.show_again(request.buffer)
                return self._stepped(call, {})
            case Invoke():
                args, kwargs = unpickle(request.arguments)
                return _returned(call, shard.host.call(request.name, args, kwargs))
            case SetAttribute():
                shard.host.set_attr(request.name, unpickle(request.values))
                return _returned(call, [])
            case Apply():
                return _returned(call, shard.host.apply(unpickle(request.function), request.rows))
            case Adopt():
                return self._adopt(request, weights), ()
            case Decide():
                self.load(request.version, weights)
                arguments = read_values(shard.policy, request.arguments)
                return self._stepped(call, *shard.decide(request.buffer, request.num_probes, arguments))
            case Collect():
                return self._collect(request, weights)
            case Record():
                self._kept = None
                return _returned(call, [self._recorder.begin(request.directory, request.about, request.incarnation)])
            case Evaluate():
                tasks = [Task(each.index, each.seed, _unpickled(each.options)) for each in request.episodes]
                finished, unstarted = shard.play(_unpickled(request.code), request.num_envs, tasks, request.limit_s)
                return Evaluated(call, values.dumps(finished), unstarted), ()
            case _:
                assert_never(request)

    def close(self) -> None:
        """End the recording. The shard is closed by its owner."""
        self._recorder.close()

    def _stepped(self, call: int, infos: dict[str, Any], probes: Probes | None = None) -> Answer:
        host = self._shard.host
        objects = host.objects()
        columns = values.dumps(objects) if objects else None
        errors = list(host.errors)
        packed = None if probes is None else values.dumps(pack(probes))
        if type(infos) is FullInfos:
            if self._slot_writer is not None and (generation := self._slot_writer.write(infos)):
                return Stepped(call, None, columns, generation, errors, packed), ()
            infos = complete(infos, self._assignment.num_rows)
        return Stepped(call, values.dumps(infos) if infos else None, columns, 0, errors, packed), host.buffers.results

    def _adopt(self, request: Adopt, weights: memoryview | None) -> Adopted:
        self._load_error = None
        code, self._weights_spec = unpickle(request.code)
        self._weights_memory = None
        if request.weights is not None:
            # A worker on another machine, or a replacement, is sent the weights as well.
            must_open = self._shares_memory and weights is None
            self._weights_memory = (open_memory if must_open else open_offer)(request.weights)
        self._blocks.clear()
        self._kept = None
        decoded = self._weights_spec.decode(self._newest(weights))
        spec = self._shard.adopt(
            lambda: unpickle(code), request.version, decoded, lambda policy: read_values(policy, request.arguments)
        )
        return Adopted(request.call, list(spec.extras), list(spec.states), self._new_packages())

    def load_for_next(self, version: int, weights: memoryview | None) -> None:
        """Load weights that came in a message of their own; if that raises, the next rollout reports it."""
        try:
            self.load(version, weights)
        except Exception as error:  # noqa: BLE001 - a user's policy may raise anything; it is reported
            self._load_error = error

    def load(self, version: int | None, weights: memoryview | None) -> None:
        """Load new weights, if there are any: those that came with the request, or those in shared memory."""
        if version is not None:
            self._shard.load(version, self._weights_spec.decode(self._newest(weights)))

    def _newest(self, weights: memoryview | None) -> memoryview:
        """Return the weights that came with the request, or those in shared memory."""
        if weights is None and self._weights_memory is not None:
            return self._weights_memory[: self._weights_spec.size_bytes]
        if weights is None:
            raise PolicyError("The head announced new weights, but none came.")
        return weights

    def _collect(self, request: Collect, weights: memoryview | None) -> Answer:
        started = time.perf_counter()
        if self._load_error is not None:
            error, self._load_error = self._load_error, None
            raise error
        self.load(request.version, weights)
        block = self._block_for(request)
        first = 0

        def on_step(done: int) -> None:
            """Send the steps made so far, so that they travel while the environments continue."""
            nonlocal first
            self._tick()
            if self._shares_memory or request.record is not None:
                return
            if (
                done - first >= max(least_steps, (request.num_steps - first) // _PART_SHARE)
                and done < request.num_steps
            ):
                part = block.steps(first, done)
                self._send(Part(request.call, first, done - first), part.arrays())
                first = done

        size_bytes = sum(array.nbytes for array in block.arrays())
        least_steps = -(-request.num_steps * _PART_BYTES // size_bytes)
        arguments = read_values(self._shard.policy, request.arguments)
        summary, probes = self._shard.collect(block, request.num_probes, arguments, on_step)
        packed = None if probes is None else values.dumps(pack(probes))
        version, sent = self._shard.policy_version, block.steps(first, request.num_steps)
        if request.record is not None:
            assert self._shard.rollout_layout is not None, "there is a block"
            said = self._recorder.record(request.record, self._shard.rollout_layout, block, summary, version)
            # The frames stay here. The last step is copied, as it may still be in transit when the next rollout begins.
            summary = {**summary, "finals": None, "recorded": said}
            sent = block.steps(request.num_steps - 1, request.num_steps).copy()
        busy_s = time.perf_counter() - started
        return Collected(request.call, values.dumps(summary), busy_s, first, version, packed), sent.arrays()

    def _block_for(self, request: Collect) -> RolloutBuffers:
        """Return this shard's columns of the block; shared memory is laid out once per memory and rollout length."""
        spec, num_steps, num_rows = self._shard.rollout_layout, request.num_steps, self._assignment.num_rows
        if spec is None:
            raise PolicyError("No policy was sent to this worker.")
        if request.record is not None:
            if self._kept is None or len(self._kept.rewards) != num_steps:
                self._kept = spec.make(num_steps, num_rows, allocate)
            return self._kept
        if not self._shares_memory:
            return spec.make(num_steps, num_rows, allocate)  # A new one: the last may still be in transit to the head.
        key = request.memory, num_steps
        if key not in self._blocks:
            while len(self._blocks) >= _MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            assert request.memory is not None, "it is offered to all who share memory"
            memory = open_memory(request.memory)
            if request.is_own:
                block = spec.make(num_steps, num_rows, shared_allocator(memory))
            else:
                start = self._assignment.start
                block = spec.make(num_steps, self._assignment.num_envs, shared_allocator(memory)).columns(
                    start, start + num_rows
                )
            self._blocks[key] = block
        return self._blocks[key]


def _returned(call: int, results: list[Any]) -> Answer:
    return Returned(call, values.dumps(results)), ()


def _unpickled(data: bytes | None) -> Any:
    return None if data is None else unpickle(data)
