"""Vector environments that break one law each: in all else they are ClusterEnvs, which keep them all."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from clusterenv import ClusterEnv
from tests.worlds import make_factories

NUM_ENVS = 3


class Lawful(ClusterEnv):
    """Keeps all laws, for now."""

    def __init__(self, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **options: Any) -> None:
        super().__init__(make_factories(NUM_ENVS), autoreset_mode=mode, **{"num_workers": 0, **options})

    def step(self, actions: Any, **options: Any) -> Any:
        return self.spoil(super().step(actions, **options))

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        """Change what a step returns."""
        return answer


class ReturnsFour(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return answer[:4]


class NotAVectorEnv:
    def __init__(self) -> None:
        self.envs = Lawful()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)


class Modeless(Lawful):
    def __init__(self) -> None:
        super().__init__()
        del self.metadata["autoreset_mode"]


class Unbatched(Lawful):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = self.single_observation_space


class IntegerFlags(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (*answer[:2], answer[2].astype(np.int64), *answer[3:])


class ListOfRewards(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (answer[0], answer[1].tolist(), *answer[2:])


class DoublePrecision(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (answer[0].astype(np.float64), *answer[1:])


class OutOfBounds(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (answer[0] + np.float32(100), *answer[1:])


class OneBuffer(Lawful):
    """Returns the same array every time."""

    buffer = None

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        if self.buffer is None:
            self.buffer = np.empty_like(answer[1])
        self.buffer[:] = answer[1]
        return (answer[0], self.buffer, *answer[2:])


class Reader(Lawful):
    """Looks at what it has returned before: if somebody wrote there, it returns something else."""

    last: Any = None

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        rewards = answer[1]
        if self.last is not None:
            rewards = rewards + (self.last[0] - self.last[1])
        self.last = rewards, rewards.copy()
        return (answer[0], rewards, *answer[2:])


class Writer(Lawful):
    """Writes into the actions."""

    def step(self, actions: Any, **options: Any) -> Any:
        answer = super().step(actions, **options)
        actions[:] = 0
        return answer


class Rememberer(Lawful):
    """Steps with the actions of the last step, which it has not copied: with them as they are by now."""

    last: Any = None

    def step(self, actions: Any, **options: Any) -> Any:
        spoiled = actions if self.last is None else np.where(self.last[0] == self.last[1], actions, 0)
        self.last = actions, actions.copy()
        return super().step(spoiled, **options)


class Individual(Lawful):
    """Is not like any other."""

    numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.numbers)

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (answer[0], answer[1] + self.number, *answer[2:])


class Resetting(Lawful):
    """Resets in a way of its own."""

    num_resets = 0

    def reset_async(self, seed: Any = None, options: Any = None) -> None:
        self.num_resets += 1
        super().reset_async(*self.change(seed, options))

    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        """Change the arguments."""
        return seed, options


class Ageing(Resetting):
    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return (seed + self.num_resets if isinstance(seed, int) else seed), options


class OneSeedForAll(Resetting):
    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return ([seed] * NUM_ENVS if isinstance(seed, int) else seed), options


class FirstOfTheList(Resetting):
    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return (seed[0] if isinstance(seed, list) else seed), options


class Repeating(Resetting):
    """Begins the same episode at every reset."""

    seed: Any = None

    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        if seed is not None:
            self.seed = seed
        return self.seed, options


class Forgetful(Resetting):
    """Takes any seed when it is given none."""

    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return (int.from_bytes(os.urandom(2)) if seed is None else seed), options


class WrongOnes(Resetting):
    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        if options and "reset_mask" in options:
            options = {"reset_mask": np.roll(options["reset_mask"], 1)}
        return seed, options


class ResetsInSilence(Lawful):
    """Resets all, but shows of those that are not named what was seen last."""

    last: Any = None

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        self.last = answer[0]
        return answer

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if not options:
            self.last, infos = super().reset(seed=seed)
            return self.last, infos
        mask = options["reset_mask"]
        observations, _ = super().reset(seed=seed)
        self.last = np.where(mask[:, None], observations, self.last)
        return self.last, {}


class Maskless(Resetting):
    """Resets all, whatever the mask says."""

    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return seed, None


class Popping(Resetting):
    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return seed, {"reset_mask": options.pop("reset_mask")} if options else options


class PaidReset(Lawful):
    """Rewards the step that resets."""

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (answer[0], np.where(answer[1] == 0, 1.0, answer[1]), *answer[2:])


class LateReset(Lawful):
    """Shows what was seen last while it resets."""

    last: Any = None

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        shown = answer[0].copy()
        if self.last is not None:
            observations, ended = self.last
            shown[ended] = observations[ended]
        self.last = answer[0].copy(), answer[2] | answer[3]
        return (shown, *answer[1:])


class ShowsTheEnd(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        observations = answer[0].copy()
        for index in np.flatnonzero(answer[2] | answer[3]):
            observations[index] = answer[4]["final_obs"][index]
        return (observations, *answer[1:])


class SeedsWhatEnded(Resetting):
    """Begins the same episode whenever one has ended."""

    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return ([1] * NUM_ENVS if options else seed), options


class DoublePay(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (answer[0], 2 * answer[1], *answer[2:])


class OtherInfos(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        infos = {key: values[::-1].copy() if key == "score" else values for key, values in answer[4].items()}
        return (*answer[:4], infos)


class MasklessInfos(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (*answer[:4], {key: values for key, values in answer[4].items() if key != "_score"})


class ShortInfos(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (*answer[:4], {key: values[:1] if key == "score" else values for key, values in answer[4].items()})


class Endless(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (*answer[:4], {key: values for key, values in answer[4].items() if "final" not in key})


class FinalAnyway(Lawful):
    def spoil(self, answer: tuple[Any, ...]) -> Any:
        finals = {"final_obs": answer[0].astype(object), "_final_obs": np.ones(NUM_ENVS, np.bool_)}
        return (*answer[:4], answer[4] | finals)


class ListOfResults(Lawful):
    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return list(super().call(name, *args, **kwargs))


class Backwards(Lawful):
    def set_attr(self, name: str, values: Any) -> None:
        super().set_attr(name, values[::-1] if isinstance(values, list) else values)


class AnyNumber(Lawful):
    def set_attr(self, name: str, values: Any) -> None:
        super().set_attr(name, values[:NUM_ENVS] if isinstance(values, list) else values)


class AnyName(Lawful):
    def get_attr(self, name: str) -> Any:
        try:
            return super().get_attr(name)
        except AttributeError:
            return (None,) * NUM_ENVS


class AnyActions(Lawful):
    def step(self, actions: Any, **options: Any) -> Any:
        return super().step(np.resize(actions, NUM_ENVS), **options)


class Wordless(Lawful):
    def step(self, actions: Any, **options: Any) -> Any:
        assert len(actions) == NUM_ENVS
        return super().step(actions, **options)


class StepsFirst(Lawful):
    """Steps, and only then looks at what it was given."""

    def step(self, actions: Any, **options: Any) -> Any:
        answer = super().step(np.resize(actions, NUM_ENVS), **options)
        if len(actions) != NUM_ENVS:
            raise ValueError(f"{len(actions)} actions for {NUM_ENVS} environments")
        return answer


class AnySeeds(Resetting):
    def change(self, seed: Any, options: Any) -> tuple[Any, Any]:
        return (np.resize(seed, NUM_ENVS).tolist() if isinstance(seed, list) else seed), options


class OtherHalf(Lawful):
    def step_wait(self, timeout: float | None = None) -> Any:
        observations, rewards, *others = super().step_wait(timeout)
        return (observations, rewards + 1, *others)


class TwoAtATime(Lawful):
    def step_async(self, actions: Any, **options: Any) -> None:
        try:
            super().step_async(actions, **options)
        except AlreadyPendingCallError:
            return


class ClosesIfIdle(Lawful):
    def close(self, **options: Any) -> None:
        if self._pending is not None:
            self._pending = None
            super().close(**options)
            raise RuntimeError("a step is under way")
        super().close(**options)


class ClosesOnce(Lawful):
    def close(self, **options: Any) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        super().close(**options)


class GoesOn(Lawful):
    """Returns something after its end."""

    def step(self, actions: Any, **options: Any) -> Any:
        with contextlib.suppress(ClosedEnvironmentError):
            self.last = super().step(actions, **options)
        return self.last


class LeavesProcess(Lawful):
    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.left.append(subprocess.Popen(["sleep", "600"]))


class LeavesFiles(Lawful):
    left: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.left.extend(os.pipe())


class HidesLosses(Lawful):
    """Does not say that episodes were cut short."""

    def __init__(self) -> None:
        super().__init__(num_workers=2)

    def spoil(self, answer: tuple[Any, ...]) -> Any:
        return (*answer[:3], answer[3] & ~answer[4].get("worker_lost", np.zeros(NUM_ENVS, np.bool_)), answer[4])


def in_mode(kind: type[Lawful], mode: AutoresetMode) -> Callable[[], Any]:
    """Return what makes one in this mode."""
    return lambda: kind(mode)


# What must be found to break which law.
LAWLESS: list[tuple[str, Callable[[], Any]]] = [
    ("run", ReturnsFour),
    ("vector-env", NotAVectorEnv),
    ("autoreset-mode", Modeless),
    ("batched-spaces", Unbatched),
    ("step-form", IntegerFlags),
    ("step-form", ListOfRewards),
    ("observation-form", DoublePrecision),
    ("observation-values", OutOfBounds),
    ("kept-answers", OneBuffer),
    ("written-answers", Reader),
    ("actions-untouched", Writer),
    ("actions-untouched", Rememberer),
    ("same-seed", Individual),
    ("seed-again", Ageing),
    ("seed-spread", OneSeedForAll),
    ("seed-list", FirstOfTheList),
    ("no-seed", Repeating),
    ("no-seed", Forgetful),
    ("reset-mask", WrongOnes),
    ("reset-mask", ResetsInSilence),
    ("reset-mask", in_mode(Maskless, AutoresetMode.DISABLED)),
    ("options-untouched", Popping),
    ("next-step", PaidReset),
    ("next-step", LateReset),
    ("same-step", in_mode(ShowsTheEnd, AutoresetMode.SAME_STEP)),
    ("disabled", in_mode(SeedsWhatEnded, AutoresetMode.DISABLED)),
    ("plain-loop", DoublePay),
    ("plain-loop", OtherInfos),
    ("info-masks", MasklessInfos),
    ("info-masks", ShortInfos),
    ("final-obs", in_mode(Endless, AutoresetMode.SAME_STEP)),
    ("final-obs", FinalAnyway),
    ("call", ListOfResults),
    ("set-attr", Backwards),
    ("set-attr", AnyNumber),
    ("unknown-attribute", AnyName),
    ("wrong-actions", AnyActions),
    ("wrong-actions", Wordless),
    ("refusals", StepsFirst),
    ("wrong-seeds", AnySeeds),
    ("async-halves", OtherHalf),
    ("async-order", TwoAtATime),
    ("close-pending", ClosesIfIdle),
    ("close-twice", ClosesOnce),
    ("use-after-close", GoesOn),
    ("processes", LeavesProcess),
    ("descriptors", LeavesFiles),
    ("one-killed", HidesLosses),
]
