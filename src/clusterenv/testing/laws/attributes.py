"""Attributes and methods of the environments, if supported: `get_attr`, `call` and `set_attr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clusterenv.testing.subject import Broken, NotApplicable, Play, Subject

_NAME = "clusterenv_testing_mark"  # No environment has it already.


def call(subject: Subject) -> None:
    """`get_attr` and `call` return a tuple with a result of each environment, in order; arguments are passed on."""
    play = subject.risked()
    _demand(play, "get_attr", "call")
    play.begin()
    envs = play.envs
    asked: tuple[tuple[str, Callable[[], Any], Any], ...] = (
        ("envs.get_attr('render_mode')", lambda: envs.get_attr("render_mode"), envs.render_mode),
        ("envs.call('has_wrapper_attr', 'render_mode')", lambda: envs.call("has_wrapper_attr", "render_mode"), True),
        (
            f"envs.call('set_wrapper_attr', '{_NAME}_other', 1, force=False)",
            lambda: envs.call("set_wrapper_attr", f"{_NAME}_other", 1, force=False),
            False,
        ),
    )
    for line, ask, expected in asked:
        play.note(line)
        found = ask()
        if not isinstance(found, tuple) or found != (expected,) * play.num_envs:
            raise Broken(f"{line} returned {found!r}, expected a tuple with {expected!r} for each environment.")


def set_attr(subject: Subject) -> None:
    """`set_attr` gives each environment its value of a list or tuple, or all the same, and refuses too few values."""
    play = subject.risked()
    _demand(play, "get_attr", "set_attr")
    play.begin()
    each = list(range(play.num_envs))
    for values, expected in (
        (each, tuple(each)),
        (tuple(each[::-1]), tuple(each[::-1])),
        ("all", ("all",) * len(each)),
    ):
        play.note(f"envs.set_attr({_NAME!r}, {values!r})")
        play.envs.set_attr(_NAME, values)
        if (found := tuple(play.envs.get_attr(_NAME))) != expected:
            raise Broken(f"After set_attr({_NAME!r}, {values!r}), get_attr returned {found!r}, expected {expected!r}.")
    play.note(f"envs.set_attr({_NAME!r}, {[0, *each]!r})")
    try:
        play.envs.set_attr(_NAME, [0, *each])
    except ValueError:
        return
    raise Broken(f"{len(each) + 1} values for {len(each)} environments were not refused with a ValueError.")


def unknown_attribute(subject: Subject) -> None:
    """A name that no environment has is an AttributeError."""
    play = subject.risked()
    _demand(play, "get_attr")
    play.begin()
    play.note(f"envs.get_attr('{_NAME}_other')")
    try:
        found = play.envs.get_attr(f"{_NAME}_other")
    except AttributeError:
        return
    raise Broken(f"It was not refused: get_attr returned {found!r}.")


def _demand(play: Play, *names: str) -> None:
    for name in names:
        if not callable(getattr(play.envs, name, None)):
            raise NotApplicable(f"It has no `{name}`, which VectorEnv does not demand.")
