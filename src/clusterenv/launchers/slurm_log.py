"""StepLog: what the workers of a step wrote, one labelled line after another, and what it says about each."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from clusterenv.launchers.slurm_script import SAYS

_TAIL_LINES = 40
_LABEL = re.compile(r"^ *(\d+): (.*)$")  # srun --label
_START = re.compile(rf"^{SAYS} worker (\d+) starts on (\S*) in process group (\d+)$")
_END = re.compile(rf"^{SAYS} worker (\d+) ended with status (\d+)$")
_NEW_RUN = re.compile(rf"^{SAYS} job (\d+) starts on (.*)$")

ReadFrom = Callable[[int], bytes]


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        node: Slurm's name of the node.
        process_group: The worker's, and that of everything it started.
    """

    node: str
    process_group: int


class StepLog:
    """Follows a log as it grows.

    Attributes:
        num_runs: How often the job has begun: a requeued one goes on in the same log.
        places: Where each worker that has started in the latest run, started.
        ends: The exit status of each worker that has ended in it, as a shell has it: 128 + n if signal n killed it.
    """

    def __init__(self, read_from: ReadFrom) -> None:
        """Follow a log.

        Args:
            read_from: Returns the bytes of the log from this position on; nothing while there is no log.
        """
        self.num_runs = 0
        self.places: dict[int, Place] = {}
        self.ends: dict[int, int] = {}
        self._read_from = read_from
        self._position = 0
        self._rest = b""
        self._tails: defaultdict[int | None, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=_TAIL_LINES))
        self._num_lines = 0

    def follow(self) -> None:
        """Read what has been written since."""
        data = self._read_from(self._position)
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))

    def tail(self, worker_index: int) -> str:
        """Return the last lines of a worker, and those of Slurm itself among them, in the order they were written."""
        lines = sorted([*self._tails[worker_index], *self._tails[None]])
        return "\n".join(text for _, text in lines[-_TAIL_LINES:])

    def _take(self, line: str) -> None:
        label = _LABEL.match(line)
        text = line if label is None else label[2]
        if start := _START.match(text):
            self.places[int(start[1])] = Place(start[2], int(start[3]))
        elif end := _END.match(text):
            self.ends[int(end[1])] = int(end[2])
        elif _NEW_RUN.match(text):
            self.num_runs += 1
            self.places.clear()
            self.ends.clear()
        self._num_lines += 1
        self._tails[None if label is None else int(label[1])].append((self._num_lines, text))
