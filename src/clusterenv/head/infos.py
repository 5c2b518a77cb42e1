"""Infos: reads and checks what workers return besides arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from clusterenv.errors import WireError
from clusterenv.head.failure import naming
from clusterenv.head.outcome import Outcome
from clusterenv.head.worker import Worker
from clusterenv.wire import values
from clusterenv.wire.buffers import StepBuffers
from clusterenv.wire.info_planes import SlotReader
from clusterenv.wire.infos import ShardInfos, check_infos, merge_infos
from clusterenv.wire.messages import Reply, Returned, Stepped


class StepReader:
    """Reads the results of steps and resets, from memory beside the step buffers or from a message."""

    def __init__(self, workers: Sequence[Worker], buffers: StepBuffers) -> None:
        self._workers = workers
        self._num_envs = len(buffers.rewards)
        self._num_object_leaves = sum(array is None for array in buffers.observations)
        shards = [(worker.start, worker.stop) for worker in workers]
        self._slots = SlotReader(buffers.info_slots, shards, self._find_names)

    def take(self, worker: Worker, reply: Reply) -> Outcome:
        """Return the outcome of one worker's step or reset, with errors indexed by the worker's own rows.

        Observations without a fixed size are also kept in `worker.objects`.

        Raises:
            WireError: The reply is malformed.
        """
        if isinstance(reply, Stepped) and reply.is_plain and not reply.generation and not self._num_object_leaves:
            return Outcome({}, [], [], [])
        stepped = expect(Stepped, reply)
        worker.objects = objects = read_objects(stepped, self._num_object_leaves, worker.num_envs)
        infos = self._read_infos(worker, stepped)
        errors = checked_errors(stepped.errors, worker.num_envs, 8 * worker.num_envs)
        probes = [] if stepped.probes is None else [(worker.index, worker.incarnation, stepped.probes)]
        return Outcome(infos, objects, [], errors, probes)

    def merge(self, outcomes: Sequence[tuple[Worker, Outcome]]) -> Outcome:
        """Merge the outcomes of several workers' step or reset."""
        shards: list[ShardInfos] = []
        columns: list[list[Any]] = [[] for _ in range(self._num_object_leaves)]
        errors: list[tuple[int, str]] = []
        probes: list[tuple[int, int, bytes]] = []
        for worker, outcome in outcomes:
            if outcome.infos:
                shards.append(ShardInfos(worker.start, worker.stop, outcome.infos))
            for column, part in zip(columns, outcome.columns, strict=True):
                column.extend(part)
            errors += [(worker.start + row, text) for row, text in outcome.errors]
            probes += outcome.probes
        infos = merge_infos(shards, self._num_envs) if shards else {}
        return Outcome(infos, columns, [], errors, probes)

    def read_plain(self, generations: list[int]) -> dict[str, Any]:
        """Return the infos of all environments, after a plain step with plain answers.

        Raises:
            WireError: The names that a worker has written for its infos are malformed.
        """
        if not any(generations):
            return {}
        infos = self._slots.read_all(generations)
        if infos is not None:
            return infos
        shards = []
        for worker, generation in zip(self._workers, generations, strict=True):
            if generation:
                with naming(worker):
                    shards.append(ShardInfos(worker.start, worker.stop, self._slots.read(worker.index, generation)))
        return merge_infos(shards, self._num_envs)

    def _read_infos(self, worker: Worker, stepped: Stepped) -> dict[str, Any]:
        if stepped.generation:
            return self._slots.read(worker.index, stepped.generation)
        infos = {} if stepped.infos is None else values.loads(stepped.infos)
        check_infos(infos, worker.num_envs)
        return checked_dict(infos)

    def _find_names(self, index: int) -> memoryview:
        mailbox = self._workers[index].mailbox
        if mailbox is None:
            raise WireError("A worker that shares no memory says that its infos are in shared memory.")
        return mailbox.names


def expect(kind: type[Any], reply: Reply) -> Any:
    """Return the reply if it is of this kind, else raise WireError."""
    if not isinstance(reply, kind):
        raise WireError(f"A worker answered with {type(reply).__name__} where {kind.__name__} was expected.")
    return reply


def checked_list(value: Any, size: int | None = None) -> list[Any]:
    """Return a value that must be a list, and of this size if one is given, else raise WireError."""
    if not isinstance(value, list):
        raise WireError(f"A worker sent a {type(value).__name__} where a list was expected.")
    if size is not None and len(value) != size:
        raise WireError(f"A worker sent a list of {len(value)} where {size} were expected.")
    return value


def checked_dict(value: Any) -> dict[str, Any]:
    """Return a value that must be a dict, else raise WireError."""
    if not isinstance(value, dict):
        raise WireError(f"A worker sent a {type(value).__name__} where a dict was expected.")
    return value


def checked_seconds(value: float) -> float:
    """Return a value that must be a duration, else raise WireError."""
    if not 0 <= value < math.inf:
        raise WireError(f"A worker sent {value} where a duration in seconds was expected.")
    return value


def checked_errors(errors: Any, num_rows: int, limit: int) -> list[tuple[int, str]]:
    """Return a value that must be a list of (row, exception text) of a shard, else raise WireError."""
    for item in checked_list(errors):
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise WireError("A worker sent an error that is not a row and a text.")
        row, text = item
        if type(row) is not int or not 0 <= row < num_rows or not isinstance(text, str):
            raise WireError(f"A worker sent an error of row {str(row)[:20]} where it hosts {num_rows} environments.")
    if len(errors) > limit:
        raise WireError(f"A worker sent {len(errors)} errors where there can be {limit}.")
    return [(row, text) for row, text in errors]


def read_objects(stepped: Stepped, num_leaves: int, num_rows: int) -> list[list[Any]]:
    """Return one list per leaf, with one object per environment; a wrong length would shift other workers' rows."""
    columns = [] if stepped.columns is None else values.loads(stepped.columns)
    return [checked_list(column, num_rows) for column in checked_list(columns, num_leaves)]


def read_results(reply: Reply, count: int) -> list[Any]:
    """Return the values of a `Returned` reply, which must be `count` many."""
    return checked_list(values.loads(expect(Returned, reply).values), count)
