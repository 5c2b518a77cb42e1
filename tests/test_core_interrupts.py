"""Ctrl-C may come between any two lines of any call; what comes after it equals SyncVectorEnv as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Timeouts
from tests.conftest import Backend
from tests.interruption import count_lines, is_interrupted, spread_lines
from tests.lockstep import Follower
from tests.policies import Hashing
from tests.worlds import make_factories

NUM_ENVS = 3
MOST = 36  # Interruptions of each call.
ALL = list(range(NUM_ENVS))
AGENT = Hashing(spaces.Discrete(4))
Prepare = Callable[[ClusterEnv], Callable[[], Any]]


def prepare_next(envs: ClusterEnv) -> Callable[[], Any]:
    stream = envs.stream(AGENT, 4)
    return lambda: next(stream)


def prepare_stream_close(envs: ClusterEnv) -> Callable[[], Any]:
    stream = envs.stream(AGENT, 4)
    next(stream)
    return stream.close


def prepare_reset_in_stream(envs: ClusterEnv) -> Callable[[], Any]:
    next(envs.stream(AGENT, 4))
    return lambda: envs.reset(seed=3)


def prepare_recv(envs: ClusterEnv) -> Callable[[], Any]:
    envs.send(ALL, ALL)
    return envs.recv


def ready(envs: ClusterEnv, seed: int) -> None:
    """Reset, and take in first what a call before may have left to be received: that it did is its right."""
    for _ in range(NUM_ENVS):
        try:
            envs.reset(seed=seed)
        except AlreadyPendingCallError:
            envs.recv()
        else:
            return


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda envs: lambda: envs.reset(seed=3), id="reset"),
        pytest.param(lambda envs: lambda: envs.step([0, 1, 2]), id="step"),
        pytest.param(lambda envs: lambda: envs.step(AGENT), id="step(agent)"),
        pytest.param(lambda envs: lambda: envs.rollout(AGENT, 3), id="rollout"),
        pytest.param(lambda envs: lambda: envs.rollout(Hashing(spaces.Discrete(4)), 3), id="rollout of a new agent"),
        pytest.param(lambda envs: lambda: envs.stream(AGENT, 4), id="stream"),
        pytest.param(prepare_next, id="next(stream)"),
        pytest.param(prepare_stream_close, id="stream.close"),
        pytest.param(prepare_reset_in_stream, id="reset in a stream"),
        pytest.param(lambda envs: lambda: envs.send(ALL, ALL), id="send"),
        pytest.param(prepare_recv, id="recv"),
        pytest.param(lambda envs: lambda: envs.call("describe", "We are"), id="call"),
        pytest.param(lambda envs: lambda: envs.set_attr("label", ["a", "b", "c"]), id="set_attr"),
        pytest.param(lambda envs: lambda: envs.apply(lambda env: env.unwrapped.label, [2, 0]), id="apply"),
    ],
)
def test_an_interrupt_before_any_line_of_a_call_spoils_nothing_after_it(backend: Backend, prepare: Prepare) -> None:
    factories = make_factories(NUM_ENVS)
    theirs = SyncVectorEnv(factories)
    with ClusterEnv(factories, timeouts=Timeouts(call_s=5), **backend) as envs:
        follower = Follower(envs, theirs, AGENT)
        checks = [follower.check_steps, follower.check_rollout, follower.check_stream]
        ready(envs, 0)
        num_lines = count_lines(prepare(envs))
        num_interrupted = 0
        for number, line in enumerate(spread_lines(num_lines, MOST)):
            ready(envs, number)
            num_interrupted += is_interrupted(prepare(envs), line)
            ready(envs, number)
            checks[number % 3](number)
        ready(envs, 0)
        for check in checks:
            check(num_lines)
        assert num_interrupted > 0
        assert envs.losses == ()
    theirs.close()
