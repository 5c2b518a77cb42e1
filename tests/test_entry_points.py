"""The ways in which scripts make environments: wrappers, render modes, registrations, `make_vec`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit, TransformObservation
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import clusterenv
from clusterenv import ClusterEnv, make_vec, vector_entry_point
from clusterenv.adapters.cleanrl import CleanRLView
from clusterenv.errors import ConfigError
from tests.conftest import Backend
from tests.worlds import World, assert_same

ROOT = Path(__file__).parent.parent
WRAPPERS: list[Callable[[Any], Any]] = [
    lambda env: TimeLimit(env, 3),
    lambda env: TransformObservation(env, lambda obs: -obs, None),
]


def act(obs: Any) -> Any:
    return (obs[:, 2] > 0).astype(np.int64)


def assert_alike(ours: VectorEnv[Any, Any, Any], theirs: VectorEnv[Any, Any, Any]) -> None:
    """Step both, also over the ends of episodes."""
    assert_same(ours.reset(seed=1), theirs.reset(seed=1))
    theirs.action_space.seed(1)
    for _ in range(8):
        actions = theirs.action_space.sample()
        assert_same(ours.step(actions), theirs.step(actions))
    theirs.close()


@pytest.fixture
def walker() -> Iterator[str]:
    gym.register("tests/Walker-v0", "tests.worlds:World", max_episode_steps=4, kwargs={"index": 3})
    yield "tests/Walker-v0"
    del gym.registry["tests/Walker-v0"]


def test_wrappers_are_applied_to_each_environment_in_order(backend: Backend) -> None:
    def make() -> gym.Env[Any, Any]:
        return TransformObservation(TimeLimit(gym.make("Pendulum-v1"), 3), lambda obs: -obs, None)

    with ClusterEnv("Pendulum-v1", 3, wrappers=WRAPPERS, **backend) as envs:
        assert_alike(envs, SyncVectorEnv([make] * 3))


def test_wrappers_go_with_factories_too(backend: Backend) -> None:
    factories = [lambda index=index: World(index=index) for index in range(2)]
    with ClusterEnv(factories, wrappers=[lambda env: TimeLimit(env, 1)], **backend) as envs:
        envs.reset(seed=1)
        assert envs.step([0, 0])[3].all()
        assert envs.get_attr("label") == ("world 0", "world 1")


def test_a_render_mode_is_the_environments_own(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, render_mode="rgb_array", **backend) as envs:
        envs.reset(seed=1)
        assert envs.render_mode == "rgb_array"
        assert [image.shape for image in envs.render()] == [(400, 600, 3)] * 2


def test_what_a_script_registers_under_its_own_name_reaches_workers() -> None:
    script = """
import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from clusterenv import ClusterEnv, NativeVector

class Mine(CartPoleEnv):
    def answer(self):
        return 42

class Many(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs, max_episode_steps=None):
        super().__init__([Mine] * num_envs)

gym.register("Mine-v0", entry_point="__main__:Mine", vector_entry_point="__main__:Many", max_episode_steps=9)
for env in ("Mine-v0", lambda: gym.make("Mine-v0"), gym.spec("Mine-v0")):
    with ClusterEnv(env, 2, num_workers=2) as envs:
        assert envs.call("answer") == (42, 42)
with ClusterEnv(NativeVector("Mine-v0"), 2, num_workers=1) as envs:
    assert envs.reset(seed=1)[0].shape == (2, 4)
print(gym.spec("Mine-v0").entry_point)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "__main__:Mine\n"), done.stderr


@pytest.mark.parametrize("mode", [None, "cluster"])
def test_make_vec_is_gymnasiums_with_workers(mode: str | None, walker: str, backend: Backend) -> None:
    ours = make_vec(walker, 3, mode, dict(backend), WRAPPERS, infos="numbers")
    assert isinstance(ours, ClusterEnv)
    with ours:
        assert_alike(ours, gym.make_vec(walker, 3, "sync", wrappers=WRAPPERS, infos="numbers"))
        assert ours.get_attr("index") == (3, 3, 3)


@pytest.mark.filterwarnings("error")
def test_make_vec_runs_a_native_vector_on_workers() -> None:
    with make_vec("CartPole-v1", 4, "vector_entry_point", {"num_workers": 2}, max_episode_steps=5) as envs:  # type: ignore[attr-defined]  # a ClusterEnv
        assert isinstance(envs, ClusterEnv)
        envs.reset(seed=1)
        assert [envs.step([0] * 4)[3].all() for _ in range(5)] == [False] * 4 + [True]


def test_make_vec_leaves_gymnasiums_own_modes_to_it(walker: str) -> None:
    envs = make_vec(walker, 2, "sync")
    assert isinstance(envs, SyncVectorEnv)
    envs.close()


def test_a_registration_may_lead_to_workers(walker: str) -> None:
    spec = gym.spec(walker)
    spec.vector_entry_point = vector_entry_point(walker, num_workers=2)
    envs = gym.make_vec(walker, 3, infos="numbers")
    assert isinstance(envs, ClusterEnv)
    with envs:
        assert len(envs.workers) == 2
        assert_alike(envs, gym.make_vec(walker, 3, "sync", infos="numbers"))


def test_a_vector_entry_point_takes_a_class_as_well() -> None:
    gym.register("tests/Other-v0", vector_entry_point=vector_entry_point(World, num_workers=1), max_episode_steps=2)
    try:
        with gym.make_vec("tests/Other-v0", 2, index=5) as envs:  # type: ignore[attr-defined]  # a ClusterEnv
            envs.reset(seed=1)
            assert envs.get_attr("index") == (5, 5)
            envs.step([0, 0])
            assert envs.step([0, 0])[3].any()
    finally:
        del gym.registry["tests/Other-v0"]


def test_the_public_names_are_the_functions() -> None:
    assert clusterenv.make_vec is make_vec
    assert callable(clusterenv.vector_entry_point)


def test_behind_a_vector_wrapper_the_rollout_is_that_of_what_is_wrapped(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **remote) as cluster:
        envs = RecordEpisodeStatistics(cluster)
        envs.reset(seed=1)
        assert envs.unwrapped.rollout(act, 4).rewards.shape == (4, 2)  # type: ignore[attr-defined]  # a ClusterEnv


def test_the_view_for_cleanrl_makes_rollouts_and_streams(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, autoreset_mode="SameStep", **backend) as cluster:
        envs = CleanRLView(cluster)
        envs.reset(seed=1)
        assert envs.rollout(act, 4, values={}).rewards.shape == (4, 2)
        with envs.stream(act, 3, min_envs=2) as rollouts:
            assert next(rollouts).rewards.shape == (3, 2)
        assert envs.stats["rollouts"] >= 2


def test_what_is_between_the_view_and_the_workers_is_not_passed_over_in_silence() -> None:
    with ClusterEnv("CartPole-v1", 2, autoreset_mode="SameStep", num_workers=0) as cluster:
        envs = CleanRLView(RecordEpisodeStatistics(cluster))
        with pytest.raises(ConfigError, match=r"RecordEpisodeStatistics.* envs\.unwrapped\.rollout\(\)"):
            envs.rollout(act, 4)
