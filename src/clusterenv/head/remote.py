"""Remote: the environments and policies on the workers, as the head uses them: messages out, one result back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from clusterenv.errors import PolicyError, WireError, WorkerLost
from clusterenv.head.batch import ShardInfos, merge_infos
from clusterenv.head.hub import Hub
from clusterenv.head.outcome import Collection, Lost, Outcome
from clusterenv.head.roster import Member
from clusterenv.policy.policy import Policy
from clusterenv.policy.sketch import Measurement, Sketch
from clusterenv.policy.weights import WeightsSpec
from clusterenv.wire import values
from clusterenv.wire.arrays import allocate, carver, size_of
from clusterenv.wire.block import Block, BlockSpec
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import (
    Adopt,
    Adopted,
    Assign,
    Collect,
    Collected,
    Decide,
    Invoke,
    Measure,
    Measured,
    Part,
    Ready,
    Reply,
    Reset,
    Returned,
    SetAttribute,
    Step,
    Stepped,
)
from clusterenv.wire.planes import Planes
from clusterenv.wire.shared import Bell, HeadDesk, SharedMemory, desks_bytes, planes_memory


@dataclass(eq=False, repr=False)
class _Weights:
    """Where a version's weights lie for all workers to read: shared memory, or a block to send."""

    memory: SharedMemory | None
    block: NDArray[Any]


class Remote:
    """Environments on workers. `reset`, `step`, `invoke`, `set_attr` and `decide` start a call, `finish` ends it."""

    def __init__(self, hub: Hub, actions: Layout, observations: Layout, num_envs: int, *, shares_memory: bool) -> None:
        """Lay out the planes.

        Args:
            hub: The workers, all of which have joined.
            actions: Of one environment.
            observations: Of one environment.
            num_envs: Of the whole run.
            shares_memory: Whether to offer shared memory; a worker that cannot reach it uses the socket.
        """
        self._hub = hub
        self._layouts = actions, observations
        self._num_envs = num_envs
        self._offers_memory = shares_memory
        self._memories: list[SharedMemory] = []

        def make_planes(make: Any) -> Planes:
            return Planes.make(actions, observations, num_envs, make)

        num_workers = len(hub.members)
        if shares_memory:
            self._run_memory: SharedMemory | None = self._share(desks_bytes(num_workers) + size_of(make_planes))
            self.planes = make_planes(carver(planes_memory(self._memories[0].memory, num_workers)))
        else:
            self._run_memory = None
            self.planes = make_planes(allocate)
        self._rows = [self.planes.rows(member.start, member.stop) for member in hub.members]
        self._block: tuple[int, SharedMemory | None, Block] | None = None
        self._block_spec: BlockSpec | None = None
        self._weights: _Weights | None = None
        hub.landing = self._landing

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The environments of each worker, `[start, stop)`."""
        return [(member.start, member.stop) for member in self._hub.members]

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, on their own machines."""
        return tuple(member.pid or 0 for member in self._hub.members)

    def assign(self, code: Callable[[int, int], bytes], timeout_s: float) -> None:
        """Give every worker its shard, and wait until its environments are made."""
        memory = self._run_memory
        offer = None if memory is None else memory.offer
        desks = [] if memory is None else [HeadDesk(memory.memory, member.index) for member in self._hub.members]
        if memory is not None:
            self._hub.bell = Bell(memory.memory, initialise=True)
        self._hub.start(lambda call, m: Assign(call, m.start, m.stop, code(m.start, m.stop), offer))
        for member, reply in self._answers(timeout_s):
            if _expect(Ready, reply).shares_memory:
                self._hub.use_desk(member, desks[member.index])

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> None:
        """Start resetting the environments, or those in the mask."""
        pickled = None if options is None else cloudpickle.dumps(options)
        self._hub.start(
            lambda call, m: Reset(
                call, list(seeds[m.start : m.stop]), None if mask is None else list(mask[m.start : m.stop]), pickled
            )
        )

    def step(self, actions: Any | None) -> None:
        """Start a step.

        Args:
            actions: Anything that can be sliced by environment index; None if they are in the planes already.
        """
        if actions is None and self._hub.all_share_memory:
            self._hub.start_plain_step()
        elif actions is None:
            self._hub.broadcast(lambda call: Step(call, None), lambda member: self._rows[member.index].actions)
        else:
            self._hub.start(lambda call, m: Step(call, pickle.dumps(actions[m.start : m.stop])))

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start calling a method, or reading an attribute, of every environment."""
        arguments = cloudpickle.dumps((args, kwargs))
        self._hub.broadcast(lambda call: Invoke(call, name, arguments))

    def set_attr(self, name: str, items: Sequence[Any]) -> None:
        """Start setting an attribute of every environment."""
        self._hub.start(lambda call, m: SetAttribute(call, name, cloudpickle.dumps(list(items[m.start : m.stop]))))

    def finish(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the call under way.

        Raises:
            CallTimeout: A worker has not answered in time; `finish` may be called again.
            WorkerLost: A worker has died.
            WorkerFailed: An environment or policy raised.
        """
        answers = self._answers(timeout_s)
        if not answers:
            return Outcome({}, [], [])
        shards: list[ShardInfos] = []
        objects: list[list[list[Any]]] = []
        results: list[Any] = []
        for member, reply in answers:
            if isinstance(reply, Returned):
                results += _checked_list(values.loads(reply.values))
            else:
                stepped = _expect(Stepped, reply)
                if stepped.infos is not None:
                    shards.append(ShardInfos(member.start, member.stop, values.loads(stepped.infos)))
                if stepped.columns is not None:
                    objects.append(_checked_list(values.loads(stepped.columns)))
        infos = merge_infos(shards, self._num_envs) if shards else {}
        columns = [[item for part in parts for item in part] for parts in zip(*objects, strict=True)] if objects else []
        return Outcome(infos, columns, results)

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
            self._unshare(self._weights.memory)
        if self._block is not None:
            self._unshare(self._block[1])
        self._weights = self._block = None
        memory = self._share(spec.size_bytes) if self._offers_memory else None
        block = spec.encode(policy.weights(), None if memory is None else _bytes_of(memory, spec.size_bytes))
        self._weights = _Weights(memory, block)
        offer = None if memory is None else memory.offer
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        self._hub.broadcast(lambda call: Adopt(call, code, version, offer, num_probes, pickled), lambda _: [block])
        schemas = {(tuple(a.extras), tuple(a.states)) for _, r in self._answers() for a in [_expect(Adopted, r)]}
        if len(schemas) != 1:
            raise PolicyError(f"The policy returns different extras or states on different workers: {schemas}.")
        ((extras, states),) = schemas
        self._block_spec = BlockSpec(*self._layouts, extras, states)

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]]) -> None:
        """Encode a version's weights once, for all workers that will be told to take them."""
        assert self._weights is not None, "a policy was adopted"
        if self._weights.memory is None:
            # A new block: the socket may still be sending the old one.
            self._weights.block = spec.encode(weights)
        else:
            spec.encode(weights, self._weights.block)

    def measure(self, sketches: Mapping[int, Sketch], number: int) -> dict[int, Measurement]:
        """Let workers compare their policy with a sketch of the newest; keys are worker indices."""
        members = [member for member in self._hub.members if member.index in sketches]

        def ask(call: int, member: Member) -> Measure:
            sketch = sketches[member.index]
            return Measure(call, number, sketch.version, sketch.family, values.dumps(sketch.arrays))

        self._hub.start(ask, members)
        answers = ((member, _expect(Measured, reply)) for member, reply in self._answers())
        return {member.index: Measurement(a.divergence, a.standard_error) for member, a in answers}

    def decide(self, version: int, pulls: Sequence[bool], arguments: Mapping[str, Any]) -> None:
        """Start a step in which the workers choose the actions."""
        pickled = cloudpickle.dumps(dict(arguments)) if arguments else None
        self._start_with_weights(pulls, lambda call, pulled: Decide(call, version if pulled else None, pickled))

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
        self._start_with_weights(
            pulls, lambda call, pulled: Collect(call, number, num_steps, version if pulled else None, pickled, offer)
        )
        summaries: list[Mapping[str, Any]] = []
        busy_s: list[float] = []
        for _, reply in self._answers():
            collected = _expect(Collected, reply)
            summaries.append(_checked_dict(values.loads(collected.summary)))
            busy_s.append(collected.busy_s)
        return Collection(block, summaries, busy_s)

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers and let go of the memory."""
        self._hub.close(timeout_s, terminate=terminate)
        for memory in self._memories:
            memory.close()

    def _answers(self, timeout_s: float | None = None) -> list[tuple[Member, Reply]]:
        """Wait for the answers to the call under way.

        Raises:
            WorkerLost: There will be none from one of the workers.
        """
        answers: list[tuple[Member, Reply]] = []
        for member, reply in self._hub.collect(timeout_s):
            if isinstance(reply, Lost):
                raise WorkerLost(
                    f"{str(member).capitalize()}, is lost: {reply.reason}",
                    worker_index=member.index,
                    env_indices=member.env_indices,
                )
            answers.append((member, reply))
        return answers

    def _start_with_weights(self, pulls: Sequence[bool], make: Callable[[int, bool], Collect | Decide]) -> None:
        weights = self._weights
        assert weights is not None, "a policy was adopted"
        self._hub.start(
            lambda call, member: make(call, pulls[member.index]),
            arrays=lambda member: [weights.block] if pulls[member.index] else [],
        )

    def _block_for(self, num_steps: int) -> tuple[SharedMemory | None, Block]:
        spec = self._block_spec
        assert spec is not None, "a policy was adopted"
        if self._block is None or self._block[0] != num_steps:
            if self._block is not None:
                self._unshare(self._block[1])
            if self._offers_memory:
                memory = self._share(size_of(lambda make: spec.make(num_steps, self._num_envs, make)))
                self._block = num_steps, memory, spec.make(num_steps, self._num_envs, carver(memory.memory))
            else:
                self._block = num_steps, None, spec.make(num_steps, self._num_envs, allocate)
        return self._block[1], self._block[2]

    def _share(self, size_bytes: int) -> SharedMemory:
        memory = SharedMemory(size_bytes)
        self._memories.append(memory)
        return memory

    def _unshare(self, memory: SharedMemory | None) -> None:
        if memory is not None:
            memory.close()
            self._memories.remove(memory)

    def _landing(self, member: Member, reply: Reply) -> Sequence[NDArray[Any]]:
        if isinstance(reply, Stepped):
            return list(self._rows[member.index].results())
        if isinstance(reply, Collected | Part) and self._block is not None:
            num_steps, _, block = self._block
            stop = num_steps if isinstance(reply, Collected) else reply.first + reply.count
            if reply.first != member.num_parts or not reply.first < stop <= num_steps:
                raise WireError(f"steps {reply.first} to {stop} of {num_steps} come after {member.num_parts}")
            return list(block.columns(member.start, member.stop).steps(reply.first, stop).arrays())
        return ()


def _bytes_of(memory: SharedMemory, size_bytes: int) -> NDArray[Any]:
    return np.frombuffer(memory.memory, np.uint8, size_bytes)


def _expect(kind: type[Any], reply: Reply) -> Any:
    if not isinstance(reply, kind):
        raise WireError(f"A worker answered with {type(reply).__name__} where {kind.__name__} was expected.")
    return reply


def _checked_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(f"A worker sent a {type(value).__name__} where a list was expected.")
    return value


def _checked_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"A worker sent a {type(value).__name__} where a dict was expected.")
    return value
