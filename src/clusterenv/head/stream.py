"""Stream: rollouts as they are made, while the learner learns from earlier ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, Self

from clusterenv.errors import ClusterEnvError, ConfigError
from clusterenv.head.acting import pickle_arguments
from clusterenv.head.failure import failure_of
from clusterenv.head.infos import checked_dict, checked_seconds, expect
from clusterenv.head.remote import Remote
from clusterenv.head.rollouts import Rollouts, ShardRollout, check_summary
from clusterenv.head.worker import AskedRollout, Worker
from clusterenv.policy.policy import Policy
from clusterenv.policy.sync import Reason
from clusterenv.rollout import Rollout
from clusterenv.wire import values as codec
from clusterenv.wire.board import digest_of
from clusterenv.wire.messages import Collect, Collected, Failed, Load, Part, Reply
from clusterenv.wire.zeromq import Frames

log = logging.getLogger(__name__)

_WAIT_S = 0.1
_CATCH_UP_S = 0.25  # At most this long is spent reading what arrived while the learner learned.
_MAX_LOADS = 8  # Weights queued for a hung or disconnected worker use memory, and it will need only the last ones.
_AHEAD_BYTES = 64 << 20  # Weights to send before any rollout has come in between.


@dataclass(frozen=True, kw_only=True)
class StreamWish:
    """The options of a stream; see `ClusterEnv.stream`."""

    num_steps: int
    min_envs: int
    in_flight: int
    max_lag: float | None
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.max_lag is not None and not (isinstance(self.max_lag, Real) and self.max_lag >= 0):
            raise ConfigError(f"max_lag must be at least 0 versions, got {self.max_lag!r}.")


class Stream:
    """Rollouts from one or more workers at a time, in the order in which they are made.

    Use it as an iterator, and as a context manager to end it before the environments are closed. Iteration can pause
    and resume: meanwhile workers go on until they have made as many rollouts ahead as they may. Any other call on the
    environments ends the stream.

    Attributes:
        values: Per-call values for the policy; changes take effect with the next requested rollouts.
    """

    def __init__(self, envs: object, flow: Flow) -> None:
        """Deliver the flow's rollouts; holding `envs` keeps them from being garbage-collected, and so closed."""
        self._envs = envs
        self._flow = flow
        self.values = flow.values

    @property
    def is_open(self) -> bool:
        """Whether the stream has not ended."""
        return self._flow.is_open

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __next__(self) -> Rollout:
        """Return the next rollout; the agent may have changed since the last one.

        Raises:
            WorkerFailed: An environment or the policy raised; the stream has ended.
            WorkerLost: A worker is lost and will not be replaced; the stream has ended.
        """
        self._flow.values = self.values
        return self._flow.take()

    def close(self) -> None:
        """End the stream; rollouts that were made but not delivered are discarded, and counted."""
        self._flow.close()

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stream."""
        self.close()


class Flow:
    """The state behind a stream: which rollouts workers were asked for, and which have arrived.

    Owed answers refer to this object, which does not refer to the environments. So when the user drops the
    environments, they are garbage-collected and the workers end, even in the middle of a stream.

    Attributes:
        values: Per-call values for the policy; changes take effect with the next requested rollouts.
        is_open: Whether the stream has not ended.
    """

    def __init__(
        self,
        remote: Remote,
        rollouts: Rollouts,
        policy: Policy,
        wish: StreamWish,
        pulls: set[Worker],
        owner: contextlib.AbstractContextManager[None],
    ) -> None:
        """Start workers that already hold the policy; those in `pulls` are sent the newest weights first.

        The owner keeps other threads out of the environments.
        """
        self.values = dict(wish.values)
        self.is_open = True
        self._remote = remote
        self._rollouts = rollouts
        self._versions, self._holdings, self._probing = rollouts.versions, rollouts.holdings, rollouts.probing
        self._pulls = rollouts.versions.pulls
        self._stats = rollouts.stats
        self._policy = policy
        self._assemble = rollouts.assembler()
        self._owner = owner
        self._num_steps, self._min_envs = wish.num_steps, wish.min_envs
        self._in_flight = wish.in_flight
        # A rollout ages while it is made and while other workers' rollouts are queued ahead of it; weights are one
        # rollout older still.
        allowed = self._pulls.max_lag + (wish.in_flight + 1) * len(remote.workers)
        self._max_lag = allowed if wish.max_lag is None else wish.max_lag
        self._ready: deque[ShardRollout] = deque()
        self._num_ready_envs = 0
        # Workers that may need more requests; scanning all workers after every message would be slow.
        self._due = dict.fromkeys(worker for worker in remote.workers if worker.is_ready)
        self._unsent: dict[Worker, Reason] = {}  # Workers that are to pull, and wait for their turn.
        self._room_bytes = _AHEAD_BYTES
        self._digested: tuple[int, bytes] | None = None
        self._must_judge = False
        self._seen_version = self._holdings.newest
        self._failure: ClusterEnvError | None = None
        self._has_warned = False
        remote.stream = self  # From here on the next call, whatever it is, ends the stream.
        self._send_weights([worker for worker in pulls if worker.is_ready])
        self._supply()

    def take(self) -> Rollout:
        """Return the next rollout; see `Stream.__next__`."""
        if not self.is_open:
            raise StopIteration
        with self._owner:
            if not self._versions.notice(self._policy):
                self._begin_anew()
            started = time.monotonic()
            try:
                # Read only what arrived while the learner learned.
                while self._remote.advance(0.0) and time.monotonic() - started < _CATCH_UP_S:
                    pass
                with self._remote.deferred:
                    self._discard_old()
                self._supply()
                while self._num_ready_envs < self._min_envs:
                    self._remote.raise_fatal(self._remote.workers)
                    if self._failure is not None:
                        raise self._failure
                    self._remote.advance(_WAIT_S)
                    self._supply()
                if self._failure is not None:
                    raise self._failure
                with self._remote.deferred:
                    group = self._take_group()
                self._supply()  # Workers must not wait for the learner to come back.
            except BaseException:
                self._versions.forget_policy()  # Nobody knows which weights the workers hold.
                self.close()
                raise
            return self._assemble(group)

    def close(self) -> None:
        """End the stream; rollouts that were made but not delivered are discarded, and counted."""
        with self._owner:
            if self.is_open:
                self.is_open = False
                for made in self._ready:
                    self._stats.note_discarded(made.buffers.rewards.size)
                self._ready.clear()
            if self._remote.stream is self:
                self._remote.settle()

    def abandon(self) -> None:
        """Note that the environments were closed, which ends the stream."""
        self.is_open = False

    def _begin_anew(self) -> None:
        """Send the workers a policy whose structure has changed; what the old one made is discarded, and counted."""
        with self._remote.without_late(), self._rollouts.distrust_after_failure():
            self._remote.settle()
            self._versions.prepare(self._policy, self.values)
        for made in self._ready:
            self._stats.note_discarded(made.buffers.rewards.size)
        self._ready.clear()
        self._num_ready_envs = 0
        self._due = dict.fromkeys(worker for worker in self._remote.workers if worker.is_ready)
        self._remote.stream = self

    def on_lost(self, worker: Worker) -> None:
        """Note that a worker is lost, along with the rollouts it was asked for."""
        self._stats.rollouts_lost += len(worker.stream.asked)
        self._unsent.pop(worker, None)

    def on_ready(self, worker: Worker) -> None:
        """Note that a worker can be asked for rollouts."""
        self._due[worker] = None
        self._must_judge = True

    def on_end(self) -> None:
        """Let the next call judge again the workers that were not sent weights yet."""
        for worker in self._unsent:
            self._pulls.judge_again(worker)
        self._unsent.clear()

    def _supply(self) -> None:
        """Send workers new weights if they need them, and requests for rollouts."""
        if self._holdings.newest != self._seen_version:
            self._seen_version = self._holdings.newest
            self._must_judge = True
        if self._must_judge:
            self._must_judge = False
            self._renew()
        while self._unsent and self._room_bytes > 0:
            self._send_next()
        due, self._due = self._due, {}
        for worker in due:
            if worker.is_ready:  # Otherwise `on_ready` follows.
                while len(worker.stream.asked) + worker.stream.num_ready < self._in_flight:
                    self._ask(worker)

    def _renew(self) -> None:
        """Find out which workers need the newest weights."""
        late = self._pulls.find_late(self._max_lag)
        wanted = {worker: reason for worker, reason in late.items() if self._can_pull(worker)}
        self._unsent |= wanted
        self._unsent |= self._pulls.judge(self._can_pull)

    def _can_pull(self, worker: Worker) -> bool:
        return _can_take(worker) and worker not in self._unsent

    def _ask(self, worker: Worker) -> None:
        """Ask a worker for one more rollout."""
        calls = self._remote.calls
        call = calls.next_number()
        with calls.deferred:
            if not (free := worker.stream.free):
                is_shared = worker.mailbox is not None
                free.append(self._remote.make_slot(self._num_steps, worker.num_envs, is_shared=is_shared))
            slot = free.pop()
            asked = AskedRollout(slot, self._probing.num_probes(worker.policy.given[-1]))
            offer = None if slot.memory is None else slot.memory.offer
            worker.stream.asked.append(asked)
            calls.send(
                worker,
                Collect(
                    call, self._num_steps, asked.num_probes, None, pickle_arguments(self.values), offer, is_own=True
                ),
                call,
                partial(self._accept, asked),
                destination=self._remote.rollout_destination(worker, slot.buffers),
            )

    def _send_next(self) -> None:
        """Send the newest weights to the next worker in turn, and to those that share its machine.

        Not to all workers at once: a thousand copies would hold up incoming rollouts. A few copies are sent right away,
        and then one more for each rollout that comes in.
        """
        first = next(iter(self._unsent))
        if not first.is_ready:  # All workers were ended because they had used up their worker hours.
            del self._unsent[first]
            return
        workers = self._remote.machines.find_mates(first, self._unsent)
        with self._remote.deferred:
            self._pulls.note_all({worker: self._unsent.pop(worker) for worker in workers})
            num_sent = self._send_weights(workers)
            self._versions.note_sent(num_sent)
            self._room_bytes -= num_sent * self._holdings.spec.size_bytes

    def _send_weights(self, workers: Sequence[Worker]) -> int:
        """Send workers the newest weights, encoded once for all; returns how many copies were really sent."""
        if not workers:
            return 0
        version, frames = self._versions.encode_newest()
        size_bytes = self._holdings.spec.size_bytes
        shares = self._remote.machines.share(workers, size_bytes, lambda: self._digest(version, frames))
        for worker in workers:
            worker.stream.num_loads += 1
            arrays = frames if shares.travels_to(worker) else ()
            self._remote.calls.tell(worker, Load(version, shares.copy_for(worker)), arrays)
        return len(workers) - shares.num_spared

    def _digest(self, version: int, frames: Frames) -> bytes:
        if self._digested is None or self._digested[0] != version:
            self._digested = version, digest_of(frames)
        return self._digested[1]

    def _accept(self, asked: AskedRollout, worker: Worker, reply: Reply) -> None:
        """Take a rollout, a part of one, or the report that it failed."""
        work = worker.stream
        if not _can_take(worker):
            self._pulls.judge_again(worker)
            self._must_judge = True
        work.num_loads = 0
        self._due[worker] = None
        if isinstance(reply, Part):
            return
        work.asked.remove(asked)
        self._room_bytes = min(_AHEAD_BYTES, self._room_bytes + self._holdings.spec.size_bytes)
        is_shared = asked.slot.memory is not None
        if is_shared:
            work.free.append(asked.slot)
        if isinstance(reply, Failed):
            self._failure = self._failure or failure_of(worker, reply)
            return
        collected = expect(Collected, reply)
        summary = checked_dict(codec.loads(collected.summary))
        buffers = asked.slot.buffers.copy() if is_shared else asked.slot.buffers
        check_summary(summary, buffers, self._rollouts.layouts[1], self._rollouts.mode)
        version = self._holdings.find_acted_with(worker, collected.version)
        self._probing.take_rollout(version, collected.probes, buffers, asked.num_probes)
        self._pulls.count_rollout(worker, _MAX_LOADS)
        self._must_judge = self._must_judge or self._pulls.can_judge(version)
        if not is_shared:  # A worker that shares memory writes its step buffers itself, and is further on.
            self._remote.note_last_step(worker, buffers)
        made = ShardRollout(worker, buffers, summary, checked_seconds(collected.busy_s), version)
        if self.is_open:
            work.num_ready += 1
            self._keep(made)
        else:
            self._stats.note_discarded(buffers.rewards.size)

    def _take_group(self) -> list[ShardRollout]:
        group: list[ShardRollout] = []
        count = 0
        while count < self._min_envs:
            made = self._ready.popleft()
            made.worker.stream.num_ready -= 1
            self._due[made.worker] = None
            count += made.worker.num_envs
            group.append(made)
        self._num_ready_envs -= count
        return group

    def _discard_old(self) -> None:
        """Discard rollouts that have become too old to learn from, if there is a new version."""
        if self._holdings.newest != self._seen_version:
            ready, self._ready, self._num_ready_envs = self._ready, deque(), 0
            for made in ready:
                self._keep(made)

    def _keep(self, made: ShardRollout) -> None:
        """Queue a rollout for delivery, unless it is too old to learn from."""
        age = self._holdings.newest - made.version.number
        if age <= self._max_lag:
            self._ready.append(made)
            self._num_ready_envs += made.worker.num_envs
            return
        made.worker.stream.num_ready -= 1
        self._due[made.worker] = None
        self._stats.note_discarded(made.buffers.rewards.size)
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "a rollout of worker %d was thrown away: its policy is %d versions old, and max_lag is %g. Others are "
                "counted in envs.stats['rollouts_discarded']. A worker much slower than the rest makes old rollouts, "
                "and so does a large in_flight. stream(max_lag=...) sets the bound, math.inf lifts it.",
                made.worker.index,
                age,
                self._max_lag,
            )


def _can_take(worker: Worker) -> bool:
    """Whether a worker can be sent more weights: not too many are queued for it already."""
    return worker.stream.num_loads < _MAX_LOADS
