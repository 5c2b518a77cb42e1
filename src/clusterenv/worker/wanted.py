"""Wanted: weights that a worker was told of, and that another one on its machine gets for both."""

from __future__ import annotations

import logging

from clusterenv.wire.board import Board, Unreachable
from clusterenv.wire.messages import Copy

log = logging.getLogger(__name__)

_LEAST_BYTES_PER_S = 1e6  # What a network must do to be waited for: one that is slower delivers to nobody in time.


class Wanted:
    """The newest weights that are to be found on another worker's board, until they are had.

    Attributes:
        version: Of these weights; None if there are none that are wanted.
        must_ask: Whether they are not to be had there: the head must be told, and will send them.
    """

    def __init__(self, board: Board | None, silence_s: float, hang_s: float) -> None:
        """Want nothing yet.

        Args:
            board: This worker's own.
            silence_s: How long the other worker may take to receive them, in addition to the time that they take.
            hang_s: A call without progress for so long is taken for hung: it may not take nearly as long.
        """
        self.version: int | None = None
        self.must_ask = False
        self._board = board
        self._silence_s, self._most_s = silence_s, hang_s / 3
        self._copy: Copy | None = None
        self._until = 0.0

    def set(self, version: int, copy: Copy, now: float) -> None:
        """Want these weights, and no others any more; they have no longer than those have that were wanted before."""
        if version != self.version:
            if self.version is None or self.must_ask:
                self._until = now + min(self._silence_s + copy.size_bytes / _LEAST_BYTES_PER_S, self._most_s)
            self.version, self._copy, self.must_ask = version, copy, False

    def clear(self) -> None:
        """Want nothing any more."""
        self.version = self._copy = None
        self.must_ask = False

    def look(self, now: float) -> memoryview | None:
        """Return the weights if they are there by now; None if not, and maybe never: then `must_ask` is set."""
        if self.version is None or self._copy is None or self.must_ask:
            return None
        try:
            if self._board is None:
                raise Unreachable("this worker has no board of its own")
            found = self._board.read(self._copy, self.version)
            if found is None and now > self._until:
                raise Unreachable(f"process {self._copy.board.pid} has not got it in time")
        except Unreachable as error:
            log.warning("version %d of the policy comes by the network: %s", self.version, error)
            self.must_ask = True
            return None
        return found
