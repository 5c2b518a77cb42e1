"""Ctrl-C may come between any two lines of a call; the calls after it are as good as ever."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from gymnasium.vector import SyncVectorEnv

import clusterenv
from clusterenv import ClusterEnv, Timeouts
from tests.conftest import Backend
from tests.worlds import assert_same, make_factories

LIBRARY = Path(clusterenv.__file__).parent
# What holds a call's state. What reads and merges infos runs a thousand lines a call, and holds none.
STATEFUL = tuple(
    str(LIBRARY / name)
    for name in ("env.py", "vector.py", "head/remote", "head/crew.py", "head/hub.py", "head/desks.py", "wire/zeromq.py")
)

Call = Callable[[ClusterEnv], Any]


class Interruption:
    """Ctrl-C before the given stateful line of clusterenv that is run inside the block; the first is 0."""

    def __init__(self, line: int) -> None:
        self._left = line

    @property
    def has_come(self) -> bool:
        return self._left < 0

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._previous)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(STATEFUL):
            return None
        if event == "line":
            self._left -= 1
            if self._left == -1:
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda envs: envs.step([0, 1, 2]), id="step"),
        pytest.param(lambda envs: envs.reset(seed=3), id="reset"),
        pytest.param(lambda envs: envs.call("label"), id="call"),
    ],
)
def test_an_interrupt_before_any_line_of_a_call_spoils_no_later_call(remote: Backend, call: Call) -> None:
    factories = make_factories(3)
    theirs = SyncVectorEnv(factories)
    with ClusterEnv(factories, timeouts=Timeouts(call_s=5), **remote) as envs:
        line, has_come = 0, True
        while has_come:
            envs.reset(seed=1)
            interruption = Interruption(line)
            try:
                with interruption:
                    call(envs)
                was_raised = False
            except KeyboardInterrupt:
                was_raised = True
            has_come = interruption.has_come
            assert was_raised == has_come, f"before line {line}"
            assert_same(envs.reset(seed=line), theirs.reset(seed=line))
            assert_same(envs.step([0, 1, 2]), theirs.step([0, 1, 2]))
            line += 1
        assert line > 50, "a call has as many lines"
