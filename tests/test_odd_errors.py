"""Whatever is raised on a worker arrives at the learner, says whose fault it was, and costs no worker its life."""

from __future__ import annotations

import builtins
import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from clusterenv import ClusterEnv, Faults, Timeouts
from clusterenv.errors import CallTimeout, ClusterEnvError, ConfigError, WorkerFailed, WorkerLost
from tests.conftest import Backend
from tests.worlds import World

ACTIONS = np.zeros(2, np.int64)
RESETS = Faults(on_env_error="reset")
MANY = 10_000_000


class Homeless(Exception):
    """Of no module."""


Homeless.__module__ = None  # type: ignore[assignment]  # that is what is odd about it


class Numbered(Exception):
    """Of a module that is a number."""


Numbered.__module__ = 5  # type: ignore[assignment]  # that is what is odd about it


class Mute(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Fatal(Mute):
    """Ends whoever wants to show it."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Wordless(Exception):
    """Has a text that is none."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # that is what is odd about it


class Nameless(type):
    """Of classes that do not tell their names."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__name__", "__mro__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Unnamed(Exception, metaclass=Nameless):
    """Of such a class."""


class Annotated(Exception):
    """Has notes that cannot be formatted."""

    @property
    def __notes__(self) -> NoReturn:  # type: ignore[override]  # that is what is odd about it
        raise RuntimeError("no notes")


class Final(BaseException):
    """Not an Exception."""


def make_unnamed() -> Exception:
    return Unnamed()


ODD: dict[str, Callable[[], BaseException]] = {
    "a lone surrogate": lambda: ValueError("\udcff \ud800"),
    "control characters": lambda: ValueError("\x1b[2J\0\r"),
    "megabytes": lambda: ValueError("x" * MANY),
    "a deep chain": lambda: chain(2000),
    "no module": Homeless,
    "a module that is a number": Numbered,
    "no words": Mute,
    "fatal words": Fatal,
    "a text that is a number": Wordless,
    "no name": make_unnamed,
    "no notes": Annotated,
    "an exception group": lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "SystemExit": lambda: SystemExit(5),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "a BaseException": Final,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
}


def chain(length: int) -> Exception:
    error: Exception = ValueError("the first")
    for _ in range(length):
        follower = KeyError("another")
        follower.__cause__ = error
        error = follower
    return error


class Raising(World):
    """Raises what it is told to, wherever it is told to."""

    def __init__(self, place: str, make: Callable[[], BaseException], index: int) -> None:
        super().__init__(longest_episode=99, index=index)
        self._place, self._make = place, make
        self.meet("constructor")

    def arm(self, name: str) -> None:
        """Raise this one of the odd exceptions from now on."""
        self._make = ODD[name]

    def reset(self, **kwargs: Any) -> Any:
        self.meet("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.meet("step")
        return super().step(action)

    def meet(self, place: str) -> None:
        if self.index == 1 and self._place == place:
            raise self._make()


def raising(place: str, make: Callable[[], BaseException]) -> list[Callable[[], World]]:
    return [lambda: Raising(place, make, 0), lambda: Raising(place, make, 1)]


def test_odd_exceptions_arrive_and_the_worker_lives_on(remote: Backend) -> None:
    with ClusterEnv(raising("step", ValueError), **remote, timeouts=Timeouts(call_s=60)) as envs:
        pids = envs.worker_pids
        for name in ODD:
            envs.call("arm", name)
            envs.reset(seed=1)
            with pytest.raises(WorkerFailed, match=r"^Environment 1 raised ") as caught:
                envs.step(ACTIONS)
            assert (caught.value.worker_index, caught.value.env_indices) == (1, (1,)), name
            assert "Traceback" in caught.value.remote_traceback, name
            assert "in meet" in caught.value.remote_traceback, name
            text = str(caught.value)
            assert len(text) < 200_000, name
            text.encode()
            assert all(character.isprintable() or character in "\n\t" for character in text), name
            envs.reset(seed=1)
            assert envs.worker_pids == pids, name
            assert envs.losses == (), name


def test_odd_exceptions_of_constructors_arrive(remote: Backend) -> None:
    for make in (SystemExit, Fatal):
        with pytest.raises(WorkerFailed, match=r"^The factory of environment 1 raised "):
            ClusterEnv(raising("constructor", make), **remote)


def test_odd_exceptions_can_be_forgiven(remote: Backend) -> None:
    with ClusterEnv(raising("step", ValueError), **remote, faults=RESETS) as envs:
        for name in ("a lone surrogate", "megabytes", "no words", "no module", "fatal words"):
            envs.call("arm", name)
            envs.reset(seed=1)
            assert envs.step(ACTIONS)[3].tolist() == [False, True], name
        assert envs.losses == ()


class Derived(KeyError):
    """Of a type that only the user knows."""


BUILTIN = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, BaseExceptionGroup | StopIteration | StopAsyncIteration | UnicodeError)
]


@pytest.mark.parametrize("backend", [{"num_workers": 1}], ids=["shm"])
def test_an_exception_of_a_builtin_type_is_caught_as_such(backend: Backend) -> None:
    class Holder(World):
        kind: type[Exception] = ValueError

        def fail(self) -> None:
            raise self.kind("what happened")

    with ClusterEnv([Holder], **backend) as envs:
        for kind in [*BUILTIN, Derived]:
            envs.set_attr("kind", [kind])
            with pytest.raises(kind if kind is not Derived else KeyError) as caught:
                envs.call("fail")
            error = caught.value
            assert isinstance(error, WorkerFailed)
            assert isinstance(error, ClusterEnvError)
            assert type(error).__name__ == "WorkerFailed"
            assert type(error).__module__ == "clusterenv.errors"
            assert str(error).startswith(f"Environment 0 raised {kind.__qualname__}: ")
            assert type(error.__cause__) is kind
            for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
                assert type(twin) is type(error)
                assert str(twin) == str(error)
                assert twin.remote_traceback == error.remote_traceback
                assert (twin.worker_index, twin.env_indices) == (0, (0,))


def test_what_would_be_taken_for_something_else_is_a_plain_failure() -> None:
    with ClusterEnv(raising("step", ValueError), num_workers=1) as envs:
        for name in ("StopIteration", "StopAsyncIteration", "SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            envs.call("arm", name)
            envs.reset(seed=1)
            with pytest.raises(WorkerFailed) as caught:
                envs.step(ACTIONS)
            assert type(caught.value) is WorkerFailed, name


def test_a_timeout_of_an_environment_is_not_taken_for_ours(remote: Backend) -> None:
    with ClusterEnv(raising("step", lambda: TimeoutError("the simulator is slow")), **remote) as envs:
        envs.reset(seed=1)
        envs.step_async(ACTIONS)
        with pytest.raises(TimeoutError, match="the simulator is slow") as caught:
            envs.step_wait()
        assert not isinstance(caught.value, CallTimeout)
        envs.reset(seed=1)  # The call is over.
        envs.send(ACTIONS, [0, 1])
        with pytest.raises(TimeoutError, match="the simulator is slow"):
            [envs.recv() for _ in range(2)]
        with contextlib.suppress(ConfigError):  # Unless it came first, the other one's result is still to be received.
            envs.recv()
        envs.reset(seed=1)


def test_losses_can_be_pickled() -> None:
    lost = pickle.loads(pickle.dumps(WorkerLost("gone", worker_index=1, env_indices=(2, 3))))
    assert (str(lost), lost.worker_index, lost.env_indices) == ("gone", 1, (2, 3))


def test_it_is_said_whether_the_environment_or_the_policy_raised(remote: Backend) -> None:
    def fine(observations: Any) -> Any:
        return np.zeros(len(observations), np.int64)

    def wrong(observations: Any) -> Any:
        raise LookupError("the policy stumbled")

    with ClusterEnv(raising("step", lambda: OSError("the legs broke")), **remote) as envs:
        ways: list[Callable[[Any], object]] = [
            envs.step,
            lambda policy: envs.rollout(policy, 3),
            lambda policy: [None for _ in envs.stream(policy, 3)],
        ]
        for act in ways:
            envs.reset(seed=1)
            with pytest.raises(OSError, match=r"^Environment 1 raised OSError: the legs broke"):
                act(fine)
            envs.reset(seed=1)
            with pytest.raises(LookupError, match=r"^The policy raised LookupError: the policy stumbled") as caught:
                act(wrong)
            assert isinstance(caught.value, WorkerFailed)
        with pytest.raises(ZeroDivisionError, match=r"^The function given to apply\(\), on environment 1, raised"):
            envs.apply(lambda env: 1 / (1 - env.unwrapped.index), [0, 1])


def test_the_users_frames_come_first(remote: Backend) -> None:
    with ClusterEnv(raising("step", ValueError), **remote) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerFailed) as caught:
            envs.step(ACTIONS)
    heading, first, *_ = caught.value.remote_traceback.splitlines()
    assert heading == "Traceback (most recent call last):"
    assert __file__ in first
    assert caught.value.remote_traceback in str(caught.value)
