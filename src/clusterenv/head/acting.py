"""Acting: policies that run on the workers, beside the environments: adopt one, and let it make rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import ConfigError, PolicyError, WireError
from clusterenv.head.backend import Instructions
from clusterenv.head.calls import Destination
from clusterenv.head.failure import naming
from clusterenv.head.infos import checked_dict, checked_seconds, expect
from clusterenv.head.machines import Shares
from clusterenv.head.outcome import Collection
from clusterenv.head.pending import PendingCall
from clusterenv.head.worker import Slot, Worker
from clusterenv.head.workers import Workers
from clusterenv.policy.policy import Policy
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import messages, values
from clusterenv.wire.arrays import allocate, shared_allocator, size_of
from clusterenv.wire.board import digest_of
from clusterenv.wire.buffers import RolloutBuffers, RolloutLayout, check_specs
from clusterenv.wire.messages import ArraySpec, Load, Missing, Reply
from clusterenv.wire.shared import SharedMemory
from clusterenv.wire.zeromq import Frames, cut


@dataclass(eq=False, repr=False)
class _Weights:
    """A version's encoded weights, in shared memory or as a block to send, and which workers they are sent to."""

    version: int
    memory: SharedMemory | None
    block: NDArray[Any]
    shares: Shares

    @cached_property
    def frames(self) -> Frames:
        """The block for workers that do not share memory, cut once for all of them."""
        return cut(self.block)


def _as_given(_worker: Worker, _version: int, _held: int, frames: Frames | None) -> Frames | None:
    return frames


class Acting(Workers):
    """Workers that hold a policy which chooses their actions; `Versions` and `Rollouts` build on this.

    Attributes:
        rollout_layout: The layout of rollouts, once a policy was adopted.
    """

    rollout_layout: RolloutLayout | None = None
    on_missing: Callable[[Worker, int, int, Frames | None], Frames | None] = staticmethod(_as_given)
    """Called with a worker, the version it did not find, the one it holds, and the frames if known; returns frames."""

    _weights: _Weights | None = None
    _rollout: Slot | None = None

    def adopt(self, policy: Policy, spec: WeightsSpec, version: int, arguments: Mapping[str, Any]) -> int:
        """Send every worker the policy's structure and weights, and find out what it returns besides actions.

        Returns:
            How many copies of the weights were sent.

        Raises:
            PolicyError: The policy cannot be sent, or returns different extras or states on different workers.
        """
        code = cloudpickle.dumps((pickle_policy(policy), spec))
        self.settle()
        self.preparation.adoption = None  # If this fails halfway, no worker is trusted to hold a policy.
        if self._weights is not None:
            self.memories.unshare(self._weights.memory)
        if self._rollout is not None:
            self.memories.unshare(self._rollout.memory)
        self._weights = self._rollout = None
        memory = self.memories.share(spec.size_bytes) if self.shares_memory else None
        target = None if memory is None else np.frombuffer(memory.memory, np.uint8, spec.size_bytes)
        block = spec.encode(policy.weights(), target)
        present = [worker for worker in self.workers if worker.is_ready]
        self._weights = weights = _Weights(version, memory, block, self._share_out(present, block))
        offer = None if memory is None else memory.offer
        adoption = partial(messages.Adopt, code=code, weights=offer, arguments=pickle_arguments(arguments))
        pending = self._start(
            PendingCall(
                self.calls,
                lambda call, worker, _: adoption(call=call, version=version, copy=weights.shares.copy_for(worker)),
                arrays=lambda worker: weights.frames if weights.shares.travels_to(worker) else (),
                asks_newcomers=True,
            )
        )
        self.finish(pending)
        self.preparation.adoption = adoption
        schemas: dict[Worker, tuple[tuple[ArraySpec, ...], tuple[ArraySpec, ...]]] = {}
        for worker, reply in pending.in_order():
            with naming(worker):
                adopted = expect(messages.Adopted, reply)
                check_specs([*adopted.extras, *adopted.states])
                schemas[worker] = tuple(adopted.extras), tuple(adopted.states)
            self.preparation.packages.note(worker, adopted.packages)
        self.preparation.packages.tell()
        first, (extras, states) = next(iter(schemas.items()))
        for worker, schema in schemas.items():
            if schema != (extras, states):
                raise PolicyError(
                    f"The policy returns different extras or states on different workers: worker {first.index} "
                    f"{repr((extras, states))[:300]}, worker {worker.index} {repr(schema)[:300]}."
                )
        self.rollout_layout = RolloutLayout(self.action_layout, self.observation_layout, extras, states)
        return len(present) - weights.shares.num_spared

    def forget_policy(self) -> None:
        """Stop trusting any worker to hold a policy."""
        self.preparation.adoption = None

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int, pulls: set[Worker]) -> int:
        """Encode the newest weights once, for all workers that will be told to load them.

        Returns:
            How many copies this takes; a worker that shares memory with the head counts as one.
        """
        assert self._weights is not None, "a policy was adopted"
        memory, takers = self._weights.memory, list(pulls)
        # A new block if there is no memory: the socket may still be sending the old one.
        block = spec.encode(weights, None if memory is None else self._weights.block)
        self._weights = _Weights(version, memory, block, self._share_out(takers, block))
        return len(takers) - self._weights.shares.num_spared

    def count_copies(self, size_bytes: int) -> int:
        """Return how many copies of weights of this size would be sent if all workers pulled."""
        return self.machines.count_copies(size_bytes)

    def collect(self, num_steps: int, instructions: Instructions, record: int | None = None) -> Collection:
        """Let every worker make its part of a rollout, and wait for all parts.

        With `record`, its number in a recording, the rollout stays on the workers except for its last step.
        """

        def take(worker: Worker, reply: Reply) -> tuple[messages.Collected, Mapping[str, Any], float]:
            collected: messages.Collected = expect(messages.Collected, reply)
            if worker.mailbox is None:
                self.note_last_step(worker, buffers.columns(worker.start, worker.stop))
            return collected, checked_dict(values.loads(collected.summary)), checked_seconds(collected.busy_s)

        self.settle()
        memory, buffers = (
            self._slot_for_all(num_steps) if record is None else self.make_slot(1, self.num_envs, is_shared=False)
        )
        offer = None if memory is None else memory.offer
        told = self._acting_fields(instructions)
        pending = self._start(
            PendingCall(
                self.calls,
                lambda call, w, _: messages.Collect(call, num_steps, memory=offer, record=record, **told(w)),
                arrays=lambda worker: self._weights_for(worker, instructions),
                destination=lambda w, _: self.rollout_destination(w, buffers.columns(w.start, w.stop)),
                take=take,
            )
        )
        self.finish(pending)
        summaries: list[Mapping[str, Any]] = []
        busy_s: list[float] = []
        versions: list[int] = []
        probes: list[bytes | None] = []
        for _, (collected, summary, seconds) in pending.in_order():
            summaries.append(summary)
            busy_s.append(seconds)
            versions.append(collected.version)
            probes.append(collected.probes)
        return Collection(buffers, summaries, busy_s, versions, probes)

    def note_last_step(self, worker: Worker, columns: RolloutBuffers) -> None:
        """Copy a rollout's last step to the step buffers, for a worker that shares no memory and cannot do so."""
        rows = worker.buffers[worker.shown]
        for row, column in zip(rows.observations, columns.observations, strict=True):
            assert row is not None, "rollouts have leaves of fixed size only"
            row[...] = column[-1]
        rows.terminations[:] = columns.terminations[-1]
        rows.truncations[:] = columns.truncations[-1]

    def rollout_destination(self, worker: Worker, columns: RolloutBuffers) -> Destination:
        """Return a function that says which arrays each part of a rollout fills, one part after another."""
        num_steps = len(columns.rewards)

        def destination(reply: Reply, done: int) -> Sequence[NDArray[Any]]:
            if isinstance(reply, messages.Failed):
                return worker.buffers[worker.shown].results
            if not isinstance(reply, messages.Collected | messages.Part):
                return ()
            stop = num_steps if isinstance(reply, messages.Collected) else reply.first + reply.count
            if reply.first != done or not reply.first < stop <= num_steps:
                raise WireError(f"steps {reply.first} to {stop} of {num_steps} come after {done}")
            return list(columns.steps(reply.first, stop).arrays())

        return destination

    def _acting_fields(self, instructions: Instructions) -> Callable[[Worker], dict[str, Any]]:
        """Return a function that makes the fields common to `Collect` and `Decide` for a worker."""
        arguments = pickle_arguments(instructions.arguments)

        def make(worker: Worker) -> dict[str, Any]:
            assert self._weights is not None, "a policy was adopted"
            takes = self._takes(worker, instructions)
            return {
                "version": instructions.version if takes else None,
                "copy": self._weights.shares.copy_for(worker) if takes else None,
                "num_probes": instructions.num_probes.get(worker, 0),
                "arguments": arguments,
            }

        return make

    def _weights_for(self, worker: Worker, instructions: Instructions) -> Sequence[Any]:
        """Return the weights to send along with a message to a worker, if any."""
        assert self._weights is not None, "a policy was adopted"
        travels = self._takes(worker, instructions) and self._weights.shares.travels_to(worker)
        return self._weights.frames if travels else ()

    def _takes(self, worker: Worker, instructions: Instructions) -> bool:
        """Whether a worker loads the weights of a call: a replacement may hold newer ones already."""
        assert self._weights is not None, "a policy was adopted"
        return worker in instructions.pulls and worker.policy.version <= self._weights.version

    def _share_out(self, takers: Sequence[Worker], block: NDArray[Any]) -> Shares:
        return self.machines.share(takers, block.nbytes, lambda: digest_of([block]))

    def _supply(self, worker: Worker, missing: Missing) -> None:
        """Send a worker weights that it did not find on a board, or let the sync rule judge the worker again."""
        if missing.version < worker.policy.version:
            return  # It has been told to load newer ones since.
        self.machines.note_missing(worker)
        own = self._weights
        found = None
        if own is not None and own.version == missing.version:
            found = own.frames if own.memory is None else cut(own.block.copy())  # The next version overwrites it.
        frames = self.on_missing(worker, missing.version, missing.held, found)
        self.calls.tell(worker, Load(missing.version), frames or ())
        if frames is None and self.stream is not None:
            self.stream.on_ready(worker)

    def make_slot(self, num_steps: int, num_envs: int, *, is_shared: bool) -> Slot:
        """Make the arrays of a rollout, in memory to be shared with workers or in the head's own."""
        layout = self.rollout_layout
        assert layout is not None, "a policy was adopted"
        if not is_shared:
            return Slot(None, layout.make(num_steps, num_envs, allocate))
        memory = self.memories.share(size_of(lambda make: layout.make(num_steps, num_envs, make)))
        return Slot(memory, layout.make(num_steps, num_envs, shared_allocator(memory.memory)))

    def _slot_for_all(self, num_steps: int) -> Slot:
        """Return where rollouts of all workers are stored; reused as long as their length stays the same."""
        if self._rollout is None or len(self._rollout.buffers.rewards) != num_steps:
            if self._rollout is not None:
                self.memories.unshare(self._rollout.memory)
            self._rollout = self.make_slot(num_steps, self.num_envs, is_shared=self.shares_memory)
        return self._rollout


def pickle_arguments(arguments: Mapping[str, Any]) -> bytes | None:
    """Pickle per-call values for a policy; None if there are none.

    Raises:
        ConfigError: The values cannot be pickled.
    """
    try:
        return cloudpickle.dumps(dict(arguments)) if arguments else None
    except Exception as error:
        raise ConfigError(
            f"values hold something that cannot be sent to workers: {type(error).__name__}: {error}. Give numbers, "
            "text, arrays, or objects that can be pickled."
        ) from error


def pickle_policy(policy: object) -> bytes:
    """Pickle a policy, or an object that holds one.

    Raises:
        PolicyError: It cannot be pickled.
    """
    try:
        code: bytes = cloudpickle.dumps(policy)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"The agent cannot be sent to workers: {type(error).__name__}: {error}.") from error
    return code
