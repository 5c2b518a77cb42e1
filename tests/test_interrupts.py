"""Ctrl-C may come between any two lines of a call; the calls after it are as good as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Timeouts
from tests.conftest import Backend
from tests.interruption import Interruption
from tests.worlds import assert_same, make_factories

# What holds a call's state. What reads and merges infos runs a thousand lines per call, and holds none.
PLACES = (
    *("env.py", "vector.py", "wire/zeromq"),
    *(f"head/{name}" for name in ("remote", "workers", "acting", "calls", "pending", "mailboxes")),
)

Call = Callable[[ClusterEnv], Any]

pytestmark = pytest.mark.slow  # Before every line; test_core_interrupts tries some lines of every call.


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
            interruption = Interruption(line, *PLACES)
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
