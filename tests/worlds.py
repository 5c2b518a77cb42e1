"""Environments to test in, and what it means for two answers to be the same.

A `World` is deterministic: what it returns depends on its seed, the options of its reset, and the value, shape and
dtype of every action since. A row, an action or a seed that goes astray therefore shows in the next observation.
A `TroubledWorld` does as told until the moment it was told to break. A `SlackWorld` breaks its own spaces.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from clusterenv.testing.difference import find_difference

Factory = Callable[[], gym.Env[Any, Any]]
Infos = Literal["none", "sparse", "rich", "numbers"]


class World(gym.Env[Any, Any]):
    """An environment over any two spaces, with episodes of 1 to `longest_episode` steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        *,
        infos: Infos = "rich",
        longest_episode: int = 5,
        index: int = 0,
        loose: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(4)
        self.render_mode = render_mode
        self.index = index
        self.label = f"world {index}"
        self._infos = infos
        self._longest_episode = longest_episode
        self._loose = loose
        self._source = deepcopy(self.observation_space)
        self._digest = 0
        self._steps_left = 0
        self._num_infos = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps_left = int(self.np_random.integers(1, self._longest_episode + 1))
        start = int(self.np_random.integers(2**31))
        self._digest = _digest_of("reset", self.index, start, sorted((options or {}).items()))
        return self._observe(), self._describe(is_last=False)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self._steps_left == 0:
            raise RuntimeError("A World was stepped before its reset or after its end.")
        self._steps_left -= 1
        self._digest = _digest_of("step", self._digest, action)
        is_last = self._steps_left == 0
        ending = self._digest % 3
        terminated = is_last and ending != 1
        truncated = is_last and ending != 0
        reward = (self._digest % 2001 - 1000) / 7.0
        if self._digest % 2:
            return self._observe(), np.float32(reward), np.bool_(terminated), truncated, self._describe(is_last=is_last)
        return self._observe(), reward, terminated, np.bool_(truncated), self._describe(is_last=is_last)

    def render(self) -> Any:
        return np.full((4, 6, 3), self.index + 1, np.uint8) if self.render_mode == "rgb_array" else None

    def describe(self, greeting: str = "I am", *, shout: bool = False) -> str:
        """A method for `call`, with a positional and a keyword argument."""
        text = f"{greeting} {self.label}"
        return text.upper() if shout else text

    def echo(self, value: Any) -> Any:
        """Return what was sent, to see what the way there and back does to it."""
        return value

    @property
    def twice_index(self) -> int:
        return 2 * self.index

    def _observe(self) -> Any:
        self._source.seed(self._digest % 2**31)
        observation = self._source.sample()
        if not self._loose:
            return observation
        if isinstance(self._source, spaces.Discrete):
            return int(observation)
        if isinstance(self._source, spaces.Box) and self._source.dtype == np.float32:
            return np.asarray(observation, np.float64) + 1e-12
        return observation

    def _describe(self, *, is_last: bool) -> dict[str, Any]:
        if self._infos == "none":
            return {}
        digest = self._digest
        self._num_infos += 1
        if self._infos == "numbers":
            return _numbers(digest, self._num_infos // 3 % 4)
        entries = _rich_entries(digest)
        if self._infos == "sparse":
            entries = [entry for place, entry in enumerate(entries) if (digest >> place) % 4 == 0]
        if is_last:
            entries.append(("episode", {"r": digest / 3.0, "l": digest % 100}))
        turn = digest % max(len(entries), 1)
        return dict(entries[turn:] + entries[:turn])


def _numbers(digest: int, form: int) -> dict[str, Any]:
    """The same numbers in every environment, most of the time."""
    small = digest % 100
    if form == 1:
        return {"score": small / 9.0, "byte": np.uint8(small)}
    numbers = {
        "count": small,
        "score": small / 7.0,
        "flag": small % 2 == 0,
        "float32": np.float32(small / 7.0),
        "int32": np.int32(-small),
        "float64": np.float64(small / 3.0),
    }
    if form == 2 and small % 3 == 0:
        del numbers["flag"]
    if form == 3:
        return numbers | ({"vector": np.full(2, small)} if small % 3 == 0 else {"name": f"{small}"})
    return numbers


def _rich_entries(digest: int) -> list[tuple[Any, Any]]:
    small = digest % 100
    return [
        ("count", small),
        ("score", small / 7.0),
        ("flag", small % 2 == 0),
        ("float32", np.float32(small / 7.0)),
        ("uint8", np.uint8(small)),
        ("complex64", np.complex64(complex(small, 1))),
        ("numpy_flag", np.bool_(small % 2)),
        ("vector", np.arange(3, dtype=np.float32) + small),
        ("matrix", np.full((2, 2), small, np.uint8)),
        ("zero_dim", np.array(small / 3.0)),
        ("empty", np.zeros((0, 2), np.int16)),
        ("code", np.array(f"{small:03d}")),
        ("name", f"naïve {small}"),
        ("maybe", None if small % 3 else f"{small}"),
        ("bytes", bytes([small, 0, 255])),
        ("complex", complex(small, -1.0)),
        ("pair", (small, "pair")),
        ("listed", [small, None, 1.5]),
        ("tags", {small, "tag"}),
        ("nested", {"depth": small, "deeper": {"x": small / 3.0, "name": f"deep {small}"}}),
        ("hollow", {}),
    ]


def _digest_of(*parts: Any) -> int:
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        _feed(state, part)
    return int.from_bytes(state.digest(), "little")


def _feed(state: hashlib.blake2b, part: Any) -> None:
    if part is None or isinstance(part, str | bytes):
        state.update(repr(part).encode())
    elif isinstance(part, dict):
        _feed(state, sorted(part.items()))
    elif isinstance(part, tuple) or (isinstance(part, list) and not _is_numeric(part)):
        state.update(f"({len(part)}".encode())
        for item in part:
            _feed(state, item)
    else:
        array = np.asarray(part)
        state.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())


def _is_numeric(values: list[Any]) -> bool:
    return all(isinstance(value, bool | int | float | list | np.number) for value in values)


class WordSpace(spaces.Space[str]):
    """A space Gymnasium knows nothing about."""

    def __init__(self, words: Sequence[str] = ("ox", "bee", "heron", "")) -> None:
        self.words = tuple(words)
        super().__init__(shape=None, dtype=None)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return self.words[int(self.np_random.integers(len(self.words)))]

    def contains(self, x: Any) -> bool:
        return x in self.words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordSpace) and other.words == self.words


class WorldError(Exception):
    """An error the head knows by name."""


class PickyError(Exception):
    """An error that cannot be made from its message alone."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{detail} ({code})")


Place = Literal["constructor", "reset", "step", "render", "method", "close", "nowhere"]
Trouble = Literal["raise", "raise picky", "hang", "hang deaf", "wait", "exit", "kill"]


class TroubledWorld(World):
    """A World that gets into trouble once, at `place`, when a writer has come to and left the named pipe `gate`."""

    def __init__(self, place: Place, trouble: Trouble = "raise", *, gate: str = "", **options: Any) -> None:
        super().__init__(longest_episode=1000, render_mode="rgb_array", **options)
        self._place = place
        self._trouble = trouble
        self._gate = gate
        self._meet("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._meet("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._meet("step")
        return super().step(action)

    def render(self) -> Any:
        self._meet("render")
        return super().render()

    def close(self) -> None:
        self._meet("close")

    def method(self) -> str:
        self._meet("method")
        return "well"

    def _meet(self, place: Place) -> None:
        if place != self._place:
            return
        self._place = "nowhere"
        sys.stderr.write(f"the last words of {self.label}\n")
        if self._gate:
            with open(self._gate, "rb") as gate:
                gate.read()
        match self._trouble:
            case "raise":
                raise WorldError(f"{self.label} broke in its {place}")
            case "raise picky":
                raise PickyError(17, detail=f"{self.label} is picky")
            case "hang":
                threading.Event().wait()
            case "hang deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                threading.Event().wait()
            case "wait":
                pass
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


class SlackWorld(World):
    """A World whose `flaw` breaks the space or the signature it promised, in all but the first step after a reset."""

    flaws: ClassVar[dict[str, Callable[[tuple[Any, ...]], Any]]] = {
        "shape": lambda answer: (np.zeros(5, np.float32), *answer[1:]),
        "broadcastable shape": lambda answer: (np.zeros(1, np.float32), *answer[1:]),
        "dtype kind": lambda answer: (np.zeros(3, np.complex64), *answer[1:]),
        "type": lambda answer: ("not an array", *answer[1:]),
        "missing": lambda answer: (None, *answer[1:]),
        "reward": lambda answer: (answer[0], "plenty", *answer[2:]),
        "four values": lambda answer: answer[:4],
        "info": lambda answer: (*answer[:4], ["not", "a", "dict"]),
    }

    def __init__(self, flaw: str, **options: Any) -> None:
        super().__init__(longest_episode=1000, infos="none", **options)
        self.flaw = flaw
        self._has_stepped = False

    def reset(self, **options: Any) -> Any:
        self._has_stepped = False
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        if not self._has_stepped:
            self._has_stepped = True
            return answer
        return self.flaws[self.flaw](answer)


class Talker(World):
    """Prints what it is told to."""

    def say(self, text: str, times: int = 1) -> None:
        for _ in range(times):
            print(text)  # noqa: T201 - what environments do

    def warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=1)

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def die(self, last_words: str) -> None:
        os.write(1, last_words.encode())
        os._exit(7)


class ReusingWorld(World):
    """A World that writes every observation into one array, as fast simulators do."""

    _buffer: NDArray[np.float32] | None = None

    def _observe(self) -> Any:
        if self._buffer is None:
            self._buffer = np.zeros(3, np.float32)
        self._buffer[:] = super()._observe()
        return self._buffer


def make_factories(num_envs: int, **options: Any) -> list[Factory]:
    """Factories of `num_envs` Worlds that differ by their index."""
    return [lambda index=index: World(index=index, **options) for index in range(num_envs)]  # type: ignore[misc]  # mypy cannot infer a lambda's default


def assert_same(ours: Any, theirs: Any, where: str = "answer") -> None:
    """Demand equality of type, dtype, shape, order of keys and every bit, at any depth."""
    difference = find_difference(ours, theirs, where)
    assert difference is None, difference
