"""Acting: the policies beside the environments: adopt one, let it make rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError, WireError
from clusterenv.head.calls import Destination
from clusterenv.head.failure import naming
from clusterenv.head.infos import checked_dict, checked_seconds, expect
from clusterenv.head.machines import Shares
from clusterenv.head.outcome import Collection
from clusterenv.head.pending import PendingCall
from clusterenv.head.worker import Worker
from clusterenv.head.workers import Workers
from clusterenv.policy.policy import Policy
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import messages, values
from clusterenv.wire.arrays import allocate, shared_allocator, size_of
from clusterenv.wire.board import digest_of
from clusterenv.wire.buffers import RolloutBuffers, RolloutLayout, check_specs
from clusterenv.wire.messages import ArraySpec, Copy, Load, Missing, Reply
from clusterenv.wire.shared import SharedMemory
from clusterenv.wire.zeromq import Frames, cut


@dataclass(eq=False, repr=False)
class _Weights:
    """Where a version's weights lie for all workers to read: shared memory, or a block to send, and who gets it."""

    version: int
    memory: SharedMemory | None
    block: NDArray[Any]
    shares: Shares

    @cached_property
    def frames(self) -> Frames:
        """The block for those who do not share memory, cut once for all of them."""
        return cut(self.block)


def _as_given(_worker: Worker, _version: int, _held: int, frames: Frames | None) -> Frames | None:
    return frames


class Acting(Workers):
    """Workers that hold a policy, which chooses actions there: what `Versions` and `Rollouts` build upon.

    Attributes:
        rollout_layout: What rollouts look like, once a policy was adopted.
    """

    rollout_layout: RolloutLayout | None = None
    on_missing: Callable[[Worker, int, int, Frames | None], Frames | None] = staticmethod(_as_given)
    """Told who does not find a version, and which it holds; returns what to send, given what is at hand here."""

    _weights: _Weights | None = None
    _rollout: tuple[int, SharedMemory | None, RolloutBuffers] | None = None

    def adopt(self, policy: Policy, spec: WeightsSpec, version: int, arguments: Mapping[str, Any]) -> int:
        """Send every worker the policy's structure and weights, and learn what it returns besides actions.

        Returns:
            How often the weights were sent.

        Raises:
            PolicyError: The policy cannot be sent, or does not return the same on all workers.
        """
        code = pickle_policy((policy, spec))
        self.settle()
        self.preparation.adoption = None  # Should this fail halfway, no worker is trusted to hold any policy.
        if self._weights is not None:
            self.memories.unshare(self._weights.memory)
        if self._rollout is not None:
            self.memories.unshare(self._rollout[1])
        self._weights = self._rollout = None
        memory = self.memories.share(spec.size_bytes) if self.shares_memory else None
        target = None if memory is None else np.frombuffer(memory.memory, np.uint8, spec.size_bytes)
        block = spec.encode(policy.weights(), target)
        present = [worker for worker in self.workers if worker.is_ready]
        self._weights = weights = _Weights(version, memory, block, self._share_out(present, block))
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        adoption = partial(messages.Adopt, code=code, weights=offer, arguments=pickled)
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
        """Do not trust any worker to hold a policy."""
        self.preparation.adoption = None

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int, pulls: set[Worker]) -> int:
        """Encode the newest weights once, for all workers that will be told to take them.

        Returns:
            To how many they are sent, those included that share memory with the head.
        """
        assert self._weights is not None, "a policy was adopted"
        memory, takers = self._weights.memory, list(pulls)
        # A new block if there is no memory: the socket may still be sending the old one.
        block = spec.encode(weights, None if memory is None else self._weights.block)
        self._weights = _Weights(version, memory, block, self._share_out(takers, block))
        return len(takers) - self._weights.shares.num_spared

    def count_copies(self, size_bytes: int) -> int:
        """Return how often weights of this size would be sent if all workers took them."""
        return self.machines.count_copies(size_bytes)

    def collect(
        self,
        num_steps: int,
        version: int,
        pulls: set[Worker],
        num_probes: Mapping[Worker, int],
        arguments: Mapping[str, Any],
        record: int | None = None,
    ) -> Collection:
        """Let every worker make its part of a rollout, and wait for it.

        Args:
            num_steps: How long.
            version: Of the weights that `load` encoded last.
            pulls: Which workers take them.
            num_probes: At how many rows workers should say how their actions were distributed; at none by default.
            arguments: Per-call values for the policy.
            record: The rollout's number in a recording: then it stays with the workers, but for its last step.

        Returns:
            The buffers, which the next rollout will overwrite, and each shard's summary.
        """

        def take(worker: Worker, reply: Reply) -> tuple[messages.Collected, Mapping[str, Any], float]:
            collected: messages.Collected = expect(messages.Collected, reply)
            if worker.mailbox is None:
                self.note_last_step(worker, buffers.columns(worker.start, worker.stop))
            return collected, checked_dict(values.loads(collected.summary)), checked_seconds(collected.busy_s)

        self.settle()
        memory, buffers = self._rollout_buffers(num_steps) if record is None else (None, self._last_step())
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        pending = self._start(
            PendingCall(
                self.calls,
                lambda call, w, _: messages.Collect(
                    call,
                    num_steps,
                    num_probes.get(w, 0),
                    version if self._takes(w, pulls) else None,
                    pickled,
                    offer,
                    record=record,
                    copy=self._copy_for(w, pulls),
                ),
                arrays=lambda worker: self._weights_for(worker, pulls),
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
        """Keep what a rollout ended with as what the learner saw last, where its worker does not write that here."""
        rows = worker.buffers[worker.shown]
        for row, column in zip(rows.observations, columns.observations, strict=True):
            assert row is not None, "rollouts have leaves of fixed size only"
            row[...] = column[-1]
        rows.terminations[:] = columns.terminations[-1]
        rows.truncations[:] = columns.truncations[-1]

    def rollout_destination(self, worker: Worker, columns: RolloutBuffers) -> Destination:
        """Return where the parts of a rollout go, one after another."""
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

    def _weights_for(self, worker: Worker, pulls: set[Worker]) -> Sequence[Any]:
        """Return the weights as a worker gets them with a message, if it shares no memory."""
        assert self._weights is not None, "a policy was adopted"
        return self._weights.frames if self._takes(worker, pulls) and self._weights.shares.travels_to(worker) else ()

    def _copy_for(self, worker: Worker, pulls: set[Worker]) -> Copy | None:
        """Return who on a worker's machine gets the weights, if it is to take them."""
        assert self._weights is not None, "a policy was adopted"
        return self._weights.shares.copy_for(worker) if self._takes(worker, pulls) else None

    def _takes(self, worker: Worker, pulls: set[Worker]) -> bool:
        """Whether a worker takes the weights of a call: a successor may have been given newer ones already."""
        return worker in pulls and self._weights is not None and worker.policy.version <= self._weights.version

    def _share_out(self, takers: Sequence[Worker], block: NDArray[Any]) -> Shares:
        return self.machines.share(takers, block.nbytes, lambda: digest_of([block]))

    def _supply(self, worker: Worker, missing: Missing) -> None:
        """Send a worker weights that it did not find where it was told; or let the rule decide anew what it gets."""
        if missing.version < worker.policy.version:
            return  # It was told of newer ones since.
        self.machines.note_missing(worker)
        own = self._weights
        found = None
        if own is not None and own.version == missing.version:
            found = own.frames if own.memory is None else cut(own.block.copy())  # That one is overwritten by the next.
        frames = self.on_missing(worker, missing.version, missing.held, found)
        if frames is not None:
            self.calls.tell(worker, Load(missing.version), frames)
        elif self.stream is not None:
            self.stream.on_ready(worker)

    def _last_step(self) -> RolloutBuffers:
        assert self.rollout_layout is not None, "a policy was adopted"
        return self.rollout_layout.make(1, self.num_envs, allocate)

    def _rollout_buffers(self, num_steps: int) -> tuple[SharedMemory | None, RolloutBuffers]:
        layout = self.rollout_layout
        assert layout is not None, "a policy was adopted"
        if self._rollout is None or self._rollout[0] != num_steps:
            if self._rollout is not None:
                self.memories.unshare(self._rollout[1])
            if self.shares_memory:
                memory = self.memories.share(size_of(lambda make: layout.make(num_steps, self.num_envs, make)))
                self._rollout = (
                    num_steps,
                    memory,
                    layout.make(num_steps, self.num_envs, shared_allocator(memory.memory)),
                )
            else:
                self._rollout = num_steps, None, layout.make(num_steps, self.num_envs, allocate)
        return self._rollout[1], self._rollout[2]


def pickle_policy(policy: object) -> bytes:
    """Pickle what holds a policy.

    Raises:
        PolicyError: It cannot be sent.
    """
    try:
        code: bytes = cloudpickle.dumps(policy)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"The agent cannot be sent to workers: {type(error).__name__}: {error}.") from error
    return code
