"""Policies on workers: the right weights, the right probabilities, no more traffic than the sync rule wants."""

from __future__ import annotations

import logging
import os
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, NeverSync, PeriodicSync, Rollout
from clusterenv.errors import PolicyError, WorkerFailed
from tests.agents import Agent
from tests.conftest import Backend
from tests.policies import Forgetful, Linear, Table


def assert_equal_rollouts(left: Rollout, right: Rollout) -> None:
    for name in ("obs", "actions", "rewards", "terminations", "truncations", "valid", "next_obs", "logprob", "value"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name


def test_the_same_seeds_give_the_same_rollouts_twice(backend: Backend) -> None:
    runs = []
    for _ in range(2):
        agent = Linear()
        with ClusterEnv("CartPole-v1", 5, **backend) as envs:
            envs.reset(seed=7)
            first = envs.rollout(agent, 40)
            agent.nudge()
            runs.append([first, envs.rollout(agent, 20)])
    for left, right in zip(*runs, strict=True):
        assert_equal_rollouts(left, right)


def test_a_new_seed_starts_the_policys_choices_anew(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        envs.reset(seed=7)
        first = envs.rollout(agent, 30)
        envs.reset(seed=7)
        again = envs.rollout(agent, 30)
        envs.reset(seed=8)
        other = envs.rollout(agent, 30)
    assert_equal_rollouts(first, again)
    assert not np.array_equal(first.actions, other.actions)


def test_logprobs_and_values_are_those_of_the_version_that_acted(backend: Backend) -> None:
    agent = Linear()
    history = {}
    with ClusterEnv("CartPole-v1", 6, sync=AdaptiveSync(threshold=0.02, plateau=None), **backend) as envs:
        envs.reset(seed=1)
        for version in range(1, 8):
            history[version] = deepcopy(agent)
            rollout = envs.rollout(agent, 16)
            assert (rollout.versions + rollout.ages == version).all()
            for env_index, behaviour in enumerate(rollout.versions):
                logprob, value = history[behaviour].evaluate(rollout.obs, rollout.actions)
                np.testing.assert_allclose(rollout.logprob[:, env_index], logprob[:, env_index], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(
                    rollout.value[:, env_index].ravel(), value[:, env_index].ravel(), rtol=1e-4, atol=1e-5
                )
            agent.nudge(0.1)
        assert 1 < rollout.versions.max() <= 7
        assert envs.stats["pulls"] < 7 * max(1, envs.num_workers)


def test_with_every_update_actions_have_the_head_policys_probabilities(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 32, sync=EveryUpdate(), **backend) as envs:
        envs.reset(seed=3)
        envs.rollout(agent, 8)
        agent.nudge(0.5)
        rollout = envs.rollout(agent, 250)
    probabilities = np.exp(agent.evaluate(rollout.obs, np.ones_like(rollout.actions))[0])
    # Sum of independent Bernoulli draws: asymptotically normal; fixed seeds, so this either always passes or never.
    surprise = (rollout.actions - probabilities).sum() / np.sqrt((probabilities * (1 - probabilities)).sum())
    assert abs(surprise) < 3.0
    tilted = (rollout.actions - np.clip(probabilities + 0.05, 0, 1)).sum() / np.sqrt(
        (probabilities * (1 - probabilities)).sum()
    )
    assert abs(tilted) > 3.0  # The test is sharp enough to see five per cent.


def test_a_step_with_an_agent_tells_what_it_decided(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 5, sync=EveryUpdate(), **backend) as envs:
        obs, _ = envs.reset(seed=1)
        for version in (1, 2, 3):
            following, rewards, _, _, infos = envs.step(agent)
            logprob, value = agent.evaluate(obs, infos["action"])
            np.testing.assert_allclose(infos["logprob"], logprob, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(infos["value"].ravel(), value.ravel(), rtol=1e-4, atol=1e-5)
            assert infos["policy_version"].tolist() == [version] * 5
            assert rewards.tolist() == [1.0] * 5
            obs = following
            agent.nudge()


def test_steps_with_an_agent_pull_only_when_it_has_diverged(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 8, sync=AdaptiveSync(threshold=0.01, plateau=None), **backend) as envs:
        envs.reset(seed=1)
        envs.step(agent)
        agent.nudge(0.0001)
        *_, infos = envs.step(agent)
        assert (infos["policy_version"] == 1).all()
        agent.nudge(30.0)
        *_, infos = envs.step(agent)
        assert (infos["policy_version"] == 3).all()


@pytest.mark.parametrize(
    ("rule", "versions"),
    [
        (EveryUpdate(), [1, 2, 3, 4, 5, 6]),
        (PeriodicSync(3), [1, 1, 1, 4, 4, 4]),
        (NeverSync(), [1, 1, 1, 1, 1, 1]),
        (AdaptiveSync(threshold=1e6, plateau=None, max_lag=4), [1, 1, 1, 1, 5, 5]),
        (AdaptiveSync(threshold=1e-9), [1, 2, 3, 4, 5, 6]),
    ],
    ids=str,
)
def test_each_rule_brings_the_versions_it_promises(backend: Backend, rule: Any, versions: list[int]) -> None:
    agent = Linear()
    seen = []
    with ClusterEnv("CartPole-v1", 4, sync=rule, **backend) as envs:
        envs.reset(seed=1)
        for _ in versions:
            rollout = envs.rollout(agent, 5)
            seen.append(int(rollout.versions[0]))
            assert len(set(rollout.versions.tolist())) == 1
            agent.nudge()
        workers = max(1, envs.num_workers)
        assert envs.stats["pulls"] == len(set(versions)) * workers
        assert envs.stats["updates"] == len(versions)
        assert envs.stats["bytes_weights"] == envs.stats["pulls"] * 128
        assert (envs.stats["bytes_checks"] > 0) == isinstance(rule, AdaptiveSync)
    assert seen == versions


def test_unchanged_weights_are_no_new_version_and_are_not_measured_again(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, sync=AdaptiveSync(threshold=1e6, plateau=None), **backend) as envs:
        for _ in range(3):
            envs.rollout(agent, 128)
        assert envs.stats["updates"] == 1
        agent.nudge()
        for _ in range(3):
            envs.rollout(agent, 128)
        assert envs.stats["updates"] == 2
        assert envs.stats["checks"] == 1  # Once for all workers that hold the same version.


def test_publish_offers_weights_whose_change_cannot_be_noticed(backend: Backend) -> None:
    policy = Table()
    with ClusterEnv("CartPole-v1", 4, sync=EveryUpdate(), **backend) as envs:
        envs.rollout(policy, 2)
        policy.logits[:] = [-1000.0, 1000.0]
        assert (envs.rollout(policy, 20).versions == 1).all()
        envs.publish(policy)
        rollout = envs.rollout(policy, 20)
        assert (rollout.versions == 2).all()
        assert (rollout.actions == 1).all()


def test_weights_that_no_longer_fit_are_a_clear_error(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 2, sync=EveryUpdate(), **backend) as envs:
        envs.rollout(agent, 2)
        agent.critic = np.zeros(5, np.float32)
        with pytest.raises(PolicyError, match=r"critic: expected float32\[4\], got float32\[5\]"):
            envs.rollout(agent, 2)


def test_a_torch_agent_acts_and_learns_on_workers(backend: Backend) -> None:
    torch.manual_seed(0)
    agent = Agent()
    with ClusterEnv("CartPole-v1", 4, sync=EveryUpdate(), **backend) as envs:
        envs.reset(seed=1)
        for version in (1, 2, 3):
            rollout = envs.rollout(agent, 20)
            obs, actions = torch.from_numpy(rollout.obs), torch.from_numpy(rollout.actions)
            _, logprob, _, value = agent.get_action_and_value(obs, actions)
            np.testing.assert_allclose(rollout.logprob, logprob.detach(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rollout.value.ravel(), value.detach().ravel(), rtol=1e-4, atol=1e-5)
            assert (rollout.versions == version).all()
            agent.zero_grad()
            logprob.mean().backward()  # type: ignore[no-untyped-call]  # torch's
            with torch.no_grad():
                for parameter in agent.actor.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad)


def test_after_weights_that_could_not_be_sent_the_next_rollout_is_labelled_truly(backend: Backend) -> None:
    agent = Linear()
    good = agent.critic
    with ClusterEnv("CartPole-v1", 2, sync=EveryUpdate(), **backend) as envs:
        envs.rollout(agent, 2)
        agent.critic = np.zeros(5, np.float32)
        with pytest.raises(PolicyError):
            envs.rollout(agent, 2)
        agent.critic = good
        agent.nudge()
        rollout = envs.rollout(agent, 4)
        np.testing.assert_allclose(
            rollout.logprob, agent.evaluate(rollout.obs, rollout.actions)[0], rtol=1e-4, atol=1e-5
        )
        assert (rollout.ages == 0).all()


def test_after_an_agent_that_fails_on_one_worker_the_old_one_acts_everywhere(remote: Backend) -> None:
    def picky(obs: Any) -> Any:
        if len(obs) == 1:
            raise ValueError("not for one environment alone")
        return np.ones(len(obs), np.int64)

    def zeros(obs: Any) -> Any:
        return np.zeros(len(obs), np.int64)

    with ClusterEnv("CartPole-v1", 3, **remote) as envs:
        envs.rollout(zeros, 2)
        with pytest.raises(WorkerFailed, match="not for one environment alone"):
            envs.rollout(picky, 2)
        assert (envs.rollout(zeros, 2).actions == 0).all()


def test_changing_agents_leaks_no_memory_or_descriptors(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        agents = Linear(1), Linear(2)
        for agent in agents:
            envs.rollout(agent, 2)
        before = len(os.listdir("/proc/self/fd"))
        for agent in agents * 3:
            envs.rollout(agent, 2)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_recurrent_policy_that_returns_no_state_is_refused(backend: Backend) -> None:
    with (
        ClusterEnv("CartPole-v1", 2, **backend) as envs,
        pytest.raises((PolicyError, WorkerFailed), match=r"act\(\) must return Decision"),
    ):
        envs.rollout(Forgetful(), 2)


def test_divergence_is_unknown_where_it_was_not_measured() -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 2, num_workers=0, sync=PeriodicSync(5)) as envs:
        assert (envs.rollout(agent, 2).divergences == 0).all()
        agent.nudge()
        assert np.isnan(envs.rollout(agent, 2).divergences).all()


def test_another_agent_may_take_over_at_any_time(backend: Backend) -> None:
    first, second = Linear(1), Linear(2)
    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        envs.reset(seed=1)
        for agent in (first, second, first):
            rollout = envs.rollout(agent, 4)
            np.testing.assert_allclose(
                rollout.logprob, agent.evaluate(rollout.obs, rollout.actions)[0], rtol=1e-4, atol=1e-5
            )


def test_values_given_with_a_call_reach_the_policy(backend: Backend) -> None:
    def constant(obs: Any, choice: int) -> Any:
        return np.full(len(obs), choice)

    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        envs.reset(seed=1)
        assert (envs.rollout(constant, 3, values={"choice": 1}).actions == 1).all()
        assert (envs.rollout(constant, 3, values={"choice": 0}).actions == 0).all()
        assert envs.step(constant, values={"choice": 1})[4]["action"].tolist() == [1] * 4
        with pytest.raises(TypeError, match="values="):
            envs.step(np.zeros(4, np.int64), values={"choice": 1})


def test_stats_are_plain_numbers_and_the_summary_says_what_was_saved(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, sync=PeriodicSync(5), **backend) as envs:
        for _ in range(10):
            rollout = envs.rollout(agent, 5)
            agent.nudge()
        assert all(isinstance(value, int | float) for value in envs.stats.values())
        assert envs.stats["env_steps"] == 200
        assert rollout.stats["pulls"] == 0
        assert 0 <= rollout.stats["worker_idle_share"] <= 1
        assert "80% saved" in envs.summary()


def test_the_trap_is_named_once_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, num_workers=0, sync=AdaptiveSync(threshold=100.0, max_lag=2)) as envs:
        for _ in range(12):
            envs.rollout(agent, 4)
            agent.nudge(0.01)
    assert caplog.text.count("AdaptiveSync(max_lag=...)") == 1
    assert "decoupled objective" in caplog.text


def test_without_a_rule_every_rollout_is_made_with_the_newest_weights(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        for _ in range(3):
            rollout = envs.rollout(agent, 3)
            assert (rollout.ages == 0).all()
            np.testing.assert_allclose(
                rollout.logprob, agent.evaluate(rollout.obs, rollout.actions)[0], rtol=1e-4, atol=1e-5
            )
            agent.nudge(0.0001)


def test_actions_of_the_wrong_shape_are_a_policy_error_wherever_the_policy_runs(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **backend) as envs, pytest.raises(PolicyError, match="shape"):
        envs.rollout(lambda obs: np.zeros(1, np.int64), 3)
