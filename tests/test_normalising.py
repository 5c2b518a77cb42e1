"""Normalised observations and rewards: one set of statistics, updated by the learner, that travels with the weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clusterenv import ClusterEnv
from clusterenv.adapters.torch import Normaliser, RewardScaler
from clusterenv.errors import ConfigError
from tests.zoo import DISCRETE, VECTOR, AnySpace, Base


class Normalising(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(Normaliser(6), nn.Linear(6, 16), nn.Tanh())


def test_statistics_are_those_of_all_rows_however_they_came() -> None:
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((1000, 3)) * [1.0, 20.0, 0.01] + [0.0, 500.0, -3.0]).astype(np.float32)
    normalise = Normaliser(3)
    for part in (rows[:1].reshape(1, 1, 3), rows[1:10], rows[10:].reshape(2, -1, 3), rows[:0]):
        normalise.update(part)
    np.testing.assert_allclose(normalise.mean, rows.astype(np.float64).mean(0), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(normalise.var, rows.astype(np.float64).var(0), rtol=1e-6, atol=1e-8)
    scaled = normalise(torch.as_tensor(rows))
    np.testing.assert_allclose(scaled.mean(0), np.zeros(3), atol=1e-2)
    np.testing.assert_allclose(scaled.std(0), np.ones(3), rtol=1e-2)
    assert normalise(torch.full((1, 3), 1e9)).max() == 10.0


def test_a_saved_normaliser_goes_on_where_it_was() -> None:
    one, two = Normaliser(2), Normaliser(2)
    one.update(np.arange(10.0).reshape(5, 2))
    two.load_state_dict(one.state_dict())
    for each in (one, two):
        each.update(np.ones((3, 2)))
    assert torch.equal(one(torch.ones(1, 2)), two(torch.ones(1, 2)))


@pytest.mark.parametrize(
    "rows", [np.full((2, 3), np.nan), np.full((2, 3), np.inf), np.zeros((6, 2)), np.zeros(2)], ids=str
)
def test_what_would_spoil_the_statistics_is_refused(rows: Any) -> None:
    normalise = Normaliser(3)
    with pytest.raises(ConfigError, match=r"Normaliser\.update"):
        normalise.update(rows)
    assert torch.equal(normalise.mean, torch.zeros(3, dtype=torch.float64))


def test_rewards_of_other_environments_are_refused_and_tensors_taken() -> None:
    scale = RewardScaler(2, gamma=0.9)
    assert scale(torch.ones(3, 2), torch.zeros(3, 2)).shape == (3, 2)
    with pytest.raises(ConfigError, match="2 environments"):
        scale(np.ones((3, 4)), np.zeros((3, 4), np.bool_))
    with pytest.raises(ConfigError, match="gamma"):
        RewardScaler(2, gamma=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_normalise_by_the_learners_newest_statistics(num_workers: int) -> None:
    torch.manual_seed(0)
    agent: Any = Normalising()
    with ClusterEnv(functools.partial(AnySpace, VECTOR, DISCRETE), 4, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        for update in range(3):
            rollout = envs.rollout(agent, 5)
            assert (rollout.ages == 0).all()
            assert envs.stats["fast_path"] == 1
            with torch.no_grad():
                obs, actions = torch.as_tensor(rollout.obs).flatten(0, 1), torch.as_tensor(rollout.actions).flatten()
                _, logprob, _, value = agent.get_action_and_value(obs, actions)
            np.testing.assert_allclose(rollout.logprob.ravel(), logprob, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(rollout.value.ravel(), value[:, 0], rtol=1e-4, atol=1e-6)
            agent.body[0].update(10.0**update * rollout.obs + 3.0)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    rng = np.random.default_rng(0)
    rewards, ends = rng.standard_normal((40, 2)), rng.random((40, 2)) < 0.2
    scale = RewardScaler(2, gamma=0.9)
    first, second = scale(rewards[:25], ends[:25]), scale(rewards[25:], ends[25:])
    sums, ahead = np.zeros((40, 2)), np.zeros(2)
    for t in range(40):
        sums[t] = 0.9 * ahead + rewards[t]
        ahead = np.where(ends[t], 0.0, sums[t])
    np.testing.assert_allclose(first, rewards[:25] / sums[:25].std(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(second, rewards[25:] / sums.std(), rtol=1e-4, atol=1e-6)
