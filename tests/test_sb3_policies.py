"""SB3's models and policies act on workers by their own distributions, and follow the model that learns."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv import AdaptiveSync, ClusterEnv
from clusterenv.adapters import as_policy
from clusterenv.errors import PolicyError
from clusterenv.policy import Categorical, Deterministic, DiagonalGaussian, QValues, SquashedGaussian

sb3 = pytest.importorskip("stable_baselines3")
vec_env = pytest.importorskip("stable_baselines3.common.vec_env")


def nudge(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    ("make", "family"),
    [
        (lambda: sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu"), Categorical),
        (lambda: sb3.A2C("MlpPolicy", "Pendulum-v1", device="cpu"), DiagonalGaussian),
        (lambda: sb3.DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu"), QValues),
        (lambda: sb3.SAC("MlpPolicy", "Pendulum-v1", buffer_size=10, device="cpu"), SquashedGaussian),
        (lambda: sb3.TD3("MlpPolicy", "Pendulum-v1", buffer_size=10, device="cpu"), Deterministic),
    ],
    ids=["ppo", "a2c", "dqn", "sac", "td3"],
)
def test_models_and_their_policies_act_as_they_do_themselves(make: Any, family: Any) -> None:
    model = make()
    name = model.env.envs[0].spec.id
    for agent in (model, model.policy):
        with ClusterEnv(name, 4, num_workers=0) as envs:
            envs.reset(seed=1)
            for _ in range(2):
                rollout = envs.rollout(agent, 4, values={"deterministic": True})
                own, _ = model.predict(rollout.obs[2], deterministic=True)
                low, high = getattr(envs.single_action_space, "low", 0), getattr(envs.single_action_space, "high", 9)
                np.testing.assert_allclose(np.clip(rollout.actions[2], low, high), own, rtol=1e-4, atol=1e-4)
                nudge(model)
            assert len(envs.step(agent)[4]["action"]) == 4
    assert isinstance(as_policy(model).distribution(rollout.obs[0]), family)


def test_logprobs_and_values_are_the_models_and_adaptive_sync_measures_it() -> None:
    model = sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    with ClusterEnv("CartPole-v1", 4, num_workers=1, sync=AdaptiveSync(1e-9)) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            rollout = envs.rollout(model, 5)
            obs = torch.as_tensor(rollout.obs.reshape(-1, 4))
            with torch.no_grad():
                value, logprob, _ = model.policy.evaluate_actions(obs, torch.as_tensor(rollout.actions.reshape(-1)))
            np.testing.assert_allclose(rollout.logprob.reshape(-1), logprob, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(rollout.value.reshape(-1), value[:, 0], rtol=1e-4, atol=1e-4)
            nudge(model)
        assert envs.stats["checks"] > 0
        assert envs.stats["pulls_diverged"] > 0


def test_a_lambda_around_predict_follows_the_model() -> None:
    model = sb3.DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu")
    agent = lambda obs: model.predict(obs, deterministic=True)[0]  # noqa: E731 - as users write it
    with ClusterEnv("CartPole-v1", 2, num_workers=1) as envs:
        envs.reset(seed=1)
        for choice in (0, 1, 0):
            with torch.no_grad():
                model.q_net.q_net[-1].bias.copy_(torch.tensor([1e3, -1e3] if choice == 0 else [-1e3, 1e3]))
            assert (envs.rollout(agent, 3).actions == choice).all()


@pytest.mark.parametrize("norm_obs", [True, False])
def test_a_model_whose_observations_are_normalised_on_the_head_is_warned_of(
    norm_obs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = vec_env.VecNormalize(vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_obs=norm_obs)
    as_policy(sb3.PPO("MlpPolicy", wrapped, device="cpu"))
    assert ("VecNormalize" in caplog.text) == norm_obs


def test_what_is_not_understood_is_refused_in_a_sentence() -> None:
    model = sb3.A2C("MlpPolicy", "Pendulum-v1", use_sde=True, device="cpu")
    with pytest.raises(PolicyError, match="use_sde"):
        as_policy(model)
