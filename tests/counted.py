"""Counted environments: every row says which environment, episode and step it is of; mishaps befall them once.

What comes back of a lost, hung or failing worker can so be compared with what was seen before, exactly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

INDEX, EPISODE, STEP, DRAW = range(4)
NUM_ACTIONS = 5
Kind = Literal["box", "dict", "mixed", "text"]
Place = Literal["constructor", "reset", "step"]
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Mishap:
    """What befalls an environment, once.

    Args:
        what: It kills its worker, lets it go once it has answered, hangs (with or without Python's lock), raises, waits
            at the named pipe `gate`, or opens that for another one.
        mark: A file that is made when it happens, so that it happens to no other.
        place: In which of its methods.
        at: In which call of it, of the object's life, counted from 1, or any later one.
        given: A file without which it does not happen; "" for none.
        gate: The pipe: it waits until a writer has come and left.
    """

    what: Literal["kill", "exit", "leave", "hang", "hang with the lock", "raise", "wait", "open"]
    mark: str
    place: Place = "step"
    at: int = 1
    given: str = ""
    gate: str = ""

    def strike(self) -> None:
        """Let it happen, unless it has."""
        if self.given and not os.path.exists(self.given):
            return
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        match self.what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "leave":
                os.kill(os.getpid(), signal.SIGTERM)
            case "hang":
                stuck_in_the_mud()
            case "hang with the lock":
                stuck_under_ice()
            case "raise":
                raise ValueError(f"a mishap in the {self.place}")
            case "wait":
                with open(self.gate, "rb") as opened:
                    opened.read()
            case "open":
                open(self.gate, "wb").close()


def stuck_in_the_mud() -> None:
    """Never return; the name is what a Python stack should show."""
    threading.Event().wait()


def stuck_under_ice() -> None:
    """Never return, and let no other Python thread run meanwhile."""
    pause = ctypes.PyDLL(None).pause  # Unlike ctypes.CDLL, this keeps the interpreter's lock.
    while True:
        pause()


class Counted(gym.Env[Any, Any]):
    """Observes its index, how many episodes and steps it has behind it, and a number drawn at its reset.

    Args:
        index: Its number in the vector environment.
        mishaps: What befalls it.
        length: Of every episode, in steps.
        kind: Whether the numbers come as a vector, as a Dict of two, as a Dict with a text, or as a text alone.
    """

    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(
        self, index: int = 0, mishaps: Sequence[Mishap] = (), *, length: int = 10**6, kind: Kind = "box"
    ) -> None:
        numbers, text = spaces.Box(0, 2**62, (4,), np.int64), spaces.Text(60, charset="0123456789 ")
        self.observation_space: spaces.Space[Any] = {
            "box": numbers,
            "dict": spaces.Dict(numbers=numbers, again=numbers),
            "mixed": spaces.Dict(numbers=numbers, text=text),
            "text": text,
        }[kind]
        self.index = index
        self.tag = f"counted {index}"
        self.count = 0
        self._mishaps = mishaps
        self._length = length
        self._kind = kind
        self._calls: Counter[Place] = Counter()
        self._episode = -1
        self._draw = 0
        self._meet("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._meet("reset")
        self._episode += 1
        self.count = 0
        self._draw = int(self.np_random.integers(2**40))
        return self.observe(), {"count": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._meet("step")
        self.count += 1
        return self.observe(), float(self.count), self.count == self._length, False, {"count": self.count}

    def observe(self) -> Any:
        """Its newest observation."""
        numbers = np.array([self.index, self._episode, self.count, self._draw], np.int64)
        text = " ".join(map(str, numbers))
        return {
            "box": numbers,
            "dict": {"numbers": numbers, "again": numbers},
            "mixed": {"numbers": numbers, "text": text},
            "text": text,
        }[self._kind]

    def _meet(self, place: Place) -> None:
        self._calls[place] += 1
        for mishap in self._mishaps:
            if mishap.place == place and mishap.at <= self._calls[place]:
                mishap.strike()


def make_counted(
    num_envs: int,
    mishaps: Mapping[int, Sequence[Mishap]] | None = None,
    *,
    lengths: Mapping[int, int] | None = None,
    kind: Kind = "box",
) -> list[Callable[[], Counted]]:
    """Return factories; some of environments that meet with mishaps, some with short episodes."""

    def factory(index: int) -> Callable[[], Counted]:
        own, length = (mishaps or {}).get(index, ()), (lengths or {}).get(index, 10**6)
        return lambda: Counted(index, own, length=length, kind=kind)

    return [factory(index) for index in range(num_envs)]


def rows_of(observations: Any) -> Rows:
    """Return a copy of the numbers of a batch of observations of any kind; the parts of a Dict must agree."""
    if isinstance(observations, np.ndarray) and observations.dtype != object:
        return np.array(observations, np.int64)
    if isinstance(observations, dict):
        first, second = (rows_of(part) for part in observations.values())
        assert (first == second).all(), f"parts of different observations: {first} and {second}"
        return first
    if isinstance(observations[0], dict):
        return rows_of({name: [row[name] for row in observations] for name in observations[0]})
    return np.array([row.split() if isinstance(row, str) else row for row in observations], np.int64)


def choose(observations: Any) -> NDArray[np.int64]:
    """A policy whose actions follow from the rows."""
    chosen: NDArray[np.int64] = np.asarray(observations).sum(axis=1) % NUM_ACTIONS
    return chosen
