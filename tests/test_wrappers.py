"""Gymnasium's vector wrappers cannot tell ClusterEnv from SyncVectorEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import RescaleObservation
from gymnasium.wrappers import vector as wrappers

from clusterenv import ClusterEnv
from tests.conftest import Backend
from tests.worlds import assert_same, make_factories

AnyVector = VectorEnv[Any, Any, Any]

POINT = spaces.Box(-3.0, 3.0, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 6, 3), np.uint8)
PAIR = spaces.Dict({"point": POINT, "image": IMAGE})


NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


class Wrapping(NamedTuple):
    """A wrapper, the spaces it needs below it, and the modes it serves."""

    wrap: Callable[[AnyVector], AnyVector]
    observation_space: spaces.Space[Any] = POINT
    action_space: spaces.Space[Any] = spaces.Discrete(4)
    modes: tuple[AutoresetMode, ...] = (NEXT_STEP, SAME_STEP)


def count_episodes(envs: AnyVector) -> AnyVector:
    return wrappers.RecordEpisodeStatistics(envs, stats_key="statistics")


def on_observations(wrap: Callable[[AnyVector], AnyVector], space: spaces.Space[Any] = POINT) -> Wrapping:
    """Wrappers of observations refuse SAME_STEP, since they would not see the final ones."""
    return Wrapping(wrap, space, modes=(NEXT_STEP,))


WRAPPINGS = {
    "RecordEpisodeStatistics": Wrapping(count_episodes),
    "DictInfoToList": Wrapping(wrappers.DictInfoToList),
    "NormalizeObservation": on_observations(wrappers.NormalizeObservation),
    "TransformObservation": on_observations(lambda envs: wrappers.TransformObservation(envs, np.tanh)),
    "FilterObservation": on_observations(lambda envs: wrappers.FilterObservation(envs, ["point"]), PAIR),
    "FlattenObservation": on_observations(wrappers.FlattenObservation, PAIR),
    "GrayscaleObservation": on_observations(wrappers.GrayscaleObservation, IMAGE),
    "ReshapeObservation": on_observations(lambda envs: wrappers.ReshapeObservation(envs, (2, 2))),
    "RescaleObservation": on_observations(lambda envs: wrappers.RescaleObservation(envs, -1.0, 1.0)),
    "DtypeObservation": on_observations(lambda envs: wrappers.DtypeObservation(envs, np.float64)),
    "VectorizeTransformObservation": on_observations(
        lambda envs: wrappers.VectorizeTransformObservation(envs, RescaleObservation, min_obs=0.0, max_obs=1.0)
    ),
    "TransformAction": Wrapping(lambda envs: wrappers.TransformAction(envs, lambda actions: 3 - actions)),
    "ClipAction": Wrapping(wrappers.ClipAction, action_space=POINT),
    "RescaleAction": Wrapping(lambda envs: wrappers.RescaleAction(envs, -1.0, 1.0), action_space=POINT),
    "TransformReward": Wrapping(lambda envs: wrappers.TransformReward(envs, np.sign)),
    "ClipReward": Wrapping(lambda envs: wrappers.ClipReward(envs, -10.0, 10.0)),
    "NormalizeReward": Wrapping(wrappers.NormalizeReward),
}


def check(wrapping: Wrapping, mode: AutoresetMode, backend: Backend) -> None:
    options = {"observation_space": wrapping.observation_space, "action_space": wrapping.action_space}
    theirs = wrapping.wrap(SyncVectorEnv(make_factories(3, **options), autoreset_mode=mode))
    theirs.action_space.seed(6)
    with ClusterEnv(make_factories(3, **options), autoreset_mode=mode, **backend) as envs:
        ours = wrapping.wrap(envs)
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert_same(ours.reset(seed=2), theirs.reset(seed=2))
        for step in range(12):
            actions = theirs.action_space.sample()
            assert_same(timeless(ours.step(actions)), timeless(theirs.step(actions)), f"step {step}")


def timeless(answer: Any) -> Any:
    """Set to zero what a wrapper read from the clock."""
    infos = answer[4]
    for each in (infos, infos.get("final_info", {})) if isinstance(infos, dict) else ():
        if "statistics" in each:
            each["statistics"]["t"] = np.zeros_like(each["statistics"]["t"])
    return answer


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in WRAPPINGS for mode in WRAPPINGS[name].modes])
def test_a_wrapper_gives_the_same_over_both(name: str, mode: AutoresetMode) -> None:
    check(WRAPPINGS[name], mode, {"num_workers": 0})


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_a_stack_of_wrappers_gives_the_same_over_workers(remote: Backend, mode: AutoresetMode) -> None:
    check(Wrapping(lambda envs: wrappers.ClipReward(count_episodes(envs), -9.0, 9.0)), mode, remote)


def test_tensors_are_as_good_as_arrays_for_actions(backend: Backend) -> None:
    torch = pytest.importorskip("torch")
    actions = torch.tensor([0, 1, 2])
    theirs = SyncVectorEnv(make_factories(3))
    with ClusterEnv(make_factories(3), **backend) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        assert_same(ours.step(actions), theirs.step(actions.numpy()))
