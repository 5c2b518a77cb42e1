"""Action masks in infos reach policies on workers, and rollouts; outputs that are wrong are named."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv import BasePolicy, ClusterEnv, Decision
from clusterenv.adapters.torch import TorchPolicy
from clusterenv.errors import PolicyError, WorkerFailed
from clusterenv.policy import Categorical
from tests.conftest import Backend


class Masked(gym.Env[Any, Any]):
    """Allows one action at a time, which follows from the step; any other is an error."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._allowed = int(self.np_random.integers(5))
        self._steps = 0
        return self._look()

    def step(self, action: Any) -> Any:
        assert action == self._allowed, "a forbidden action"
        self._allowed = (self._allowed + 1) % 5
        self._steps += 1
        obs, info = self._look()
        return obs, 1.0, self._steps == 4, False, info

    def _look(self) -> Any:
        mask = np.zeros(5, np.int8)
        mask[self._allowed] = 1
        return np.full(2, self._allowed / 5, np.float32), {"action_mask": mask}


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(2, 5), nn.Linear(2, 1)

    def get_action_and_value(self, x: Any, action: Any = None, action_mask: Any = None) -> Any:
        logits = self.actor(x)
        if action_mask is not None:
            logits = logits.masked_fill(~action_mask, -1e9)
        probs: Any = torch.distributions.Categorical(logits=logits)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class NeedsMask(Agent):
    def get_action_and_value(self, x: Any, action_mask: Any, action: Any = None) -> Any:  # type: ignore[override]  # as users do
        return super().get_action_and_value(x, action, action_mask)


class Own(BasePolicy):
    takes = frozenset({"action_mask"})

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        return Decision(call["action_mask"].argmax(axis=1), {})


def by_function(obs: Any, action_mask: Any) -> Any:
    return action_mask.argmax(axis=1)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_masks_in_infos_reach_the_policy_and_the_rollout(num_workers: int, mode: str) -> None:
    with ClusterEnv(Masked, 3, num_workers=num_workers, autoreset_mode=mode) as envs:
        for agent in (Agent(), NeedsMask(), Own(), by_function):
            envs.reset(seed=1)
            for _ in range(2):
                rollout = envs.rollout(agent, 9)
                assert rollout.action_mask.shape == (9, 3, 5)
                chosen = np.take_along_axis(rollout.action_mask, rollout.actions[..., None], axis=2)[..., 0]
                assert (chosen[rollout.valid] == 1).all()
                assert (rollout.action_mask.argmax(axis=2) == np.rint(rollout.obs[..., 0] * 5))[rollout.valid].all()
            infos = envs.step(agent)[4]
            assert infos["action_mask"].shape == (3, 5)
            assert (envs.rollout(agent, 3).action_mask[0] == infos["action_mask"]).all()


def test_a_policy_that_takes_no_masks_is_left_alone_and_the_rollout_has_them() -> None:
    with ClusterEnv(Masked, 2, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(lambda obs: np.rint(obs[:, 0] * 5).astype(np.int64), 5)
        assert rollout.action_mask.shape == (5, 2, 5)


def test_an_agent_that_needs_masks_says_so_where_there_are_none(backend: Backend) -> None:
    class Plain(NeedsMask):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    with (
        ClusterEnv("CartPole-v1", 2, **backend) as envs,
        pytest.raises((PolicyError, WorkerFailed), match=r"needs action_mask.*info\['action_mask'\]"),
    ):
        envs.rollout(Plain(), 2)


def wrong(obs: Any, what: str) -> Any:
    n = len(obs)
    good = np.zeros(n, np.int64)
    match what:
        case "range":
            return good + 2
        case "negative":
            return good - 1
        case "shape":
            return np.zeros((n, 1), np.int64)
        case "dtype":
            return good + 0.5
        case "scalar value":
            return Decision(good, {"value": np.float32(1.0)})  # type: ignore[dict-item]  # that is the point
        case "short logprob":
            return Decision(good, {"logprob": np.zeros(n + 1)})
        case "nan value":
            return Decision(good, {"value": np.full(n, np.nan)})
    raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("range", "action must be from 0 to 1, got 2 to 2"),
        ("negative", "action must be from 0 to 1, got -1"),
        ("shape", r"action must have shape \(2,\)"),
        ("dtype", "dtype that fits int64, got shape .* of float64"),
        ("scalar value", "value must be an array of numbers with one row for each"),
        ("short logprob", "logprob must be an array of numbers with one row for each of the 2"),
        ("nan value", "value holds NaN"),
    ],
)
def test_wrong_outputs_name_the_output_and_what_was_expected(what: str, message: str) -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs, pytest.raises(PolicyError, match=message):
        envs.rollout(functools.partial(wrong, what=what), 2)


def test_outputs_that_change_their_shape_later_are_named_too() -> None:
    calls = 0

    def fickle(obs: Any) -> Decision:
        nonlocal calls
        calls += 1
        return Decision(np.zeros(len(obs), np.int64), {"value": np.zeros((len(obs), 1 + (calls > 2)))})

    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs, pytest.raises(PolicyError, match="value must have shape"):
        envs.rollout(fickle, 4)


def test_nan_weights_are_a_policy_error_not_torchs() -> None:
    class Diverged(BasePolicy):
        def distribution(self, obs: Any, state: Any = None) -> Categorical:
            return Categorical(np.full((len(obs), 2), np.nan))

    agent: Any = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        agent[0].weight.fill_(torch.nan)
    for policy in (Diverged(), TorchPolicy(agent, output="logits")):
        with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs, pytest.raises(PolicyError, match="NaN"):
            envs.rollout(policy, 2)


def test_actions_that_are_nan_never_reach_an_environment() -> None:
    with ClusterEnv("Pendulum-v1", 2, num_workers=0) as envs, pytest.raises(PolicyError, match="action holds NaN"):
        envs.rollout(lambda obs: np.full((len(obs), 1), np.nan, np.float32), 2)
