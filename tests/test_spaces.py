"""Every kind of space, and every kind of value, makes the way to a worker and back unharmed."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from clusterenv import ClusterEnv, RemoteObject, Timeouts
from tests.conftest import Backend
from tests.worlds import Factory, WordSpace, World, WorldError, assert_same, make_factories

POINT = spaces.Box(-1.0, 1.0, (2,), np.float32)

SPACES: dict[str, spaces.Space[Any]] = {
    "box": POINT,
    "scalar box": spaces.Box(-5.0, 5.0, (), np.float64),
    "empty box": spaces.Box(0.0, 1.0, (0, 3), np.float32),
    "unbounded box": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "half precision box": spaces.Box(-1.0, 1.0, (3,), np.float16),
    "boolean box": spaces.Box(0, 1, (3,), np.bool_),
    "integer box": spaces.Box(-(2**62), 2**62, (2,), np.int64),
    "image": spaces.Box(0, 255, (84, 84, 4), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi discrete": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(12, charset="aß漢😀"),
    "graph": spaces.Graph(POINT, spaces.Discrete(3)),
    "graph without edges": spaces.Graph(spaces.Discrete(4), None),
    "sequence": spaces.Sequence(POINT),
    "stacked sequence": spaces.Sequence(POINT, stack=True),
    "one of": spaces.OneOf((spaces.Discrete(3), POINT, spaces.Text(3))),
    "custom": WordSpace(),
    "tuple": spaces.Tuple((POINT, spaces.Discrete(3), spaces.Tuple((spaces.MultiBinary(2),)))),
    "dict": spaces.Dict(
        {"b": POINT, "a": spaces.Dict({"x": spaces.Discrete(3), "image": spaces.Box(0, 9, (4, 4), np.uint8)})}
    ),
    "dict of odd ones": spaces.Dict({"word": WordSpace(), "graph": spaces.Graph(POINT, None), "box": POINT}),
}

VALUES: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "integers of any size": [0, -1, 2**31, -(2**63), 2**64 - 1, 2**200, -(2**200)],
    "floats": [0.0, -0.0, 1e308, 5e-324, float("inf"), float("-inf")],
    "complex numbers": 1.5 - 2j,
    "text": ["", "plain", "naïve 漢 😀", "\0"],
    "bytes": [b"", b"\0\xff" * 100],
    "containers": [[], (), {}, set(), frozenset(), [1, (2, [3, {"k": (4,)}])]],
    "dicts with keys of many kinds": {"s": 1, 2: "two", (3, "t"): [None], None: 0.5, True: b"b"},
    "sets": [{1, "a", (2, 3)}, frozenset({b"x", 4.5})],
    "numpy scalars": [
        np.float32(1.1),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1j),
        np.str_("s"),
        np.datetime64("2020-01-01", "s"),
    ],
    "arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float16), np.array(3.5), np.array(["a", "漢b"])],
    "arrays with strides": np.arange(12).reshape(3, 4)[::-1, ::2],
    "arrays in other byte orders": np.arange(3, dtype=">i4"),
    "object arrays": np.array([1, "two", None, [3.0]], dtype=object),
    "graph instances": spaces.GraphInstance(np.zeros((2, 2), np.float32), None, None),
}


@pytest.mark.parametrize("kind", SPACES)
def test_a_space_of_each_kind_serves_observations_and_actions(kind: str, backend: Backend) -> None:
    space = SPACES[kind]
    theirs = SyncVectorEnv(make_factories(3, observation_space=space, action_space=space))
    theirs.action_space.seed(1)
    backend = {**backend, "num_workers": min(1, backend["num_workers"])}  # One, if any, is enough for that.
    with ClusterEnv(make_factories(3, observation_space=space, action_space=space), **backend) as ours:
        assert ours.single_observation_space == space
        assert ours.single_action_space == space
        assert ours.observation_space == batch_space(space, 3)
        assert ours.action_space == batch_space(space, 3)
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for step in range(6):
            actions = theirs.action_space.sample()
            answer = ours.step(actions)
            assert_same(answer, theirs.step(actions), f"step {step}")
            assert ours.observation_space.contains(answer[0])
    theirs.close()


def test_every_kind_of_value_survives_the_way_there_and_back(backend: Backend) -> None:
    with ClusterEnv(make_factories(2), **backend) as envs:
        for kind, value in VALUES.items():
            assert_same(envs.call("echo", value), (value, value), kind)


def test_text_that_is_no_valid_unicode_survives_too(backend: Backend) -> None:
    name_of_a_file = os.fsdecode(b"caf\xe9.txt")
    with ClusterEnv(make_factories(2), **backend) as envs:
        assert envs.call("echo", name_of_a_file) == (name_of_a_file, name_of_a_file)


def test_a_nan_comes_back_as_a_nan_with_its_bits(backend: Backend) -> None:
    odd_nan = np.array([0x7FF8000000000123], np.uint64).view(np.float64)
    with ClusterEnv(make_factories(2), **backend) as envs:
        (first, _) = envs.call("echo", odd_nan)
        (plain, _) = envs.call("echo", float("nan"))
    assert first.tobytes() == odd_nan.tobytes()
    assert isinstance(plain, float)
    assert np.isnan(plain)


def test_random_generators_come_back_in_the_same_state(backend: Backend) -> None:
    with ClusterEnv(make_factories(2), **backend) as envs:
        envs.reset(seed=11)
        generators = envs.np_random
        numbers = [generator.random() for generator in generators]
    assert_same(numbers, _first_numbers_after_reset([11, 12]))


def _first_numbers_after_reset(seeds: list[int]) -> list[float]:
    worlds = [World() for _ in seeds]
    for world, seed in zip(worlds, seeds, strict=True):
        world.reset(seed=seed)
    return [world.np_random.random() for world in worlds]


def test_spaces_and_specs_can_be_asked_for(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        assert envs.get_attr("action_space") == (spaces.Discrete(2),) * 2
        assert envs.get_attr("observation_space") == (envs.single_observation_space,) * 2
        assert [spec.id for spec in envs.get_attr("spec")] == ["CartPole-v1"] * 2
        assert [spec.max_episode_steps for spec in envs.get_attr("spec")] == [500] * 2


def seeded_world() -> World:
    point = spaces.Dict({"x": spaces.Box(-1.0, 1.0, (2,), np.float32), "y": spaces.Tuple((spaces.Discrete(9),))})
    world = World(observation_space=point)
    world.action_space.seed(123)
    world.observation_space.seed(7)
    return world


def test_spaces_that_a_factory_has_seeded_draw_what_they_draw_in_gymnasiums_environments(backend: Backend) -> None:
    theirs = SyncVectorEnv([seeded_world] * 6)
    with ClusterEnv([seeded_world] * 6, **backend) as ours:
        for name in ("action_space", "observation_space", "single_action_space", "single_observation_space"):
            drawn, expected = ([getattr(envs, name).sample() for _ in range(5)] for envs in (ours, theirs))
            assert_same(drawn, expected, name)


def test_an_object_that_may_not_cross_arrives_as_its_description_with_one_warning(remote: Backend) -> None:
    with ClusterEnv(make_factories(2), **remote) as envs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        first, _ = envs.call("echo", WorldError("of mine"))
        envs.call("echo", WorldError("of mine"))
    assert ["WorldError" in str(warning.message) for warning in caught] == [True]
    assert isinstance(first, RemoteObject)
    assert first.type_name.endswith("WorldError")
    assert "of mine" in first.text


def test_large_observations_do_not_overwrite_each_other(remote: Backend) -> None:
    image = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    theirs = SyncVectorEnv(make_factories(7, observation_space=image, infos="none"))
    with ClusterEnv(make_factories(7, observation_space=image, infos="none"), **remote) as ours:
        kept = [ours.reset(seed=2)[0]]
        expected = [theirs.reset(seed=2)[0]]
        for _ in range(4):
            kept.append(ours.step(np.zeros(7, np.int64))[0])
            expected.append(theirs.step(np.zeros(7, np.int64))[0])
        assert_same(kept, expected)
    assert_same(kept, expected, "after close")


class LateWorld(World):
    """Makes answers of any size; where its index is `late`, its worker answers long after the other."""

    def tell(self, size: int, late: int) -> NDArray[np.int64]:
        for _ in range(200 if self.index == late else 0):
            hashlib.sha256(bytes(10**6))
        return np.arange(size)

    def step(self, action: Any) -> Any:
        size, late = TELLINGS[int(action)]
        return (*super().step(action)[:4], {"numbers": self.tell(size, late), "text": "x" * size})


TELLINGS = [(10**6, 0), (1, 2), (10**6, 2), (1, 0)]


def make_late_worlds() -> list[Factory]:
    return [lambda index=index: LateWorld(index=index) for index in range(3)]  # type: ignore[misc]  # mypy cannot infer a lambda's default


def test_answers_of_any_size_leave_the_next_calls_alone(remote: Backend) -> None:
    with ClusterEnv(make_late_worlds(), timeouts=Timeouts(call_s=30), **remote) as envs:
        for size, late in TELLINGS:
            assert_same(envs.call("tell", size, late), (np.arange(size),) * 3, f"{size} numbers")


def test_infos_of_any_size_leave_the_next_steps_alone(remote: Backend) -> None:
    theirs = SyncVectorEnv(make_late_worlds())
    with ClusterEnv(make_late_worlds(), timeouts=Timeouts(call_s=30), **remote) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for telling in range(len(TELLINGS)):
            assert_same(ours.step(np.full(3, telling)), theirs.step(np.full(3, telling)), f"step {telling}")


class Objects(World):
    """Its infos hold arrays of objects."""

    def step(self, action: Any) -> Any:
        infos = {"pair": np.array([None, "a"], object)} if self.index != 1 else {}
        return (*super().step(action)[:4], infos)


def test_arrays_of_objects_in_infos_are_put_together_as_gymnasium_does(backend: Backend) -> None:
    factories = [lambda index=index: Objects(index=index) for index in range(4)]
    theirs = SyncVectorEnv(factories)
    with ClusterEnv(factories, **backend) as ours:
        assert_same(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
        assert_same(ours.step(np.zeros(4, np.int64))[4], theirs.step(np.zeros(4, np.int64))[4])
