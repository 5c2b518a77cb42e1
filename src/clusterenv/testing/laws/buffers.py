"""Ownership of arrays: returned arrays belong to the caller, and passed ones still do."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from clusterenv.testing.difference import find_difference
from clusterenv.testing.infos import without_clock
from clusterenv.testing.subject import Broken, Play, Subject


def kept_answers(subject: Subject) -> None:
    """What was returned does not change later, but for observations with `copy=False`."""
    start = 0 if _copies(subject.shared()) else 1
    for moment in subject.recording:
        if difference := find_difference(without_clock(moment.given[start:]), moment.answer[start:], moment.name):
            raise Broken(f"What was returned has changed since: {difference}", subject.recording[-1].lines)


def written_answers(subject: Subject) -> None:
    """What the caller writes into what was returned changes nothing, but for observations with `copy=False`."""

    def write(play: Play) -> None:
        _scribble(play.moments[-1].given[0 if _copies(play) else 1 :])

    _go_along(subject, "the caller wrote into what had been returned", after=write)


def actions_untouched(subject: Subject) -> None:
    """Actions are not written to, and the caller may use their arrays for something else once the step is done."""

    def look(play: Play, actions: Any, sent: Any) -> None:
        if difference := find_difference(actions, sent, "the actions"):
            raise Broken(f"`step` wrote into what it was given: {difference}")

    _go_along(subject, "the caller wrote into the actions of the steps before", look=look)


def _go_along(
    subject: Subject,
    what: str,
    *,
    after: Callable[[Play], None] | None = None,
    look: Callable[[Play, Any, Any], None] | None = None,
) -> None:
    """Do as in the recorded run, with something in between, and compare."""
    play = subject.shared(1)
    play.begin()
    if after is not None:
        after(play)
    for moment in subject.recording[1:]:
        actions = deepcopy(moment.actions)
        if moment.is_step:
            play.step(actions)
        else:
            play.repeat(moment)
        if difference := find_difference(play.moments[-1].answer, moment.answer, moment.name):
            raise Broken(f"When {what}, the answer became another one: {difference}")
        if look is not None:
            look(play, actions, moment.actions)
            _scribble(actions)
        if after is not None:
            after(play)


def _copies(play: Play) -> bool:
    return getattr(play.envs.unwrapped, "copy", True) is not False


def _scribble(value: Any) -> None:
    """Write something else into every array that can be written to."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.dtype == object):
        for item in value:
            _scribble(item)
    elif isinstance(value, np.ndarray) and value.flags.writeable and value.size:
        if value.dtype == np.bool_:
            np.logical_not(value, out=value)
        elif np.issubdtype(value.dtype, np.number):
            value[...] = 0 if value.flat[0] else 1
