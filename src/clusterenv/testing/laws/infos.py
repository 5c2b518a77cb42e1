"""Infos: their masks, and those at the end of an episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.testing.infos import is_mask
from clusterenv.testing.subject import Broken, Moment, NotApplicable, Subject


def info_masks(subject: Subject) -> None:
    """Every info `key` has a row for each environment and a bool array `_key` that says who has it, at any depth."""
    num_envs = subject.shared().num_envs
    for moment in subject.recording:
        for problem in _problems(moment.answer[-1], num_envs, "infos"):
            raise Broken(f"After {moment.name}, {problem}", moment.lines)


def final_obs(subject: Subject) -> None:
    """`final_obs` and `final_info` are there in the mode SAME_STEP, for those whose episodes ended, and never else."""
    play = subject.shared()
    if play.mode is None:
        raise NotApplicable('metadata["autoreset_mode"] does not say what to expect.')
    is_same_step = play.mode == AutoresetMode.SAME_STEP
    if is_same_step:
        subject.endings()
    for moment in subject.steps:
        ended = moment.ended if is_same_step else np.zeros(play.num_envs, np.bool_)
        for key in ("final_obs", "final_info"):
            _check_mask(moment, key, ended)
        for index in np.flatnonzero(ended):
            final = moment.answer[4]["final_obs"][index]
            if not play.envs.single_observation_space.contains(final):
                raise Broken(
                    f"After {moment.name}, final_obs of environment {index} is {final!r}, which is not in "
                    f"{play.envs.single_observation_space}.",
                    moment.lines,
                )


def _check_mask(moment: Moment, key: str, expected: Any) -> None:
    mask = moment.answer[4].get(f"_{key}", np.zeros_like(expected))
    if not np.array_equal(mask, expected) or (expected.any() and key not in moment.answer[4]):
        raise Broken(f"After {moment.name}, infos['_{key}'] is {mask}, expected {expected}.", moment.lines)


def _problems(infos: dict[Any, Any], num_envs: int, path: str) -> Iterator[str]:
    for key, values in infos.items():
        if is_mask(key, infos):
            continue
        where = f"{path}[{key!r}]"
        mask = infos.get(f"_{key}")
        if mask is None:
            yield f"{where} is there, but {path}['_{key}'], which says whose it is, is not."
        elif not isinstance(mask, np.ndarray) or (mask.dtype, mask.shape) != (np.bool_, (num_envs,)):
            yield f"{path}['_{key}'] is {mask!r}, expected a bool array of {num_envs}."
        if isinstance(values, dict):
            yield from _problems(values, num_envs, where)
        elif not isinstance(values, np.ndarray) or values.shape[:1] != (num_envs,):
            yield f"{where} is {values!r}, expected an array with {num_envs} rows."
