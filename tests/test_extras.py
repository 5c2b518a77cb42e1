"""Rollouts hold the extras that were asked for, as arrays, tensors or a TensorDict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clusterenv import ClusterEnv
from clusterenv.errors import ConfigError, PolicyError, WorkerFailed
from tests.conftest import Backend
from tests.policies import Linear


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1))

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs: Any = torch.distributions.Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def nudge(agent: nn.Module) -> None:
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.1)


def test_only_what_is_asked_for_is_sent_computed_and_synchronised(backend: Backend) -> None:
    agent = Agent()
    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        envs.reset(seed=1)
        spent = []
        for extras in (None, ("logprob",)):
            envs.rollout(agent, 4, extras=extras)
            nudge(agent)
            before = envs.stats["bytes_weights"]
            rollout = envs.rollout(agent, 4, extras=extras)
            spent.append(envs.stats["bytes_weights"] - before)
            assert (rollout.ages == 0).all()
            with torch.no_grad():
                logprob = agent.get_action_and_value(torch.from_numpy(rollout.obs), torch.from_numpy(rollout.actions))[
                    1
                ]
            np.testing.assert_allclose(rollout.logprob, logprob, rtol=1e-4, atol=1e-4)
        assert list(rollout.extras) == ["logprob"]
        assert spent[1] < spent[0] / 10, "nobody asked for the critic"
        assert list(envs.rollout(agent, 4, extras=()).extras) == []


def test_any_policys_extras_can_be_chosen_in_streams_too(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        with envs.stream(agent, 3, extras=["value"]) as stream:
            assert list(next(stream).extras) == ["value"]
        agent.nudge()
        rollout = envs.rollout(agent, 3, extras=["value"])
        np.testing.assert_allclose(rollout.value, agent.evaluate(rollout.obs, rollout.actions)[1], rtol=1e-4, atol=1e-5)


def test_extras_that_do_not_exist_are_named() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs:
        with pytest.raises((PolicyError, WorkerFailed), match=r"asks for entropy.*returns: logprob, value"):
            envs.rollout(Linear(), 3, extras=("entropy",))
        with pytest.raises(ConfigError, match=r"\('logprob',\)"):
            envs.rollout(Linear(), 3, extras="logprob")


def test_tensors_share_the_rollouts_memory() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs:
        rollout = envs.rollout(Linear(), 5)
    tensors = rollout.to_torch()
    assert isinstance(tensors.obs, torch.Tensor)
    rollout.obs[0, 0, 0] = 7.0
    assert tensors.obs[0, 0, 0] == 7.0
    assert tensors.logprob.shape == tensors.rewards.shape == (5, 2)
    assert tensors.valid.dtype == torch.bool
    assert tensors.num_steps == 5
    assert tensors.episodes is rollout.episodes


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_tensordict_has_what_each_action_led_to(mode: str) -> None:
    pytest.importorskip("tensordict")
    with ClusterEnv("CartPole-v1", 3, num_workers=0, autoreset_mode=mode) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Linear(), 60)
    data = rollout.to_tensordict()
    assert data.batch_size == (60, 3)
    assert data["next", "reward"].shape == data["next", "done"].shape == (60, 3, 1)
    valid = torch.from_numpy(rollout.valid)
    np.testing.assert_array_equal(data["next", "observation"][valid], rollout.transitions().next_obs)
    np.testing.assert_array_equal(data["logprob"], rollout.logprob)
