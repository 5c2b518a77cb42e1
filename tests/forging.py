"""A worker that others on its machine should get weights from, and that keeps something else for them.

Run as a program by `tests/test_machines.py` in place of `python -m clusterenv.worker`: `$CLUSTERENV_FORGERY` says what.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from clusterenv.wire.board import Board
from clusterenv.worker import __main__, loop

FORGERY_VARIABLE = "CLUSTERENV_FORGERY"


class ForgingBoard(Board):
    """Keeps what it should not."""

    def keep(self, version: int, pieces: Sequence[memoryview]) -> None:
        forgery = os.environ[FORGERY_VARIABLE]
        data = bytearray(b"".join(pieces))
        if forgery == "other bytes":
            data[len(data) // 2] ^= 1
            super().keep(version, [memoryview(data)])
        elif forgery == "a pipe":
            super().keep(version, pieces)
            os.dup2(os.pipe()[0], self._kept[-1][1])


if __name__ == "__main__":
    vars(loop)["Board"] = ForgingBoard  # Of this process only: the worker's own code does the rest.
    sys.exit(__main__.main())
