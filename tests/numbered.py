"""An environment that numbers its own steps, and a checker that follows every row it is shown.

Whatever goes wrong between a worker and the learner (a step left out, one delivered twice, a row in another's place, an
episode that ends without being told) breaks the numbering, and the checker says where. It also knows when the
environments end their episodes by themselves, so that an end must either be theirs or be flagged as a loss.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from clusterenv import Rollout

ENV, INSTANCE, EPISODE, STEP, ACTION, DRAW = range(6)
NUM_ACTIONS = 5
Place = Literal["constructor", "reset", "step", "method"]
Rows = NDArray[np.int64]


def length_of(env_index: int, episode: int) -> int:
    """Return how many steps an episode has."""
    return 3 + (5 * env_index + 7 * episode) % 6


def ending_of(env_index: int, episode: int) -> tuple[bool, bool]:
    """Return how an episode ends: terminated, truncated, or both."""
    return (True, False) if (env_index + episode) % 3 else ((env_index + episode) % 2 == 0, True)


@dataclass(frozen=True)
class Fault:
    """How an environment brings its worker down.

    Args:
        kind: By a signal, as the kernel does when memory runs out; by leaving; by a segmentation fault; or not at all,
            but by an exception.
        place: In which of its methods.
        after: At which call of it, counted from 0.
        once: A file that notes that it has happened, so that it does not happen to the next worker; "" for always.
        given: A file without which it does not happen; "" for none.
    """

    kind: Literal["kill", "stop", "exit", "segfault", "raise"]
    place: Place
    after: int = 0
    once: str = ""
    given: str = ""

    def strike(self) -> None:
        """Do it."""
        if self.given and not os.path.exists(self.given):
            return
        if self.once:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "segfault":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                ctypes.string_at(0)
            case "raise":
                raise RuntimeError(f"a fault in the {self.place}")


class Numbered(gym.Env[Any, Any]):
    """Observes which environment it is, which instance of it, and how many episodes and steps it has behind it.

    Args:
        index: Its number in the vector environment.
        faults: What befalls it.
        wide: Whether the numbers come as a Dict with a text, rather than as a vector.
    """

    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, index: int, faults: Sequence[Fault] = (), *, wide: bool = False) -> None:
        numbers = spaces.Box(-1, 2**62, (6,), np.int64)
        self.observation_space = (
            spaces.Dict(numbers=numbers, text=spaces.Text(64, charset="0123456789 -")) if wide else numbers
        )
        self.index = index
        self.tag = "none"
        self._faults = faults
        self._is_wide = wide
        self._calls: Counter[Place] = Counter()
        self._instance = int.from_bytes(os.urandom(6), "little")
        self._episode = -1
        self._step = 0
        self._draw = 0
        self._meet("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._meet("reset")
        self._episode += 1
        self._step = 0
        self._draw = int(self.np_random.integers(2**40))
        return self._observe(-1), {"episode_number": self._episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        self._meet("step")
        is_last = self._step == length_of(self.index, self._episode)
        assert self._step <= length_of(self.index, self._episode), "stepped after its end"
        terminated, truncated = ending_of(self.index, self._episode) if is_last else (False, False)
        return self._observe(int(action)), float(self._step), terminated, truncated, {}

    def method(self) -> tuple[int, str]:
        """Something to `call`."""
        self._meet("method")
        return self.index, self.tag

    def _observe(self, action: int) -> Any:
        numbers = np.array([self.index, self._instance, self._episode, self._step, action, self._draw], np.int64)
        return {"numbers": numbers, "text": " ".join(map(str, numbers[:4]))} if self._is_wide else numbers

    def _meet(self, place: Place) -> None:
        call = self._calls[place]
        self._calls[place] += 1
        for fault in self._faults:
            if fault.place == place and fault.after <= call:
                fault.strike()


def make_numbered(num_envs: int, faults: Mapping[int, Sequence[Fault]] | None = None, **options: Any) -> list[Any]:
    """Return factories, some of environments with faults."""
    return [_factory(index, (faults or {}).get(index, ()), options) for index in range(num_envs)]


def _factory(index: int, faults: Sequence[Fault], options: dict[str, Any]) -> Callable[[], Numbered]:
    return lambda: Numbered(index, faults, **options)


def read_rows(observations: Any) -> Rows:
    """Return the numbers of a batch of observations; where there is a text, it must say the same."""
    if not isinstance(observations, dict):
        rows: Rows = np.array(observations)
        return rows
    for numbers, text in zip(observations["numbers"], observations["text"], strict=True):
        expect(text == " ".join(map(str, numbers[:4])), f"the text {text!r} is not of {numbers}")
    return np.array(observations["numbers"])


class Inconsistent(AssertionError):
    """What was delivered cannot have happened."""


def expect(holds: object, what: str | Callable[[], str]) -> None:
    """Raise `Inconsistent` unless something holds; where that is asked of every step, its text is made only if not."""
    if not holds:
        raise Inconsistent(what if isinstance(what, str) else what())


class Checker:
    """Follows every row of a vector environment of `Numbered`s.

    Attributes:
        delivered: How many transitions of each environment were delivered and found right.
        flagged: How often each environment's row was flagged as lost.
        jumped: How often an environment was found to be another instance at the start of a rollout, or after a reset.
    """

    def __init__(self, num_envs: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.delivered = np.zeros(num_envs, np.int64)
        self.flagged: Counter[int] = Counter()
        self.jumped: Counter[int] = Counter()
        self._mode = mode
        self._num_envs = num_envs
        self._rows: Rows | None = None
        self._is_over = np.zeros(num_envs, np.bool_)
        self._is_lost = np.zeros(num_envs, np.bool_)
        self._gone: set[int] = set()

    @property
    def num_steps(self) -> int:
        """How many transitions were delivered and found right."""
        return int(self.delivered.sum())

    @property
    def rows(self) -> Rows:
        """What was seen last of each environment."""
        assert self._rows is not None, "reset first"
        return self._rows.copy()

    def reset(self, observations: Any, mask: NDArray[np.bool_] | None = None, *, may_skip: bool = False) -> None:
        """Follow a reset of all environments, or of those in the mask.

        Args:
            observations: Of all.
            mask: Whose reset it was; None for all.
            may_skip: Whether rollouts may have been thrown away before, as when a stream ends.
        """
        rows = read_rows(observations)
        for index, row in enumerate(rows):
            if mask is not None and not mask[index]:
                expect(self._rows is not None and (row == self._rows[index]).all(), f"reset changed row {index}: {row}")
                continue
            self._check_first(index, row, may_skip=may_skip)
            self._is_over[index] = self._is_lost[index] = False
        self._rows = rows

    def step(
        self,
        actions: Any,
        answer: tuple[Any, Any, Any, Any, dict[str, Any]],
        env_indices: NDArray[np.int64] | None = None,
    ) -> NDArray[np.bool_]:
        """Follow a step of all environments, or of some, as `recv` returns them; returns whose episode is over."""
        assert self._rows is not None, "reset first"
        observations, rewards, terminated, truncated, infos = answer
        indices = np.arange(self._num_envs) if env_indices is None else env_indices
        rows = read_rows(observations)
        expect(rows.shape == (len(indices), 6), f"{rows.shape} rows of {len(indices)} environments")
        lost = infos.get("_worker_lost", np.zeros(len(indices), np.bool_))
        expect((lost == infos.get("worker_lost", lost)).all(), "a flag differs from its mask")
        for position, (index, row) in enumerate(zip(indices.tolist(), rows, strict=True)):
            ends = bool(terminated[position]), bool(truncated[position])
            reward, final = float(rewards[position]), None
            if self._mode is AutoresetMode.SAME_STEP and any(ends):
                final = read_rows(_batch(infos["final_obs"][position]))[0]
            if lost[position]:
                self._follow_loss(index, row, reward, ends, final)
            else:
                self._advance(index, int(actions[position]), row, reward, ends, final)
            self._rows[index] = row
        over: NDArray[np.bool_] = terminated | truncated
        return over

    def _follow_loss(self, index: int, row: Rows, reward: float, ends: tuple[bool, bool], final: Rows | None) -> None:
        """Follow a row whose worker was lost over the step."""
        expect(reward == 0, f"lost row {index} has a reward of {reward}")
        if self._is_over[index] and ends == (False, False):
            # Its episode had ended already: all it had to do was to begin a new one.
            self._lose(index)
            self._is_lost[index] = True
            self._check_first(index, row)
            self._is_over[index] = self._is_lost[index] = False
            return
        expect(ends == (False, True), f"lost row {index} ended {ends}")
        self._check_last(index, row if final is None else final)
        self._lose(index)
        if final is not None:
            self._check_first(index, row)
        self._is_over[index] = self._is_lost[index] = final is None

    def rollout(self, rollout: Rollout, *, may_skip: bool = False) -> None:
        """Follow a rollout, of all environments or, as streams deliver them, of some.

        Args:
            rollout: T steps.
            may_skip: Whether rollouts of the same environments may have been thrown away before this one.
        """
        assert self._rows is not None, "reset first"
        rows = np.concatenate([np.asarray(rollout.obs), np.asarray(rollout.next_obs)[None]])
        places = zip(rollout.finals.steps.tolist(), rollout.finals.columns.tolist(), strict=True)
        finals = dict(zip(places, np.asarray(rollout.finals.obs), strict=True))
        for column, index in enumerate(rollout.env_indices.tolist()):
            first, seen = rows[0, column], self._rows[index]
            if first[INSTANCE] != seen[INSTANCE]:
                self._lose(index, jumps=True)
                self._is_over[index] = self._is_lost[index] = False
                if not may_skip:
                    self._check_first(index, first)
            elif may_skip:
                expect(first[ENV] == index, f"row {index} shows environment {first[ENV]}")
                expect(tuple(first[[EPISODE, STEP]]) >= tuple(seen[[EPISODE, STEP]]), f"row {index} goes back: {first}")
                self._is_over[index] = first[STEP] == length_of(index, int(first[EPISODE]))
            else:
                expect((first == seen).all(), f"row {index} begins with {first}, not {seen}")
            self._rows[index] = first
            for step in range(rollout.num_steps):
                self._follow(rollout, step, column, index, rows[step + 1, column], finals.get((step, column)))

    def _follow(self, rollout: Rollout, step: int, column: int, index: int, row: Rows, final: Rows | None) -> None:
        """Follow one environment for one step of a rollout."""
        assert self._rows is not None
        takes_action = not self._is_over[index] or self._mode is AutoresetMode.SAME_STEP
        expect(rollout.valid[step, column] == takes_action, f"row {index}, step {step}: wrongly (in)valid")
        ends = bool(rollout.terminations[step, column]), bool(rollout.truncations[step, column])
        if self._is_over[index] and self._mode is AutoresetMode.DISABLED:
            expect((row == self._rows[index]).all() and ends == (False, False), f"row {index} went on: {row}")
            return
        action, reward = int(rollout.actions[step, column]), float(rollout.rewards[step, column])
        is_same_step = self._mode is AutoresetMode.SAME_STEP
        self._advance(index, action, row, reward, ends, final if is_same_step else None)
        self._rows[index] = row

    def finish(self, losses: Sequence[Any]) -> None:
        """Compare what was seen with the losses that were reported."""
        happened = Counter(index for loss in losses for index in loss.env_indices)
        for index in range(self._num_envs):
            seen = self.flagged[index] + self.jumped[index]
            expect(seen <= happened[index], f"environment {index} was lost {seen} times, {happened[index]} reported")
            expect(seen or not happened[index], f"environment {index} was lost, and nothing was seen of it")

    def _advance(
        self, index: int, action: int, row: Rows, reward: float, ends: tuple[bool, bool], final: Rows | None
    ) -> None:
        assert self._rows is not None
        before = self._rows[index]
        if self._is_over[index] and self._mode is AutoresetMode.NEXT_STEP:
            expect(ends == (False, False) and reward == 0, lambda: f"row {index} was reset with {ends}, {reward}")
            self._check_first(index, row)
            self._is_over[index] = self._is_lost[index] = False
            return
        expect(not self._is_over[index], lambda: f"row {index} went on after its end: {row}")
        reached = row if final is None else final
        wanted = before.copy()
        wanted[STEP] += 1
        wanted[ACTION] = action
        expect((reached == wanted).all(), lambda: f"row {index}: {reached} follows {before} with action {action}")
        expect(reward == wanted[STEP], lambda: f"row {index}: reward {reward} of step {wanted[STEP]}")
        is_last = wanted[STEP] == length_of(index, int(wanted[EPISODE]))
        expected = ending_of(index, int(wanted[EPISODE])) if is_last else (False, False)
        expect(ends == expected, lambda: f"row {index} ended {ends}, not {expected}: {reached}")
        if final is not None:
            self._rows[index] = final
            self._check_first(index, row)
        elif is_last:
            expect(self._mode is not AutoresetMode.SAME_STEP, lambda: f"row {index} has no final observation")
            self._is_over[index] = True
        self.delivered[index] += 1

    def _check_first(self, index: int, row: Rows, *, may_skip: bool = False) -> None:
        """Check the first observation of an episode."""
        expect(row[ENV] == index, f"row {index} shows environment {row[ENV]}")
        expect(row[STEP] == 0 and row[ACTION] == -1, f"row {index}: an episode begins with {row}")
        expect(int(row[INSTANCE]) not in self._gone, f"row {index}: a lost environment came back: {row}")
        if self._rows is None:
            return
        before = self._rows[index]
        if row[INSTANCE] == before[INSTANCE]:
            skipped = row[EPISODE] - before[EPISODE] - 1
            expect(skipped == 0 or (may_skip and skipped > 0), f"row {index}: {row} begins after {before}")
        elif not self._is_lost[index] and int(before[INSTANCE]) not in self._gone:
            self._lose(index, jumps=True)

    def _check_last(self, index: int, final: Rows) -> None:
        """Check what a lost row shows: what was seen last."""
        assert self._rows is not None
        before = self._rows[index]
        is_same = (final == before).all()
        expect(not self._is_over[index], f"lost row {index} was truncated after its end")
        expect(is_same, f"lost row {index} shows {final} after {before}")

    def _lose(self, index: int, *, jumps: bool = False) -> None:
        assert self._rows is not None
        (self.jumped if jumps else self.flagged)[index] += 1
        self._gone.add(int(self._rows[index, INSTANCE]))


def _batch(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {"numbers": np.array([observation["numbers"]]), "text": [observation["text"]]}
    return np.array([observation])
