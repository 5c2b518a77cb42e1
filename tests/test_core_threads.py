"""Environments belong to one process, and to one thread at a time; the others are told so, and harm nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import ClusterEnv, Timeouts
from clusterenv.errors import ClusterEnvError
from clusterenv.ownership import Ownership
from tests.conftest import Backend
from tests.counted import STEP, Mishap, choose, make_counted, rows_of
from tests.script import run_script

NUM_ENVS = 4
ACTIONS = np.zeros(NUM_ENVS, np.int64)

FORKED = """
import gc, json, os, signal, sys
import numpy as np
from gymnasium.vector import SyncVectorEnv
from clusterenv import ClusterEnv, Network, Timeouts
from clusterenv.errors import ClusterEnvError
from tests.counted import choose, make_counted
from tests.worlds import assert_same

transport, ending = sys.argv[1:]
actions = np.zeros(4, np.int64)
makers = make_counted(4)
theirs = SyncVectorEnv(makers)
ours = ClusterEnv(makers, num_workers=2, network=Network(transport=transport), timeouts=Timeouts(call_s=10))
assert_same(ours.reset(seed=1), theirs.reset(seed=1))
assert_same(ours.step(actions), theirs.step(actions))
calls = {
    "reset": lambda: ours.reset(seed=2),
    "step": lambda: ours.step(actions),
    "step_async": lambda: ours.step_async(actions),
    "step(agent)": lambda: ours.step(choose),
    "rollout": lambda: ours.rollout(choose, 2),
    "stream": lambda: next(ours.stream(choose, 2)),
    "send": lambda: ours.send(actions, range(4)),
    "call": lambda: ours.call("index"),
    "set_attr": lambda: ours.set_attr("tag", "changed"),
    "apply": lambda: ours.apply(lambda env: env.unwrapped.index, [0]),
}
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(40)  # Should it hang, that ends it.
    for name, call in calls.items():
        try:
            call()
        except ClusterEnvError as error:
            if "fork" not in str(error):
                os.write(2, f"{name}: {error}".encode())
                os._exit(7)
        else:
            os.write(2, f"{name} was not refused in the child".encode())
            os._exit(6)
    if ending == "close":
        try:
            ours.close()
        except ClusterEnvError as error:
            assert "fork" in str(error)
    del ours, calls, call
    gc.collect()
    sys.exit(0)  # As any program ends: with all that is done at exit.
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
for _ in range(3):
    assert_same(ours.step(actions), theirs.step(actions))
rollout = ours.rollout(choose, 2)
assert ours.losses == ()
assert ours.get_attr("tag") == theirs.get_attr("tag")
ours.close()
theirs.close()
print(json.dumps(status))
"""


@pytest.mark.parametrize("ending", ["exit", "close"])
def test_a_forked_child_cannot_use_its_parents_environments_nor_harm_them(remote: Backend, ending: str) -> None:
    assert run_script(FORKED, remote["network"].transport, ending, deadline_s=60) == [0]


@pytest.mark.parametrize(
    "intrude",
    [
        pytest.param(lambda envs: envs.step(ACTIONS), id="step"),
        pytest.param(lambda envs: envs.reset(seed=1), id="reset"),
        pytest.param(lambda envs: envs.call("index"), id="call"),
        pytest.param(lambda envs: envs.rollout(choose, 2), id="rollout"),
        pytest.param(lambda envs: envs.stream(choose, 2), id="stream"),
        pytest.param(lambda envs: envs.close(), id="close"),
    ],
)
def test_a_second_thread_is_refused_while_the_first_is_in_a_call(
    remote: Backend, intrude: Callable[[ClusterEnv], Any], tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    makers = make_counted(NUM_ENVS, {3: [Mishap("wait", str(tmp_path / "mark"), at=3, gate=gate)]})
    with ClusterEnv(makers, **remote, timeouts=Timeouts(call_s=10, close_s=1)) as envs:
        envs.reset(seed=1)
        envs.step(ACTIONS)
        envs.step(ACTIONS)
        answers: list[Any] = []

        def step() -> None:
            try:
                answers.append(rows_of(envs.step(ACTIONS)[0])[:, STEP].tolist())
            except BaseException as error:  # It is what the test is about: compared with what should have come.
                answers.append(error)

        first = threading.Thread(target=step, daemon=True)
        first.start()
        with open(gate, "wb"), pytest.raises(ClusterEnvError, match="thread"):
            intrude(envs)  # Environment 3 is in its step, until the gate is closed.
        first.join(30)
        assert answers == [[3] * NUM_ENVS]
        assert rows_of(envs.step(ACTIONS)[0])[:, STEP].tolist() == [4] * NUM_ENVS
        assert envs.losses == ()


def test_without_workers_too_a_stream_keeps_other_threads_out() -> None:
    outcomes: list[str] = []

    def intrude() -> None:
        try:
            envs.step(ACTIONS[:1])
            outcomes.append("it was stepped")
        except ClusterEnvError as error:
            outcomes.append(str(error))

    class Meanwhile(gym.Wrapper[Any, Any, Any, Any]):
        """Has another thread step the environments during its own step."""

        def step(self, action: Any) -> Any:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            return super().step(action)

    with ClusterEnv([lambda: Meanwhile(gym.make("CartPole-v1"))], num_workers=0) as envs:
        envs.reset(seed=1)
        next(envs.stream(lambda obs: np.zeros(len(obs), np.int64), 1))
    assert len(outcomes) == 1
    assert "thread" in outcomes[0]


def test_threads_may_take_turns(remote: Backend) -> None:
    with ClusterEnv(make_counted(NUM_ENVS), **remote) as envs:
        envs.reset(seed=1)
        for number in range(1, 4):
            answers: list[Any] = []
            thread = threading.Thread(target=lambda into: into.append(envs.step(ACTIONS)), args=(answers,))
            thread.start()
            thread.join()
            assert rows_of(answers[0][0])[:, STEP].tolist() == [number] * NUM_ENVS


def test_a_lock_that_an_interrupt_left_taken_is_no_longer_in_the_way_of_other_threads() -> None:
    owner = Ownership()
    owner.__enter__()  # Ctrl-C came right here, before the block began.
    entered: list[bool] = []

    def enter() -> None:
        with owner:
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]
    with owner:
        pass
