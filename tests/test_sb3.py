"""Stable-Baselines3 trains on a ClusterEnv as it does on its own vector environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from clusterenv import ClusterEnv, NativeVector
from clusterenv.errors import ConfigError
from tests.conftest import Backend
from tests.worlds import Factory, World, make_factories

pytest.importorskip("stable_baselines3")
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecMonitor, VecNormalize

from clusterenv.adapters.sb3 import ClusterVecEnv

DICT = spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2,), np.float32), "b": spaces.Discrete(5)})


def make(env: Any, num_envs: int | None = None, **options: Any) -> ClusterVecEnv:
    return ClusterVecEnv(ClusterEnv(env, num_envs, autoreset_mode="SameStep", **options))


@pytest.fixture
def ours(backend: Backend) -> Iterator[ClusterVecEnv]:
    envs = make(make_factories(3, render_mode="rgb_array"), **backend)
    yield envs
    envs.close()


@pytest.fixture
def theirs() -> Iterator[DummyVecEnv]:
    envs = DummyVecEnv([*make_factories(3, render_mode="rgb_array")])
    yield envs
    envs.close()


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    """Demand equal values; a number may be numpy's own where theirs is Python's, as vector infos have it."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, tuple | list):
        assert len(ours) == len(theirs), where
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}[{place}]")
    elif isinstance(theirs, np.ndarray) and theirs.ndim:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert ours.tobytes() == theirs.tobytes(), where
    else:
        assert ours == theirs, f"{where}: {ours!r} is not {theirs!r}"


def compare(ours: VecEnv, theirs: VecEnv, num_steps: int) -> int:
    """Step both with the same seeds and actions, demand equal answers, and count the episodes."""
    ours.action_space.seed(3)
    assert ours.seed(7) == theirs.seed(7)
    assert_equal(ours.reset(), theirs.reset(), "reset")
    assert_equal(ours.reset_infos, theirs.reset_infos, "reset infos")
    num_episodes = 0
    for step in range(num_steps):
        actions = np.array([ours.action_space.sample() for _ in range(ours.num_envs)])
        answer = theirs.step(actions)
        assert_equal(ours.step(actions), answer, f"step {step}")
        assert_equal(ours.reset_infos, theirs.reset_infos, f"reset infos after step {step}")
        num_episodes += int(answer[2].sum())
    return num_episodes


@pytest.mark.parametrize("space", [spaces.Box(-1.0, 1.0, (3,), np.float32), DICT], ids=["box", "dict"])
def test_every_row_equals_sb3s_own_vector_environment(backend: Backend, space: spaces.Space[Any]) -> None:
    factories = make_factories(3, observation_space=space)
    ours, theirs = make(factories, **backend), DummyVecEnv([*factories])
    assert compare(ours, theirs, 60) > 20
    ours.close()


def test_environments_of_gymnasium_and_monitors_give_equal_rows(backend: Backend) -> None:
    def factory() -> Monitor[Any, Any]:
        return Monitor(TimeLimit(gym.make("CartPole-v1"), 20), info_keywords=())

    ours, theirs = make(factory, 2, **backend), DummyVecEnv([factory, factory])

    def without_time(envs: VecEnv) -> VecEnv:
        step_wait = envs.step_wait

        def timeless() -> Any:
            answer = step_wait()
            for info in answer[3]:
                if "episode" in info:
                    assert info["episode"].pop("t") >= 0.0
            return answer

        envs.step_wait = timeless  # type: ignore[method-assign]  # the only entry that is the clock's
        return envs

    assert compare(without_time(ours), without_time(theirs), 100) > 4
    ours.close()


def test_attributes_and_methods_reach_the_environments_asked_for(ours: ClusterVecEnv, theirs: DummyVecEnv) -> None:
    for envs in (ours, theirs):
        assert envs.get_attr("label") == ["world 0", "world 1", "world 2"]
        assert envs.get_attr("index", [2, 0]) == [2, 0]
        assert envs.get_attr("index", -1) == [2]
        envs.set_attr("label", "renamed", 1)
        assert envs.env_method("describe", "am", shout=True) == ["AM WORLD 0", "AM RENAMED", "AM WORLD 2"]
        assert envs.env_method("describe", indices=[1, 0]) == ["I am renamed", "I am world 0"]
        assert envs.has_attr("label")
        assert not envs.has_attr("no_such_thing")


def test_wrappers_are_found_where_they_are_worn(backend: Backend) -> None:
    def worn() -> gym.Env[Any, Any]:
        return Monitor(World())

    envs = make([World, worn], **backend)
    assert envs.env_is_wrapped(Monitor) == [False, True]
    assert envs.env_is_wrapped(Monitor, 1) == [True]
    assert envs.env_is_wrapped(TimeLimit) == [False, False]
    envs.close()


def test_a_worker_need_not_have_sb3() -> None:
    head = os.getpid()

    def make_world() -> World:
        if os.getpid() != head:
            sys.modules["stable_baselines3"] = None  # type: ignore[assignment]  # what makes an import fail
        return World()

    envs = make([make_world], num_workers=1)
    envs.set_attr("label", "mine", 0)
    assert envs.env_method("describe") == ["I am mine"]
    assert envs.has_attr("label")
    assert envs.env_is_wrapped(TimeLimit) == [False]
    envs.close()


def test_options_are_given_once_and_to_each_its_own(ours: ClusterVecEnv, theirs: DummyVecEnv) -> None:
    for options in ({"level": 2}, [{"level": 1}, {}, {"level": 3}], None):
        for envs in (ours, theirs):
            envs.set_options(options)
            envs.seed(5)
        for time in ("first", "second"):  # The second time they are used up.
            assert_equal(ours.reset(), theirs.reset(), f"{time} reset, {options}")
            assert_equal(ours.reset_infos, theirs.reset_infos, f"infos of the {time} reset, {options}")
    actions = np.zeros(3, np.int64)
    assert_equal(ours.step(actions), theirs.step(actions), "step")


def test_images_are_tiled_as_sb3_tiles_them(ours: ClusterVecEnv, theirs: DummyVecEnv) -> None:
    images = ours.render(), theirs.render()
    assert images[0] is not None
    assert_equal(*images, "image")
    assert ours.metadata["render_modes"] == ["human", "rgb_array"]


def test_without_a_render_mode_there_are_no_images() -> None:
    envs = make(World, 2, num_workers=0)
    with pytest.warns(UserWarning, match="rgb_array"):
        assert list(envs.get_images()) == [None, None]
    envs.close()


def test_sb3s_wrappers_go_around_it(backend: Backend) -> None:
    ours, theirs = (
        VecNormalize(VecFrameStack(VecMonitor(envs), 2))
        for envs in (make(World, 2, **backend), DummyVecEnv([World, World]))
    )
    for envs in (ours, theirs):
        envs.seed(1)
        envs.reset()
    for _ in range(30):
        answers = [envs.step(np.zeros(2, np.int64)) for envs in (ours, theirs)]
        assert_equal(answers[0][:3], answers[1][:3], "step")
        assert [info.get("episode", {}).get("r") for info in answers[0][3]] == [
            info.get("episode", {}).get("r") for info in answers[1][3]
        ]
    ours.close()


@pytest.mark.parametrize(
    ("env", "options", "remedy"),
    [
        (World, {}, 'autoreset_mode="SameStep"'),
        (World, {"autoreset_mode": "SameStep", "copy": False}, "copy=False"),
    ],
)
def test_environments_that_sb3_would_misread_are_refused(env: Factory, options: dict[str, Any], remedy: str) -> None:
    with ClusterEnv(env, num_workers=0, **options) as envs, pytest.raises(ConfigError, match=remedy):
        ClusterVecEnv(envs)


def test_native_vectors_can_be_trained_on(backend: Backend) -> None:
    def make_vector(num_envs: int) -> Any:
        return gym.make_vec(
            "CartPole-v1",
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
        )

    envs = make(NativeVector(make_vector), 3, **backend)
    assert envs.env_is_wrapped(Monitor) == [False] * 3
    model = quiet(PPO("MlpPolicy", VecMonitor(envs), n_steps=32, batch_size=32, n_epochs=1, seed=1))
    model.learn(96)
    assert model.ep_info_buffer
    envs.close()


def small() -> dict[str, Any]:
    """Networks to learn quickly with; a dict for each model, for they write into it."""
    return {"net_arch": [16]}


LEARNERS: dict[str, tuple[str, Callable[[VecEnv], BaseAlgorithm]]] = {
    "ppo": (
        "CartPole-v1",
        lambda envs: PPO("MlpPolicy", envs, n_steps=64, batch_size=64, n_epochs=2, policy_kwargs=small(), seed=1),
    ),
    "dqn": ("CartPole-v1", lambda envs: DQN("MlpPolicy", envs, learning_starts=100, policy_kwargs=small(), seed=1)),
    "sac": ("Pendulum-v1", lambda envs: SAC("MlpPolicy", envs, learning_starts=200, policy_kwargs=small(), seed=1)),
}


def quiet(model: BaseAlgorithm) -> BaseAlgorithm:
    """Keep SB3 from making a directory for its log."""
    model.set_logger(Logger(None, []))
    return model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # Networks this small only suffer from more, beside the workers.
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_ends_with_the_weights_it_has_over_sb3s_own_environments(name: str, backend: Backend) -> None:
    env_id, make_model = LEARNERS[name]

    def train(envs: VecEnv) -> dict[str, torch.Tensor]:
        model = quiet(make_model(VecMonitor(envs)))
        model.learn(300)
        assert model.num_timesteps >= 300
        envs.close()
        return model.policy.state_dict()

    theirs = train(DummyVecEnv([lambda: gym.make(env_id)] * 2))
    for key, value in train(make(env_id, 2, **backend)).items():
        assert torch.equal(value, theirs[key]), key


def test_sb3_makes_it_as_it_makes_its_own_environments(backend: Backend) -> None:
    def make_theirs(kind: Any, options: dict[str, Any]) -> Any:
        return make_vec_env("CartPole-v1", n_envs=3, seed=5, vec_env_cls=kind, vec_env_kwargs=options)

    ours, theirs = make_theirs(ClusterVecEnv, dict(backend)), make_theirs(DummyVecEnv, {})
    assert np.array_equal(ours.reset(), theirs.reset())
    for _ in range(60):
        (obs, rewards, dones, infos), wanted = (envs.step(np.array([1, 0, 1])) for envs in (ours, theirs))
        assert np.array_equal(obs, wanted[0])
        assert np.array_equal(rewards, wanted[1])
        assert np.array_equal(dones, wanted[2])
        assert ["episode" in info for info in infos] == ["episode" in info for info in wanted[3]]
    assert ours.env_is_wrapped(Monitor) == [True] * 3
    ours.close()
    theirs.close()


def test_what_is_for_making_environments_is_refused_with_made_ones() -> None:
    with (
        ClusterEnv("CartPole-v1", 2, num_workers=0, autoreset_mode="SameStep") as envs,
        pytest.raises(ConfigError, match=r"takes num_workers with factories, not with a ClusterEnv"),
    ):
        ClusterVecEnv(envs, num_workers=2)


@pytest.mark.slow
def test_ppo_learns_to_balance_the_pole() -> None:
    envs = make("CartPole-v1", 16, num_workers=2)
    model = quiet(
        PPO("MlpPolicy", envs, n_steps=32, batch_size=256, n_epochs=10, learning_rate=3e-3, gae_lambda=0.8, seed=1)
    )
    before, _ = evaluate_policy(model, envs, n_eval_episodes=16, warn=False)
    model.learn(12_000)
    after, _ = evaluate_policy(model, envs, n_eval_episodes=16, warn=False)
    envs.close()
    assert float(np.mean(after)) > float(np.mean(before)) + 100, (before, after)


def test_a_saved_model_passes_sb3s_checks_and_goes_on_learning(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    first = make("CartPole-v1", 2, num_workers=0)
    quiet(LEARNERS["ppo"][1](first)).learn(128).save(path)
    first.close()
    # Loading compares the spaces and the number of environments with those of the model.
    envs = make("CartPole-v1", 2, num_workers=2)
    model = quiet(PPO.load(path, env=envs, device="cpu"))
    model.learn(128, reset_num_timesteps=False)
    assert model.num_timesteps == 256
    envs.close()
    with make("Acrobot-v1", 2, num_workers=0).envs as others, pytest.raises(ValueError, match="spaces do not match"):
        PPO.load(path, env=ClusterVecEnv(others), device="cpu")
