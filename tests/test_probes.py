"""How a worker says how it acted, and how far that is from the newest policy: probes, forms, and pools of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from clusterenv.errors import PolicyError, WireError
from clusterenv.policy import Categorical, DiagonalGaussian, divergence
from clusterenv.policy.distribution import Array, Distribution
from clusterenv.policy.policy import BasePolicy, FunctionPolicy, State, Tree
from clusterenv.policy.pool import Pool, Sample
from clusterenv.policy.probes import Form, Probes, pack, spread, unpack
from tests.policies import Linear
from tests.script import run_script
from tests.test_divergence import MAKERS

Floats = NDArray[np.float32]
N = 16  # The states of MAKERS' distributions.


class Fixed(BasePolicy):
    """Acts in state i as a given distribution does."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._per_state = {name: len(array) == N for name, array in distribution.to_arrays()[1].items()}

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution:
        assert isinstance(obs, np.ndarray)
        arrays = self._distribution.to_arrays()[1]
        chosen = {name: array[obs[:, 0]] if self._per_state[name] else array for name, array in arrays.items()}
        return self._distribution.with_arrays(chosen)


class Remembering(BasePolicy):
    """Acts by its recurrent state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def distribution(self, obs: Tree, state: State | None = None) -> Distribution:
        assert state is not None
        return Categorical(self.factor * state["memory"])


def first(leaves: Sequence[Array]) -> Tree:
    return leaves[0]


def form_of(policy: BasePolicy, obs: Tree, state: State | None = None) -> Form:
    form = Form.of(policy, obs, state)
    assert form is not None
    return form


def sample_of(policy: BasePolicy, obs: Array) -> Sample:
    distribution = policy.distribution(obs)
    assert distribution is not None
    return Sample([obs], {}, distribution.to_arrays()[1])


@pytest.mark.parametrize("name", MAKERS)
def test_a_pool_measures_exactly_the_divergence_on_its_rows_for_every_family(name: str) -> None:
    rng = np.random.default_rng(3)
    own, newest = MAKERS[name](rng), MAKERS[name](rng)
    states = np.arange(N)[:, None]
    pool = Pool(form_of(Fixed(own), states))
    for part in (states[:5], states[5:6], states[6:]):  # As several workers say it, a few rows each.
        pool.add(sample_of(Fixed(own), part), at_most=512)
    np.testing.assert_allclose(pool.diverges_from(Fixed(newest), first), divergence(own, newest).mean(), rtol=1e-6)
    assert pool.diverges_from(Fixed(own), first) == pytest.approx(0.0, abs=1e-9)


def test_a_recurrent_policy_is_compared_in_the_states_in_which_it_acted() -> None:
    memory = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    obs = np.zeros((8, 1), np.float32)
    form = form_of(Remembering(1.0), obs, {"memory": memory})
    pool = Pool(form)
    pool.add(Sample([obs], {"memory": memory}, {"logits": memory}), at_most=512)
    expected = divergence(Categorical(memory), Categorical(2 * memory)).mean()
    assert pool.diverges_from(Remembering(2.0), first) == pytest.approx(expected)


def test_a_pool_keeps_the_newest_rows_and_no_more_than_it_may() -> None:
    agent = Linear()
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    pool = Pool(form_of(agent, rows))
    for _ in range(20):
        pool.add(sample_of(agent, np.full((7, 4), -9.0, np.float32)), at_most=10)
        assert len(pool) <= 10
    pool.add(sample_of(agent, rows), at_most=10)
    other = Linear(1)
    expected = divergence(agent.distribution(rows), other.distribution(rows)).mean()
    assert pool.diverges_from(other, first) == pytest.approx(expected)
    pool.trim(3)
    expected = divergence(agent.distribution(rows[7:]), other.distribution(rows[7:])).mean()
    assert pool.diverges_from(other, first) == pytest.approx(expected)
    assert pool.row_bytes == 4 * 4 + 2 * 4


def test_512_rows_estimate_a_divergence_at_the_threshold_within_five_percent() -> None:
    rng = np.random.default_rng(4)
    obs = (1 + 0.5 * rng.normal(size=(8192, 4))).astype(np.float32)
    own, newest = Linear(0), Linear(0)
    newest.matrix[:, 0] += 0.16
    truth = divergence(own.distribution(obs), newest.distribution(obs)).mean()
    assert 0.02 < truth < 0.1
    errors = []
    for _ in range(200):
        pool = Pool(form_of(own, obs))
        for half in np.split(obs, 2):  # Two workers.
            pool.add(sample_of(own, half[spread(256, len(half), rng)]), at_most=512)
        errors.append(pool.diverges_from(newest, first) / truth - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.05
    assert abs(np.mean(errors)) < 0.01


def test_training_that_diverged_to_nan_is_reported_when_policies_are_compared() -> None:
    agent, newest = Linear(), Linear()
    obs = np.ones((4, 4), np.float32)
    pool = Pool(form_of(agent, obs))
    pool.add(sample_of(agent, obs), at_most=512)
    newest.matrix[0, 0] = np.nan
    with pytest.raises(PolicyError, match="diverged"):
        pool.diverges_from(newest, first)


def test_numbers_that_overflow_are_infinitely_far() -> None:
    class Wide(BasePolicy):
        def distribution(self, obs: Tree, state: State | None = None) -> Distribution:
            return DiagonalGaussian(np.zeros((len(obs), 1)), np.full(1, -400.0))

    obs = np.zeros((2, 1), np.float32)
    pool = Pool(form_of(Wide(), obs))
    pool.add(Sample([obs], {}, {"mean": np.full((2, 1), 1e300), "log_std": np.zeros((2, 1))}), at_most=512)
    assert pool.diverges_from(Wide(), first) == np.inf


def test_a_policy_without_distribution_has_no_form() -> None:
    assert Form.of(FunctionPolicy(lambda obs: obs), np.zeros((2, 4)), None) is None


def test_deviations_have_a_row_for_each_state_even_where_they_are_the_same() -> None:
    gaussian = Fixed(DiagonalGaussian(np.zeros((N, 2), np.float32), np.zeros(2, np.float32)))
    assert form_of(gaussian, np.arange(N)[:, None]).per_state == {"mean", "log_std"}


@given(st.integers(1, 100), st.integers(0, 300), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rows_are_spread_evenly_and_none_is_chosen_twice(count: int, size: int, seed: int) -> None:
    chosen = spread(count, size, np.random.default_rng(seed))
    assert len(chosen) == min(count, size)
    assert (np.diff(chosen) > 0).all()
    for index, place in enumerate(chosen.tolist()):
        assert index * size // len(chosen) <= place < (index + 1) * size // len(chosen)


def say(change: dict[str, Any]) -> Any:
    """Read what an honest worker says of 4 of 20 rows, but for a change."""
    agent = Linear()
    obs = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    arrays = agent.distribution(obs).to_arrays()[1]
    said = pack(Probes(np.array([0, 3, 7, 19], np.uint32), "categorical", arrays, {}))
    return unpack(said | change, form_of(agent, obs), num_rows=20, at_most=4, states={})


def test_what_an_honest_worker_says_is_read_as_it_was_said() -> None:
    probes = say({})
    assert probes.rows.tolist() == [0, 3, 7, 19]
    assert probes.arrays["logits"].shape == (4, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": np.array([0, 3, 7, 20], np.uint32)},
        {"rows": np.array([0, 3, 3, 19], np.uint32)},
        {"rows": np.array([3, 0, 7, 19], np.uint32)},
        {"rows": np.array([0, 3, 7, 19], np.int64)},
        {"rows": np.arange(5, dtype=np.uint32), "arrays": {"logits": np.zeros((5, 2), np.float32)}},
        {"rows": np.arange(0, dtype=np.uint32), "arrays": {"logits": np.zeros((0, 2), np.float32)}},
        {"family": "q_values"},
        {"arrays": {"logits": np.zeros((3, 2), np.float32)}},
        {"arrays": {"logits": np.full((4, 2), np.nan, np.float32)}},
        {"arrays": {"logits": np.full((4, 2), -np.inf, np.float32)}},
        {"arrays": []},
        {"states": {"memory": np.zeros((4, 1))}},
        {"unheard_of": 1},
    ],
    ids=str,
)
def test_what_no_honest_worker_says_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="malformed"):
        say(change)


EVALUATE = """
import os
from pathlib import Path

import numpy as np

from clusterenv.adapters.torch.policy import TorchPolicy
from tests.torch_agents import Discrete


def ticks_of_others():
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    fields = [(task / "stat").read_text().rsplit(")", 1)[1].split() for task in tasks]
    return sum(int(each[11]) + int(each[12]) for each in fields)


obs = np.random.default_rng(0).normal(size=(512, 4)).astype(np.float32)
policy = TorchPolicy(Discrete())
policy.look_at(obs[:64])
assert policy.is_fast
whole = policy.distribution(obs)
parts = [policy.distribution(obs[start : start + 32]) for start in range(0, 512, 32)]
np.testing.assert_allclose(whole.logits, np.concatenate([part.logits for part in parts]), rtol=1e-4, atol=1e-6)
before = ticks_of_others()
for _ in range(200):
    policy.distribution(obs)
print(ticks_of_others() - before)
"""


def test_comparing_small_networks_keeps_no_core_busy_that_workers_could_use() -> None:
    """Threads of numpy, once woken by a large product, spin for a while in case there is another."""
    pytest.importorskip("torch")
    (ticks,) = run_script(EVALUATE, deadline_s=120.0)
    assert ticks <= 2
