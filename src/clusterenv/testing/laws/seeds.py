"""Seeds: what they determine, and which environment gets which."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.testing.difference import find_difference
from clusterenv.testing.subject import Broken, Mask, NotApplicable, Play, Subject

_FEW = 10
_TRIES = 5


def same_seed(subject: Subject) -> None:
    """Two of them give the same answers to the same seed and actions."""
    play = subject.shared(1)
    for number, moment in enumerate(subject.recording):
        answer = play.begin() if number == 0 else play.repeat(moment)
        if difference := find_difference(answer, moment.answer, moment.name):
            raise Broken(f"Made twice, with the same seed and actions, they differ at {difference}")


def seed_again(subject: Subject) -> None:
    """A reset with a seed starts the same all over again, whatever was before."""
    play = subject.shared()
    play.begin()
    for _ in range(_FEW):
        play.step()
    first = play.moments
    play.begin(is_again=True)
    for moment in first[1:]:
        play.repeat(moment)
    for now, then in zip(play.moments, first, strict=True):
        if difference := find_difference(now.answer, then.answer, then.name):
            raise Broken(f"Reset with the same seed once more, it differs from the first time at {difference}")


def seed_spread(subject: Subject) -> None:
    """An int as the seed gives environment i the seed + i, as a list of these does."""
    play = subject.shared()
    with_int = play.reset(seed=subject.seed)
    with_list = play.reset(seed=[subject.seed + index for index in range(play.num_envs)])
    if difference := find_difference(with_list, with_int):
        raise Broken(f"A list of seed + i gives other observations than the int: {difference}")


def seed_list(subject: Subject) -> None:
    """Each environment gets its own entry of a list of seeds, and no other."""
    play = subject.shared()
    seeds = [subject.seed + 7 * index + 3 for index in range(play.num_envs)]
    rows = play.rows(play.reset(seed=seeds)[0])
    for index, seed in enumerate(seeds):
        expected = play.rows(play.reset(seed=seed - index)[0])[index]
        if difference := find_difference(rows[index], expected, f"environment {index}"):
            raise Broken(
                f"With reset(seed={seeds}) and with reset(seed={seed - index}) environment {index} has the seed "
                f"{seed}, but {difference}"
            )


def no_seed(subject: Subject) -> None:
    """A reset without a seed continues from the generators: a new episode, the same after the same history."""
    _goes_on_alike(subject)
    play = subject.shared()
    first = play.begin()[0]
    other = play.reset(seed=subject.seed + 1000)[0]
    if find_difference(first, other) is None:
        return  # Its seed does not show in its first observation.
    play.begin()
    if all(find_difference(play.reset()[0], first) is None for _ in range(_TRIES)):
        raise Broken("Every reset without a seed begins the very episode that the seed before it began.")


def _goes_on_alike(subject: Subject) -> None:
    answers = []
    for number in (0, 1):
        play = subject.shared(number)
        play.begin()
        for _ in range(_FEW):
            play.step()
        answers.append(play.reset())
    if difference := find_difference(answers[1], answers[0]):
        raise Broken(f"Made twice and treated the same, a reset without a seed differs: {difference}")


def reset_mask(subject: Subject) -> None:
    """`options["reset_mask"]` resets those it names, and leaves the episodes of the others as they are."""
    play, other = subject.shared(0), subject.shared(1)
    if play.num_envs == 1:
        raise NotApplicable("There is only one environment.")
    mask, before = _go_some_way(play)
    _go_some_way(other)
    subject.play = play
    seeds = [subject.seed + 100 + index for index in range(play.num_envs)]
    over = play.over.copy()
    observations, infos = _reset_masked(play, mask, seeds)
    fresh = other.rows(other.reset(seed=seeds)[0])
    rows = play.rows(observations)
    if play.mode != AutoresetMode.DISABLED and find_difference(rows, fresh) is None:
        raise NotApplicable("It ignores the mask and resets all, as only the mode DISABLED forbids.")
    for index, (row, new, old) in enumerate(zip(rows, fresh, before, strict=True)):
        expected, what = (new, "was to be reset") if mask[index] else (old, "was not to be reset")
        if difference := find_difference(row, expected, "its observation"):
            raise Broken(f"With reset_mask={mask}, environment {index} {what}, but {difference}")
    for key, values in infos.items():
        if str(key).startswith("_") and isinstance(values, np.ndarray) and (values & ~mask).any():
            raise Broken(f"With reset_mask={mask}, infos[{key!r}] is {values}: it names some that were not reset.")
    _go_some_way(other)
    if over.any() and play.mode == AutoresetMode.DISABLED:
        other.reset(options={"reset_mask": over})
    _compare_the_others(play, other, ~mask)


def options_untouched(subject: Subject) -> None:
    """`reset` leaves the caller's options as they are, the mask included."""
    play = subject.shared()
    mask = np.zeros(play.num_envs, np.bool_)
    mask[0] = True
    play.begin()
    options = {"reset_mask": mask.copy()}
    try:
        play.reset(options=options)
    except Exception as error:
        raise NotApplicable(f"It refuses a reset_mask: {error}") from error
    if set(options) != {"reset_mask"} or not np.array_equal(options["reset_mask"], mask):
        raise Broken(
            f"Given {{'reset_mask': {mask}}}, it left {options} to the caller: given the same options once more, it "
            "would do something else."
        )


def _go_some_way(play: Play) -> tuple[Mask, list[Any]]:
    """Begin, make a few steps, and choose which to reset: every other environment, and those that have finished."""
    for num_steps in (3, 2, 1, 0):
        answer = play.begin()
        for _ in range(num_steps):
            answer = play.step()
        mask = np.arange(play.num_envs) % 2 == 0
        if not (mask | play.over).all():
            break
    return mask | play.over, play.rows(answer[0])


def _reset_masked(play: Play, mask: Mask, seeds: list[int]) -> tuple[Any, ...]:
    try:
        return play.reset(seed=seeds, options={"reset_mask": mask.copy()})
    except Exception as error:
        if play.mode == AutoresetMode.DISABLED:
            raise
        raise NotApplicable(f"It refuses a reset_mask, as only the mode DISABLED forbids: {error}") from error


def _compare_the_others(play: Play, other: Play, chosen: Mask) -> None:
    """Step both, and compare the environments that were not reset in either."""
    play.envs.action_space.seed(play.seed + 1)
    play.note(f"envs.action_space.seed({play.seed + 1})")
    for _ in range(_FEW):
        actions = play.sample()
        answers = [each.step(actions) for each in (play, other)]
        for index in np.flatnonzero(chosen):
            ours, theirs = (
                (each.rows(answer[0])[index], *(values[index] for values in answer[1:4]))
                for each, answer in zip((play, other), answers, strict=True)
            )
            if difference := find_difference(ours, theirs, f"environment {index}"):
                raise Broken(f"Environment {index} was not reset, but does not go on with its episode: {difference}")
        if play.mode == AutoresetMode.DISABLED and (play.over | other.over).any():
            return
