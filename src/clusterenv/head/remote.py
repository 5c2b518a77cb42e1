"""Remote: the environments on the workers, and the policies beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError, WireError
from clusterenv.head.checks import checked_dict, expect
from clusterenv.head.crew import Arrays, Make
from clusterenv.head.failure import blame
from clusterenv.head.hub import Hub
from clusterenv.head.outcome import Collection
from clusterenv.head.remote_envs import RemoteEnvs
from clusterenv.head.remote_plan import RemotePlan
from clusterenv.head.roster import Member
from clusterenv.policy.policy import Policy
from clusterenv.policy.sketch import Measurement, Sketch
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import values
from clusterenv.wire.arrays import allocate, carver, size_of
from clusterenv.wire.block import Block, BlockSpec, check_specs
from clusterenv.wire.messages import (
    Adopt,
    Adopted,
    ArraySpec,
    Collect,
    Collected,
    Decide,
    Measure,
    Measured,
    Part,
    Reply,
)
from clusterenv.wire.shared import SharedMemory
from clusterenv.wire.zeromq import Frames, cut


@dataclass(eq=False, repr=False)
class _Weights:
    """Where a version's weights lie for all workers to read: shared memory, or a block to send."""

    memory: SharedMemory | None
    block: NDArray[Any]
    version: int

    @cached_property
    def frames(self) -> Frames:
        """The block for those who do not share memory, cut once for all of them."""
        return cut(self.block)


class Remote(RemoteEnvs):
    """Environments with policies beside them. `decide` starts a call that `finish` ends.

    Attributes:
        block_spec: What rollouts look like, once a policy was adopted.
    """

    def __init__(self, hub: Hub, plan: RemotePlan) -> None:
        """Lay out the planes, as `RemoteEnvs` does."""
        self._block: tuple[int, SharedMemory | None, Block] | None = None
        self.block_spec: BlockSpec | None = None
        self._weights: _Weights | None = None
        self._adoption: Callable[..., Adopt] | None = None
        self._held: dict[int, int] = {}
        self._is_decision = False
        self._new: dict[int, int] = {}
        super().__init__(hub, plan)

    def take_new(self) -> dict[int, int]:
        """Return the version that each worker holds which is new since the last time."""
        new, self._new = self._new, {}
        return new

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
        if self._weights is not None:
            self.unshare(self._weights.memory)
        if self._block is not None:
            self.unshare(self._block[1])
        self._weights = self._block = None
        memory = self.share(spec.size_bytes) if self.plan.shares_memory else None
        block = spec.encode(policy.weights(), None if memory is None else _bytes_of(memory, spec.size_bytes))
        self._weights = _Weights(memory, block, version)
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        self._adoption = None
        self._new = {}  # What was new held the policy before this one.
        self._is_step = False
        adoption = partial(Adopt, code=code, weights=offer, num_probes=num_probes, arguments=pickled)
        self.crew.start(lambda call, _: adoption(call=call, version=version), arrays=self._weights_for)
        answers, _ = self.crew.answers()
        self._adoption = adoption
        schemas: dict[int, tuple[tuple[ArraySpec, ...], tuple[ArraySpec, ...]]] = {}
        for member, reply in answers:
            with blame(member):
                adopted = expect(Adopted, reply)
                check_specs([*adopted.extras, *adopted.states])
                schemas[member.index] = tuple(adopted.extras), tuple(adopted.states)
        extras, states = schemas[0]
        for worker_index, schema in schemas.items():
            if schema != (extras, states):
                raise PolicyError(
                    "The policy returns different extras or states on different workers: "
                    f"worker 0 {repr((extras, states))[:300]}, worker {worker_index} {repr(schema)[:300]}."
                )
        self.block_spec = BlockSpec(self.plan.actions, self.plan.observations, extras, states)

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int) -> None:
        """Encode a version's weights once, for all workers that will be told to take them."""
        assert self._weights is not None, "a policy was adopted"
        if self._weights.memory is None:
            # A new block: the socket may still be sending the old one.
            self._weights = _Weights(None, spec.encode(weights), version)
        else:
            spec.encode(weights, self._weights.block)
            self._weights.version = version

    def measure(self, sketches: Mapping[int, Sketch], numbers: Mapping[int, int]) -> dict[int, Measurement]:
        """Let workers compare their policy with a sketch of the newest; keys are worker indices."""
        members = [member for member in self.hub.members if member.index in sketches]

        def ask(call: int, member: Member) -> Measure:
            sketch = sketches[member.index]
            return Measure(call, numbers[member.index], sketch.version, sketch.family, values.dumps(sketch.arrays))

        self._is_step = False
        self.crew.expect_once()
        self.hub.start(ask, members)
        answers, _ = self.crew.answers()
        measurements = {}
        for member, reply in answers:
            with blame(member):
                measured = expect(Measured, reply)
            measurements[member.index] = Measurement(measured.divergence, measured.standard_error)
        return measurements

    def decide(self, version: int, pulls: Sequence[bool], arguments: Mapping[str, Any]) -> None:
        """Start a step in which the workers choose the actions."""
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        # Those that are told of truncated episodes instead do not take the weights now.
        self._new |= {index: self._held[index] for index in self._lost if pulls[index]}
        self._is_decision, self._is_invoking = True, False
        self._start_step(
            *self._with_weights(pulls, lambda call, pulled: Decide(call, version if pulled else None, pickled))
        )

    def step(self, actions: Any | None) -> None:
        """Start a step."""
        self._is_decision = False
        super().step(actions)

    def step_shard(self, index: int) -> None:
        """Start a step of one worker's environments."""
        self._is_decision = False
        super().step_shard(index)

    def collect(
        self, num_steps: int, number: int, version: int, pulls: Sequence[bool], arguments: Mapping[str, Any]
    ) -> Collection:
        """Let every worker make its part of a rollout, and wait for it.

        Args:
            num_steps: How long.
            number: Of the rollout: with it, head and worker choose the same probes.
            version: Of the weights that `load` encoded last.
            pulls: Which workers take them.
            arguments: Per-call values for the policy.

        Returns:
            The block, which the next rollout will overwrite, and each shard's summary.
        """
        memory, block = self._block_for(num_steps)
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        self._show_new()
        self._is_step = False
        self.crew.start(
            *self._with_weights(
                pulls,
                lambda call, pulled: Collect(call, number, num_steps, version if pulled else None, pickled, offer),
            )
        )
        summaries: list[Mapping[str, Any]] = []
        busy_s: list[float] = []
        answers, _ = self.crew.answers()
        self._lost.clear()  # A rollout may begin with new episodes: there is nothing to tell.
        for member, reply in answers:
            with blame(member):
                collected = expect(Collected, reply)
                summaries.append(checked_dict(values.loads(collected.summary)))
            if not self.hub.shares_memory(member):
                columns = block.columns(member.start, member.stop)
                self.note_observations(member, [column[-1] for column in columns.observations])
            busy_s.append(collected.busy_s)
        return Collection(block, summaries, busy_s)

    def adoption(self, call: int, version: int) -> Adopt:
        """Return what gives a worker the policy that the others have; weights of this version must follow."""
        assert self._adoption is not None, "a policy was adopted"
        return self._adoption(call=call, version=version)

    def _set_up(self, members: Sequence[Member]) -> None:
        """Bring new workers to where the lost ones were: attributes set, environments reset, the policy adopted."""
        super()._set_up(members)
        adoption, weights = self._adoption, self._weights
        if adoption is None or weights is None:
            return
        self._ask(lambda call, _: adoption(call=call, version=weights.version), members, self._weights_for)
        self._held |= {member.index: weights.version for member in members}
        self._new |= {member.index: weights.version for member in members}

    def _blank_infos(self, member: Member) -> dict[str, Any]:
        if not self._is_decision:
            return {}
        assert self.block_spec is not None, "a policy was adopted"
        count = member.stop - member.start
        actions = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in self.plan.actions.leaves]
        extras = {spec.name: np.zeros((count, *spec.shape), spec.dtype) for spec in self.block_spec.extras}
        version = np.full(count, self._held[member.index], np.int64)
        return {"action": self.plan.actions.nest(actions), **extras, "policy_version": version}

    def _with_weights(
        self, pulls: Sequence[bool], make: Callable[[int, bool], Collect | Decide]
    ) -> tuple[Make, Arrays]:
        return (
            lambda call, member: make(call, pulls[member.index]),
            lambda member: self._weights_for(member) if pulls[member.index] else (),
        )

    def _weights_for(self, member: Member) -> Sequence[Any]:
        """Return the weights as a worker gets them with a message: not at all, if it shares memory."""
        assert self._weights is not None, "a policy was adopted"
        return () if self.hub.shares_memory(member) else self._weights.frames

    def _block_for(self, num_steps: int) -> tuple[SharedMemory | None, Block]:
        spec = self.block_spec
        assert spec is not None, "a policy was adopted"
        if self._block is None or self._block[0] != num_steps:
            if self._block is not None:
                self.unshare(self._block[1])
            if self.plan.shares_memory:
                memory = self.share(size_of(lambda make: spec.make(num_steps, self._num_envs, make)))
                self._block = num_steps, memory, spec.make(num_steps, self._num_envs, carver(memory.memory))
            else:
                self._block = num_steps, None, spec.make(num_steps, self._num_envs, allocate)
        return self._block[1], self._block[2]

    def _landing(self, member: Member, reply: Reply) -> Sequence[NDArray[Any]]:
        if isinstance(reply, Collected | Part) and self._block is not None:
            num_steps, _, block = self._block
            stop = num_steps if isinstance(reply, Collected) else reply.first + reply.count
            if reply.first != member.num_parts or not reply.first < stop <= num_steps:
                raise WireError(f"steps {reply.first} to {stop} of {num_steps} come after {member.num_parts}")
            return list(block.columns(member.start, member.stop).steps(reply.first, stop).arrays())
        return super()._landing(member, reply)


def _bytes_of(memory: SharedMemory, size_bytes: int) -> NDArray[Any]:
    return np.frombuffer(memory.memory, np.uint8, size_bytes)
