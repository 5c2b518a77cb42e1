"""A worker that has finished no step or reset for `call_s` is hung, in every mode; one that makes progress is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterenv import ClusterEnv, Faults, Timeouts
from clusterenv.errors import WorkerLost
from tests.conftest import Backend, wait_until_gone
from tests.counted import STEP, Counted, Mishap, choose, make_counted, rows_of

NUM_ENVS = 4  # Two on each of two workers.
ACTIONS = np.zeros(NUM_ENVS, np.int64)
LOST = [False, False, True, True]
CALL_S = 3.0
SOON_S = 40.0  # To notice a hang, and to start another worker on a busy machine.
BRIEF = Timeouts(call_s=CALL_S, close_s=1.0)
Stopwatch = Callable[[], float]


def hanging(tmp_path: Path, what: Any = "hang", place: Any = "step", at: int = 5) -> list[Callable[[], Counted]]:
    """Environments of which the last hangs once."""
    return make_counted(NUM_ENVS, {3: [Mishap(what, str(tmp_path / "mark"), place, at)]})


def assert_replaced(envs: ClusterEnv, hung: int, function: str = "stuck_in_the_mud") -> None:
    """Demand that the second worker was given up and another is there, and that the loss says where it hung."""
    (loss,) = envs.losses
    assert (loss.worker_index, loss.env_indices) == (1, (2, 3))
    assert function in loss.reason, "the Python stack of the hung environment"
    assert wait_until_gone([hung]) == []
    assert envs.call("index") == tuple(range(NUM_ENVS))


@pytest.mark.parametrize(
    ("what", "function"), [("hang", "stuck_in_the_mud"), ("hang with the lock", "stuck_under_ice")]
)
def test_a_hung_environment_in_a_stream_is_noticed_though_others_deliver(
    remote: Backend, what: str, function: str, tmp_path: Path, seconds: Stopwatch
) -> None:
    with ClusterEnv(hanging(tmp_path, what, at=40), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        hung = envs.worker_pids[1]
        with envs.stream(choose, 8) as stream:
            while not (tmp_path / "mark").exists():
                next(stream)
            began, others = seconds(), 0
            while not envs.losses:
                others += int(next(stream).env_indices[0]) == 0
                assert seconds() - began < SOON_S, f"{others} rollouts of the other worker, and nothing was noticed"
            assert seconds() - began > CALL_S / 2
            while int(next(stream).env_indices[0]) != 2:
                pass
        assert others > 0
        assert_replaced(envs, hung, function)


def test_a_hung_environment_ends_a_stream_if_losses_are_to_be_raised(
    remote: Backend, tmp_path: Path, seconds: Stopwatch
) -> None:
    with ClusterEnv(hanging(tmp_path), **remote, timeouts=BRIEF, faults=Faults(on_loss="raise")) as envs:
        envs.reset(seed=1)
        stream = envs.stream(choose, 8)

        def go_on() -> None:
            for _ in stream:
                assert seconds() < SOON_S, "nothing was noticed"

        with pytest.raises(WorkerLost, match=r"(?s)[Ww]orker 1 .*stuck_in_the_mud") as caught:
            go_on()
        assert (caught.value.worker_index, caught.value.env_indices) == (1, (2, 3))


def test_a_hung_environment_in_a_step_costs_its_worker_one_step(
    remote: Backend, tmp_path: Path, seconds: Stopwatch
) -> None:
    with ClusterEnv(hanging(tmp_path), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        for _ in range(4):
            seen = rows_of(envs.step(ACTIONS)[0])
        hung, began = envs.worker_pids[1], seconds()
        observations, rewards, _, truncated, infos = envs.step(ACTIONS)
        assert CALL_S / 2 < seconds() - began < SOON_S
        assert truncated.tolist() == infos["worker_lost"].tolist() == LOST
        assert rewards.tolist() == [5, 5, 0, 0]
        assert rows_of(observations)[2:].tolist() == seen[2:].tolist()
        assert rows_of(envs.step(ACTIONS)[0])[:, STEP].tolist() == [6, 6, 0, 0]
        assert_replaced(envs, hung)


def test_a_hung_environment_in_a_step_by_an_agent_costs_its_worker_one_step(remote: Backend, tmp_path: Path) -> None:
    with ClusterEnv(hanging(tmp_path), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        hung = envs.worker_pids[1]
        for _ in range(4):
            envs.step(choose)
        assert envs.step(choose)[4]["worker_lost"].tolist() == LOST
        assert_replaced(envs, hung)


def test_a_hung_environment_in_a_reset_costs_its_worker(remote: Backend, tmp_path: Path, seconds: Stopwatch) -> None:
    with ClusterEnv(hanging(tmp_path, place="reset", at=2), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        hung, began = envs.worker_pids[1], seconds()
        observations, _ = envs.reset(seed=2)
        assert seconds() - began < SOON_S
        assert rows_of(observations)[:, STEP].tolist() == [0] * NUM_ENVS
        assert_replaced(envs, hung)


def test_a_hung_environment_in_a_rollout_has_its_shard_collected_again(
    remote: Backend, tmp_path: Path, seconds: Stopwatch
) -> None:
    with ClusterEnv(hanging(tmp_path), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        hung, began = envs.worker_pids[1], seconds()
        rollout = envs.rollout(choose, 8)
        assert seconds() - began < SOON_S
        assert rollout.obs[:, :, STEP].tolist() == [[step] * NUM_ENVS for step in range(8)]
        assert_replaced(envs, hung)


def test_a_hung_environment_is_noticed_where_actions_are_sent(
    remote: Backend, tmp_path: Path, seconds: Stopwatch
) -> None:
    with ClusterEnv(hanging(tmp_path, at=1), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        hung, began = envs.worker_pids[1], seconds()
        envs.send(ACTIONS, np.arange(NUM_ENVS))
        others = 0
        while True:
            *_, truncated, infos = envs.recv()
            if 2 in infos["env_id"]:
                break
            others += 1
            assert infos["env_id"].tolist() == [0, 1]
            assert seconds() - began < SOON_S, "nothing was noticed"
            envs.send([0, 0], [0, 1])
        assert others > 0
        lost = infos["env_id"] >= 2
        assert truncated.tolist() == infos["_worker_lost"].tolist() == lost.tolist()
        if 0 not in infos["env_id"]:
            envs.recv()
        envs.reset(seed=2)
        assert_replaced(envs, hung)


@pytest.mark.parametrize(
    "name", ["rollout", *(pytest.param(name, marks=pytest.mark.slow) for name in ("step", "recv"))]
)
def test_a_hung_worker_is_raised_if_losses_are_to_be_raised(
    remote: Backend, name: str, tmp_path: Path, seconds: Stopwatch
) -> None:
    with ClusterEnv(hanging(tmp_path, at=1), **remote, timeouts=BRIEF, faults=Faults(on_loss="raise")) as envs:
        envs.reset(seed=1)

        def use() -> None:
            match name:
                case "step":
                    envs.step(ACTIONS)
                case "rollout":
                    envs.rollout(choose, 8)
                case "recv":
                    envs.send([0, 0], [2, 3])
                    envs.recv()

        with pytest.raises(WorkerLost, match=r"(?s)[Ww]orker 1 .*stuck_in_the_mud") as caught:
            use()
        assert (caught.value.worker_index, caught.value.env_indices) == (1, (2, 3))
        assert seconds() < SOON_S + CALL_S


def test_a_wait_with_a_time_out_of_its_own_can_be_repeated_until_the_worker_is_given_up(
    remote: Backend, tmp_path: Path
) -> None:
    with ClusterEnv(hanging(tmp_path, at=1), **remote, timeouts=BRIEF) as envs:
        envs.reset(seed=1)
        hung = envs.worker_pids[1]
        envs.step_async(ACTIONS)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                envs.step_wait(timeout=0.1)
        assert envs.losses == ()
        assert envs.step_wait()[4]["worker_lost"].tolist() == LOST
        assert_replaced(envs, hung)


class Slow(Counted):
    """Takes a while over each step, as a simulator does."""

    def step(self, action: Any) -> Any:
        threading.Event().wait(self.index * 0.08)  # Not a wait of the test's: what it is about.
        return super().step(action)


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.slow), True], ids=["rollout", "stream"])
def test_a_rollout_that_makes_progress_for_three_times_as_long_is_left_alone(
    remote: Backend, streams: bool, seconds: Stopwatch
) -> None:
    makers = [lambda: Slow(0), lambda: Slow(1)]
    timeouts = Timeouts(call_s=2.5, close_s=0.5)
    with ClusterEnv(makers, **remote, timeouts=timeouts) as envs:
        envs.reset(seed=1)
        envs.rollout(choose, 1)
        began = seconds()
        if streams:
            with envs.stream(choose, 100) as stream:
                rollout = next(rollout for rollout in stream if 1 in rollout.env_indices)
        else:
            rollout = envs.rollout(choose, 100)
        assert seconds() - began > 7.5
        assert rollout.obs[:, -1, STEP].tolist() == list(range(1, 101))
        assert envs.losses == ()
