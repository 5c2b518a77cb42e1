"""Calls in two halves, if there are any: `step_async` and `step_wait`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from clusterenv.testing.difference import find_difference
from clusterenv.testing.infos import without_clock
from clusterenv.testing.subject import Broken, NotApplicable, Play, Subject

_FEW = 10


def async_halves(subject: Subject) -> None:
    """`step_async` and `step_wait` together do what `step` does."""
    play = subject.shared(1)
    _demand_halves(play)
    play.begin()
    for moment in subject.recording[1:_FEW]:
        if not moment.is_step:
            play.repeat(moment)
            continue
        play.note("envs.step_async(envs.action_space.sample()); envs.step_wait()")
        play.envs.step_async(deepcopy(moment.actions))
        if difference := find_difference(without_clock(play.envs.step_wait()), moment.answer, moment.name):
            raise Broken(f"In two halves, the answer is another one: {difference}")


def async_order(subject: Subject) -> None:
    """A second `step_async` before `step_wait`, and `step_wait` without `step_async`, are refused."""
    play = subject.risked()
    _demand_halves(play)
    play.begin()
    actions = play.sample()
    _demand_refusal(play, "envs.step_wait()", play.envs.step_wait)
    play.note("envs.step_async(actions)")
    play.envs.step_async(actions)
    _demand_refusal(play, "envs.step_async(actions)", lambda: play.envs.step_async(actions))
    play.note("envs.step_wait()")
    play.envs.step_wait()


def close_pending(subject: Subject) -> None:
    """`close` may be called while a step is under way."""
    play = subject.fresh()
    _demand_halves(play)
    play.begin()
    play.note("envs.step_async(envs.action_space.sample())")
    play.envs.step_async(play.sample())
    play.note("envs.close()")
    play.is_closed = True
    play.envs.close()


def _demand_halves(play: Play) -> None:
    if not all(callable(getattr(play.envs, name, None)) for name in ("step_async", "step_wait")):
        raise NotApplicable("It has no `step_async` and `step_wait`, which VectorEnv does not demand.")


def _demand_refusal(play: Play, line: str, action: Callable[[], object]) -> None:
    play.note(line)
    try:
        action()
    except Exception:  # noqa: BLE001 - any kind will do
        return
    raise Broken(f"{line} was not refused.")
