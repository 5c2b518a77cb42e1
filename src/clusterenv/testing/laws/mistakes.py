"""Mistakes of the caller: refused with an error, and without consequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.vector.utils import batch_space

from clusterenv.testing.difference import find_difference
from clusterenv.testing.subject import Broken, Play, Subject


def wrong_actions(subject: Subject) -> None:
    """Too many and too few actions are refused with an exception that says something."""
    play = subject.risked()
    play.begin()
    for count in _wrong_counts(play):
        actions = _sample(play, count)
        _demand_refusal(lambda actions=actions: play.step(actions), f"{count} actions", play)  # type: ignore[misc]  # mypy cannot infer a lambda's default


def refusals(subject: Subject) -> None:
    """After a wrong number of actions was refused, all goes on as if nothing had happened: nobody was stepped."""
    play = subject.risked()
    for count in _wrong_counts(play):
        actions = _sample(play, count)
        play.begin()
        try:
            play.step(actions)
        except Exception:  # noqa: BLE001 - another law is about how it is refused
            pass
        else:
            raise Broken(f"{count} actions for {play.num_envs} environments were not refused.")
        for moment in subject.recording[1:5]:
            answer = play.repeat(moment)
            if difference := find_difference(answer, moment.answer, moment.name):
                raise Broken(f"{count} actions for {play.num_envs} environments were refused, but then {difference}")


def wrong_seeds(subject: Subject) -> None:
    """Too many and too few seeds are refused with an exception that says something."""
    play = subject.risked()
    for count in (play.num_envs + 1, play.num_envs - 1):
        seeds = list(range(count))
        _demand_refusal(lambda seeds=seeds: play.reset(seed=seeds), f"{count} seeds", play)  # type: ignore[misc]  # mypy cannot infer a lambda's default


def _wrong_counts(play: Play) -> list[int]:
    # Not every space can be batched for zero environments.
    return [count for count in (play.num_envs + 1, play.num_envs - 1) if count]


def _sample(play: Play, count: int) -> Any:
    space = batch_space(play.envs.single_action_space, count)
    space.seed(play.seed)
    return space.sample()


def _demand_refusal(action: Callable[[], object], what: str, play: Play) -> None:
    try:
        action()
    except Exception as error:
        if str(error).strip():
            return
        raise Broken(f"{what} for {play.num_envs} environments: refused with {error!r}, which says nothing.") from error
    raise Broken(f"{what} for {play.num_envs} environments were not refused.")
