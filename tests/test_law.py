"""The law: with the same factories, seeds and actions, ClusterEnv equals SyncVectorEnv bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from clusterenv import ClusterEnv, Network
from tests.conftest import Backend
from tests.worlds import Factory, Infos, ReusingWorld, WordSpace, World, assert_same, make_factories

MODES = tuple(AutoresetMode)


@dataclass(frozen=True)
class Case:
    """What both sides get: environments, and what is done with them."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    mode: AutoresetMode
    num_envs: int
    infos: Infos
    is_loose: bool
    seed: int
    moves: Sequence[str]

    def make_factories(self) -> list[Factory]:
        return make_factories(
            self.num_envs,
            observation_space=self.observation_space,
            action_space=self.action_space,
            infos=self.infos,
            loose=self.is_loose,
        )


def boxes() -> st.SearchStrategy[spaces.Space[Any]]:
    shapes = st.sampled_from([(), (1,), (3,), (2, 3), (0, 2), (8, 6, 3)])
    dtypes = st.sampled_from([np.float32, np.float32, np.float64, np.float16, np.uint8, np.int16, np.int64, np.bool_])
    bounded = st.builds(
        lambda shape, dtype: spaces.Box(0, 1 if dtype is np.bool_ else 100, shape, dtype), shapes, dtypes
    )
    return bounded | shapes.map(lambda shape: spaces.Box(-np.inf, np.inf, shape, np.float32))


def leaf_spaces() -> st.SearchStrategy[spaces.Space[Any]]:
    point = spaces.Box(-1.0, 1.0, (2,), np.float32)
    odd: list[spaces.Space[Any]] = [
        spaces.Discrete(5, start=-2),
        spaces.Discrete(3, dtype=np.int32),
        spaces.MultiDiscrete([2, 5], start=[1, -3]),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
        spaces.MultiBinary(3),
        spaces.MultiBinary([2, 2]),
        spaces.Text(6, charset="aüß漢"),
        spaces.Graph(point, spaces.Discrete(3)),
        spaces.Graph(point, None),
        spaces.Sequence(point),
        spaces.Sequence(spaces.Discrete(4), stack=True),
        spaces.OneOf((spaces.Discrete(3), point)),
        WordSpace(),
    ]
    return boxes() | st.sampled_from(odd)


def nested_spaces() -> st.SearchStrategy[spaces.Space[Any]]:
    keys = st.sampled_from(["b", "a", "c c"])
    return st.recursive(
        leaf_spaces(),
        lambda inner: (
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(spaces.Dict)
            | st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        ),
        max_leaves=4,
    )


MOVES = ["step"] * 4 + ["step list", "step cast", "step strided", "step async", "reset", "reset seeds", "reset some"]


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        observation_space=nested_spaces(),
        action_space=st.sampled_from([spaces.Discrete(4), spaces.Box(-1.0, 1.0, (2,), np.float32)]) | nested_spaces(),
        mode=st.sampled_from(MODES),
        num_envs=st.integers(1, 7),
        infos=st.sampled_from(["none", "sparse", "rich", "numbers"]),
        is_loose=st.booleans(),
        seed=st.integers(0, 10_000),
        moves=st.permutations(MOVES),
    )


def lawful(max_examples: int, *, is_remote: bool) -> settings:
    return settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        report_multiple_bugs=False,
        phases=[Phase.generate] if is_remote else [Phase.generate, Phase.shrink],  # Shrinking starts many workers.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.mark.quick
@lawful(max_examples=150, is_remote=False)
@given(case=cases())
def test_in_process_every_answer_equals_gymnasiums(case: Case) -> None:
    check(case, {"num_workers": 0})


@lawful(max_examples=10, is_remote=True)
@given(case=cases(), num_workers=st.integers(1, 3))
def test_over_shared_memory_every_answer_equals_gymnasiums(case: Case, num_workers: int) -> None:
    check(case, {"num_workers": min(num_workers, case.num_envs), "network": Network(transport="shm")})


@lawful(max_examples=10, is_remote=True)
@given(case=cases(), num_workers=st.integers(1, 3))
def test_over_zeromq_every_answer_equals_gymnasiums(case: Case, num_workers: int) -> None:
    check(case, {"num_workers": min(num_workers, case.num_envs), "network": Network(transport="zmq")})


def check(case: Case, backend: Backend) -> None:
    theirs = SyncVectorEnv(case.make_factories(), autoreset_mode=case.mode)
    with ClusterEnv(case.make_factories(), autoreset_mode=case.mode, **backend) as ours:
        play(case, ours, theirs)
    theirs.close()


def play(case: Case, ours: ClusterEnv, theirs: SyncVectorEnv) -> None:
    """Make every move on both sides, and compare at once; at the end, no answer of ours may have changed since."""
    rng = np.random.default_rng(case.seed)
    theirs.action_space.seed(case.seed)
    kept: list[tuple[Any, Any]] = []

    def compare(our: Any, their: Any, move: str) -> None:
        assert_same(our, their, move)
        kept.append((our, deepcopy(our)))

    compare(ours.reset(seed=case.seed), theirs.reset(seed=case.seed), "first reset")
    is_over = np.zeros(case.num_envs, np.bool_)
    for move in case.moves:
        if move.startswith("step"):
            if case.mode == AutoresetMode.DISABLED and is_over.any():
                compare(*reset_some(ours, theirs, is_over), "reset of the finished")
            actions = rewrite(theirs.action_space.sample(), move, theirs.action_space)
            their_answer = theirs.step(deepcopy(actions))
            if move == "step async":
                ours.step_async(actions)
                compare(ours.step_wait(), their_answer, move)
            else:
                compare(ours.step(actions), their_answer, move)
            is_over = their_answer[2] | their_answer[3]
        elif move == "reset some":
            chosen = is_over | (rng.random(case.num_envs) < 0.5)
            chosen[rng.integers(case.num_envs)] = True
            compare(*reset_some(ours, theirs, chosen), move)
            is_over &= ~chosen
        else:
            numbers: list[int | None] = [int(number) for number in rng.integers(1000, size=case.num_envs)]
            seeds = numbers if move == "reset seeds" else None
            options = {"purpose": "test"} if move == "reset seeds" else None
            compare(ours.reset(seed=seeds, options=options), theirs.reset(seed=seeds, options=options), move)
            is_over[:] = False
    for answer, then in kept:
        assert_same(answer, then, "an earlier answer")


def reset_some(ours: ClusterEnv, theirs: SyncVectorEnv, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Any, Any]:
    seeds = [None if index % 2 else index for index in range(len(chosen))]
    our_answer = ours.reset(seed=seeds, options={"reset_mask": chosen.copy(), "more": 1})
    return our_answer, theirs.reset(seed=seeds, options={"reset_mask": chosen.copy(), "more": 1})


def rewrite(actions: Any, move: str, space: spaces.Space[Any]) -> Any:
    """The same actions as users also pass them: a list, another dtype, a view with strides."""
    if not isinstance(actions, np.ndarray):
        is_flat = isinstance(space, spaces.Tuple) and not any(isinstance(part, spaces.Tuple) for part in space)
        return list(actions) if move == "step list" and is_flat else actions
    if move == "step list":
        return list(actions)
    if move == "step cast" and actions.dtype == np.float32:
        return actions.astype(np.float64) + 1e-9
    if move == "step cast" and actions.dtype == np.int64:
        return actions.astype(np.int32)
    if move == "step strided":
        return np.repeat(actions, 2, axis=0)[::2]
    return actions


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("mode", MODES)
def test_cartpole_equals_gymnasiums(mode: AutoresetMode, transport: str, num_workers: int) -> None:
    check_real(
        "CartPole-v1", mode, {"num_workers": num_workers, "network": Network(transport=transport)}, num_steps=400
    )


@pytest.mark.parametrize("num_workers", [2])
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("mode", MODES)
def test_lunar_lander_equals_gymnasiums(mode: AutoresetMode, transport: str, num_workers: int) -> None:
    pytest.importorskip("Box2D")
    check_real(
        "LunarLander-v3", mode, {"num_workers": num_workers, "network": Network(transport=transport)}, num_steps=300
    )


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_cartpole_in_process_equals_gymnasiums(mode: AutoresetMode) -> None:
    check_real("CartPole-v1", mode, {"num_workers": 0}, num_steps=1000)


def check_real(env_id: str, mode: AutoresetMode, backend: Backend, num_steps: int) -> None:
    num_envs = 5
    theirs = SyncVectorEnv([lambda: gym.make(env_id)] * num_envs, autoreset_mode=mode)
    theirs.action_space.seed(7)
    with ClusterEnv(env_id, num_envs, autoreset_mode=mode, **backend) as ours:
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        for step in range(num_steps):
            actions = theirs.action_space.sample()
            their_answer = theirs.step(actions)
            assert_same(ours.step(actions), their_answer, f"step {step}")
            is_over = their_answer[2] | their_answer[3]
            if mode == AutoresetMode.DISABLED and is_over.any():
                assert_same(*reset_some(ours, theirs, is_over), f"reset after step {step}")
    theirs.close()


def test_factories_that_differ_by_index_keep_their_place(backend: Backend) -> None:
    makers: list[Factory] = [
        lambda: World(longest_episode=1),
        lambda: World(longest_episode=9, infos="none"),
        lambda: gym.wrappers.TimeLimit(World(longest_episode=9, infos="sparse"), 2),
        lambda: gym.wrappers.TransformReward(World(index=8), lambda reward: 100 + float(reward)),
    ]
    theirs = SyncVectorEnv(makers)
    with ClusterEnv(makers, **backend) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for step in range(12):
            actions = np.array([step % 4, 1, 2, 3])
            assert_same(ours.step(actions), theirs.step(actions), f"step {step}")
    theirs.close()


@pytest.mark.parametrize("mode", MODES)
def test_infos_of_numbers_equal_gymnasiums_whenever_they_change(mode: AutoresetMode, backend: Backend) -> None:
    case = Case(
        observation_space=spaces.Box(-1.0, 1.0, (3,), np.float32),
        action_space=spaces.Discrete(4),
        mode=mode,
        num_envs=5,
        infos="numbers",
        is_loose=False,
        seed=4,
        moves=(["step"] * 10 + ["reset", "step", "reset some"]) * 4,
    )
    check(case, backend)


class Outgrowing(gym.Wrapper[Any, Any, Any, Any]):
    """Counts in its infos, and says so in many words: more than there is room for beside the planes."""

    def __init__(self, num_keys: int, length: int) -> None:
        super().__init__(World(infos="none", longest_episode=100))
        self._num_keys, self._padding = num_keys, "x" * length
        self._count = 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._count += 1
        count = 2**64 * self._count if self._count == 3 else self._count
        return (*self.env.step(action)[:4], {f"{self._padding}{key}": count + key for key in range(self._num_keys)})


@pytest.mark.parametrize(("num_keys", "length"), [(3, 1), (40, 1), (4, 20_000)])
def test_numbers_that_are_too_many_or_too_large_come_another_way(num_keys: int, length: int, backend: Backend) -> None:
    with ClusterEnv([lambda: Outgrowing(num_keys, length)] * 4, **backend) as ours:
        ours.reset(seed=1)
        for step in range(1, 6):
            infos = ours.step([0, 1, 2, 3])[4]
            count = 2**64 * step if step == 3 else step
            assert len(infos) == 2 * num_keys
            for key in range(num_keys):
                name = "x" * length + str(key)
                assert infos[name].tolist() == [count + key] * 4
                assert infos[f"_{name}"].all()


class MixedInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Puts one value in the infos, whose kind depends on the environment's index."""

    def __init__(self, value: Any) -> None:
        super().__init__(World(infos="none"))
        self._value = value

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {"value": self._value}


def test_an_integer_info_followed_by_a_float_is_promoted_not_truncated(backend: Backend) -> None:
    with ClusterEnv([lambda: MixedInfo(1), lambda: MixedInfo(2), lambda: MixedInfo(2.5)], **backend) as ours:
        ours.reset(seed=1)
        infos = ours.step(np.zeros(3, np.int64))[4]
    assert_same(infos, {"value": np.array([1.0, 2.0, 2.5]), "_value": np.ones(3, np.bool_)})


def test_info_keys_need_not_be_strings(backend: Backend) -> None:
    class Numbered(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[Any, Any]]:
            return (*self.env.step(action)[:4], {7: 1.5})

    makers: list[Factory] = [lambda: Numbered(World()), lambda: World(infos="none"), lambda: Numbered(World())]
    theirs = SyncVectorEnv(makers)
    with ClusterEnv(makers, **backend) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        assert_same(ours.step([0, 1, 2]), theirs.step([0, 1, 2]))


def test_a_reset_mask_stays_in_the_callers_options(backend: Backend) -> None:
    mask = np.array([False, True, False])
    options = {"reset_mask": mask, "purpose": "test"}
    with ClusterEnv(make_factories(3), **backend) as ours:
        ours.reset(seed=1)
        ours.reset(options=options)
    assert options == {"reset_mask": mask, "purpose": "test"}
    assert mask.tolist() == [False, True, False]


def test_final_observations_survive_an_environment_that_reuses_its_buffer(backend: Backend) -> None:
    actions = np.zeros(3, np.int64)
    with ClusterEnv([World] * 3, autoreset_mode="SameStep", **backend) as fresh:
        fresh.reset(seed=5)
        expected = [fresh.step(actions) for _ in range(8)]
    with ClusterEnv([ReusingWorld] * 3, autoreset_mode="SameStep", **backend) as ours:
        ours.reset(seed=5)
        answers = [ours.step(actions) for _ in range(8)]
    assert any("final_obs" in answer[4] for answer in expected)
    assert_same(answers, expected)


def test_without_copies_the_answer_is_right_until_the_next_call(backend: Backend) -> None:
    theirs = SyncVectorEnv(make_factories(3))
    with ClusterEnv(make_factories(3), copy=False, **backend) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for step in range(10):
            assert_same(ours.step(np.full(3, step % 4)), theirs.step(np.full(3, step % 4)), f"step {step}")


class Board:
    """What environments of one process write to, all of them."""

    scores = np.zeros(2)


class Sharing(gym.Wrapper[Any, Any, Any, Any]):
    """Returns numbers, and every third time the board, which the next environment to be stepped will change."""

    def __init__(self, index: int) -> None:
        super().__init__(World(infos="none", longest_episode=100))
        self._index, self._count = index, 0

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._count += 1
        Board.scores += self._index + 1
        scores = Board.scores if self._count % 3 == 0 else float(Board.scores[0])
        return (*self.env.step(action)[:4], {"scores": scores})


def test_an_info_is_what_it_was_when_its_environment_returned_it() -> None:
    makers: list[Factory] = [lambda index=index: Sharing(index) for index in range(4)]  # type: ignore[misc]
    theirs = SyncVectorEnv(makers)
    with ClusterEnv(makers, num_workers=0) as ours:
        theirs.reset(seed=1)
        ours.reset(seed=1)
        for _ in range(7):
            Board.scores = np.zeros(2)
            their_answer = theirs.step(np.zeros(4, np.int64))
            Board.scores = np.zeros(2)
            assert_same(ours.step(np.zeros(4, np.int64)), their_answer)
    theirs.close()
