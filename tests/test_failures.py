"""When something breaks, the error comes in time, says what broke and where, and the rest goes on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from clusterenv import ClusterEnv, Faults, Timeouts
from clusterenv.errors import CallTimeout, ClusterEnvError, ConfigError, WorkerFailed, WorkerLost
from tests.conftest import Backend, wait_until_gone
from tests.worlds import (
    Factory,
    PickyError,
    SlackWorld,
    TroubledWorld,
    World,
    WorldError,
    assert_same,
    make_factories,
)

ACTIONS = np.zeros(3, np.int64)
BRIEF = Timeouts(join_s=60, call_s=3.0, close_s=0.5)  # The healthy answer within it on a busy machine too.
Stopwatch = Callable[[], float]


def two_fine_and(last: Factory) -> list[Factory]:
    """Factories of three environments, of which the last is on the second of two workers."""
    return [lambda: TroubledWorld("nowhere", index=0), lambda: TroubledWorld("nowhere", index=1), last]


def use(envs: ClusterEnv) -> None:
    """Do everything once at which an environment can break."""
    envs.reset(seed=1)
    envs.step(ACTIONS)
    envs.render()
    envs.call("method")


def assert_blames_environment_2(error: WorkerFailed, cause: type[Exception]) -> None:
    assert (error.worker_index, error.env_indices) == (1, (2,))
    assert "Traceback" in error.remote_traceback
    assert "_meet" in error.remote_traceback
    assert error.remote_traceback in str(error)
    assert type(error.__cause__) is cause
    assert "world 2" in str(error.__cause__)


@pytest.mark.parametrize("place", ["constructor", "reset", "step", "render", "method"])
def test_an_exception_arrives_with_its_traceback_place_and_cause(remote: Backend, place: Any) -> None:
    makers = two_fine_and(lambda: TroubledWorld(place, index=2))
    with pytest.raises(WorkerFailed, match="WorldError") as caught, ClusterEnv(makers, **remote) as envs:
        use(envs)
    assert_blames_environment_2(caught.value, WorldError)
    assert f"broke in its {place}" in str(caught.value)


@pytest.mark.parametrize("place", ["constructor", "reset", "step", "render", "method"])
def test_in_process_an_exception_arrives_as_it_is(place: Any) -> None:
    makers = two_fine_and(lambda: TroubledWorld(place, index=2))
    with pytest.raises(WorldError, match=f"2 broke in its {place}"), ClusterEnv(makers, num_workers=0) as envs:
        use(envs)


def test_an_exception_in_the_first_constructor_arrives_too(backend: Backend) -> None:
    with pytest.raises((WorkerFailed, WorldError), match="world 0 broke in its constructor"):
        ClusterEnv([lambda: TroubledWorld("constructor")] * 2, **backend)


def test_an_exception_that_cannot_be_rebuilt_still_arrives(remote: Backend) -> None:
    makers = two_fine_and(lambda: TroubledWorld("reset", "raise picky", index=2))
    with ClusterEnv(makers, **remote) as envs, pytest.raises(WorkerFailed, match="PickyError: world 2 is") as caught:
        envs.reset(seed=1)
    assert "PickyError" in caught.value.remote_traceback
    assert not isinstance(caught.value.__cause__, PickyError) or "world 2 is picky" in str(caught.value.__cause__)


def test_an_exception_of_a_class_made_on_the_spot_still_arrives(remote: Backend) -> None:
    class Passing(Exception):
        pass

    class Failing(World):
        def reset(self, **_: Any) -> Any:
            raise Passing("by the way")

    makers = two_fine_and(Failing)
    with ClusterEnv(makers, **remote) as envs, pytest.raises(WorkerFailed, match="Passing: by the way"):
        envs.reset(seed=1)


def test_an_environment_may_not_end_its_worker_by_sys_exit(remote: Backend) -> None:
    class Leaving(World):
        def reset(self, **_: Any) -> Any:
            raise SystemExit(5)

    with ClusterEnv(two_fine_and(Leaving), **remote) as envs, pytest.raises(ClusterEnvError) as caught:
        envs.reset(seed=1)
    assert isinstance(caught.value, WorkerFailed | WorkerLost)
    assert caught.value.worker_index == 1


@pytest.mark.parametrize("place", ["reset", "step", "render", "method"])
def test_after_an_exception_a_reset_goes_on(backend: Backend, place: Any) -> None:
    makers = two_fine_and(lambda: TroubledWorld(place, index=2))
    with ClusterEnv(makers, **backend) as ours:
        with pytest.raises((WorkerFailed, WorldError)):
            use(ours)
        theirs = SyncVectorEnv(two_fine_and(lambda: TroubledWorld("nowhere", index=2)))
        assert_same(ours.reset(seed=8), theirs.reset(seed=8))
        for _ in range(3):
            assert_same(ours.step(ACTIONS), theirs.step(ACTIONS))


def test_when_several_environments_break_each_call_is_over(remote: Backend) -> None:
    makers: list[Factory] = [lambda: TroubledWorld("step", index=0), World, lambda: TroubledWorld("step", index=2)]
    theirs = SyncVectorEnv(
        [lambda: TroubledWorld("nowhere", index=0), World, lambda: TroubledWorld("nowhere", index=2)]
    )
    with ClusterEnv(makers, **remote) as ours:
        ours.reset(seed=1)
        with pytest.raises(WorkerFailed):
            ours.step(ACTIONS)
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        assert_same(ours.step(ACTIONS), theirs.step(ACTIONS))


def test_an_exception_while_closing_does_not_stop_close(remote: Backend, seconds: Stopwatch) -> None:
    envs = ClusterEnv(two_fine_and(lambda: TroubledWorld("close", index=2)), **remote)
    envs.close()
    assert wait_until_gone(envs.worker_pids, 0.0) == []
    assert seconds() < 60


def test_an_environment_that_breaks_its_own_space_is_named(backend: Backend) -> None:
    with ClusterEnv(two_fine_and(lambda: SlackWorld("shape", index=2)), **backend) as envs:
        for flaw in SlackWorld.flaws:
            envs.set_attr("flaw", flaw)
            envs.reset(seed=1)
            envs.step(ACTIONS)
            with pytest.raises((ClusterEnvError, ValueError, TypeError, AttributeError)) as caught:
                envs.step(ACTIONS)
            if envs.num_workers:
                assert isinstance(caught.value, WorkerFailed), flaw
                assert (caught.value.worker_index, caught.value.env_indices) == (1, (2,)), flaw
            if "shape" in flaw or "dtype" in flaw:
                assert "(3,)" in str(caught.value), f"{flaw}: the error says which shape was expected"
                assert "float32" in str(caught.value), f"{flaw}: the error says which dtype was expected"


@pytest.mark.parametrize(
    ("place", "trouble", "status"),
    [
        ("constructor", "exit", "3"),
        ("reset", "kill", "SIGKILL|9"),
        ("step", "kill", "SIGKILL|9"),
        ("method", "exit", "3"),
    ],
)
def test_a_worker_that_dies_is_named_with_its_status_and_last_words(
    remote: Backend, place: Any, trouble: Any, status: str, seconds: Stopwatch
) -> None:
    makers = two_fine_and(lambda: TroubledWorld(place, trouble, index=2))
    with (
        pytest.raises(WorkerLost, match=rf"\b({status})\b") as caught,
        ClusterEnv(makers, **remote, faults=Faults(on_loss="raise")) as envs,
    ):
        use(envs)
    assert seconds() < 60
    assert (caught.value.worker_index, caught.value.env_indices) == (1, (2,))
    assert "worker 1" in str(caught.value).lower()
    assert "the last words of world 2" in str(caught.value)


def test_a_worker_killed_between_calls_is_noticed_by_the_next(remote: Backend, seconds: Stopwatch) -> None:
    with ClusterEnv(make_factories(3), **remote, faults=Faults(on_loss="raise")) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        assert wait_until_gone([envs.worker_pids[1]]) == []
        for _ in range(2):
            with pytest.raises(WorkerLost, match=r"(?i)worker 1") as caught:
                envs.step(ACTIONS)
            assert caught.value.worker_index == 1
        assert seconds() < 60


def test_a_worker_killed_while_the_head_waits_is_noticed(remote: Backend, tmp_path: Path, seconds: Stopwatch) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    makers = two_fine_and(lambda: TroubledWorld("step", "hang", gate=gate, index=2))
    with ClusterEnv(makers, **remote, faults=Faults(on_loss="raise")) as envs:

        def kill_when_it_hangs() -> None:
            with open(gate, "wb"):
                os.kill(envs.worker_pids[1], signal.SIGKILL)

        killer = threading.Thread(target=kill_when_it_hangs)
        envs.reset(seed=1)
        envs.step_async(ACTIONS)
        killer.start()
        with pytest.raises(WorkerLost, match=r"(?i)worker 1"):
            envs.step_wait(timeout=60)
        killer.join()
    assert seconds() < 55


def test_when_all_workers_die_close_still_works(remote: Backend) -> None:
    envs = ClusterEnv(make_factories(3), **remote, faults=Faults(on_loss="raise"))
    for pid in envs.worker_pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(envs.worker_pids) == []
    with pytest.raises(WorkerLost):
        envs.reset(seed=1)
    envs.close()
    envs.close()


@pytest.mark.parametrize(("place", "trouble"), [("reset", "hang"), ("step", "hang deaf"), ("method", "hang")])
def test_a_worker_that_hangs_is_named_at_the_deadline_and_can_be_closed(
    remote: Backend, place: Any, trouble: Any, seconds: Stopwatch
) -> None:
    makers = two_fine_and(lambda: TroubledWorld(place, trouble, index=2))
    with ClusterEnv(makers, timeouts=BRIEF, faults=Faults(on_loss="raise"), **remote) as envs:
        with pytest.raises(WorkerLost, match=r"(?is)worker 1 .*it hangs") as caught:
            use(envs)
        assert "worker 0" not in str(caught.value).lower(), "worker 0 has answered"
        began_to_close = seconds()
    assert seconds() - began_to_close < 20
    assert seconds() < 60


def test_a_stopped_worker_is_a_hanging_worker(remote: Backend) -> None:
    with ClusterEnv(make_factories(3), timeouts=BRIEF, faults=Faults(on_loss="raise"), **remote) as envs:
        envs.reset(seed=1)
        os.kill(envs.worker_pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"(?is)worker 0 .*it hangs"):
            envs.step(ACTIONS)


def test_a_constructor_that_hangs_ends_in_an_error(remote: Backend, seconds: Stopwatch) -> None:
    makers = two_fine_and(lambda: TroubledWorld("constructor", "hang", index=2))
    with pytest.raises(ClusterEnvError, match=r"(?i)worker 1"):
        ClusterEnv(makers, timeouts=Timeouts(join_s=9, call_s=4, close_s=1), **remote)
    assert seconds() < 60


def test_an_environment_that_hangs_while_closing_is_killed(remote: Backend, seconds: Stopwatch) -> None:
    envs = ClusterEnv(two_fine_and(lambda: TroubledWorld("close", "hang deaf", index=2)), timeouts=BRIEF, **remote)
    began = seconds()
    envs.close()
    assert seconds() - began < 20


@pytest.mark.parametrize(("place", "name"), [("reset", "reset"), ("step", "step"), ("method", "call")])
def test_after_a_timeout_the_call_is_still_pending_and_can_be_waited_for(
    remote: Backend, place: Any, name: str, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    theirs = SyncVectorEnv(two_fine_and(lambda: TroubledWorld("nowhere", index=2)))
    with ClusterEnv(two_fine_and(lambda: TroubledWorld(place, "wait", gate=gate, index=2)), **remote) as ours:
        if name == "reset":
            ours.reset_async(seed=3)
            expected: Any = theirs.reset(seed=3)
        else:
            arguments: Any = ACTIONS if name == "step" else "method"
            ours.reset(seed=3)
            theirs.reset(seed=3)
            getattr(ours, f"{name}_async")(arguments)
            expected = getattr(theirs, name)(arguments)
        wait = getattr(ours, f"{name}_wait")
        for _ in range(2):
            with pytest.raises(CallTimeout, match=r"(?i)worker 1"):
                wait(timeout=0.2)
        with open(gate, "wb"):
            pass
        assert_same(wait(timeout=30), expected)
        assert_same(ours.reset(seed=4), theirs.reset(seed=4))


def test_what_an_environment_prints_or_asks_for_stops_nobody(remote: Backend) -> None:
    class Talkative(World):
        def talk(self) -> int:
            return sys.stdout.write("x" * 10**6) + sys.stderr.write("y" * 10**6)

        def ask(self) -> str:
            return input("what now?")

    with ClusterEnv([Talkative] * 3, timeouts=Timeouts(call_s=20), **remote) as envs:
        assert envs.call("talk") == (2 * 10**6,) * 3
        with pytest.raises(WorkerFailed, match="EOFError"):
            envs.call("ask")


def test_what_cannot_be_sent_is_refused_and_the_next_call_works(remote: Backend) -> None:
    lock = threading.Lock()
    with ClusterEnv(make_factories(3), **remote) as envs:
        attempts: list[Callable[[], object]] = [
            lambda: envs.call("echo", lock),
            lambda: envs.set_attr("label", lock),
            lambda: envs.reset(options={"lock": lock}),
            lambda: envs.step([lock] * 3),
        ]
        for attempt in attempts:
            with pytest.raises((TypeError, ClusterEnvError), match="lock"):
                attempt()
            assert_same(envs.reset(seed=1), SyncVectorEnv(make_factories(3)).reset(seed=1))


@pytest.mark.parametrize("kind", ["lock", "generator", "socket"])
def test_a_factory_that_cannot_be_sent_is_refused_in_plain_words(remote: Backend, kind: str) -> None:
    with socket.socket() as opened:
        culprit = {"lock": threading.Lock(), "generator": (number for number in range(3)), "socket": opened}[kind]
        with pytest.raises(ConfigError, match=r"(?i)cannot be sent to a worker") as caught:
            ClusterEnv([World, lambda: World(infos="rich" if culprit else "none")], **remote)
    assert caught.value.__cause__ is not None


def test_in_process_a_factory_need_not_be_sent() -> None:
    lock = threading.Lock()
    with ClusterEnv(lambda: World(infos="rich" if lock else "none"), 2, num_workers=0) as envs:
        envs.reset(seed=1)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        (([],), {}),
        ((World(),), {}),
        (([World(), World()],), {}),
        (([World, "CartPole-v1"],), {}),
        ((SyncVectorEnv,), {}),
        ((7,), {}),
        (([World, World], 3), {}),
        ((World, 0), {}),
        ((World, -1), {}),
        ((World, 2), {"num_workers": 3}),
        ((World, 2), {"num_workers": -1}),
        ((World, 2), {"network": "pigeon"}),
        ((World, 2), {"env_kwargs": {"index": 1}}),
        ((lambda: "no environment",), {"num_workers": 0}),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError if arguments else TypeError):
        ClusterEnv(*arguments, **options)


@pytest.mark.parametrize("seed", [2**70, [0, 2**70]])
def test_a_seed_that_is_too_large_is_refused_in_a_sentence(seed: Any, backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        with pytest.raises(ValueError, match="64 bits"):
            envs.reset(seed=seed)
        envs.reset(seed=1)
