"""TorchPolicy(wire_dtype="bfloat16"): half as much is sent, and all that comes back is said of what was sent."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from clusterenv import AdaptiveSync, ClusterEnv
from clusterenv.errors import ConfigError, PolicyError
from clusterenv.policy import Categorical, divergence
from clusterenv.policy.weights import WeightsSpec
from clusterenv.rollout import Rollout
from tests.conftest import Backend

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  # after importorskip

from clusterenv.adapters.torch import Normaliser, TorchPolicy  # noqa: E402
from tests.torch_agents import TorchCategorical  # noqa: E402


class Agent(nn.Module):
    """An actor and a critic on normalised observations; of layers that numpy knows, or not."""

    def __init__(self, middle: nn.Module, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.normalise = Normaliser(4)
        self.normalise.update(np.random.default_rng(seed).normal(size=(64, 4)))
        self.body = nn.Sequential(nn.Linear(4, 128), middle, nn.Linear(128, 128), nn.Tanh())
        self.actor, self.critic = nn.Linear(128, 2), nn.Linear(128, 1)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.body(self.normalise(x))
        probs = TorchCategorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)

    def learn(self, size: float = 0.02) -> None:
        rng = torch.Generator().manual_seed(int(self.actor.bias.sum().item() * 1e6) % 2**31)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=rng))


MIDDLES = {"numpy": nn.Tanh, "torch": nn.Softshrink}


def as_sent(agent: Agent) -> Agent:
    """Return what workers hold, by torch's own rounding."""
    twin = copy.deepcopy(agent)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return twin


def opinion(agent: Agent, rollout: Rollout) -> tuple[Any, Any]:
    obs = torch.as_tensor(rollout.obs).reshape(-1, 4)
    with torch.no_grad():
        _, logprob, _, value = agent.get_action_and_value(obs, torch.as_tensor(rollout.actions).reshape(-1))
    return logprob.numpy().reshape(rollout.logprob.shape), value.numpy().reshape(rollout.value.shape)


def logits(agent: Agent, obs: Any) -> Categorical:
    with torch.no_grad():
        flat = torch.as_tensor(obs).reshape(-1, 4)
        return Categorical(agent.actor(agent.body(agent.normalise(flat))).numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_rounded_as_torch_rounds_them(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)  # Of all sizes; some are NaN.
    halves = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    with np.errstate(invalid="ignore"):
        array = np.concatenate([patterns, halves.view(np.float32), special]).astype(dtype).reshape(-1, 1)
    spec = WeightsSpec.of({"a": array}, {"a"})
    block = spec.encode({"a": array})
    assert len(block) < 2 * array.size + 64
    expected = torch.from_numpy(array).float().to(torch.bfloat16).to(torch.from_numpy(array).dtype).numpy()
    decoded = spec.decode(block)["a"]
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded[~np.isnan(array)]), np.signbit(array[~np.isnan(array)]))


def test_a_single_number_is_rounded_too() -> None:
    array = np.array(1.2345, np.float32)
    spec = WeightsSpec.of({"log_std": array}, {"log_std"})
    decoded = spec.decode(spec.encode({"log_std": array}))["log_std"]
    assert decoded.shape == ()
    assert decoded == torch.tensor(array).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("array", [np.zeros(3, np.int64), np.zeros(3, np.float16), np.zeros(3, ">f4")])
def test_what_bfloat16_is_no_shorter_form_of_is_not_rounded(array: Any) -> None:
    with pytest.raises(PolicyError, match="bfloat16"):
        WeightsSpec.of({"a": array}, {"a"})


@pytest.mark.parametrize("middle", MIDDLES)
def test_workers_return_what_the_rounded_weights_return_and_half_as_much_is_sent(middle: str, backend: Backend) -> None:
    agent = Agent(MIDDLES[middle]())
    policy = TorchPolicy(agent, wire_dtype="bfloat16")
    with ClusterEnv("CartPole-v1", 4, **backend) as envs:
        envs.reset(seed=1)
        for _ in range(4):
            rollout = envs.rollout(policy, 16)
            logprob, value = opinion(as_sent(agent), rollout)
            np.testing.assert_allclose(rollout.logprob, logprob, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rollout.value, value, rtol=1e-4, atol=1e-5)
            logprob, value = opinion(agent, rollout)
            np.testing.assert_allclose(rollout.logprob, logprob, rtol=2e-2, atol=2e-2)
            np.testing.assert_allclose(rollout.value, value, rtol=2e-2, atol=2e-2)
            assert np.abs(rollout.logprob - logprob).max() > 1e-6  # They were rounded.
            agent.learn()
        assert envs.stats["fast_path"] == (middle == "numpy")
        half = envs.stats["bytes_weights"] / envs.stats["pulls"]
        envs.rollout(TorchPolicy(agent), 16)
        full = (envs.stats["bytes_weights"] - 4 * half * max(1, envs.num_workers)) / max(1, envs.num_workers)
    assert 0.5 * full <= half < 0.55 * full


def test_divergences_are_of_what_workers_hold_from_the_newest(remote: Backend) -> None:
    agent = Agent(nn.Tanh())
    policy = TorchPolicy(agent, wire_dtype="bfloat16")
    made = {1: copy.deepcopy(agent)}
    ages: set[int] = set()
    with ClusterEnv("CartPole-v1", 4, **remote, sync=AdaptiveSync(0.02, plateau=None)) as envs:
        envs.reset(seed=1)
        with envs.stream(policy, 128, max_lag=1000) as stream:
            for rollout in itertools.islice(stream, 24):
                version = int(rollout.versions[0])
                logprob, _ = opinion(as_sent(made[version]), rollout)
                np.testing.assert_allclose(rollout.logprob, logprob, rtol=1e-4, atol=1e-5)
                held, newest = logits(as_sent(made[version]), rollout.obs), logits(agent, rollout.obs)
                assert 0 < rollout.divergences[0] < 10 * float(divergence(held, newest).mean()) + 1e-3
                ages.add(int(rollout.ages[0]))
                agent.learn(0.005)
                made[len(made) + 1] = copy.deepcopy(agent)
        envs.reset(seed=1)
        made[len(made) + 1] = copy.deepcopy(agent)
        for _ in range(5):  # Nobody is given anything new: what is left is the rounding.
            rollout = envs.rollout(policy, 128)
        unpulled = rollout.ages > 0
        for column in np.flatnonzero(~unpulled):
            held, newest = logits(as_sent(agent), rollout.obs[:, column]), logits(agent, rollout.obs[:, column])
            assert 0 < rollout.divergences[column] < 1e-3
            assert float(divergence(held, newest).mean()) < 1e-3
    assert max(ages) > 1


def test_statistics_travel_as_they_are() -> None:
    agent = Agent(nn.Tanh())
    policy = TorchPolicy(agent, wire_dtype="bfloat16")
    assert policy.rounded
    assert policy.rounded == {name for name, _ in agent.named_parameters()}
    assert {"normalise.shift", "normalise.scale"} <= set(policy.weights()) - policy.rounded


def test_without_it_nothing_is_rounded() -> None:
    assert not TorchPolicy(Agent(nn.Tanh())).rounded
    assert not TorchPolicy(Agent(nn.Tanh()).to(torch.bfloat16), wire_dtype="bfloat16").rounded


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire_dtype"):
        TorchPolicy(Agent(nn.Tanh()), wire_dtype="float8")  # type: ignore[arg-type]  # that is the point
