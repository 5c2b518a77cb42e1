"""RemoteEnvs: the environments on the workers, as the head uses them: messages out, one result back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.head.batch import ShardInfos, merge_infos
from clusterenv.head.checks import expect, read_objects, read_results
from clusterenv.head.crew import Arrays, Crew, Loss, Make, lost_error
from clusterenv.head.failure import blame
from clusterenv.head.hub import Hub
from clusterenv.head.info_reader import InfoReader
from clusterenv.head.lost_rows import LostRows
from clusterenv.head.outcome import Lost, Outcome
from clusterenv.head.remote_plan import RemotePlan
from clusterenv.head.roster import Member
from clusterenv.wire.arrays import ArrayMaker, allocate, carver, size_of
from clusterenv.wire.messages import (
    Apply,
    Invoke,
    Reply,
    Request,
    Reset,
    Returned,
    SetAttribute,
    Step,
    Stepped,
    Truncate,
)
from clusterenv.wire.planes import Planes
from clusterenv.wire.shared import SharedMemory, desks_bytes, planes_memory


class RemoteEnvs:
    """Environments on workers. `reset`, `step`, `invoke` and `set_attr` start a call, `finish` ends it.

    Attributes:
        hub: The conversation with the workers.
        crew: Replaces those that are lost.
        plan: What they do.
        planes: The newest observations, rewards and flags.
    """

    def __init__(self, hub: Hub, plan: RemotePlan) -> None:
        """Lay out the planes.

        Args:
            hub: The workers, all of which have joined.
            plan: What they are to do.
        """
        self.hub = hub
        self.plan = plan
        self._num_envs = hub.members[-1].stop
        self._memories: list[SharedMemory] = []
        num_workers = len(hub.members)
        memory: SharedMemory | None = None
        if plan.shares_memory:
            memory = self.share(desks_bytes(num_workers) + size_of(self._make_planes))
            self.planes = self._make_planes(carver(planes_memory(memory.memory, num_workers)))
        else:
            self.planes = self._make_planes(allocate)
        self.crew = Crew(hub, plan.code, memory, replaces=plan.replaces)
        self._infos = InfoReader(hub, self.planes)
        self._rows = [self.planes.rows(member.start, member.stop) for member in hub.members]
        self._lost: dict[int, LostRows] = {}  # Of workers that were replaced, until the learner is told.
        self._objects: dict[int, list[list[Any]]] = {}
        self._attributes: dict[str, Make] = {}
        self._is_step = False
        self._note: Callable[[dict[int, list[list[Any]]]], None] = _nothing
        self._num_object_leaves = sum(leaf.dtype is None for leaf in plan.observations.leaves)
        self._is_invoking = False
        self._num_results: Callable[[Member], int] = lambda member: 0
        self.crew.on_new = self._set_up
        hub.landing = self._landing

    def open(self) -> None:
        """Give every worker that is here its shard; returns when the environments are made.

        Raises:
            WorkerFailed: A factory raised.
            WorkerLost: A worker died.
        """
        self.crew.assign([member for member in self.hub.members if member.peer is not None])

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The environments of each worker, `[start, stop)`."""
        return [(member.start, member.stop) for member in self.hub.members]

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, on their own machines."""
        return tuple(member.pid or 0 for member in self.hub.members)

    @property
    def losses(self) -> list[Loss]:
        """The workers that were lost, and replaced."""
        return self.crew.losses

    def reset(self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None) -> None:
        """Start resetting the environments, or those in the mask."""
        pickled = None if options is None else cloudpickle.dumps(options)
        if mask is None:
            self.crew.seed(seeds[0])
        self._is_step = False
        self._note = self._forget_lost if mask is None else partial(self._hide_lost, np.array(mask, np.bool_))

        def ask(call: int, m: Member) -> Reset:
            part = None if mask is None else list(mask[m.start : m.stop])
            chosen = list(seeds[m.start : m.stop])
            if m.index in self._lost:  # Without a seed of the learner's, its environments keep the recorded ones.
                chosen = [
                    new if seed is None else seed for seed, new in zip(chosen, self.crew.seeds_of(m), strict=True)
                ]
            return Reset(call, chosen, part, pickled)

        self._is_invoking = False
        self.crew.start(ask)

    def step(self, actions: Any | None) -> None:
        """Start a step.

        Args:
            actions: Anything that can be sliced by environment index; None if they are in the planes already.
        """
        hub, self._is_step, self._is_invoking = self.hub, True, False
        if actions is None and not self._lost:
            self.crew.expect_once()
            if (desks := hub.desks.all) is not None:
                hub.start_plain_step(desks)
            else:
                hub.broadcast(lambda call: Step(call, None), lambda m: self._rows[m.index].actions)
        elif actions is None:
            self._start_step(lambda call, _: Step(call, None), lambda m: self._rows[m.index].actions)
        else:
            self._start_step(lambda call, m: Step(call, pickle.dumps(actions[m.start : m.stop])))

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start calling a method, or reading an attribute, of every environment."""
        arguments = cloudpickle.dumps((args, kwargs))
        self._invoke(lambda m: m.stop - m.start, _nothing)
        self.crew.start(lambda call, _: Invoke(call, name, arguments))

    def set_attr(self, name: str, items: Sequence[Any]) -> None:
        """Start setting an attribute of every environment."""
        # Pickled now: what the caller does to the values later is no business of a worker that comes later.
        pickled = {m.index: cloudpickle.dumps(list(items[m.start : m.stop])) for m in self.hub.members}

        def ask(call: int, m: Member) -> SetAttribute:
            return SetAttribute(call, name, pickled[m.index])

        def note(_: object) -> None:
            self._attributes.pop(name, None)  # The newest last, as they were set.
            self._attributes[name] = ask

        self._invoke(lambda m: 0, note)
        self.crew.start(ask)

    def apply(self, function: Callable[[Any], Any], env_indices: Sequence[int]) -> None:
        """Start running a function on these environments, given in ascending order."""
        code, chosen = cloudpickle.dumps(function), set(env_indices)

        def rows(m: Member) -> list[int]:
            return [index - m.start for index in range(m.start, m.stop) if index in chosen]

        self._invoke(lambda m: len(rows(m)), _nothing)
        self.crew.start(lambda call, m: Apply(call, rows(m), code))

    def finish(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the call under way.

        Raises:
            CallTimeout: A worker has not answered in time; `finish` may be called again.
            WorkerLost: A worker has died.
            WorkerFailed: An environment or policy raised.
        """
        answers, silent = self.crew.answers(timeout_s)
        if not answers and not silent:
            return Outcome(self._infos.read_plain(), [], [])
        shards: list[ShardInfos] = []
        objects: dict[int, list[list[Any]]] = {}
        results: list[Any] = []
        for member, reply in answers:
            with blame(member):
                if self._is_invoking:
                    results += read_results(reply, self._num_results(member))
                elif self._is_step and member.index in self._lost and isinstance(reply, Returned):
                    silent.append(member)  # It was lost before the step, and was told that its episodes are over.
                else:
                    self._read_stepped(member, reply, shards, objects)
        if self._is_step:
            shards += [self._report(member, objects) for member in silent]
        else:
            self._note(objects)
        if objects:
            self._objects |= objects
        shards.sort(key=lambda shard: shard.start)
        infos = merge_infos(shards, self._num_envs) if shards else {}
        parts = [objects[index] for index in sorted(objects)]
        columns = [[item for part in column for item in part] for column in zip(*parts, strict=True)] if parts else []
        return Outcome(infos, columns, results)

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """End the workers and let go of the memory."""
        self.hub.close(timeout_s, terminate=terminate)
        for memory in self._memories:
            memory.close()

    def _invoke(self, num_results: Callable[[Member], int], note: Callable[[dict[int, list[list[Any]]]], None]) -> None:
        """Expect results that are no step's, so many of each worker."""
        self._is_step, self._is_invoking, self._num_results, self._note = False, True, num_results, note

    def _make_planes(self, make: ArrayMaker) -> Planes:
        return Planes.make(self.plan.actions, self.plan.observations, self._num_envs, make)

    def step_shard(self, index: int) -> None:
        """Start a step of one worker's environments, with the actions in the planes; `finish_some` ends it."""
        member, self._is_step = self.hub.members[index], True
        if index in self._lost:
            seen = self._lost[index].dump_seen()
            self.hub.start_one(member, lambda call: Truncate(call, seen), ())
        else:
            self.hub.start_one(member, lambda call: Step(call, None), self._rows[index].actions)

    def finish_some(self, timeout_s: float | None = None) -> list[tuple[int, Outcome]]:
        """Wait until some worker that was told to step has done so; returns all that have, by worker index.

        Raises:
            CallTimeout: None was in time; `finish_some` may be called again.
            WorkerLost: A worker has died, and is not replaced.
            WorkerFailed: An environment raised.
        """
        finished: list[tuple[int, Outcome]] = []
        for member, reply in self.hub.collect_some(timeout_s):
            shards: list[ShardInfos] = []
            objects: dict[int, list[list[Any]]] = {}
            if isinstance(reply, Lost):
                self.crew.replace([(member, reply)])
            if isinstance(reply, Lost) or (isinstance(reply, Returned) and member.index in self._lost):
                shards.append(self._report(member, objects))
            else:
                with blame(member):
                    self._read_stepped(member, reply, shards, objects)
            self._objects |= objects
            infos = shards[0].infos if shards else {}
            finished.append((member.index, Outcome(infos, objects.get(member.index, []), [])))
        return finished

    def ask_all(self, make: Callable[[int], Request]) -> None:
        """Ask all workers the same before they make rollouts, and wait until they have done it."""
        self._is_step = False
        self.crew.start(lambda call, _: make(call))
        self.crew.answers()
        self._show_new()
        self._lost.clear()

    def attribute_requests(self) -> list[Make]:
        """Return what makes a new worker's environments have the attributes that were set."""
        return list(self._attributes.values())

    def rows(self, member: Member) -> Planes:
        """Return a worker's rows of the planes."""
        return self._rows[member.index]

    def note_observations(self, member: Member, leaves: Sequence[NDArray[Any]]) -> None:
        """Keep a worker's newest observations, where it does not write them here itself."""
        for plane, leaf in zip(self._rows[member.index].observations, leaves, strict=True):
            assert plane is not None, "rollouts have leaves of fixed size only"
            plane[...] = leaf

    def _set_up(self, members: Sequence[Member]) -> None:
        """Bring new workers to where the lost ones were: attributes set, environments reset."""
        for make in self.attribute_requests():
            self._ask(make, members)
        for member in members:
            if member.index not in self._lost:
                self._lost[member.index] = LostRows(self._rows[member.index], self._objects.get(member.index))
        for member, reply in self._ask(lambda call, m: Reset(call, list(self.crew.seeds_of(m)), None, None), members):
            with blame(member):
                stepped, lost = expect(Stepped, reply), self._lost[member.index]
                lost.new_infos = self._infos.read(member, stepped)
                lost.new_objects = read_objects(stepped, self._num_object_leaves, member.stop - member.start)
        if self._is_step:
            self._ask(lambda call, m: Truncate(call, self._lost[m.index].dump_seen()), members)

    def _ask(
        self, make: Make, members: Sequence[Member], arrays: Arrays = lambda member: ()
    ) -> list[tuple[Member, Reply]]:
        """Ask new workers for something they need before they can take over.

        Raises:
            WorkerLost: One of them is lost, too.
        """
        self.hub.start(make, members, arrays)
        answers: list[tuple[Member, Reply]] = []
        for member, reply in self.hub.collect():
            if isinstance(reply, Lost):
                raise lost_error(member, reply)
            answers.append((member, reply))
        return answers

    def _start_step(self, make: Make, arrays: Arrays = lambda member: ()) -> None:
        """Start a step; workers that have replaced others since the last one are told that their episodes are over."""
        self._is_step = True
        unreported = {index: lost.dump_seen() for index, lost in self._lost.items()}
        self.crew.expect_once()
        self.hub.start(
            lambda call, m: Truncate(call, unreported[m.index]) if m.index in unreported else make(call, m),
            arrays=lambda m: () if m.index in unreported else arrays(m),
        )

    def _report(self, member: Member, objects: dict[int, list[list[Any]]]) -> ShardInfos:
        """Report the episodes of a lost worker as truncated, by the rules of the autoreset mode.

        The learner sees once more what it saw last: what the action led to, nobody knows.
        """
        rows, lost = self._rows[member.index], self._lost.pop(member.index)
        everyone = np.ones(member.stop - member.start, np.bool_)
        rows.rewards[:] = 0.0
        rows.terminations[:] = False
        rows.truncations[:] = True
        infos = self._blank_infos(member) | {"worker_lost": everyone, "_worker_lost": everyone.copy()}
        if self.plan.autoreset_mode is AutoresetMode.SAME_STEP:
            lost.show_new()
            finals = {"final_obs": lost.finals(self.plan.observations), "_final_obs": everyone.copy()}
            infos, shown = lost.new_infos | infos | finals, lost.new_objects
        else:
            lost.show_seen()
            shown = lost.objects
        if shown:
            objects[member.index] = shown
        return ShardInfos(member.start, member.stop, infos)

    def _blank_infos(self, member: Member) -> dict[str, Any]:
        """Return what every step's info has, for rows of which nothing is known."""
        return {}

    def _show_new(self) -> None:
        """Put new episodes' first observations into the planes: rollouts begin with them."""
        for lost in self._lost.values():
            lost.show_new()

    def _forget_lost(self, objects: dict[int, list[list[Any]]]) -> None:
        self._lost.clear()

    def _hide_lost(self, mask: NDArray[np.bool_], objects: dict[int, list[list[Any]]]) -> None:
        """After a reset of some environments, show the others as they were: their loss is told with the next step."""
        for index, lost in self._lost.items():
            member = self.hub.members[index]
            lost.hide_new(mask[member.start : member.stop], objects.get(index, []))
            if index in objects:
                objects[index] = lost.objects

    def _read_stepped(
        self, member: Member, reply: Reply, shards: list[ShardInfos], objects: dict[int, list[list[Any]]]
    ) -> None:
        stepped = expect(Stepped, reply)
        if infos := self._infos.read(member, stepped):
            shards.append(ShardInfos(member.start, member.stop, infos))
        if self._num_object_leaves or stepped.columns is not None:
            objects[member.index] = read_objects(stepped, self._num_object_leaves, member.stop - member.start)

    def share(self, size_bytes: int) -> SharedMemory:
        """Make memory that workers on this machine can open; `close` lets go of it."""
        memory = SharedMemory(size_bytes)
        self._memories.append(memory)
        return memory

    def unshare(self, memory: SharedMemory | None) -> None:
        """Let go of memory before the end."""
        if memory is not None:
            memory.close()
            self._memories.remove(memory)

    def _landing(self, member: Member, reply: Reply) -> Sequence[NDArray[Any]]:
        return list(self._rows[member.index].results()) if isinstance(reply, Stepped) else ()


def _nothing(objects: dict[int, list[list[Any]]]) -> None:
    pass
