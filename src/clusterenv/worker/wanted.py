"""Wanted: weights that a worker was told to load from the board of another worker on its machine."""

from __future__ import annotations

import logging

from clusterenv.wire.board import Board, Unreachable
from clusterenv.wire.messages import Copy

log = logging.getLogger(__name__)

_LEAST_BYTES_PER_S = 1e6  # The slowest network worth waiting for: a slower one is of no use to any worker.


class Wanted:
    """The newest weights to be found on another worker's board, until they are there.

    Attributes:
        version: The version of these weights; None if none are wanted.
        must_ask: Whether they cannot be found there, so that the head must be told, and will send them.
    """

    def __init__(self, board: Board | None, silence_s: float, hang_s: float) -> None:
        """Want nothing yet.

        Args:
            board: This worker's own board.
            silence_s: How long the other worker may take on top of the transfer time.
            hang_s: A call without progress for this long is considered hung, so the wait must be much shorter.
        """
        self.version: int | None = None
        self.must_ask = False
        self._board = board
        self._silence_s, self._most_s = silence_s, hang_s / 3
        self._copy: Copy | None = None
        self._until = 0.0

    def set(self, version: int, copy: Copy, now: float) -> None:
        """Want these weights in place of any others; the deadline of those wanted before still holds."""
        if version != self.version:
            if self.version is None or self.must_ask:
                self._until = now + min(self._silence_s + copy.size_bytes / _LEAST_BYTES_PER_S, self._most_s)
            self.version, self._copy, self.must_ask = version, copy, False

    def clear(self) -> None:
        """Stop wanting any weights."""
        self.version = self._copy = None
        self.must_ask = False

    def look(self, now: float) -> memoryview | None:
        """Return the weights if they are there by now, else None; sets `must_ask` if they will not come."""
        if self.version is None or self._copy is None or self.must_ask:
            return None
        try:
            if self._board is None:
                raise Unreachable("this worker has no board of its own")
            found = self._board.read(self._copy, self.version)
            if found is None and now > self._until:
                raise Unreachable(f"process {self._copy.board.pid} did not receive it in time")
        except Unreachable as error:
            log.warning("version %d of the policy must come over the network: %s", self.version, error)
            self.must_ask = True
            return None
        return found
