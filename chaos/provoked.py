"""Environments that number their own steps, and misbehave in one of them when they are told to."""

from __future__ import annotations

import ctypes
import enum
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.numbered import Numbered

_FOR_EVER_S = 10**6
_TALK = "x" * 4095 + "\n"


class Deed(enum.IntEnum):
    """What an environment does in its next step."""

    NOTHING = 0
    HANG = 1
    HANG_HOLDING_GIL = 2  # No other thread of the worker runs any more.
    SEGFAULT = 3
    RAISE_UNPRINTABLE = 4
    RAISE_UNENCODABLE = 5
    RAISE_HOMELESS = 6
    TALK = 7  # It prints 4 KiB, in this step and in all that follow, until it is told otherwise.


class Board:
    """What each environment is told: a byte each, in a file that the head and all workers map.

    Args:
        path: The file.
        num_envs: Makes it, for so many environments; None opens one that is there.
    """

    def __init__(self, path: Path, num_envs: int | None = None) -> None:
        if num_envs is not None:
            path.write_bytes(bytes(num_envs))
        self._deeds = np.memmap(path, np.uint8, "r+")

    def tell(self, env_indices: Sequence[int], deed: Deed) -> None:
        """Tell some environments what to do."""
        self._deeds[list(env_indices)] = deed

    def read(self, env_index: int) -> Deed:
        """Return what an environment is to do; it is told once, but for talking."""
        deed = self._deeds[env_index]
        if deed and deed != Deed.TALK:
            self._deeds[env_index] = Deed.NOTHING
        return Deed(deed)


class Provoked(Numbered):
    """A numbered environment that looks at the board before every step."""

    def __init__(self, index: int, board: Path) -> None:
        super().__init__(index)
        self._board = Board(board)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do what it is told, and step, if that is still possible."""
        if deed := self._board.read(self.index):
            misbehave(deed)
        return super().step(action)


def make_provoked(num_envs: int, board: Path) -> list[Callable[[], Provoked]]:
    """Return factories."""
    return [partial(Provoked, index, board) for index in range(num_envs)]


def misbehave(deed: Deed) -> None:
    """Do it."""
    match deed:
        case Deed.HANG:
            time.sleep(_FOR_EVER_S)
        case Deed.HANG_HOLDING_GIL:
            ctypes.PyDLL(None).sleep(_FOR_EVER_S)
        case Deed.SEGFAULT:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(0)
        case Deed.RAISE_UNPRINTABLE:
            raise Unprintable
        case Deed.RAISE_UNENCODABLE:
            raise RuntimeError("half a surrogate pair: \ud800")
        case Deed.RAISE_HOMELESS:
            raise Homeless("of a class without a module")
        case Deed.TALK:
            print(_TALK, end="", flush=True)
        case Deed.NOTHING:
            pass


class Unprintable(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words for it")

    __repr__ = __str__


class Homeless(Exception):
    """An exception whose class does not know its module."""


Homeless.__module__ = None  # type: ignore[assignment]  # That is what is odd about it.
