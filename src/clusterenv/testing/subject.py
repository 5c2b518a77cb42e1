"""Subject: the vector environment under test, what laws may do with it, and how to reproduce that."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from clusterenv.errors import ConfigError
from clusterenv.testing.deadline import DeadlinePassed, deadline
from clusterenv.testing.difference import find_difference
from clusterenv.testing.infos import without_clock
from clusterenv.testing.processes import Process, descendants

Mask = NDArray[np.bool_]

_CLOSE_S = 20.0
_SOUND_MOMENTS = 5


class Broken(Exception):
    """A law is broken; the message says what happened and what was expected.

    Attributes:
        lines: The calls that show it; by default those of the vector environment used last.
    """

    def __init__(self, message: str, lines: Sequence[str] | None = None) -> None:
        super().__init__(message)
        self.lines = lines


class NotApplicable(Exception):
    """A law does not apply to this vector environment; the message says why."""


class Moment(NamedTuple):
    """One call of a recorded run.

    Attributes:
        name: The call in words, such as "step 3".
        actions: The actions of a step; None for a reset.
        mask: The mask of a partial reset.
        answer: A copy of the result, made immediately, without the durations of episodes.
        given: The result itself, which may have changed since.
        pending: Which environments' episodes had ended before the call, and were not reset yet.
        lines: The calls up to this one.
    """

    name: str
    actions: Any
    mask: Mask | None
    answer: tuple[Any, ...]
    given: tuple[Any, ...]
    pending: Mask
    lines: tuple[str, ...]

    @property
    def is_step(self) -> bool:
        """Whether it is a step."""
        return self.name.startswith("step")

    @property
    def ended(self) -> Mask:
        """Which environments' episodes ended in this step."""
        return np.asarray(self.answer[2], np.bool_) | np.asarray(self.answer[3], np.bool_)


class Play:
    """One vector environment, and everything that has been done with it.

    Args:
        make: Makes the vector environment.
        seed: The seed of random actions, and of `begin`.
    """

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self.envs = make()
        self.seed = seed
        self.is_closed = False
        self.moments: list[Moment] = []
        self.over: Mask = np.zeros(self.num_envs, np.bool_)
        self._lines = ["envs = make()"]

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return int(self.envs.num_envs)

    @property
    def mode(self) -> AutoresetMode | None:
        """The autoreset mode, if the metadata names one."""
        try:
            return AutoresetMode(self.envs.metadata["autoreset_mode"])
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def script(self) -> str:
        """The calls so far, as code that reproduces them."""
        return render(self._lines)

    def note(self, line: str) -> None:
        """Add a line to the script, for what is done to `envs` directly."""
        self._lines.append(line)

    def begin(self, *, is_again: bool = False) -> tuple[Any, ...]:
        """Reset all environments with the seed, and from then on draw the same actions as after every other `begin`.

        Args:
            is_again: Whether the script should include what was done before.
        """
        self.envs.action_space.seed(self.seed)
        self._lines = [*(self._lines if is_again else ["envs = make()"]), f"envs.action_space.seed({self.seed})"]
        self.moments = []
        return self.reset(seed=self.seed)

    def reset(self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """Reset all environments, or those that the options name."""
        arguments = [] if seed is None else [f"seed={seed}"]
        arguments += [] if options is None else [f"options={options!r}"]
        self.note(f"envs.reset({', '.join(arguments)})")
        mask = None if options is None else deepcopy(options.get("reset_mask"))
        pending = self.over.copy()
        answer = _checked(self.envs.reset(seed=seed, options=options), "reset", 2)
        self.over &= np.zeros_like(self.over) if mask is None else ~mask
        return self._record("reset", None, mask, answer, pending)

    def sample(self) -> Any:
        """Draw actions."""
        return self.envs.action_space.sample()

    def step(self, actions: Any = None) -> tuple[Any, ...]:
        """Step all environments, with random actions by default; without autoreset, reset finished ones first."""
        if self.mode == AutoresetMode.DISABLED and self.over.any():
            self.reset_over()
        self.note("envs.step(envs.action_space.sample())" if actions is None else f"envs.step({_shorten(actions)})")
        return self._step(self.sample() if actions is None else actions)

    def _step(self, actions: Any) -> tuple[Any, ...]:
        pending = self.over.copy()
        sent = deepcopy(actions)
        answer = _checked(self.envs.step(actions), "step", 5)
        self.over = np.asarray(answer[2], np.bool_) | np.asarray(answer[3], np.bool_)
        if self.mode == AutoresetMode.SAME_STEP:
            self.over = np.zeros_like(self.over)
        return self._record("step", sent, None, answer, pending)

    def reset_over(self) -> None:
        """Reset the environments whose episodes have ended; if that is impossible, all."""
        try:
            self.reset(options={"reset_mask": self.over.copy()})
        except Exception:  # noqa: BLE001 - the law of masks says more about it
            self.note("# raised; instead:")
            self.reset()

    def repeat(self, moment: Moment) -> tuple[Any, ...]:
        """Repeat a call of another run, with the same actions or mask."""
        if moment.is_step:
            self.note("envs.step(envs.action_space.sample())")
            return self._step(deepcopy(moment.actions))
        if moment.mask is None:
            return self.reset()
        return self.reset(options={"reset_mask": moment.mask.copy()})

    def rows(self, observations: Any) -> list[Any]:
        """Split batched observations by environment."""
        return list(iterate(self.envs.observation_space, observations))

    def close(self) -> None:
        """Close the vector environment, ignoring errors: other laws judge how it closes."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            with deadline(_CLOSE_S):
                self.envs.close()
        except (Exception, DeadlinePassed):  # noqa: BLE001 - other laws say why
            # It was already broken. Gymnasium's AsyncVectorEnv and ClusterEnv can still be terminated.
            with contextlib.suppress(Exception, DeadlinePassed), deadline(_CLOSE_S):
                self.envs.close(terminate=True)

    def _record(
        self, name: str, actions: Any, mask: Mask | None, answer: tuple[Any, ...], pending: Mask
    ) -> tuple[Any, ...]:
        number = sum(moment.is_step == (name == "step") for moment in self.moments)
        copied = without_clock(deepcopy(answer))
        moment = Moment(f"{name} {number}", actions, mask, copied, answer, pending, tuple(self._lines))
        self.moments.append(moment)
        return moment.answer


class Ended(NamedTuple):
    """A vector environment that was used and closed.

    Attributes:
        started: The processes that the vector environment had started.
    """

    play: Play
    started: set[Process]


class Subject:
    """The vector environment that all laws examine in turn.

    Attributes:
        seed: The seed of everything random.
        factories: The factories of its environments, if they are known.
        worker_pids: Returns the ids of the processes whose loss it claims to survive, if it claims that.
        name: The repr of the vector environment, and its autoreset mode.
        play: The instance that a law has used last.
        open_files: How many files this process had open each time the instances of a law were closed, since the shared
            instances were made.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        seed: int,
        num_steps: int,
        factories: Sequence[Callable[[], gym.Env[Any, Any]]] | None,
        worker_pids: Callable[[Any], Sequence[int]] | None,
    ) -> None:
        self.seed = seed
        self.factories = factories
        self.worker_pids = worker_pids
        self.name = "the vector environment"
        self.play: Play | None = None
        self.open_files: list[int] = []
        self._make = make
        self._num_steps = num_steps
        self._shared: dict[int, Play] = {}
        self._fresh: list[Play] = []
        self._is_risked = False
        self._ended: Ended | None = None
        self._recording: list[Moment] | None = None

    def shared(self, number: int = 0) -> Play:
        """Return an instance that all laws share: only reset it and step it.

        Args:
            number: Which shared instance; two can be compared with each other.
        """
        if number not in self._shared:
            play = self._shared[number] = Play(self._make, self.seed)
            self.name = f"{play.envs!r}, {getattr(play.mode, 'name', 'of no autoreset mode')}"
        self.play = self._shared[number]
        return self.play

    def risked(self) -> Play:
        """Return a shared instance for something it should survive; if it does not, the next law gets a new one."""
        self._is_risked = True
        return self.shared(1)

    def fresh(self) -> Play:
        """Make an instance for one law, which may break it."""
        self.play = Play(self._make, self.seed)
        self._fresh.append(self.play)
        return self.play

    def ended(self) -> Ended:
        """Make an instance, use it and close it, once for all laws about closing."""
        if self._ended is None:
            before = set(descendants(os.getpid()))
            play = self.fresh()
            play.begin()
            play.step()
            started = set(descendants(os.getpid())) - before
            play.note("envs.close()")
            play.is_closed = True
            play.envs.close()
            self._ended = Ended(play, started)
        self.play = self._ended.play
        return self._ended

    def record(self) -> list[Moment]:
        """Record a run that begins with a seeded reset."""
        play = self.shared()
        play.begin()
        while sum(moment.is_step for moment in play.moments) < self._num_steps:
            play.step()
        self._recording = list(play.moments)
        return self._recording

    def check_factories(self) -> None:
        """Check that there are as many factories as environments, if an instance could be made.

        Raises:
            ConfigError: The numbers differ.
        """
        count = next((play.num_envs for play in self._shared.values()), None)
        if self.factories is not None and count not in (None, len(self.factories)):
            raise ConfigError(
                f"There are {len(self.factories)} factories for {count} environments; give one for each, in order."
            )

    def demand_run(self) -> None:
        """Check that there is a recorded run.

        Raises:
            NotApplicable: There is none.
        """
        if self._recording is None:
            raise NotApplicable("It cannot be reset and stepped, as the law `run` says.")

    @property
    def recording(self) -> list[Moment]:
        """The recorded run."""
        assert self._recording is not None, "demand_run comes first"
        return self._recording

    @property
    def steps(self) -> list[Moment]:
        """The steps of the recorded run."""
        return [moment for moment in self.recording if moment.is_step]

    def endings(self) -> list[Moment]:
        """Return the steps of the recorded run in which an episode ended.

        Raises:
            NotApplicable: No episode ended.
        """
        endings = [moment for moment in self.steps if moment.ended.any()]
        if not endings:
            raise NotApplicable(f"No episode ended within {self._num_steps} steps; give num_steps=.")
        return endings

    def replay(self, play: Play, stop: int) -> None:
        """Repeat the calls of the recorded run before number `stop`."""
        play.begin()
        for moment in self.recording[1:stop]:
            play.repeat(moment)

    def close(self) -> None:
        """Close all instances."""
        self.forget(is_all=True)

    def forget(self, *, is_all: bool) -> None:
        """Close the instances of one law; if it was broken, or at the end, the shared ones as well."""
        plays = [*self._fresh, *(self._shared.values() if is_all else ())]
        self._fresh, self.play = [], None
        if is_all:
            self._shared = {}
            self.open_files = []
        elif self._is_risked and not self._is_sound(self._shared[1]):
            self._shared.pop(1).close()
            self.open_files = []
        self._is_risked = False
        for play in plays:
            play.close()
        if plays and not is_all and sys.platform == "linux":
            del play
            plays.clear()
            gc.collect()
            self.open_files.append(len(os.listdir("/proc/self/fd")))

    def _is_sound(self, play: Play) -> bool:
        """Return whether a shared instance still behaves as recorded."""
        try:
            with deadline(_CLOSE_S):
                self.replay(play, _SOUND_MOMENTS)
        except (Exception, DeadlinePassed):  # noqa: BLE001 - other laws say why
            return False
        pairs = zip(play.moments, self.recording, strict=False)
        return all(find_difference(now.answer, then.answer) is None for now, then in pairs)


def render(lines: Sequence[str]) -> str:
    """Show calls as code, repeated ones as a loop."""
    shown = []
    for line, same in groupby(lines):
        count = len(list(same))
        shown += [line] if count == 1 else [f"for _ in range({count}):", f"    {line}"]
    return "\n".join(f"    {line}" for line in shown)


def _checked(answer: Any, name: str, count: int) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or len(answer) != count:
        what = f"{len(answer)} values" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
        raise Broken(f"`{name}` returned {what}, not a tuple of {count}.")
    return answer


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
