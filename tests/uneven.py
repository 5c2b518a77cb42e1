"""Environments and policies for evaluations: episodes of very different lengths, each action of which shows.

Workers import this file, so it must not import torch.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from clusterenv.policy import BasePolicy, Categorical

SHORT, LONG = 12, 400  # Nearly all episodes take fewer steps than the first, one in ten as many as the second.


class Uneven(gym.Env[NDArray[np.float32], np.int64]):
    """Episodes whose lengths, observations and rewards follow from the seed, the options and the actions.

    Args:
        mishap: Called with this environment before each step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, mishap: Callable[[Uneven], object] | None = None) -> None:
        self.seed = -1
        self.num_steps = 0
        self._mishap = mishap
        self._state = np.zeros(3)
        self._length = 0
        self._bonus = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seed = -1 if seed is None else seed
        self.num_steps = 0
        self._length = LONG if self.np_random.random() < 0.1 else int(self.np_random.integers(1, SHORT))
        self._state = self.np_random.standard_normal(3)
        self._bonus = (options or {}).get("bonus", 0.0)
        return self._state.astype(np.float32), {}

    def step(self, action: np.int64) -> Any:
        if self._mishap is not None:
            self._mishap(self)
        self.num_steps += 1
        self._state = np.tanh(0.9 * self._state + (int(action) - 1) * 0.1 + 0.3 * self.np_random.standard_normal(3))
        is_over = self.num_steps >= self._length
        terminated = is_over and self._length % 2 == 0
        info = {"success": bool(self._state[0] > 0), "state": self._state.copy()} if is_over else {}
        reward = float(self._state.sum()) + self._bonus
        return self._state.astype(np.float32), reward, terminated, is_over and not terminated, info


def act(obs: Any) -> NDArray[np.int64]:
    """A deterministic policy whose every action depends on the observation."""
    choice: NDArray[np.int64] = np.argmax(obs, axis=1)
    return choice


class Floats(gym.Wrapper[Any, Any, Any, Any]):
    """Takes two continuous actions, of which every bit shows in the return."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(np.int64(action[0] > action[1]))
        return obs, float(reward) + float(action.sum()) * 1e-3, terminated, truncated, info


class Dice(BasePolicy):
    """Draws by a distribution."""

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        return Categorical(logits=obs.astype(np.float32))


def roll(obs: Any, rng: np.random.Generator) -> Any:
    return np.where(rng.random(len(obs)) < 0.5, rng.integers(3, size=len(obs)), np.argmax(obs, axis=1))


class Masked(gym.Wrapper[Any, Any, Any, Any]):
    """Allows one action at a time, and ends the episode with an error if another is taken."""

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        self._allowed = 0
        return obs, {**info, "action_mask": self._mask()}

    def step(self, action: Any) -> Any:
        assert action == self._allowed
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._allowed = (self._allowed + 1) % 3
        return obs, reward, terminated, truncated, {**info, "action_mask": self._mask()}

    def _mask(self) -> Any:
        return (np.arange(3) == self._allowed).astype(np.int8)


def obey(obs: Any, action_mask: Any) -> Any:
    return np.argmax(action_mask, axis=1)


class Chance(gym.Wrapper[Any, Any, Any, Any]):
    """Draws from the generators of the process, as old environments do."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward) + random.random() + float(np.random.random()), terminated, truncated, info


def seed_chance(env: Any) -> None:
    random.seed(1)
    np.random.seed(1)


class Endless(Uneven):
    """Never ends an episode."""

    def step(self, action: Any) -> Any:
        return self._state.astype(np.float32), 1.0, False, False, {}


class Raises(Uneven):
    """Raises in one episode."""

    def step(self, action: Any) -> Any:
        if self.seed == 7 and self.num_steps == 2:
            raise KeyError("broken")
        return super().step(action)


def once(path: Path) -> bool:
    """Whether this is the first time, in any process, that somebody asks about this path."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class KillsItsWorker:
    """Ends the worker's process, once for each of some seeds, in the middle of an episode."""

    def __init__(self, directory: Path, seeds: Sequence[int]) -> None:
        self._directory = directory
        self._seeds = frozenset(seeds)

    def __call__(self, env: Uneven) -> None:
        if env.seed in self._seeds and once(self._directory / str(env.seed)):
            os.kill(os.getpid(), signal.SIGKILL)


class SignalsTheHead:
    """Sends the head a signal, once, when an episode with this seed is under way and the file has enough lines."""

    def __init__(self, directory: Path, head_pid: int, number: int, seed: int, journal: Path | None = None) -> None:
        self._directory, self._head_pid, self._number, self._seed = directory, head_pid, number, seed
        self._journal = journal

    def __call__(self, env: Uneven) -> None:
        if env.seed != self._seed:
            return
        if self._journal is not None and self._journal.read_bytes().count(b"\n") < 5:
            env.num_steps -= 1  # This episode goes on until there is something to resume.
            return
        if once(self._directory / "signalled"):
            os.kill(self._head_pid, self._number)


Row = tuple[int, float, int, bool, bool]


def play_plainly(
    env: gym.Env[Any, Any],
    choose: Callable[[Any], Any],
    seeds: Sequence[int],
    options: Sequence[Mapping[str, Any] | None] | None = None,
    max_steps: int | None = None,
) -> list[Row]:
    """Play episodes one after another, as one writes it by hand: what an evaluation is compared with."""
    table = []
    for index, seed in enumerate(seeds):
        given = None if options is None else options[index]
        obs, _ = env.reset(seed=seed, options=None if given is None else dict(given))
        total, length, terminated, truncated = 0.0, 0, False, False
        while not (terminated or truncated):
            obs, reward, terminated, truncated, _ = env.step(choose(np.asarray(obs)[None])[0])
            total += float(reward)
            length += 1
            truncated = truncated or (not terminated and length == max_steps)
        table.append((seed, total, length, terminated, truncated))
    return table


def rows_of(evaluation: Any) -> list[Row]:
    """Return an evaluation's table as `play_plainly` does, to be compared bit for bit."""
    columns = evaluation.seeds, evaluation.returns, evaluation.lengths, evaluation.terminated, evaluation.truncated
    return list(zip(*(column.tolist() for column in columns), strict=True))
