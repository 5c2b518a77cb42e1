"""Workers die in every way and at every moment; what the learner is given stays consistent, and nothing is left."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, Faults, NativeVector, Network, Timeouts
from clusterenv.errors import CallTimeout, WorkerFailed, WorkerLost
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import Ticket
from tests.conftest import Backend, wait_until_gone
from tests.launchers import OwnLauncher, start_module
from tests.numbered import DRAW, NUM_ACTIONS, Checker, Fault, Numbered, make_numbered
from tests.policies import Linear

NUM_ENVS = 4  # Two on each of two workers.
WATCHFUL = Timeouts(silence_s=3.0)  # On a busy machine the healthy are silent for a second now and then.
Stopwatch = Callable[[], float]


class Driver:
    """Steps environments with random actions, and checks everything that comes back."""

    def __init__(self, envs: ClusterEnv, seed: int = 7) -> None:
        self.envs = envs
        self.checker = Checker(envs.num_envs, envs.autoreset_mode)
        self._rng = np.random.default_rng(seed)
        self._over = np.zeros(envs.num_envs, np.bool_)

    def reset(self, seed: int | None = 1) -> None:
        self.checker.reset(self.envs.reset(seed=seed)[0])
        self._over[:] = False

    def step(self, num_steps: int = 1) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for _ in range(num_steps):
            if self.envs.autoreset_mode is AutoresetMode.DISABLED and self._over.any():
                self.reset_finished()
            actions = self._rng.integers(NUM_ACTIONS, size=self.envs.num_envs)
            answer = self.envs.step(actions)
            self._over = self.checker.step(actions, answer)
            infos = answer[4]
        return infos

    def reset_finished(self) -> None:
        mask = self._over.copy()
        self.checker.reset(self.envs.reset(options={"reset_mask": mask})[0], mask)
        self._over[:] = False

    def step_agent(self) -> dict[str, Any]:
        answer = self.envs.step(choose)
        self._over = self.checker.step(answer[4]["action"], answer)
        return answer[4]

    def rollout(self, num_steps: int = 9) -> None:
        self.checker.rollout(self.envs.rollout(choose, num_steps))

    def kill(self, *workers: int, by: signal.Signals = signal.SIGKILL) -> None:
        pids = [self.envs.worker_pids[worker] for worker in workers]
        for pid in pids:
            os.kill(pid, by)
        if by is signal.SIGKILL:
            assert wait_until_gone(pids) == []

    def settle(self, wanted: tuple[int, int] | None = None) -> tuple[int, int]:
        """Step until the head holds as many descriptors and threads as wanted, or as many as it did a second ago.

        ZeroMQ closes the connections of the dead in a thread of its own, when that gets a core.
        """
        held, steady_since = (0, 0), time.monotonic()
        ends_at = steady_since + 20
        while time.monotonic() < ends_at and time.monotonic() - steady_since < (1 if wanted is None else 20):
            self.step()
            if (now := (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))) != held:
                held, steady_since = now, time.monotonic()
            if held == wanted:
                break
        return held

    def finish(self) -> None:
        self.checker.finish(self.envs.losses)


def choose(observations: Any) -> NDArray[np.int64]:
    """A policy whose actions follow from the numbers."""
    chosen: NDArray[np.int64] = np.asarray(observations).sum(axis=1) % NUM_ACTIONS
    return chosen


def lost_workers(envs: ClusterEnv) -> list[int]:
    return [loss.worker_index for loss in envs.losses]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("kill", AutoresetMode.NEXT_STEP), ("exit", AutoresetMode.SAME_STEP), ("segfault", AutoresetMode.DISABLED)],
)
def test_a_worker_that_dies_in_a_step_is_replaced_and_its_rows_are_flagged_once(
    remote: Backend, kind: Any, mode: AutoresetMode, tmp_path: Path, seconds: Stopwatch
) -> None:
    fault = Fault(kind, "step", after=8, once=str(tmp_path / "once"))
    with ClusterEnv(make_numbered(NUM_ENVS, {3: [fault]}), **remote, autoreset_mode=mode) as envs:
        driver = Driver(envs)
        driver.reset()
        before = envs.worker_pids
        driver.step(40)
        driver.finish()
        assert lost_workers(envs) == [1]
        assert driver.checker.flagged == {2: 1, 3: 1}
        assert not driver.checker.jumped
        assert (envs.losses[0].env_indices, envs.num_envs) == ((2, 3), NUM_ENVS)
        assert envs.worker_pids[0] == before[0], "the other worker went on"
        assert envs.worker_pids[1] != before[1]
    assert seconds() < 60


def test_a_stopped_worker_is_replaced_after_its_silence(remote: Backend, tmp_path: Path, seconds: Stopwatch) -> None:
    fault = Fault("stop", "step", after=5, once=str(tmp_path / "once"))
    with ClusterEnv(make_numbered(NUM_ENVS, {0: [fault]}), **remote, timeouts=WATCHFUL) as envs:
        driver = Driver(envs)
        driver.reset()
        stopped = envs.worker_pids[0]
        driver.step(20)
        driver.finish()
        assert lost_workers(envs)[0] == 0
        assert driver.checker.flagged[0] >= 1
        assert wait_until_gone([stopped]) == [], "it cannot come back"
    assert seconds() < 60


def test_a_worker_killed_between_calls_is_replaced_by_the_next(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        for number, name in enumerate(["call", "step", "set_attr", "step(agent)", "rollout", "reset"]):
            driver.step(10)
            if name in ("step(agent)", "rollout"):
                driver.step_agent()
            flagged = sum(driver.checker.flagged.values())
            driver.kill(1)
            match name:
                case "call":
                    assert envs.call("method") == tuple((index, "none") for index in range(NUM_ENVS))
                case "step":
                    assert driver.step()["worker_lost"].tolist() == [False, False, True, True]
                case "set_attr":
                    envs.set_attr("tag", ["a", "b", "c", "d"])
                    assert envs.call("method") == ((0, "a"), (1, "b"), (2, "c"), (3, "d"))
                case "step(agent)":
                    assert driver.step_agent()["_worker_lost"].tolist() == [False, False, True, True]
                case "rollout":
                    driver.rollout()
                case "reset":
                    driver.reset(seed=3)
            assert lost_workers(envs) == [1] * (number + 1), name
            driver.step(3)
            driver.rollout()
            driver.step_agent()
            assert sum(driver.checker.flagged.values()) - flagged == (0 if name in ("rollout", "reset") else 2), name
        driver.finish()


def test_a_worker_that_dies_at_work_is_replaced(remote: Backend, tmp_path: Path) -> None:
    places: dict[str, Any] = {"reset": "reset", "method": "method", "step(agent)": "step", "rollout": "step"}
    faults = [
        Fault("kill", place, once=str(tmp_path / f"{name} done"), given=str(tmp_path / name))
        for name, place in places.items()
    ]
    with ClusterEnv(make_numbered(NUM_ENVS, {2: faults}), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        for number, name in enumerate(places):
            driver.step(10)
            (tmp_path / name).touch()
            match name:
                case "reset":
                    driver.reset()
                case "method":
                    assert envs.call("method") == tuple((index, "none") for index in range(NUM_ENVS))
                case "step(agent)":
                    for _ in range(3):
                        driver.step_agent()
                case "rollout":
                    driver.rollout()
            assert lost_workers(envs) == [1] * (number + 1), name
        driver.step(9)
        driver.finish()


def test_after_a_rollout_a_lost_row_shows_what_the_rollout_ended_with(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        driver.rollout()
        driver.kill(1)
        assert driver.step()["_worker_lost"].tolist() == [False, False, True, True]


def test_resetting_some_environments_while_a_worker_is_lost_leaves_the_others_in_place(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote, autoreset_mode=AutoresetMode.DISABLED) as envs:
        driver = Driver(envs)
        driver.reset()
        for _ in range(40):
            driver.step()
            if driver._over.any() and not driver._over[2:].all() and not driver._over[:2].all() and not envs.losses:
                driver.kill(0, 1)
        driver.finish()
        assert sorted(lost_workers(envs)) == [0, 1]
        # Those that were reset there and then have begun their new episodes; the others are told with the next step.
        assert driver.checker.flagged + driver.checker.jumped == {0: 1, 1: 1, 2: 1, 3: 1}
        assert driver.checker.flagged
        assert driver.checker.jumped


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_all_workers_may_die_at_once(remote: Backend, mode: AutoresetMode) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote, autoreset_mode=mode) as envs:
        driver = Driver(envs)
        driver.reset()
        driver.step(7)
        driver.kill(0, 1)
        driver.step(10)
        driver.step_agent()
        driver.kill(0, 1)
        infos = driver.step_agent()
        assert infos["worker_lost"].all()
        assert infos["action"].shape == infos["policy_version"].shape == (NUM_ENVS,)
        driver.rollout()
        driver.finish()


def test_replacements_may_die_while_they_start(remote: Backend, tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    faults = {
        1: [Fault("kill", "step", after=4, once=first)],
        3: [Fault("kill", "constructor", once=second, given=first), Fault("exit", "reset", once=third, given=second)],
    }
    with ClusterEnv(make_numbered(NUM_ENVS, faults), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        driver.step(4)
        driver.kill(1)
        driver.step(20)
        driver.finish()
        assert sorted(lost_workers(envs)) == [0, 1]
        assert Path(third).exists()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_observations_of_any_kind_survive_a_loss(remote: Backend, mode: AutoresetMode) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS, wide=True), **remote, autoreset_mode=mode) as envs:
        driver = Driver(envs)
        driver.reset()
        driver.step(6)
        driver.kill(1)
        lost = driver.step()["_worker_lost"]  # A row whose episode had ended begins its new one.
        assert not lost[:2].any()
        assert lost[2:].any()
        driver.step(6)
        driver.kill(0)
        envs.call("method")
        driver.step(6)
        driver.finish()


class Worded(gym.Env[Any, Any]):
    """Observes nothing but a text."""

    observation_space = gym.spaces.Text(20)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "first", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "next", 1.0, False, False, {}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_lost_row_of_text_shows_what_was_seen_last(mode: AutoresetMode) -> None:
    with ClusterEnv(Worded, 2, num_workers=2, autoreset_mode=mode) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        observations, _, _, truncated, infos = envs.step(np.zeros(2, np.int64))
        assert truncated.tolist() == [False, True]
        if mode is AutoresetMode.SAME_STEP:
            assert observations == ("next", "first")
            assert infos["final_obs"].tolist() == [None, "next"]
        else:
            assert observations == ("next", "next")


@pytest.mark.parametrize("mode", AutoresetMode)
def test_native_vector_environments_survive_a_loss(mode: AutoresetMode) -> None:
    def make(num_envs: int) -> Any:
        return SyncVectorEnv([lambda: Numbered(0)] * num_envs, autoreset_mode=mode)

    with ClusterEnv(NativeVector(make), 2, num_workers=2, autoreset_mode=mode) as envs:
        driver = Driver(envs)
        envs.set_attr("index", [0, 1])
        driver.reset()
        driver.step(5)
        driver.kill(1)
        driver.step(12)
        if mode is not AutoresetMode.DISABLED:  # There, a native environment cannot be stepped beyond an end.
            driver.rollout()
        driver.finish()
        assert driver.checker.flagged == {1: 1}


def test_native_environments_that_take_one_seed_survive_a_loss(remote: Backend) -> None:
    with ClusterEnv(NativeVector("CartPole-v1"), NUM_ENVS, **remote) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        actions = np.zeros(NUM_ENVS, np.int64)
        assert envs.step(actions)[3].tolist() == [False, False, True, True]
        again = envs.step(actions)[0]
        fresh = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
        assert (again[2:] == fresh.reset(seed=envs.losses[0].seeds[0])[0]).all()


@pytest.mark.parametrize(("mode", "seed"), [("NEXT_STEP", 5), ("SAME_STEP", None), ("DISABLED", 5)])
def test_environments_made_again_are_reset_with_the_recorded_seeds(mode: str, seed: int | None) -> None:
    with ClusterEnv(make_numbered(2), num_workers=2, autoreset_mode=AutoresetMode[mode]) as envs:
        driver = Driver(envs)
        driver.reset(seed)
        driver.kill(1)
        driver.step(1 if mode == "SAME_STEP" else 2)
        driver.kill(0)
        rollout = envs.rollout(choose, 2)
        expected = [Numbered(0).reset(seed=loss.seeds[0])[0][DRAW] for loss in envs.losses]
        assert [rollout.obs[0, 1, DRAW], rollout.obs[0, 0, DRAW]] == expected


def test_runs_with_the_same_seed_and_losses_are_the_same(remote: Backend) -> None:
    runs = []
    for _ in range(2):
        with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
            driver = Driver(envs)
            driver.reset(seed=11)
            driver.step(3)
            driver.kill(1)
            driver.step(4)
            assert driver.checker._rows is not None
            runs.append((driver.checker._rows[:, DRAW].tolist(), envs.losses[0].seeds))
    assert runs[0] == runs[1]


def test_attributes_survive_a_loss_as_they_were_when_they_were_set(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        tags: list[Any] = [["a"], ["b"], ["c"], ["d"]]
        envs.set_attr("tag", tags)
        tags[2].append("changed since")
        driver.kill(0, 1)
        driver.step()
        assert envs.get_attr("tag") == (["a"], ["b"], ["c"], ["d"])


def test_an_attribute_that_could_not_be_set_is_not_set_on_a_new_worker(remote: Backend) -> None:
    class Picky(Numbered):
        @property
        def mood(self) -> str:
            return "good"

        @mood.setter
        def mood(self, value: str) -> None:
            raise RuntimeError("leave my mood alone")

    with ClusterEnv([lambda: Picky(0), lambda: Picky(1)], **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        with pytest.raises(WorkerFailed, match="leave my mood alone"):
            envs.set_attr("mood", "bad")
        driver.kill(1)
        driver.step(5)
        driver.finish()


def test_an_environment_that_always_kills_its_worker_ends_the_run_with_its_last_words(
    remote: Backend, seconds: Stopwatch
) -> None:
    class Doomed(Numbered):
        def step(self, action: Any) -> Any:
            os.write(2, b"here it comes\n")
            return super().step(action)

    makers = [lambda: Numbered(0), lambda: Doomed(1, [Fault("kill", "step")])]
    with ClusterEnv(makers, **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        for number in range(12):  # Many messages to a new worker; that must not hide that it achieves nothing.
            envs.set_attr(f"tag{number}", number)
        with pytest.raises(WorkerLost, match=r"(?s)3 replacements in a row.*SIGKILL.*here it comes") as caught:
            driver.step(20)
        assert caught.value.env_indices == (1,)
        with pytest.raises(WorkerLost, match="SIGKILL"):
            driver.step()
    assert seconds() < 90


def test_a_constructor_that_kills_its_worker_the_second_time_ends_the_run(tmp_path: Path, seconds: Stopwatch) -> None:
    mark = str(tmp_path / "mark")
    with ClusterEnv(make_numbered(2, {1: [Fault("exit", "constructor", given=mark)]}), num_workers=2) as envs:
        driver = Driver(envs)
        driver.reset()
        Path(mark).touch()
        driver.kill(1)
        with pytest.raises(WorkerLost, match=r"(?s)3 replacements in a row.*exit status 3"):
            driver.step(20)
        Path(mark).unlink()
    assert seconds() < 90


def test_a_constructor_that_raises_on_a_replacement_is_tried_again(
    remote: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark, once = str(tmp_path / "mark"), str(tmp_path / "once")
    with ClusterEnv(make_numbered(2, {1: [Fault("raise", "constructor", given=mark, once=once)]}), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        Path(mark).touch()
        driver.kill(1)
        assert envs.call("method") == ((0, "none"), (1, "none"))
        assert "a fault in the constructor" in caplog.text
        driver.step(5)
        driver.finish()
        assert lost_workers(envs) == [1]


def test_losses_are_raised_if_asked(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote, faults=Faults(on_loss="raise")) as envs:
        driver = Driver(envs)
        driver.reset()
        driver.kill(1)
        for _ in range(2):
            with pytest.raises(WorkerLost, match="SIGKILL") as caught:
                driver.step()
            assert caught.value.env_indices == (2, 3)
        assert envs.losses == ()


class Slow(Numbered):
    """Takes longer than any silence, and lets no other Python thread run meanwhile."""

    def step(self, action: Any) -> Any:
        if self.index == 1 and self.tag == "slow":
            ctypes.PyDLL(None).usleep(5_000_000)  # Unlike ctypes.CDLL, this keeps the interpreter's lock.
        return super().step(action)


def test_a_slow_environment_is_not_a_dead_worker(remote: Backend, seconds: Stopwatch) -> None:
    with ClusterEnv([lambda: Slow(0), lambda: Slow(1)], **remote, timeouts=WATCHFUL) as envs:
        driver = Driver(envs)
        driver.reset()
        envs.set_attr("tag", "slow")
        began = seconds()
        driver.step()
        assert seconds() - began > 4.9
        assert envs.losses == ()


class LeavingFleet(ProcessFleet):
    """Does not end a worker that it starts once more: one that is cut off cannot be reached."""

    def __init__(self, start: Callable[[int, BinaryIO], subprocess.Popen[bytes]], num_workers: int) -> None:
        self.left: list[subprocess.Popen[bytes]] = []
        super().__init__(start, num_workers)

    def restart(self, worker_index: int) -> None:
        self.left.append(self._processes[worker_index])
        self._processes[worker_index] = self._start(worker_index, self._logs[worker_index].file)


class LeavingLauncher(OwnLauncher):
    fleet: LeavingFleet

    def launch(self, ticket: Ticket, num_workers: int) -> LeavingFleet:
        self.fleet = LeavingFleet(lambda index, log: start_module("clusterenv.worker", ticket, index, log), num_workers)
        return self.fleet


def test_a_worker_that_was_replaced_and_comes_back_delivers_nothing(tmp_path: Path) -> None:
    launcher = LeavingLauncher()
    fault = Fault("stop", "step", after=4, once=str(tmp_path / "once"))
    makers = make_numbered(2, {1: [fault]})
    with ClusterEnv(
        makers, num_workers=2, network=Network(transport="zmq"), launcher=launcher, timeouts=WATCHFUL
    ) as envs:
        driver = Driver(envs)
        driver.reset()
        back = envs.worker_pids[1]
        driver.step(10)
        assert 1 in lost_workers(envs)
        os.kill(back, signal.SIGCONT)
        while wait_until_gone([back], 0.0):  # It is told that its place is taken, whenever the head listens.
            driver.step()
        driver.step(20)
        driver.finish()
        for process in launcher.fleet.left:
            process.wait()


class Remembering(Linear):
    """A policy that remembers the weights of each of its versions."""

    def __init__(self) -> None:
        super().__init__(3)
        self.history = [self.copy_weights()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "history": []}

    def copy_weights(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.matrix.copy(), self.critic.copy()

    def learn(self) -> None:
        self.nudge(0.05)
        self.history.append(self.copy_weights())

    def check(self, obs: Any, actions: Any, logprob: Any, value: Any, versions: Any) -> None:
        """Check that these versions made these decisions."""
        other = Linear()
        for env, version in enumerate(versions):
            other.matrix, other.critic = self.history[version - 1]
            logprobs, values = other.evaluate(obs[..., env, :], actions[..., env])
            np.testing.assert_allclose(logprob[..., env], logprobs, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(value[..., env], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "by_steps"),
    [(EveryUpdate(), False), (EveryUpdate(), True), (AdaptiveSync(threshold=0.002), False)],
)
def test_every_decision_is_labelled_with_the_version_that_made_it_after_losses(
    remote: Backend, rule: Any, by_steps: bool
) -> None:
    policy = Remembering()
    with ClusterEnv("CartPole-v1", NUM_ENVS, **remote, sync=rule) as envs:
        obs, _ = envs.reset(seed=1)
        for update in range(10):
            if update in (3, 6):
                os.kill(envs.worker_pids[update % 2], signal.SIGKILL)
            if by_steps:
                for _ in range(3):
                    following, _, _, _, infos = envs.step(policy)
                    kept = ~infos.get("_worker_lost", np.zeros(NUM_ENVS, np.bool_))
                    decision = (infos[name][kept] for name in ("action", "logprob", "value", "policy_version"))
                    policy.check(obs[kept], *decision)
                    if isinstance(rule, EveryUpdate):
                        assert set(infos["policy_version"][kept]) == {len(policy.history)}
                    obs = following
            else:
                rollout = envs.rollout(policy, 8)
                policy.check(rollout.obs, rollout.actions, rollout.logprob, rollout.value, rollout.versions)
                if isinstance(rule, EveryUpdate):
                    assert set(rollout.versions) == {len(policy.history)}
            policy.learn()
        assert len(envs.losses) == 2


def test_a_wait_that_timed_out_during_a_replacement_can_be_repeated(remote: Backend, tmp_path: Path) -> None:
    gate, mark = str(tmp_path / "gate"), str(tmp_path / "mark")
    os.mkfifo(gate)

    class Gated(Numbered):
        def method(self) -> tuple[int, str]:
            answer = super().method()  # Dies of it the first time.
            with open(gate, "rb") as opened:
                opened.read()
            return answer

    makers = [lambda: Numbered(0), lambda: Gated(1, [Fault("kill", "method", once=mark)])]
    with ClusterEnv(makers, **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        envs.call_async("method")
        with pytest.raises(CallTimeout, match=r"(?i)worker 1"):
            envs.call_wait(timeout=0.5)
        opener = threading.Thread(target=lambda: open(gate, "wb").close())  # It waits until somebody reads.
        opener.start()
        assert envs.call_wait() == ((0, "none"), (1, "none"))
        opener.join()
        driver.step(5)
        driver.finish()


def test_a_stream_loses_nothing_but_what_a_lost_worker_was_making(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        with envs.stream(choose, 16) as stream:
            for worker in (0, 1):
                driver.checker.rollout(next(stream))
                driver.kill(worker)
                while len(envs.losses) == worker:
                    driver.checker.rollout(next(stream))
            for rollout in itertools.islice(stream, 10):
                driver.checker.rollout(rollout)
        assert sorted(lost_workers(envs)) == [0, 1]
        driver.checker.reset(envs.reset(seed=2)[0], may_skip=True)
        driver.step(5)
        driver.finish()


def test_a_stream_survives_a_replacement_that_dies_while_it_starts(remote: Backend, tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    faults = [Fault("kill", "step", after=30, once=first), Fault("kill", "constructor", once=second, given=first)]
    with ClusterEnv(make_numbered(NUM_ENVS, {3: faults}), **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        with envs.stream(choose, 8) as stream:
            while not envs.losses:
                driver.checker.rollout(next(stream))
            for rollout in itertools.islice(stream, 10):
                driver.checker.rollout(rollout)
        assert Path(second).exists()
        assert lost_workers(envs) == [1]


def test_a_worker_that_has_served_a_stream_may_die_at_the_start_of_the_next_again_and_again(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
        envs.reset(seed=1)
        for number in range(4):
            with envs.stream(choose, 8) as stream:
                while next(stream).env_indices[0] != 2:
                    pass
            with envs.stream(choose, 2000) as stream:  # So many steps that it is dead before it has made them.
                os.kill(envs.worker_pids[1], signal.SIGKILL)
                while len(envs.losses) == number:
                    next(stream)
        assert lost_workers(envs) == [1] * 4


def test_a_stream_ends_when_a_worker_is_of_no_use_however_well_the_others_do(remote: Backend) -> None:
    makers = make_numbered(2, {1: [Fault("kill", "step", after=3)]})
    with ClusterEnv(makers, **remote) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerLost, match="3 replacements in a row"):
            for _ in envs.stream(choose, 8):
                pass


def test_a_loss_is_told_where_actions_are_sent_at_each_workers_own_pace(remote: Backend) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        envs.call("method")  # The loss is noticed here.
        envs.send(np.zeros(NUM_ENVS, np.int64), np.arange(NUM_ENVS))
        seen: dict[int, bool] = {}
        while len(seen) < NUM_ENVS:
            _, _, _, truncated, infos = envs.recv()
            lost = infos.get("_worker_lost", np.zeros(len(truncated), np.bool_))
            assert (truncated == lost).all()
            seen |= dict(zip(infos["env_id"].tolist(), lost.tolist(), strict=True))
        assert seen == {0: False, 1: False, 2: True, 3: True}


def test_an_interrupted_replacement_is_made_up_for_by_the_next_call(remote: Backend, tmp_path: Path) -> None:
    mark, head_pid = str(tmp_path / "mark"), os.getpid()

    class Interrupting(Numbered):
        """Presses Ctrl-C at the head when its second instance is made."""

        def __init__(self, index: int) -> None:
            super().__init__(index)
            if os.path.exists(mark):
                os.unlink(mark)
                os.kill(head_pid, signal.SIGINT)

    with ClusterEnv([lambda: Numbered(0), lambda: Interrupting(1)], **remote) as envs:
        driver = Driver(envs)
        driver.reset()
        Path(mark).touch()
        driver.kill(1)
        with pytest.raises(KeyboardInterrupt):
            envs.call("method")
        driver.step(5)
        driver.finish()
        assert lost_workers(envs) == [1]


@pytest.mark.slow
def test_thirty_losses_leave_memory_and_descriptors_as_they_were() -> None:
    with ClusterEnv(make_numbered(3), num_workers=3) as envs:
        driver = Driver(envs)
        driver.reset()
        sizes = []
        for _ in range(10):
            driver.step(12)  # Far enough apart that this is no crash loop.
            driver.kill(0, 1, 2)
            driver.step()
            gc.collect()
            sizes.append(resident_bytes())
            if len(sizes) == 3:
                before = driver.settle()
        driver.finish()
        assert len(envs.losses) == 30
        assert driver.settle(before) == before
        assert sizes[-1] - sizes[2] < 4e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Schedule = Sequence[tuple[str, frozenset[int]]]
SCHEDULES: Any = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step(agent)", "rollout", "reset", "call", "set_attr"]),
        st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 1), max_size=2)),
    ),
    min_size=4,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schedule=SCHEDULES, mode=st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]))
def test_no_schedule_of_kills_breaks_the_numbering(remote: Backend, schedule: Schedule, mode: AutoresetMode) -> None:
    with ClusterEnv(make_numbered(NUM_ENVS), **remote, autoreset_mode=mode) as envs:
        driver = Driver(envs)
        driver.reset()
        for name, killed in schedule:
            driver.step(9)  # Far enough apart that this is no crash loop.
            driver.kill(*killed)
            match name:
                case "step":
                    driver.step()
                case "step(agent)":
                    driver.step_agent()
                case "rollout":
                    driver.rollout(5)
                case "reset":
                    driver.reset(None)
                case "call":
                    envs.call("method")
                case "set_attr":
                    envs.set_attr("tag", name)
        driver.step(3)
        driver.finish()
