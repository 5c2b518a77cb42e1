"""Environments are made on workers and nowhere else; one that cannot be made is a clear error, and the head lives."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clusterenv import ClusterEnv, Faults, LocalLauncher, NativeVector
from clusterenv.errors import ConfigError
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.setup.factories import resolve
from clusterenv.setup.start import make_assignment
from clusterenv.setup.trial import check_factory
from clusterenv.wire.ticket import Ticket
from tests.conftest import Backend
from tests.counted import Counted
from tests.script import run_script
from tests.worlds import WordSpace, World, assert_same

DOOMED = """
import ctypes, json, os, resource, sys, threading, time
from clusterenv import ClusterEnv, Network, Timeouts
from clusterenv.errors import ClusterEnvError
from tests.worlds import World

ending, transport, join_s = sys.argv[1:]

class Doomed(World):
    def __init__(self):
        super().__init__()
        match ending:
            case "segfault":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "hang":
                threading.Event().wait()
            case "raise":
                raise ValueError("no luck today")

began = time.monotonic()
try:
    timeouts = Timeouts(join_s=float(join_s), close_s=1)
    ClusterEnv(Doomed, 2, num_workers=2, network=Network(transport=transport), timeouts=timeouts)
except ClusterEnvError as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - began]))
"""


@pytest.mark.parametrize(
    ("ending", "join_s", "words"),
    [("segfault", 60, "SIGSEGV"), ("exit", 60, "exit status 3"), ("hang", 8, "8 s"), ("raise", 60, "no luck today")],
    ids=["segfault", "exit", "hang", "raise"],
)
def test_a_constructor_that_fails_is_an_error_in_time_and_the_head_lives(
    remote: Backend, ending: str, join_s: int, words: str
) -> None:
    ((kind, text, took_s),) = run_script(DOOMED, ending, remote["network"].transport, str(join_s), deadline_s=60)
    assert kind in ("WorkerFailed", "WorkerLost", "LaunchError", "CallTimeout")
    assert words in text
    assert any(name in text.lower() for name in ("worker 0", "worker 1", "environment 0", "environment 1"))
    assert took_s < 40


def recorded(make: Callable[[], gym.Env[Any, Any]], path: Path) -> Callable[[], gym.Env[Any, Any]]:
    """Return a factory that writes down in which process it was called."""

    def factory() -> gym.Env[Any, Any]:
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
        return make()

    return factory


def assert_not_made_here(path: Path) -> None:
    makers = path.read_text().split()
    assert makers
    assert str(os.getpid()) not in makers, "the head has made an environment"


class Painted(World):
    """Has metadata and a render mode of its own making."""

    def __init__(self, **options: Any) -> None:
        super().__init__(render_mode="rgb_array", **options)
        self.metadata = {"render_modes": ["rgb_array", "painted"], "render_fps": 7, "colours": ["red"]}


def test_spaces_metadata_and_render_mode_come_from_the_workers(remote: Backend, tmp_path: Path) -> None:
    path = tmp_path / "made"
    space = spaces.Dict(image=spaces.Box(0, 255, (4, 6, 3), np.uint8), place=spaces.Box(-2.0, 3.0, (2,), np.float64))
    makers = [recorded(lambda index=i: Painted(observation_space=space, index=index), path) for i in range(3)]  # type: ignore[misc]  # mypy cannot infer a lambda's default
    theirs = SyncVectorEnv([lambda i=i: Painted(observation_space=space, index=i) for i in range(3)])  # type: ignore[misc]  # as above
    with ClusterEnv(makers, **remote) as envs:
        assert_not_made_here(path)
        assert len(path.read_text().split()) == 3, "each was made once"
        assert envs.single_observation_space == theirs.single_observation_space
        assert envs.observation_space == theirs.observation_space
        assert envs.single_action_space == theirs.single_action_space
        assert envs.action_space == theirs.action_space
        assert envs.metadata == theirs.metadata
        assert envs.render_mode == theirs.render_mode == "rgb_array"
        assert_same(envs.reset(seed=1), theirs.reset(seed=1))
        assert_same(envs.render(), theirs.render())
    theirs.close()


@pytest.mark.parametrize("make", ["id", "native"])
def test_environments_of_other_kinds_are_not_made_here_either(remote: Backend, make: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    counted = recorded(Counted, path)
    if make == "id":
        gym.register("RecordedCounted-v0", entry_point=lambda **_: counted())
        env: Any = "RecordedCounted-v0"
    else:
        env = NativeVector(lambda num_envs: SyncVectorEnv([counted] * num_envs))
    try:
        with ClusterEnv(env, 4, **remote) as envs:
            assert_not_made_here(path)
            assert envs.reset(seed=1)[0].shape == (4, 4)
    finally:
        gym.registry.pop("RecordedCounted-v0", None)


class Offset(World):
    """An environment whose bounds depend on its index."""

    def __init__(self, index: int) -> None:
        super().__init__(spaces.Box(-1.0 - index, 1.0 + index, (3,), np.float32), index=index)


def test_spaces_that_differ_come_from_the_workers(remote: Backend, tmp_path: Path) -> None:
    path = tmp_path / "made"
    makers = [recorded(lambda i=i: Offset(i), path) for i in range(4)]  # type: ignore[misc]  # mypy cannot infer a lambda's default
    theirs = SyncVectorEnv([lambda i=i: Offset(i) for i in range(4)], observation_mode="different")  # type: ignore[misc]  # as above
    with ClusterEnv(makers, **remote, observation_mode="different") as envs:
        assert_not_made_here(path)
        assert envs.observation_space == theirs.observation_space
        assert envs.single_observation_space == theirs.single_observation_space
        assert_same(envs.reset(seed=1), theirs.reset(seed=1))
        assert_same(envs.step(np.zeros(4, np.int64)), theirs.step(np.zeros(4, np.int64)))
    theirs.close()


class NamedBox(spaces.Box):
    """A Box with something of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(-1.0, 1.0, (3,), np.float32)
        self.name = name


@pytest.mark.parametrize(
    "space",
    [WordSpace(), NamedBox("pose"), spaces.Dict(a=NamedBox("pose"), b=WordSpace())],
    ids=["a class", "a subclass", "both"],
)
def test_spaces_of_ones_own_work_or_are_refused_in_a_sentence(
    remote: Backend, space: spaces.Space[Any], tmp_path: Path
) -> None:
    path = tmp_path / "made"
    makers = [recorded(lambda i=i: World(space, index=i), path) for i in range(3)]  # type: ignore[misc]  # mypy cannot infer a lambda's default
    theirs = SyncVectorEnv([lambda i=i: World(space, index=i) for i in range(3)])  # type: ignore[misc]  # as above
    refusal = ""
    try:
        with ClusterEnv(makers, **remote) as envs:
            assert type(envs.single_observation_space) is type(space)
            assert envs.single_observation_space == space
            assert_same(envs.reset(seed=1), theirs.reset(seed=1))
            assert_same(envs.step(np.zeros(3, np.int64)), theirs.step(np.zeros(3, np.int64)))
    except ConfigError as error:
        refusal = str(error)
    theirs.close()
    assert_not_made_here(path)
    assert not refusal or "WordSpace" in refusal or "NamedBox" in refusal
    assert "\n" not in refusal


def test_in_process_environment_0_is_made_anew_when_it_has_to_be() -> None:
    made: list[Worn] = []

    class Worn(Counted):
        """Cannot be reset again once its first episode is over; notes that it was closed."""

        is_closed = False

        def reset(self, **options: Any) -> Any:
            assert not self.is_closed, "a closed environment was reset"
            if self._episode == 0:
                raise ValueError("worn out")
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            assert not self.is_closed, "a closed environment was stepped"
            return super().step(action)

        def close(self) -> None:
            self.is_closed = True

    def make() -> Worn:
        made.append(Worn(length=10))
        return made[-1]

    with ClusterEnv([make, lambda: Counted(1)], num_workers=0, faults=Faults(on_env_error="reset")) as envs:
        envs.reset(seed=1)
        for _ in range(40):
            envs.step([0, 0])
        assert len({id(env) for env in made}) == len(made) >= 3
        assert [env.is_closed for env in made] == [True] * (len(made) - 1) + [False]


@dataclass(frozen=True, kw_only=True)
class Queue(LocalLauncher):
    """Says that workers have to queue; notes that they were."""

    marks: str

    @property
    def queues(self) -> bool:
        return True

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        Path(self.marks).touch()
        return super().launch(ticket, num_workers)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: os._exit(3), "status 3"),
        (lambda: "no environment", "must return a gymnasium.Env"),
    ],
)
def test_a_factory_that_fails_is_told_before_anything_is_queued(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){words}.*trial_s=0"):
        ClusterEnv(make, 2, num_workers=1, launcher=Queue(marks=str(tmp_path / "queued")))
    assert not (tmp_path / "queued").exists()


def test_what_may_be_missing_here_only_is_left_to_the_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = os.getpid()

    def make() -> Any:
        if os.path.exists(f"/proc/{head}/fd") and os.getppid() == head:  # A child of the head itself: the trial.
            raise ModuleNotFoundError("No module named 'simulator'")
        return Counted(0)

    with ClusterEnv(make, 2, num_workers=1, launcher=Queue(marks=str(tmp_path / "queued"))) as envs:
        envs.reset(seed=1)
    assert (tmp_path / "queued").exists()
    assert "No module named 'simulator'" in caplog.text


class Pixels(gym.Env[Any, Any]):
    """Observes frames, whose bounds alone are larger than a pipe holds."""

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)


def test_a_factory_of_frames_is_tried_in_a_moment(caplog: pytest.LogCaptureFixture) -> None:
    assignment = make_assignment(resolve(Pixels, 1, None), (0, 1), AutoresetMode.NEXT_STEP, "raise", [])
    with caplog.at_level(logging.WARNING):
        check_factory(assignment, 60.0)
    assert caplog.records == [], "it was made in time"


class Bits(gym.Env[Any, Any]):
    observation_space = gym.spaces.MultiBinary(3)
    action_space = gym.spaces.MultiBinary(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.int8), {}

    def step(self, action: Any) -> Any:
        return np.ones(3, np.int8), 0.0, False, False, {}


def test_spaces_come_from_workers_as_they_are(remote: Backend) -> None:
    with ClusterEnv(Bits, 2, **remote) as envs:
        assert envs.single_observation_space == gym.spaces.MultiBinary(3)
        assert envs.single_action_space == gym.spaces.MultiBinary(2)
