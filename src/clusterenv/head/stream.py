"""Stream: rollouts as they are made, while the learner learns from earlier ones."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import cloudpickle
import zmq

from clusterenv.errors import CallTimeout, ClusterEnvError, ConfigError, WireError
from clusterenv.head.failure import failure_of
from clusterenv.head.lane import Asked, Lane, Made, Slot
from clusterenv.head.ledger import Ledger
from clusterenv.head.outcome import Lost
from clusterenv.head.publisher import Publisher
from clusterenv.head.remote import Remote
from clusterenv.head.roster import Member
from clusterenv.head.succession import Succession
from clusterenv.policy.policy import Policy
from clusterenv.rollout import Rollout
from clusterenv.wire import values as codec
from clusterenv.wire.arrays import allocate, carver, size_of
from clusterenv.wire.messages import (
    Collect,
    Collected,
    EndStream,
    Failed,
    Join,
    Load,
    Measure,
    Measured,
    Part,
    Reply,
    Returned,
)
from clusterenv.wire.messages import Stream as StreamRequest
from clusterenv.wire.zeromq import Frames, cut

log = logging.getLogger(__name__)

_SLICE_S = 0.1
_MAX_LOADS = 8  # Weights that wait for a worker which is hung up or cut off are memory; it will need the last only.
_LOOK_S = 0.25  # How often to look for lost workers while rollouts keep coming.

Assembler = Callable[[Sequence[Made]], Rollout]


@dataclass(frozen=True, kw_only=True)
class StreamWish:
    """What a user wants of a stream; see `ClusterEnv.stream`."""

    num_steps: int
    num_envs: int
    in_flight: int
    max_lag: float | None
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_envs", "in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_lag is not None and not self.max_lag >= 0:
            raise ConfigError(f"max_lag must be at least 0 versions, got {self.max_lag}.")


class Stream:
    """Rollouts of single workers, or of several at once, in the order in which they are made.

    Use it as an iterator, and as a context manager if it is to be ended before the environments are closed. It can be
    left and taken up again: workers go on until they have made as many rollouts as they are allowed ahead. Any other
    call on the environments ends it.

    Attributes:
        values: Per-call values for the policy; changes take effect with the rollouts that are asked for next.
    """

    def __init__(
        self,
        remote: Remote,
        publisher: Publisher,
        ledger: Ledger,
        policy: Policy,
        assemble: Assembler,
        wish: StreamWish,
        pulls: Sequence[bool],
    ) -> None:
        """Set the workers going.

        Args:
            remote: The workers, which hold the policy already.
            publisher: Decides who takes which version.
            ledger: Counts.
            policy: Of the learner.
            assemble: Makes a rollout of what workers made.
            wish: What the user wants of it.
            pulls: Which workers are due the newest weights.
        """
        self.values = dict(wish.values)
        self._remote = remote
        self._hub = remote.hub
        self._crew = remote.crew
        self._publisher = publisher
        self._ledger = ledger
        self._policy = policy
        self._assemble = assemble
        self._num_steps, self._num_envs = wish.num_steps, wish.num_envs
        self._in_flight = wish.in_flight
        self._lanes = [Lane(member) for member in self._hub.members]
        # A rollout ages while it is made and while those of all workers wait before it, and weights a rollout longer.
        allowed = publisher.max_lag + (wish.in_flight + 1) * len(self._lanes)
        self._max_lag = allowed if wish.max_lag is None else wish.max_lag
        self._ready: deque[Made] = deque()
        self._num_ready_envs = 0
        # Lanes to see to: to look at all of them after every message takes long.
        self._due = dict.fromkeys(self._lanes)
        self._seen_version = 0
        self._vacant: dict[Lane, None] = {}
        self._encoded: tuple[int, Frames] | None = None
        self._failure: ClusterEnvError | None = None
        self._succession = Succession(remote, publisher, self._weights)
        self._looked_at = 0.0
        self._was_changed = False
        self._has_warned = False
        self.is_open = True
        self._remote.ask_all(StreamRequest)
        for lane in self._lanes:
            if lane.member.is_late:
                self._was_changed = True
                self._succession.expect(lane, time.monotonic())
                self._vacant[lane] = None
        for lane, pulled in zip(self._lanes, pulls, strict=True):
            if pulled and lane.is_running:
                self._send_weights(lane)
        self._tend()

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __next__(self) -> Rollout:
        """Return the next rollout; while the caller was away, its agent may have learned.

        Raises:
            WorkerFailed: An environment or the policy raised; the stream has ended.
            WorkerLost: A worker is lost, and is not to be replaced, or was too often; the stream has ended.
            CallTimeout: No rollout came for `Timeouts.call_s` seconds.
        """
        if not self.is_open:
            raise StopIteration
        self._publisher.notice(self._policy)
        started = time.monotonic()
        # What came while the learner learned, and no more than that.
        while time.monotonic() - started < _LOOK_S and self._hub.inbox.listen(0.0, self._accept):
            pass
        self._discard_old()
        try:
            self._tend()  # Also where rollouts are ready: a lost worker's successor must not wait for a lull.
            while self._failure is None and self._num_ready_envs < self._num_envs:
                self._hub.inbox.listen(_SLICE_S, self._accept)
                self._tend()
                if time.monotonic() - started > self._hub.timeouts.call_s and self._num_ready_envs < self._num_envs:
                    raise CallTimeout(
                        f"No rollout came within {self._hub.timeouts.call_s:g} s. Environments may be slow or hang; "
                        "Timeouts(call_s=...) gives them longer."
                    )
            if self._failure is not None:
                raise self._failure
        except CallTimeout:
            raise  # Still open: the next try may find one.
        except BaseException:
            self.close()
            raise
        group = self._take_group()
        self._supply()  # Workers must not wait for the learner to come back.
        return self._assemble(group)

    def close(self) -> None:
        """End the stream; rollouts that were made and not delivered are thrown away, and counted."""
        if not self.is_open:
            return
        self.is_open = False
        owing: dict[int, int] = {}
        for lane in self._lanes:
            if lane.loss is None:
                owing[lane.member.index] = self._hub.post(lane.member, EndStream)
            else:
                if lane.member.peer is not None:
                    lane.member.is_late = False  # It has come, and is half made: another takes its place.
                self._hub.give_up(lane.member, lane.loss)
                self._was_changed = True
        self._drain(owing)
        for made in self._ready:
            self._ledger.note_discarded(made.block.rewards.size)
        self._ready.clear()
        for lane in self._lanes:
            for slot in [*lane.free, *(asked.slot for asked in lane.asked)]:
                self._remote.unshare(slot.memory)
        if self._was_changed:
            self._publisher.forget_policy()  # New workers got their weights another way; the next call sends all anew.

    def abandon(self) -> None:
        """Note that the environments were closed, and the stream with them."""
        self.is_open = False

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()

    def _tend(self) -> None:
        """See to every worker, and to a successor for one that is lost."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            # Whose successor is yet to be started has ended, and was mourned.
            members = [lane.member for lane in self._lanes if lane.restart_at is None]
            for member, loss in self._hub.look_for_losses(members):
                lane = self._lanes[member.index]
                self._ledger.rollouts_lost += len(lane.asked)
                self._was_changed = True
                self._succession.begin(lane, loss, now)
                self._vacant[lane] = None
        for lane in list(self._vacant):
            self._succession.go_on(lane, now)
            if lane.is_running:
                del self._vacant[lane]
                self._due[lane] = None
        self._supply()

    def _supply(self) -> None:
        """Give workers new weights if they need them, and rollouts to make."""
        if self._publisher.version != self._seen_version:
            self._seen_version = self._publisher.version
            self._due = dict.fromkeys(self._lanes)
        due, self._due = self._due, {}
        for lane in due:
            if not lane.is_running:
                continue
            if lane.num_loads < _MAX_LOADS:
                self._renew(lane)
            while len(lane.asked) + lane.num_ready < self._in_flight:
                self._ask(lane)

    def _renew(self, lane: Lane) -> None:
        """Bring a worker the newest weights, if it needs them."""
        if self._publisher.lag(lane.member.index) > self._max_lag:
            self._publisher.insist(lane.member.index)
            self._send_weights(lane)
        elif lane.measuring is None and self._publisher.is_behind(lane.member.index):
            self._compare(lane)

    def _compare(self, lane: Lane) -> None:
        """Let a worker that is behind measure how far, or judge without."""
        index, version = lane.member.index, self._publisher.version
        found = self._publisher.sketch(self._policy, index)
        if found is None:
            if self._publisher.judge(index, version, None):
                self._send_weights(lane)
            return
        number, sketch = found
        arrays = codec.dumps(sketch.arrays)
        call = self._hub.post(lane.member, lambda call: Measure(call, number, version, sketch.family, arrays))
        lane.measuring = call, version

    def _ask(self, lane: Lane) -> None:
        """Ask a worker for one more rollout."""
        slot = lane.free.pop() if lane.free else self._make_slot(lane)
        self._publisher.number += 1
        number = self._publisher.number
        pickled = cloudpickle.dumps(self.values) if self.values else None
        offer = None if slot.memory is None else slot.memory.offer
        call = self._hub.post(
            lane.member,
            lambda call: Collect(call, number, self._num_steps, None, pickled, offer, is_own=True),
        )
        lane.asked.append(Asked(call, number, slot))

    def _make_slot(self, lane: Lane) -> Slot:
        spec, rows = self._remote.block_spec, lane.member.stop - lane.member.start
        assert spec is not None, "a policy was adopted"
        if not self._hub.shares_memory(lane.member):
            return Slot(None, spec.make(self._num_steps, rows, allocate))
        memory = self._remote.share(size_of(lambda make: spec.make(self._num_steps, rows, make)))
        return Slot(memory, spec.make(self._num_steps, rows, carver(memory.memory)))

    def _send_weights(self, lane: Lane) -> None:
        """Send a worker the newest weights, which are encoded once for all."""
        version = self._publisher.version
        lane.num_loads += 1
        self._hub.post(lane.member, lambda call: Load(version), self._weights())

    def _weights(self) -> Frames:
        version = self._publisher.version
        if self._encoded is None or self._encoded[0] != version:
            self._encoded = version, cut(self._publisher.weights_spec.encode(self._policy.weights()))
        return self._encoded[1]

    def _accept(self, member: Member, reply: Reply, frames: Sequence[zmq.Frame]) -> None:
        lane = self._lanes[member.index]
        self._due[lane] = None
        lane.num_loads = 0
        if isinstance(reply, Part | Collected):
            self._receive(lane, reply, frames)
        elif isinstance(reply, Failed):
            self._failure = failure_of(member, reply)
        elif isinstance(reply, Measured) and lane.measuring is not None and lane.measuring[0] == reply.call:
            (_, version), lane.measuring = lane.measuring, None
            self._ledger.divergence = reply.divergence
            if self._publisher.judge(member.index, version, reply.divergence):
                self._send_weights(lane)
        elif not isinstance(reply, Join | Measured) and lane.tasks and lane.tasks[0].call == reply.call:
            self._succession.accept(lane, reply, frames)
        else:
            raise WireError(f"{type(reply).__name__} was not asked for")

    def _receive(self, lane: Lane, reply: Part | Collected, frames: Sequence[zmq.Frame]) -> None:
        number = lane.asked[0].number if lane.asked else 0
        made = lane.accept(reply, frames)
        if made is None:
            return
        self._crew.note_collected(lane.member)
        if not self._hub.shares_memory(lane.member):  # Else they are the worker's own, and it is further on.
            self._remote.note_observations(lane.member, [column[-1] for column in made.block.observations])
        self._publisher.remember_shard(lane.member.index, made.block, number)
        self._keep(made)

    def _take_group(self) -> list[Made]:
        group: list[Made] = []
        count = 0
        while count < self._num_envs:
            made = self._ready.popleft()
            made.lane.num_ready -= 1
            self._due[made.lane] = None
            count += made.num_envs
            group.append(made)
        self._num_ready_envs -= count
        return group

    def _discard_old(self) -> None:
        """Throw away what has become too old to learn from, if there is a newer version by which to say so."""
        if self._publisher.version != self._seen_version:
            ready, self._ready, self._num_ready_envs = self._ready, deque(), 0
            for made in ready:
                self._keep(made)

    def _keep(self, made: Made) -> None:
        """Put a rollout to those that wait to be delivered, unless it is too old to learn from."""
        age = self._publisher.version - made.version
        if age <= self._max_lag:
            self._ready.append(made)
            self._num_ready_envs += made.num_envs
            return
        made.lane.num_ready -= 1
        self._due[made.lane] = None
        self._ledger.note_discarded(made.block.rewards.size)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a rollout of worker %d was thrown away: its policy is %d versions old, and max_lag is %g. Others are "
                "counted in envs.stats['rollouts_discarded']. A worker much slower than the rest makes old rollouts, "
                "and so does a large in_flight. stream(max_lag=...) sets the bound, math.inf lifts it.",
                made.lane.member.index,
                age,
                self._max_lag,
            )

    def _drain(self, owing: dict[int, int]) -> None:
        """Wait until workers have heard that the stream has ended, each after the rollout it is making."""
        deadline = time.monotonic() + self._hub.timeouts.call_s

        def accept(member: Member, reply: Reply, frames: Sequence[zmq.Frame]) -> None:
            if isinstance(reply, Returned) and owing.get(member.index) == reply.call:
                del owing[member.index]
            elif isinstance(reply, Part | Collected):
                self._receive(self._lanes[member.index], reply, frames)

        look_at = time.monotonic() + _LOOK_S
        while owing:
            if self._hub.inbox.listen(_SLICE_S, accept) and time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + _LOOK_S
            members = [self._lanes[index].member for index in owing]
            lost = self._hub.look_for_losses(members)
            if time.monotonic() > deadline:
                lost = [(member, Lost("it did not end its part of a stream in time")) for member in members]
            for member, loss in lost:
                self._hub.give_up(member, loss)
                del owing[member.index]
                self._was_changed = True
