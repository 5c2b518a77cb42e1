"""Inline: stands in for remote workers when there are none, and runs everything in the head's own process."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import cloudpickle
from numpy.typing import NDArray

from clusterenv.head.acting import pickle_arguments, pickle_policy
from clusterenv.head.backend import Instructions
from clusterenv.head.dealer import Dealer
from clusterenv.head.evaluating import Finished, read_finished
from clusterenv.head.outcome import Collection, Outcome
from clusterenv.head.worker import Worker, WorkerState
from clusterenv.policy.contents import is_delivered, read_values
from clusterenv.policy.policy import Policy
from clusterenv.policy.probes import Probes, pack
from clusterenv.policy.stripping import SCALARS
from clusterenv.policy.weights import WeightsSpec
from clusterenv.rollout import Rollout
from clusterenv.wire import values as codec
from clusterenv.wire.arrays import allocate
from clusterenv.wire.assignment import Assignment, EvaluationPlan, RunSpaces
from clusterenv.wire.buffers import RolloutBuffers, StepBuffers
from clusterenv.wire.layout import Layout
from clusterenv.wire.messages import Episode
from clusterenv.worker.episode_player import Task
from clusterenv.worker.infos import Infos, complete
from clusterenv.worker.making import describe_envs
from clusterenv.worker.shard import Shard, unpickle

Work = Callable[[], Outcome]

_ANSWER_S = 0.2  # How often an evaluation reports finished episodes.


class InlineCall:
    """A call that runs when it is waited for, so that exceptions are raised where the user waits.

    Attributes:
        waiting: The worker if the call has not run yet, as in a `PendingCall`.
        replies: The outcome, by worker.
        failed: Always empty, since exceptions are raised as they are.
    """

    def __init__(self, worker: Worker, work: Work) -> None:
        self.waiting = {worker: 0}
        self.replies: dict[Worker, Any] = {}
        self.failed: list[Any] = []
        self._work = work
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call, and keep its outcome or exception."""
        worker = next(iter(self.waiting))
        self.waiting = {}
        try:
            self.replies[worker] = self._work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def result(self) -> Outcome:
        """Return the outcome, or raise the exception."""
        if self._error is not None:
            raise self._error
        outcome: Outcome = next(iter(self.replies.values()))
        return outcome


class Inline:
    """One worker that runs in the head's process.

    A policy is copied, and updated by the sync rule, just as on a real worker.

    Attributes:
        workers: The record of this one worker.
        description: The description of the environments.
    """

    losses: Sequence[Any] = ()  # There is no worker to lose.

    def __init__(self, assignment: Assignment) -> None:
        """Make the environments; `open` follows."""
        self.workers = [Worker(0, 0, assignment.num_envs, state=WorkerState.READY, has_served=True)]
        self._num_envs = assignment.num_envs
        self._shard = Shard(assignment)
        self._call: InlineCall | None = None
        self._weights: Mapping[str, NDArray[Any]] = {}
        self._rollout: RolloutBuffers | None = None
        self.description = describe_envs(self._shard.make())

    def open(self, spaces: RunSpaces) -> None:
        layouts = Layout(spaces.action_space), Layout(spaces.observation_space)
        self.buffers = StepBuffers.make_pair(*layouts, self._num_envs, allocate)
        self.workers[0].rows = self.buffers
        self._shard.serve(spaces, self.buffers)

    @property
    def newest(self) -> StepBuffers:
        return self.buffers[self.workers[0].shown]

    def reset(
        self, seeds: Sequence[int | None], mask: Sequence[bool] | None, options: dict[str, Any] | None
    ) -> InlineCall:
        return self._note(lambda: self._stepped(self._shard.reset(self.workers[0].shown, seeds, mask, options)))

    def step(self, actions: Iterable[Any] | None) -> InlineCall:
        return self._note(lambda: self._fill(lambda buffer: (self._shard.step(buffer, actions), None)))

    def decide(self, instructions: Instructions) -> InlineCall:
        told = self._load(instructions)
        return self._note(lambda: self._fill(lambda buffer: self._shard.decide(buffer, *told)))

    def invoke(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InlineCall:
        return self._note(lambda: Outcome({}, [], self._shard.host.call(name, args, kwargs), []))

    def set_attr(self, name: str, items: Sequence[Any]) -> InlineCall:

        def work() -> Outcome:
            self._shard.host.set_attr(name, items)
            return Outcome({}, [], [], [])

        return self._note(work)

    def apply(self, function: Callable[[Any], Any], env_indices: Sequence[int]) -> InlineCall:
        return self._note(lambda: Outcome({}, [], self._shard.host.apply(function, env_indices), []))

    def step_shard(self, _worker: Worker) -> InlineCall:
        return self.step(None)

    def finish(self, call: InlineCall, _timeout_s: float | None = None) -> Outcome:
        """Run the call. There is no worker to wait for, so the timeout has no meaning."""
        if call.waiting:
            call.run()
        return call.result()

    def wait_for(self, call: InlineCall) -> None:
        call.result()

    def advance(self, _timeout_s: float) -> bool:
        if self._call is None or not self._call.waiting:
            return False
        self._call.run()
        return True

    @property
    def deferred(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: there are no messages that could be interrupted."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Do nothing: nothing is ever under way."""

    def raise_fatal(self, workers: Iterable[Worker]) -> None:
        """Do nothing: there is no worker to lose."""

    def note_reset(self) -> None:
        """Do nothing: there is no worker to replace."""

    def adopt(self, policy: Policy, spec: WeightsSpec, version: int, arguments: Mapping[str, Any]) -> int:
        # Copied as for a worker: what would not reach a worker must not be available here.
        weights = spec.decode(spec.encode(policy.weights()))
        code = cloudpickle.dumps(policy)
        self._shard.adopt(lambda: unpickle(code), version, weights, lambda copied: _read(copied, arguments))
        self._rollout = None
        return 1

    def forget_policy(self) -> None:
        """Do nothing: the next policy replaces this one."""

    def load(self, spec: WeightsSpec, weights: Mapping[str, NDArray[Any]], version: int, pulls: set[Worker]) -> int:
        self._weights = spec.decode(spec.encode(weights))
        return len(pulls)

    def count_copies(self, _size_bytes: int) -> int:
        return 1

    def collect(self, num_steps: int, instructions: Instructions, record: int | None = None) -> Collection:
        assert record is None, "there is nobody to keep it"
        started = time.perf_counter()
        told = self._load(instructions)
        if self._rollout is None or len(self._rollout.rewards) != num_steps:
            assert self._shard.rollout_layout is not None, "a policy was adopted"
            self._rollout = self._shard.rollout_layout.make(num_steps, self._num_envs, allocate)
        summary, probes = self._shard.collect(self._rollout, *told)
        busy_s = time.perf_counter() - started
        return Collection(self._rollout, [summary], [busy_s], [self._shard.policy_version], [_pack(probes)])

    def play(
        self, plan: EvaluationPlan, episodes: Sequence[Episode], dealer: Dealer, num_envs: int
    ) -> Generator[list[Finished], None, None]:
        """Play the dealer's episodes; see `head.evaluating`."""
        # The policy is copied, as for a worker; the factory is not, as it may not be picklable.
        begun: EvaluationPlan | None = replace(plan, policy=unpickle(pickle_policy(plan.policy)))
        worker = self.workers[0]
        while dealer.num_left:
            dealt = [episodes[index] for index in dealer.deal(worker, num_envs)]
            tasks = [
                Task(each.index, each.seed, None if each.options is None else unpickle(each.options)) for each in dealt
            ]
            answer, unstarted = self._shard.play(begun, num_envs, tasks, _ANSWER_S)
            begun = None
            finished = read_finished(answer, plan.max_steps)
            dealer.accept(worker, [each.index for each in finished], unstarted)
            yield finished

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        self._shard.close()

    def _note(self, work: Work) -> InlineCall:
        self._call = InlineCall(self.workers[0], work)
        return self._call

    def _fill(self, step: Callable[[int], tuple[Infos, Probes | None]]) -> Outcome:
        """Step into the other buffer, which is shown from then on, even if the step raises."""
        worker = self.workers[0]
        buffer = 1 - worker.shown
        try:
            return self._stepped(*step(buffer))
        finally:
            self._shard.host.show_again(buffer)
            worker.shown = buffer

    def _stepped(self, infos: Infos, probes: Probes | None = None) -> Outcome:
        host = self._shard.host
        # Copied, as from a worker: an environment may write its next observation into the same object.
        objects = copy.deepcopy(host.objects())
        said = [] if (packed := _pack(probes)) is None else [(0, self.workers[0].incarnation, packed)]
        return Outcome(complete(infos, self._num_envs), objects, [], list(host.errors), said)

    def _load(self, instructions: Instructions) -> tuple[int, Mapping[str, Any]]:
        """Load new weights, if any; returns the number of probes, and the per-call values for the policy."""
        if instructions.pulls:
            self._shard.load(instructions.version, self._weights)
        return instructions.num_probes.get(self.workers[0], 0), _read(self._shard.policy, instructions.arguments)


def _read(policy: Policy, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return per-call values as a worker's policy would read them, since an agent's copy has its own classes."""
    if SCALARS.issuperset(map(type, arguments.values())) or not is_delivered(policy):
        return arguments
    return read_values(policy, pickle_arguments(arguments))


def _pack(probes: Probes | None) -> bytes | None:
    """Encode probes as a worker does, so that they are counted and checked in the same way."""
    return None if probes is None else codec.dumps(pack(probes))


class InlineStream:
    """A stream without workers: each rollout is made when it is requested.

    Attributes:
        values: Per-call values for the policy.
        is_open: Whether the stream has not ended.
    """

    def __init__(
        self,
        rollout: Callable[[Mapping[str, Any]], Rollout],
        values: Mapping[str, Any],
        owner: contextlib.AbstractContextManager[None],
    ) -> None:
        """Make rollouts with this function; the owner keeps other threads out of the environments."""
        self.values = dict(values)
        self.is_open = True
        self._rollout = rollout
        self._owner = owner

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __next__(self) -> Rollout:
        """Make a rollout; an exception ends the stream."""
        if not self.is_open:
            raise StopIteration
        with self._owner:
            try:
                return self._rollout(self.values)
            except BaseException:
                self.is_open = False
                raise

    def close(self) -> None:
        """End the stream."""
        self.is_open = False

    abandon = close

    def __enter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the stream."""
        self.close()
