"""Rollouts: brings new versions to the workers, lets them act, and assembles their rollouts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv.errors import WireError
from clusterenv.head.backend import Backend, Instructions
from clusterenv.head.failure import naming, printable
from clusterenv.head.infos import checked_errors, checked_list
from clusterenv.head.outcome import Collection
from clusterenv.head.stats import Stats
from clusterenv.head.versions import Versions
from clusterenv.head.worker import Version, Worker
from clusterenv.policy.policy import Policy
from clusterenv.policy.sync import SyncRule
from clusterenv.rollout import Episodes, Finals, Positions, Rollout
from clusterenv.wire.buffers import RolloutBuffers, check_collectable
from clusterenv.wire.layout import Layout
from clusterenv.wire.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

_POSITIONS = ("life", "episode", "step", "seed")


@dataclass(frozen=True, eq=False, repr=False)
class ShardRollout:
    """A rollout of one shard, as its worker made it.

    Attributes:
        worker: The worker that made it.
        buffers: The arrays, owned by the head.
        summary: Finished episodes and final observations, checked.
        busy_s: How long it took.
        version: The version of the policy that made it.
    """

    worker: Worker
    buffers: RolloutBuffers
    summary: Mapping[str, Any]
    busy_s: float
    version: Version


class Rollouts:
    """Runs one learner's policy on the workers.

    Attributes:
        stats: What the run has done.
        versions: Brings versions of the policy to the workers; `holdings` and `probing` are its parts.
        layouts: The layouts of actions and observations.
        mode: How environments are reset.
        run: A random number that identifies this run; its rollouts carry it.
    """

    def __init__(
        self, backend: Backend, rule: SyncRule, layouts: tuple[Layout, Layout], mode: AutoresetMode, *, copies: bool
    ) -> None:
        self.stats = Stats()
        self.layouts = layouts
        self.mode = mode
        self.run = secrets.randbits(62)
        self.versions = Versions(rule, backend, layouts, self.stats)
        self.holdings, self.probing = self.versions.holdings, self.versions.probing
        self._backend = backend
        self._copies = copies  # Whether rollouts are the caller's own, rather than overwritten by the next.
        self._num_envs = backend.workers[-1].stop
        self._errors = RateLimitedLog(log, limit=100)

    def start_step(self, policy: Policy, arguments: Mapping[str, Any]) -> Any:
        """Start a step in which the policy chooses the actions; returns a handle to wait for."""
        check_collectable(*self.layouts)
        with self.distrust_after_failure():
            self._backend.settle()
            pulls = self._prepare(policy, arguments)
            wanted = self.probing.share_for_step()
            return self._backend.decide(Instructions(self.holdings.newest, pulls, wanted, arguments))

    def note_step(
        self, num_envs: int, errors: Sequence[tuple[int, str]], probes: Sequence[tuple[int, int, bytes]] = ()
    ) -> None:
        """Count a step, whoever chose its actions.

        Args:
            num_envs: How many environments were stepped.
            errors: Forgiven exceptions of environments: the index, and the text.
            probes: Reports on how actions were distributed, with the worker's index and incarnation.

        Raises:
            WireError: A worker's report is malformed.
        """
        self.stats.env_steps += num_envs
        self.note_errors(errors)
        for index, incarnation, data in probes:
            worker = self._backend.workers[index]
            with naming(worker):
                self.probing.take_step(worker, incarnation, data)
        self.probing.end_step()

    def note_errors(self, errors: Sequence[tuple[int, str]]) -> None:
        """Log and count the forgiven exceptions of environments."""
        for env_index, text in errors:
            self.stats.env_errors += 1
            self._errors.warn("environment %d raised, its episode was truncated: %s", env_index, text)

    def rollout(self, policy: Policy, num_steps: int, arguments: Mapping[str, Any]) -> Rollout:
        """Collect a rollout."""
        before = self.stats.snapshot()
        collection, seconds, wanted = self._collect(policy, num_steps, arguments)
        made_with: list[Version] = []
        parts = zip(collection.summaries, collection.versions, collection.probes, strict=True)
        for worker, (summary, version, probes) in zip(self._backend.workers, parts, strict=True):
            with naming(worker):
                columns = collection.buffers.columns(worker.start, worker.stop)
                check_summary(summary, columns, self.layouts[1], self.mode)
                made_with.append(held := self.holdings.find_acted_with(worker, version))
                self.probing.take_rollout(held, probes, columns, wanted.get(worker, 0))
        if self._copies:
            collection = replace(collection, buffers=collection.buffers.copy())
        return self._assemble(collection, self._backend.workers, made_with, before, seconds)

    def record(
        self, policy: Policy, num_steps: int, arguments: Mapping[str, Any], number: int
    ) -> tuple[Episodes, list[tuple[Worker, str, str]]]:
        """Let the workers make a rollout with the newest version, and record it locally under this number.

        Returns:
            The episodes that finished, and for each worker the file it records to and why it could not ("" if it did).
        """
        workers = self._backend.workers
        collection, seconds, _ = self._collect(policy, num_steps, arguments, number)
        records: list[tuple[Worker, str, str]] = []
        for worker, summary, version in zip(workers, collection.summaries, collection.versions, strict=True):
            with naming(worker):
                check_progress(summary, worker.num_envs, num_steps)
                self.holdings.find_acted_with(worker, version)
                path, reason = checked_list(summary.get("recorded"), 2)
                if not isinstance(path, str) or not isinstance(reason, str):
                    raise WireError("Its report of its recording is malformed.")
            records.append((worker, printable(path), printable(reason)))
        self._note_rollout(collection, workers, num_steps * self._num_envs, seconds)
        shards = [(worker.start, worker.stop) for worker in workers]
        return _episodes(collection.summaries, shards, np.arange(self._num_envs)), records

    def _collect(
        self, policy: Policy, num_steps: int, arguments: Mapping[str, Any], record: int | None = None
    ) -> tuple[Collection, float, Mapping[Worker, int]]:
        """Let the workers make a rollout; returns it, the seconds it took, and the number of probes per worker."""
        check_collectable(*self.layouts)
        with self.distrust_after_failure():
            self._backend.settle()
            pulls = self._prepare(policy, arguments, for_all=record is not None)
            wanted = self.probing.share() if record is None else {}
            started = time.perf_counter()
            instructions = Instructions(self.holdings.newest, pulls, wanted, arguments)
            return self._backend.collect(num_steps, instructions, record), time.perf_counter() - started, wanted

    def _prepare(self, policy: Policy, arguments: Mapping[str, Any], *, for_all: bool = False) -> set[Worker]:
        """Bring the newest version to the workers that need it; they wait for it before they act."""
        pulls = self.versions.prepare(policy, arguments, for_all=for_all)
        self.holdings.forget_older(pulls)
        return pulls

    def assembler(self) -> Callable[[Sequence[ShardRollout]], Rollout]:
        """Return a function that joins workers' rollouts into one, for a stream that begins now."""
        delivered_at = time.perf_counter()
        before = self.stats.snapshot()

        def join(group: Sequence[ShardRollout]) -> Rollout:
            nonlocal delivered_at, before
            now = time.perf_counter()
            seconds, delivered_at = now - delivered_at, now
            collection = Collection(
                RolloutBuffers.beside([made.buffers for made in group]),
                [made.summary for made in group],
                [made.busy_s for made in group],
                [],
                [],
            )
            made_by, made_with = [made.worker for made in group], [made.version for made in group]
            rollout = self._assemble(collection, made_by, made_with, before, seconds)
            before = self.stats.snapshot()
            return rollout

        return join

    def _assemble(
        self,
        collection: Collection,
        workers: Sequence[Worker],
        made_with: Sequence[Version],
        before: Mapping[str, float],
        seconds: float,
    ) -> Rollout:
        """Count a rollout, and assemble it from the columns of these workers, each made with its own version.

        The rollout's cost is what was counted since the snapshot `before`.
        """
        actions, observations = self.layouts
        block = collection.buffers
        self._note_rollout(collection, workers, block.rewards.size, seconds)
        sizes = [worker.num_envs for worker in workers]
        shards = list(itertools.pairwise(np.cumsum([0, *sizes]).tolist()))
        env_indices = np.concatenate([worker.env_indices for worker in workers])
        versions = np.repeat(np.array([held.number for held in made_with], np.int64), sizes)
        divergences = np.array([self.probing.divergence_of(held) for held in made_with], np.float64)
        return Rollout(
            obs=observations.nest([column[:-1] for column in block.observations]),
            actions=actions.nest(block.actions),
            rewards=block.rewards,
            terminations=block.terminations,
            truncations=block.truncations,
            valid=block.valid,
            extras=block.extras,
            next_obs=observations.nest([column[-1] for column in block.observations]),
            states=block.states,
            finals=_finals(collection, shards, observations, self.mode),
            episodes=_episodes(collection.summaries, shards, env_indices),
            positions=_positions(collection.summaries, self.run),
            autoreset_mode=self.mode,
            stats=self._cost(before, collection, seconds),
            env_indices=env_indices,
            versions=versions,
            ages=self.holdings.newest - versions,
            divergences=np.repeat(divergences, sizes),
        )

    def _note_rollout(self, collection: Collection, workers: Sequence[Worker], env_steps: int, seconds: float) -> None:
        self.stats.note_rollout(env_steps, collection, seconds)
        for summary, worker in zip(collection.summaries, workers, strict=True):
            self.note_errors([(worker.start + row, text) for row, text in summary["errors"]])

    @contextlib.contextmanager
    def distrust_after_failure(self) -> Iterator[None]:
        """Forget the policy on an exception, so that it is sent anew: the workers' versions are unknown then."""
        try:
            yield
        except BaseException:
            self.versions.forget_policy()
            raise

    def _cost(self, before: Mapping[str, float], collection: Collection, seconds: float) -> dict[str, Any]:
        after = self.stats.snapshot()
        return {
            "seconds": seconds,
            "env_steps_per_second": (after["env_steps"] - before["env_steps"]) / seconds,
            "worker_idle_share": max(0.0, 1.0 - sum(collection.busy_s) / (len(self._backend.workers) * seconds)),
            **{name: after[name] - before[name] for name in after if name != "env_steps"},
        }


Shards = Sequence[tuple[int, int]]


def check_summary(summary: Mapping[str, Any], columns: RolloutBuffers, layout: Layout, mode: AutoresetMode) -> None:
    """Check a worker's summary of its part of a rollout.

    Raises:
        WireError: The summary is malformed.
    """
    num_steps, num_rows = columns.rewards.shape
    check_progress(summary, num_rows, num_steps)
    if mode is AutoresetMode.SAME_STEP:
        with _refusing_malformed():
            _check_finals(summary["finals"], columns, layout)


def check_progress(summary: Mapping[str, Any], num_rows: int, num_steps: int) -> None:
    """Check a worker's summary of its part of a rollout, except for final observations.

    Raises:
        WireError: The summary is malformed.
    """
    checked_errors(summary.get("errors"), num_rows, 2 * num_steps * num_rows)
    with _refusing_malformed():
        _check_positions(summary["positions"], num_rows)
        _check_episodes(summary["episodes"], num_rows, num_steps)


@contextlib.contextmanager
def _refusing_malformed() -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise WireError(f"Its summary of its rollout is malformed: {repr(error)[:300]}.") from error


def _check_positions(part: Mapping[str, Any], num_rows: int) -> None:
    for name in _POSITIONS:
        values = part[name]
        if values.dtype != np.int64 or values.shape != (num_rows,) or values.min() < -1:
            raise ValueError(f"positions of {num_rows} environments, but {name} is {values.dtype}{values.shape}")


def _check_episodes(part: Mapping[str, Any], num_rows: int, num_steps: int) -> None:
    """Check that episodes are of the shard's own environments, and that all their columns have the same length."""
    count = len(_indices(part["row"], num_rows))
    for values, kinds in ((_indices(part["step"], num_steps), "i"), (part["return"], "if"), (part["length"], "i")):
        if values.shape != (count,) or values.dtype.kind not in kinds:
            raise ValueError(f"{count} episodes, but {values.dtype}{values.shape}")
    infos = part["info"]
    if not isinstance(infos, list) or len(infos) != count or not all(isinstance(info, dict) for info in infos):
        raise ValueError(f"not a list of {count} infos")


def _check_finals(part: Mapping[str, Any], columns: RolloutBuffers, layout: Layout) -> None:
    """Check that a shard has a final observation for each episode that ended in its columns, and no other."""
    row, step = part["row"], part["step"]
    order = np.lexsort((row, step))
    ends = np.nonzero(columns.terminations | columns.truncations)
    if not (np.array_equal(step[order], ends[0]) and np.array_equal(row[order], ends[1])):
        raise ValueError("final observations of other episodes than those that ended")
    if len(row) and len(part["leaves"]) != len(layout.leaves):
        raise ValueError(f"{len(part['leaves'])} leaves, not {len(layout.leaves)}")
    for leaf, values in zip(layout.leaves, part["leaves"], strict=False):
        if values.shape != (len(row), *leaf.shape) or values.dtype.kind not in "biuf":
            raise ValueError(f"final observations{leaf} are {values.dtype}{values.shape}")


def _episodes(summaries: Sequence[Mapping[str, Any]], shards: Shards, env_indices: NDArray[np.int64]) -> Episodes:
    """Merge the shards' episodes, ordered by time, then by environment."""
    parts = [summary["episodes"] for summary in summaries]
    rows = np.concatenate([part["row"] + start for part, (start, _) in zip(parts, shards, strict=True)])
    steps = np.concatenate([part["step"] for part in parts])
    order = np.lexsort((rows, steps))
    infos = [info for part in parts for info in part["info"]]
    return Episodes(
        np.concatenate([part["return"] for part in parts]).astype(np.float64)[order],
        np.concatenate([part["length"] for part in parts]).astype(np.int64)[order],
        env_indices[rows[order]],
        steps[order],
        [infos[index] for index in order],
        rows[order],
    )


def _positions(summaries: Sequence[Mapping[str, Any]], run: int) -> Positions:
    columns = [np.concatenate([summary["positions"][name] for summary in summaries]) for name in _POSITIONS]
    return Positions(lives=columns[0], episodes=columns[1], steps=columns[2], seeds=columns[3], run=run)


def _finals(collection: Collection, shards: Shards, layout: Layout, mode: AutoresetMode) -> Finals:
    block = collection.buffers
    steps, envs = np.nonzero(block.terminations | block.truncations)
    if mode is not AutoresetMode.SAME_STEP:
        # The next row still shows the episode's last observation: its reset comes one step later, or never.
        return Finals(layout.nest([column[steps + 1, envs] for column in block.observations]), steps, envs)
    parts = [summary["finals"] for summary in collection.summaries]
    rows = np.concatenate([part["row"] + start for part, (start, _) in zip(parts, shards, strict=True)])
    order = np.lexsort((rows, np.concatenate([part["step"] for part in parts])))
    leaves = []
    for index, leaf in enumerate(layout.leaves):
        stacks = [part["leaves"][index] for part in parts if len(part["row"])]
        column = np.zeros((len(steps), *leaf.shape), leaf.dtype)
        if stacks:
            column[...] = np.concatenate(stacks)[order]
        leaves.append(column)
    return Finals(layout.nest(leaves), steps, envs)


def _indices(values: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    if values.dtype != np.int64 or values.ndim != 1 or (len(values) and not 0 <= values.min() <= values.max() < limit):
        raise ValueError(f"not indices below {limit}")
    return values
