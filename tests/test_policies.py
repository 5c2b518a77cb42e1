"""Policies in numpy, and what becomes a policy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import cloudpickle
import numpy as np
import pytest
from numpy.typing import NDArray

from clusterenv.adapters import as_policy
from clusterenv.errors import PolicyError
from clusterenv.policy import Categorical
from clusterenv.policy.distribution import Array, Distribution
from clusterenv.policy.policy import BasePolicy, Decision, FunctionPolicy, Policy, State, Tree, start_episodes


class Linear(BasePolicy):
    """What a user writes."""

    def __init__(self, seed: int = 0) -> None:
        self.matrix = np.random.default_rng(seed).standard_normal((4, 2)).astype(np.float32)

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution:
        assert isinstance(obs, np.ndarray)
        return Categorical(logits=obs @ self.matrix)

    def weights(self) -> dict[str, Array]:
        return {"matrix": self.matrix}


@pytest.fixture
def obs() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((64, 4)).astype(np.float32)


def test_a_users_policy_is_one_method_and_its_weights(obs: NDArray[np.float32]) -> None:
    policy = Linear()
    assert isinstance(policy, Policy)
    policy.seed(1)
    decision = policy.act(obs)
    assert isinstance(decision.action, np.ndarray)
    assert decision.action.shape == (64,)
    np.testing.assert_allclose(
        decision.extras["logprob"], policy.distribution(obs).log_prob(decision.action), rtol=1e-5, atol=1e-6
    )


def test_equal_seeds_give_equal_decisions_in_a_pickled_copy(obs: NDArray[np.float32]) -> None:
    policy = Linear()
    twin = pickle.loads(cloudpickle.dumps(policy))
    policy.seed(5)
    twin.seed(5)
    for _ in range(3):
        np.testing.assert_array_equal(policy.act(obs).action, twin.act(obs).action)


def test_loading_writes_in_place_and_changes_the_stamp() -> None:
    policy, other = Linear(0), Linear(1)
    matrix, stamp = policy.matrix, policy.stamp()
    assert policy.stamp() == stamp
    policy.load(other.weights())
    assert policy.matrix is matrix
    np.testing.assert_array_equal(matrix, other.matrix)
    assert policy.stamp() != stamp
    with pytest.raises(PolicyError, match="missing"):
        policy.load({})


def test_a_policy_without_act_or_distribution_says_so(obs: NDArray[np.float32]) -> None:
    with pytest.raises(PolicyError, match="act"):
        BasePolicy().act(obs)


def test_a_per_call_value_nobody_reads_is_an_error(obs: NDArray[np.float32]) -> None:
    with pytest.raises(PolicyError, match="epsilon"):
        Linear().act(obs, call={"epsilon": 0.1})
    with pytest.raises(PolicyError, match="temperature"):
        Linear().act(obs, call={"temperature": "hot"})


def test_a_function_gets_what_its_parameters_name(obs: NDArray[np.float32]) -> None:
    def plain(obs: Array) -> Array:
        return np.zeros(len(obs), np.int64)

    def random(obs: Array, rng: np.random.Generator) -> Array:
        return rng.integers(2, size=len(obs))

    def eager(obs: Array, epsilon: float, bonus: int = 1) -> Array:
        return np.full(len(obs), epsilon + bonus)

    def greedy(obs: Array, **call: float) -> Decision:
        return Decision(np.zeros(len(obs)), {"sum": np.full(len(obs), sum(call.values()))})

    np.testing.assert_array_equal(FunctionPolicy(plain).act(obs).action, 0)
    one, two = FunctionPolicy(random), FunctionPolicy(random)
    one.seed(3)
    two.seed(3)
    np.testing.assert_array_equal(one.act(obs).action, two.act(obs).action)
    decision = copy.deepcopy(FunctionPolicy(eager)).act(obs, call={"epsilon": 0.5})  # As num_workers=0 copies it.
    np.testing.assert_array_equal(decision.action, 1.5)
    assert FunctionPolicy(greedy).act(obs, call={"a": 1.0, "b": 2.0}).extras["sum"][0] == 3.0
    with pytest.raises(PolicyError, match="needs epsilon"):
        FunctionPolicy(eager).act(obs)
    with pytest.raises(PolicyError, match="takes no epsilom"):
        FunctionPolicy(eager).act(obs, call={"epsilon": 0.5, "epsilom": 0.5})


def test_a_function_policy_has_no_weights_and_never_changes() -> None:
    policy = FunctionPolicy(lambda obs: obs)
    assert policy.weights() == {}
    assert policy.stamp() == policy.stamp()
    assert policy.distribution(np.zeros((1, 1))) is None
    assert policy.initial_state(3) is None


def test_only_rows_that_start_an_episode_get_their_initial_state() -> None:
    state: State = {"h": np.ones((3, 2), np.float32)}
    initial: State = {"h": np.full((3, 2), 7.0, np.float32)}
    fresh = start_episodes(state, initial, np.array([False, True, False]))
    np.testing.assert_array_equal(fresh["h"], [[1, 1], [7, 7], [1, 1]])
    assert (state["h"] == 1).all()
    assert start_episodes(state, initial, np.zeros(3, np.bool_)) is state


def test_what_is_a_policy_is_passed_through_and_what_is_callable_is_wrapped() -> None:
    policy = Linear()
    assert as_policy(policy) is policy
    assert isinstance(as_policy(lambda obs: obs), FunctionPolicy)
    with pytest.raises(PolicyError, match="instance"):
        as_policy(Linear)
    with pytest.raises(PolicyError, match="not a policy"):
        as_policy(3)


def test_a_numpy_agent_does_not_load_torch() -> None:
    code = (
        "import sys; from clusterenv.adapters import as_policy; as_policy(lambda obs: obs); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torch']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
