"""Faults: what a vector environment that claims to survive the loss of its workers must do."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from clusterenv.testing.difference import find_difference
from clusterenv.testing.processes import descendants, is_running, wait_for_end
from clusterenv.testing.subject import Broken, NotApplicable, Play, Subject

_WARM_UP = 3
_AFTERWARDS = 10
_END_S = 10.0


def one_killed(subject: Subject) -> None:
    """When a worker is killed, the next steps come; who was on it is truncated, and all others go on as ever."""
    _lose_some(subject, lambda pids: pids[:1])


def all_killed(subject: Subject) -> None:
    """When all workers are killed at once, the next steps come; those who were on them are truncated."""
    _lose_some(subject, lambda pids: pids)


def close_after_kill(subject: Subject) -> None:
    """After a worker was killed, `close` neither raises nor hangs, and no other process is left."""
    pids_of = _demand_pids(subject)
    before = set(descendants(os.getpid()))
    play = subject.fresh()
    play.begin()
    started = set(descendants(os.getpid())) - before
    _kill(play, pids_of(play.envs)[:1])
    play.is_closed = True
    play.note("envs.close()")
    play.envs.close()
    if left := wait_for_end(started, _END_S):
        raise Broken(f"{_END_S:g} s after close(), these processes run on: {[process.pid for process in left]}.")


def _lose_some(subject: Subject, choose: Any) -> None:
    pids_of = _demand_pids(subject)
    play = subject.fresh()
    play.begin()
    for moment in subject.recording[1 : 1 + _WARM_UP]:
        play.repeat(moment)
    was_over = play.over.copy()
    _kill(play, choose(pids_of(play.envs)))
    if play.mode == AutoresetMode.DISABLED and was_over.any():
        play.reset_over()
    observations, _, _, truncations, infos = play.step(subject.steps[_WARM_UP].actions)
    _compare_untouched(subject, play, truncations, was_over)
    if not play.envs.observation_space.contains(observations):
        raise Broken("After a worker was killed, a step returned observations that are not in the space.")
    lost = truncations & ~subject.steps[_WARM_UP].answer[3]
    if play.mode == AutoresetMode.SAME_STEP and lost.any():
        mask = infos.get("_final_obs", np.zeros_like(lost))
        if (lost & ~mask).any():
            raise Broken(f"Environments {np.flatnonzero(lost)} were truncated, but have no final_obs: {mask}.")
    for _ in range(_AFTERWARDS):
        play.step()


def _compare_untouched(subject: Subject, play: Play, truncations: Any, was_over: Any) -> None:
    """Compare with the run without kills; rows between two episodes begin one that the recording does not have."""
    expected, answer = subject.steps[_WARM_UP].answer, play.moments[-1].answer
    for index in np.flatnonzero(~truncations & ~was_over):
        ours, theirs = (
            (play.rows(each[0])[index], *(part[index] for part in each[1:4])) for each in (answer, expected)
        )
        if difference := find_difference(ours, theirs, f"environment {index}"):
            raise Broken(
                f"After a worker was killed, environment {index} was not truncated, but does not go on with its "
                f"episode either: {difference}"
            )


def _demand_pids(subject: Subject) -> Any:
    if subject.worker_pids is None:
        raise NotApplicable("worker_pids= is not given.")
    return subject.worker_pids


def _kill(play: Play, pids: Sequence[int]) -> None:
    own = {process.pid: process for process in descendants(os.getpid())}
    if not pids:
        raise Broken("worker_pids= says that there are no workers.")
    for pid in pids:
        if pid not in own:
            raise Broken(f"worker_pids= names {pid}, which was not started by this process: nobody else is killed.")
        play.note(f"os.kill({pid}, signal.SIGKILL)  # one of worker_pids(envs)")
        os.kill(pid, signal.SIGKILL)
    while any(is_running(own[pid]) for pid in pids):
        wait_for_end([own[pid] for pid in pids], _END_S)
