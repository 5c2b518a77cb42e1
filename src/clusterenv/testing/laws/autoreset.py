"""What happens when an episode ends, depending on the autoreset mode."""

from __future__ import annotations

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.testing.difference import find_difference, is_same_value
from clusterenv.testing.infos import row_of, without_clock
from clusterenv.testing.plain_loop import PlainLoop
from clusterenv.testing.subject import Broken, Moment, NotApplicable, Subject

_FEW = 3


def next_step(subject: Subject) -> None:
    """In the mode NEXT_STEP, the step after an end resets: reward 0, no flags, and the observation of a reset."""
    _demand_mode(subject, AutoresetMode.NEXT_STEP)
    endings = subject.endings()
    for moment in subject.steps:
        _, rewards, terminations, truncations, _ = moment.answer
        for index in np.flatnonzero(moment.pending):
            if rewards[index] != 0 or terminations[index] or truncations[index]:
                raise Broken(
                    f"The episode of environment {index} had ended before {moment.name}, which must reset it: expected "
                    f"reward 0 and no flags, got reward {rewards[index]}, terminated {terminations[index]}, "
                    f"truncated {truncations[index]}.",
                    moment.lines,
                )
    _compare_with_resets(subject, endings)


def same_step(subject: Subject) -> None:
    """In the mode SAME_STEP, the step that ends an episode shows the next one's first observation."""
    _demand_mode(subject, AutoresetMode.SAME_STEP)
    play = subject.shared()
    shown = []
    for moment in subject.endings():
        finals = moment.answer[4].get("final_obs")
        if finals is None:
            raise NotApplicable("There are no final observations to compare with, as the law `final-obs` says.")
        rows = play.rows(moment.answer[0])
        shown += [is_same_value(rows[index], finals[index]) for index in np.flatnonzero(moment.ended)]
    rows = [row for moment in subject.recording for row in play.rows(moment.answer[0])]
    if all(shown) and not all(is_same_value(row, rows[0]) for row in rows):
        raise Broken(
            f"In all {len(shown)} steps that ended an episode, the observation is that of the end: none was reset."
        )


def disabled(subject: Subject) -> None:
    """In DISABLED mode, ended episodes are reset by `options["reset_mask"]`, just as by a full reset."""
    _demand_mode(subject, AutoresetMode.DISABLED)
    endings = subject.endings()
    for moment in endings[:_FEW]:
        play = subject.shared(1)
        subject.replay(play, _number_of(subject, moment) + 1)
        play.reset(options={"reset_mask": moment.ended.copy()})
    _compare_with_resets(subject, endings)


def plain_loop(subject: Subject) -> None:
    """All is as in a plain loop over the same environments: observations, rewards, flags and infos."""
    if subject.factories is None:
        raise NotApplicable("factories= is not given.")
    play = subject.shared()
    mode = play.mode
    if mode is None:
        raise NotApplicable('metadata["autoreset_mode"] does not say what to expect.')
    loop = PlainLoop(subject.factories, play.envs.single_observation_space, mode)
    try:
        for number, moment in enumerate(subject.recording):
            if moment.is_step:
                expected = loop.step(play.envs.action_space, moment.actions)
            else:
                expected = loop.reset(subject.seed if number == 0 else None, moment.mask)
            *arrays, infos = expected
            if moment.is_step:
                arrays[1] = arrays[1].astype(moment.answer[1].dtype)  # Some return rewards in single precision.
            if difference := find_difference(moment.answer[:-1], tuple(arrays), moment.name):
                raise Broken(f"A plain loop over its environments gives something else: {difference}", moment.lines)
            for index, info in enumerate(map(without_clock, infos)):
                ours = row_of(moment.answer[-1], index)
                if not is_same_value(ours, info):
                    what = f"At {moment.name}, the info of environment {index} is {info}, but infos say {ours}."
                    raise Broken(what, moment.lines)
    finally:
        loop.close()


def _demand_mode(subject: Subject, mode: AutoresetMode) -> None:
    if (said := subject.shared().mode) != mode:
        raise NotApplicable(f"Its mode is {'unknown' if said is None else said.name}.")


def _compare_with_resets(subject: Subject, endings: list[Moment]) -> None:
    """Replay up to an episode's end, reset all without a seed, and compare with what autoreset returned."""
    for moment in endings[:_FEW]:
        number = _number_of(subject, moment)
        if number + 1 == len(subject.recording):
            return
        after = subject.recording[number + 1]
        play = subject.shared(1)
        subject.replay(play, number + 1)
        rows, shown = play.rows(play.reset()[0]), play.rows(after.answer[0])
        for index in np.flatnonzero(moment.ended):
            if difference := find_difference(shown[index], rows[index], "its observation"):
                raise Broken(
                    f"The episode of environment {index} ended in {moment.name}, and {after.name} must show the first "
                    f"observation of the next; compared with a reset at that moment, {difference}"
                )


def _number_of(subject: Subject, moment: Moment) -> int:
    return next(number for number, each in enumerate(subject.recording) if each is moment)
