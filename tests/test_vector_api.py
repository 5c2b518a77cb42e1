"""ClusterEnv has the manners of a Gymnasium vector environment, point by point and in Gymnasium's own words."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from clusterenv import ClusterEnv
from clusterenv.errors import WorkerFailed
from tests.conftest import Backend
from tests.worlds import Factory, World, assert_same, make_factories

NO_ACTIONS = np.zeros(3, np.int64)
WIDE = spaces.Box(-9.0, 9.0, (2,), np.float32)
NARROW = spaces.Box(-1.0, 1.0, (2,), np.float32)


@pytest.fixture(scope="module")
def envs(backend: Backend) -> Iterator[ClusterEnv]:
    """Three environments that tests may reset and ask, but not change or close."""
    with ClusterEnv(make_factories(3, render_mode="rgb_array"), **backend) as envs:
        yield envs


@pytest.fixture
def theirs() -> Iterator[SyncVectorEnv]:
    envs = SyncVectorEnv(make_factories(3, render_mode="rgb_array"))
    yield envs
    envs.close()


def error_of(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller compares it with another
        action()
    return caught.value


def test_it_is_a_vector_environment_with_all_its_attributes(envs: ClusterEnv, theirs: SyncVectorEnv) -> None:
    assert isinstance(envs, VectorEnv)
    assert envs.unwrapped is envs
    assert (envs.num_envs, envs.render_mode, envs.closed, envs.spec) == (3, "rgb_array", False, None)
    for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(envs, name) == getattr(theirs, name)
    assert envs.metadata == theirs.metadata


def test_metadata_is_a_copy_that_names_the_autoreset_mode(backend: Backend) -> None:
    class Described(World):
        metadata = {"render_modes": [], "note": "original"}  # noqa: RUF012 - as Gymnasium declares it

    with ClusterEnv([Described] * 2, autoreset_mode="SameStep", **backend) as envs:
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        envs.metadata["note"] = "changed"
        assert envs.get_attr("metadata") == ({"render_modes": [], "note": "original"},) * 2
    assert Described.metadata == {"render_modes": [], "note": "original"}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_mode_may_be_given_as_member_or_as_value(mode: AutoresetMode) -> None:
    for given in (mode, mode.value):
        with ClusterEnv([World], num_workers=0, autoreset_mode=given) as envs:
            assert envs.metadata["autoreset_mode"] is mode


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="Sometimes"):
        ClusterEnv([World], num_workers=0, autoreset_mode="Sometimes")


@pytest.mark.parametrize(
    ("mode", "second"),
    [
        ("different", NARROW),
        ((spaces.Box(-99.0, 99.0, (2, 2), np.float32), WIDE), NARROW),
        ("nonsense", WIDE),
        ("same", NARROW),
        ("different", spaces.Box(-1.0, 1.0, (3,), np.float32)),
        ("different", spaces.Discrete(2)),
        (("not", "spaces"), WIDE),
    ],
)
def test_observation_modes_work_and_fail_as_gymnasiums(backend: Backend, mode: Any, second: spaces.Space[Any]) -> None:
    makers: list[Factory] = [lambda: World(WIDE), lambda: World(second)]
    try:
        theirs = SyncVectorEnv(makers, observation_mode=mode)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        with pytest.raises(type(error)):
            ClusterEnv(makers, observation_mode=mode, **backend)
        return
    with ClusterEnv(makers, observation_mode=mode, **backend) as ours:
        assert ours.observation_space == theirs.observation_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        assert_same(ours.step([0, 1]), theirs.step([0, 1]))


def test_unequal_action_spaces_are_refused(backend: Backend) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)action.space"):
        ClusterEnv([World, lambda: World(action_space=spaces.Discrete(9))], **backend)


@pytest.mark.parametrize("seed", [5, [9, 4, 2], [None, 4, None], (1, 2, 3)])
def test_seeds_reach_the_environments_as_gymnasiums_do(envs: ClusterEnv, theirs: SyncVectorEnv, seed: Any) -> None:
    for each in (envs, theirs):
        each.reset(seed=77)
    assert_same(envs.reset(seed=seed), theirs.reset(seed=seed))
    assert envs.np_random_seed == theirs.np_random_seed


def test_seeds_of_the_wrong_number_are_refused_in_gymnasiums_words(envs: ClusterEnv, theirs: SyncVectorEnv) -> None:
    expected = error_of(lambda: theirs.reset(seed=[1, 2]))
    assert_same_error(error_of(lambda: envs.reset(seed=[1, 2])), expected)


@pytest.mark.parametrize(
    "mask",
    [[True, False, True], np.ones(2, np.bool_), np.ones((3, 1), np.bool_), np.ones(3, np.int64), np.zeros(3, np.bool_)],
)
def test_a_wrong_reset_mask_is_refused_in_gymnasiums_words(envs: ClusterEnv, theirs: SyncVectorEnv, mask: Any) -> None:
    expected = error_of(lambda: theirs.reset(options={"reset_mask": mask}))
    assert_same_error(error_of(lambda: envs.reset(options={"reset_mask": mask})), expected)


def assert_same_error(ours: BaseException, theirs: BaseException) -> None:
    assert (type(ours), str(ours)) == (type(theirs), str(theirs))


def test_a_reset_after_an_error_of_the_callers_works(envs: ClusterEnv, theirs: SyncVectorEnv) -> None:
    error_of(lambda: envs.reset(seed=[1]))
    assert_same(envs.reset(seed=1), theirs.reset(seed=1))


@pytest.mark.parametrize("actions", [3, np.int64(1), np.array(1), 1.5, None])
def test_a_scalar_is_no_batch_of_actions(envs: ClusterEnv, actions: Any) -> None:
    envs.reset(seed=1)
    with pytest.raises(TypeError):
        envs.step(actions)


@pytest.mark.parametrize("actions", [[], [0, 1], np.zeros(2, np.int64), [0] * 4, np.zeros(4, np.int32)])
def test_a_wrong_number_of_actions_is_refused_and_steps_nobody(
    envs: ClusterEnv, theirs: SyncVectorEnv, actions: Any
) -> None:
    envs.reset(seed=1)
    theirs.reset(seed=1)
    with pytest.raises(ValueError, match="3"):
        envs.step(actions)
    assert_same(envs.step(NO_ACTIONS), theirs.step(NO_ACTIONS))


@pytest.mark.parametrize(
    "actions",
    [np.full((2, 2), 0.1, np.float64), [[0.1, 0.2], [0.3, 0.4]], np.full((2, 2), 1, np.int64), [NARROW.low] * 2],
)
def test_actions_reach_the_environments_uncast(backend: Backend, actions: Any) -> None:
    makers = make_factories(2, action_space=NARROW)
    theirs = SyncVectorEnv(makers)
    with ClusterEnv(makers, **backend) as ours:
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        assert_same(ours.step(actions), theirs.step(actions))


def test_a_call_returns_a_tuple_with_one_result_per_environment(envs: ClusterEnv) -> None:
    assert envs.call("describe") == ("I am world 0", "I am world 1", "I am world 2")
    assert envs.call("describe", "WE ARE", shout=True) == ("WE ARE WORLD 0", "WE ARE WORLD 1", "WE ARE WORLD 2")
    assert envs.call("twice_index") == envs.get_attr("twice_index") == (0, 2, 4)


@pytest.mark.parametrize("name", ["reset", "step", "close", "_setattr", "_check_spaces"])
def test_names_with_a_method_of_their_own_are_refused(envs: ClusterEnv, name: str) -> None:
    words = f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
    with pytest.raises(ValueError, match=re.escape(words)):
        envs.call(name)
    assert envs.call("twice_index") == (0, 2, 4)


def test_an_unknown_attribute_is_an_attribute_error(envs: ClusterEnv) -> None:
    error = error_of(lambda: envs.get_attr("nonesuch"))
    if envs.num_workers:
        assert isinstance(error, WorkerFailed)
        assert isinstance(error.__cause__, AttributeError)
    else:
        assert isinstance(error, AttributeError)
    assert "nonesuch" in str(error)


def test_attributes_are_read_and_set_through_wrappers(backend: Backend) -> None:
    def make() -> gym.Env[Any, Any]:
        return gym.wrappers.TimeLimit(gym.wrappers.PassiveEnvChecker(World()), 7)

    with ClusterEnv(make, 3, **backend) as envs:
        envs.set_attr("label", ["a", "b", "c"])
        assert envs.call("describe") == ("I am a", "I am b", "I am c")
        envs.set_attr("label", "all")
        assert envs.get_attr("label") == ("all",) * 3
        envs.set_attr("label", ([1], (2,), {"three": 3}))
        assert envs.get_attr("label") == ([1], (2,), {"three": 3})
        with pytest.raises(ValueError, match="Got `2` values for 3 environments"):
            envs.set_attr("label", ["a", "b"])


def test_render_returns_a_frame_per_environment(envs: ClusterEnv, theirs: SyncVectorEnv) -> None:
    assert_same(envs.render(), theirs.render())


def test_a_function_runs_on_the_chosen_environments_in_the_order_asked_for(backend: Backend) -> None:
    def rename(env: gym.Env[Any, Any]) -> str:
        world: Any = env.unwrapped
        world.label = world.label.upper()
        return str(world.describe())

    with ClusterEnv(make_factories(3), **backend) as envs:
        assert envs.apply(rename, [2, 0, -1]) == ("I am WORLD 2", "I am WORLD 0", "I am WORLD 2")
        assert envs.get_attr("label") == ("WORLD 0", "world 1", "WORLD 2")
        assert envs.apply(rename, []) == ()
        with pytest.raises(IndexError):
            envs.apply(rename, [3])
        with pytest.raises((WorkerFailed, AttributeError), match="no_such"):
            envs.apply(lambda env: env.no_such, [1])
        assert envs.apply(rename, [1]) == ("I am WORLD 1",)


def test_a_second_call_before_the_first_was_waited_for_is_refused(envs: ClusterEnv) -> None:
    starts: dict[str, Callable[[], None]] = {
        "reset": lambda: envs.reset_async(seed=1),
        "step": lambda: envs.step_async(NO_ACTIONS),
        "call": lambda: envs.call_async("describe"),
    }
    waits: dict[str, Callable[[], Any]] = {"reset": envs.reset_wait, "step": envs.step_wait, "call": envs.call_wait}
    for pending in starts:
        starts[pending]()
        for name in starts:
            words = f"Calling `{name}_async` while waiting for a pending call to `{pending}` to complete"
            with pytest.raises(AlreadyPendingCallError, match=re.escape(words)) as caught:
                starts[name]()
            assert caught.value.name == pending
        with pytest.raises(AlreadyPendingCallError, match="`set_attr`"):
            envs.set_attr("label", 1)
        waits[pending]()


def test_waiting_for_what_was_not_started_is_refused(envs: ClusterEnv) -> None:
    for name in ("reset", "step", "call"):
        words = f"Calling `{name}_wait` without any prior call to `{name}_async`."
        with pytest.raises(NoAsyncCallError, match=re.escape(words)) as caught:
            getattr(envs, f"{name}_wait")()
        assert caught.value.name == name
    envs.reset_async(seed=1)
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    envs.reset_wait(timeout=30)


def test_asynchronous_pairs_bring_what_the_plain_calls_bring(envs: ClusterEnv, theirs: SyncVectorEnv) -> None:
    envs.reset_async(seed=4, options={"purpose": "test"})
    assert_same(envs.reset_wait(timeout=30), theirs.reset(seed=4, options={"purpose": "test"}))
    envs.step_async(NO_ACTIONS)
    assert_same(envs.step_wait(timeout=30), theirs.step(NO_ACTIONS))
    envs.call_async("describe", "we", shout=True)
    assert envs.call_wait(timeout=30) == theirs.call("describe", "we", shout=True)


def test_after_close_every_operation_says_so_and_closing_again_is_fine(backend: Backend) -> None:
    envs = ClusterEnv(make_factories(3), **backend)
    envs.close()
    assert envs.closed
    envs.close()
    envs.close(timeout=1, terminate=True)
    operations: list[Callable[[], object]] = [
        envs.reset,
        envs.reset_async,
        envs.reset_wait,
        envs.step_wait,
        envs.call_wait,
        envs.render,
        lambda: envs.step(NO_ACTIONS),
        lambda: envs.step_async(NO_ACTIONS),
        lambda: envs.call("describe"),
        lambda: envs.get_attr("label"),
        lambda: envs.set_attr("label", 1),
        lambda: envs.np_random,
    ]
    for operation in operations:
        with pytest.raises(ClosedEnvironmentError, match="Trying to operate on `ClusterEnv`, after a call to `close"):
            operation()


def test_it_may_be_closed_while_a_call_is_under_way(backend: Backend) -> None:
    envs = ClusterEnv(make_factories(3), **backend)
    envs.reset_async(seed=1)
    envs.close()
    assert envs.closed


def test_as_a_context_manager_it_closes_and_lets_errors_through(backend: Backend) -> None:
    with pytest.raises(ZeroDivisionError), ClusterEnv([World], **{**backend, "num_workers": 0}) as envs:
        raise ZeroDivisionError
    assert envs.closed


def test_an_id_gives_spec_and_name(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 3, env_kwargs={"sutton_barto_reward": True}, **backend) as envs:
        assert repr(envs) == "ClusterEnv(CartPole-v1, num_envs=3)"
        assert envs.spec == gym.spec("CartPole-v1")
        envs.spec = gym.spec("Acrobot-v1")
        assert repr(envs) == "ClusterEnv(Acrobot-v1, num_envs=3)"
        envs.reset(seed=1)
        assert envs.step(NO_ACTIONS)[1].tolist() == [0.0, 0.0, 0.0], "env_kwargs reached the environments"


def test_a_spec_may_be_given_and_its_changes_count(backend: Backend) -> None:
    spec = deepcopy(gym.spec("CartPole-v1"))
    spec.max_episode_steps = 1
    with ClusterEnv(spec, 2, **backend) as envs:
        envs.reset(seed=1)
        assert envs.step([0, 1])[3].tolist() == [True, True]


def test_factories_alone_have_no_spec(envs: ClusterEnv) -> None:
    assert repr(envs) == "ClusterEnv(num_envs=3)"


@pytest.fixture
def registered() -> Iterator[str]:
    """An environment id known only to this process."""
    gym.register("OnlyHere-v0", entry_point=lambda **options: World(index=42, **options), max_episode_steps=3)
    yield "OnlyHere-v0"
    del gym.registry["OnlyHere-v0"]


def test_an_id_registered_only_on_the_head_works_on_workers(backend: Backend, registered: str) -> None:
    with ClusterEnv(registered, 2, env_kwargs={"longest_episode": 9}, **backend) as envs:
        assert envs.get_attr("index") == (42, 42)


def test_a_factory_may_use_an_id_registered_only_on_the_head(backend: Backend, registered: str) -> None:
    with ClusterEnv([lambda: gym.make(registered), lambda: gym.make(registered)], **backend) as envs:
        assert envs.get_attr("index") == (42, 42)


def test_make_vec_finds_it_through_a_vector_entry_point(backend: Backend) -> None:
    def make(**options: Any) -> ClusterEnv:
        num_envs = options.pop("num_envs")
        return ClusterEnv(lambda: World(**options), num_envs, **backend)

    gym.register("Vectorised-v0", vector_entry_point=make)
    try:
        envs = gym.make_vec("Vectorised-v0", num_envs=2, vectorization_mode="vector_entry_point", index=6)
    finally:
        del gym.registry["Vectorised-v0"]
    with envs.unwrapped as ours:  # type: ignore[attr-defined]  # make_vec promises only a VectorEnv
        assert isinstance(ours, ClusterEnv)
        assert ours.get_attr("index") == (6, 6)
        assert repr(envs) == "ClusterEnv(Vectorised-v0, num_envs=2)"


def test_closures_and_classes_made_on_the_spot_reach_the_workers(backend: Backend) -> None:
    secret = {"word": "heron"}

    class Local(World):
        def whisper(self) -> str:
            return f"{secret['word']} {self.index}"

    with ClusterEnv([lambda index=index: Local(index=index) for index in range(3)], **backend) as envs:  # type: ignore[misc]  # mypy cannot infer a lambda's default
        assert envs.call("whisper") == ("heron 0", "heron 1", "heron 2")


def test_shards_are_contiguous_and_workers_are_named_in_their_order(backend: Backend) -> None:
    class Placed(World):
        @property
        def pid(self) -> int:
            return os.getpid()

    with ClusterEnv([Placed] * 3, **backend) as envs:
        pids = envs.get_attr("pid")
        assert envs.num_workers == len(envs.worker_pids) == len(set(envs.worker_pids))
        places = list(dict.fromkeys(pids))
        assert places == (list(envs.worker_pids) or [os.getpid()])
        assert sorted(pids, key=places.index) == list(pids)


def test_by_default_there_are_workers_and_at_most_one_per_environment() -> None:
    with ClusterEnv("CartPole-v1", num_envs=2) as envs:
        assert 1 <= envs.num_workers <= 2
        assert len(envs.worker_pids) == envs.num_workers


def test_in_process_each_factory_is_called_once() -> None:
    count = itertools.count()
    with ClusterEnv(lambda: World(index=next(count)), 3, num_workers=0) as envs:
        assert envs.get_attr("index") == (0, 1, 2)


@pytest.mark.parametrize("copy", [True, False])
def test_observations_are_the_callers_own_only_with_copy(backend: Backend, copy: bool) -> None:
    with ClusterEnv(make_factories(3), copy=copy, **backend) as envs:
        first, _ = envs.reset(seed=1)
        second, third = [envs.step(NO_ACTIONS)[0] for _ in range(2)]
        assert not np.shares_memory(first, second), "what was seen last stays as it is while a step is under way"
        assert np.shares_memory(first, third) is not copy


class Reusing(gym.Env[Any, Any]):
    """Observes a sequence whose only array it changes with every step."""

    observation_space = spaces.Sequence(spaces.Box(0, 9, (1,), np.float32))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation = (np.zeros(1, np.float32),)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.observation[0][:] += 1
        return self.observation, 0.0, False, False, {}


def test_observations_without_a_fixed_size_are_the_callers_own_too(backend: Backend) -> None:
    with ClusterEnv(Reusing, 2, **backend) as envs:
        seen = [envs.reset()[0], *(envs.step(np.zeros(2, np.int64))[0] for _ in range(2))]
        assert [[row[0].item() for row in rows] for rows in seen] == [[0, 0], [1, 1], [2, 2]]
