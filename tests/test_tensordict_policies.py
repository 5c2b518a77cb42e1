"""TensorDict modules as policies: workers return what the modules themselves return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv import AdaptiveSync, ClusterEnv
from clusterenv.adapters import as_policy
from clusterenv.errors import PolicyError
from tests.any_space import AnySpace

tensordict = pytest.importorskip("tensordict")
tdn = pytest.importorskip("tensordict.nn")

VECTOR = spaces.Box(-1.0, 1.0, (6,), np.float32)
DICT = spaces.Dict({"body": VECTOR, "mask": spaces.MultiBinary(3)})
DISCRETE = spaces.Discrete(3)
CONTINUOUS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, 16), nn.Tanh(), nn.Linear(16, num_outputs))


def actor(module: Any, parameters: list[str], distribution: Any) -> Any:
    chooser = tdn.ProbabilisticTensorDictModule(
        in_keys=parameters, out_keys=["action"], distribution_class=distribution, return_log_prob=True
    )
    return tdn.ProbabilisticTensorDictSequential(module, chooser)


def discrete() -> Any:
    module = tdn.TensorDictModule(network(6, 3), in_keys=["observation"], out_keys=["logits"])
    return actor(module, ["logits"], torch.distributions.Categorical)


def gaussian() -> Any:
    body = nn.Sequential(network(6, 4), tdn.NormalParamExtractor())
    module = tdn.TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"])
    return actor(module, ["loc", "scale"], functools.partial(torch.distributions.Normal))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = network(6, 3)

    def forward(self, body: Any, mask: Any) -> Any:
        return self.body(body).masked_fill(mask == 0, -1e9)


def masked() -> Any:
    module = tdn.TensorDictModule(Masked(), in_keys=["body", "mask"], out_keys=["logits"])
    return actor(module, ["logits"], torch.distributions.Categorical)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "seen", "done"), [(discrete, VECTOR, DISCRETE), (gaussian, VECTOR, CONTINUOUS), (masked, DICT, DISCRETE)]
)
def test_workers_return_what_the_actor_itself_returns(
    make: Callable[[], Any], seen: Any, done: Any, num_workers: int
) -> None:
    torch.manual_seed(0)
    agent = make()
    with ClusterEnv(functools.partial(AnySpace, seen, done), 5, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            rollout = envs.rollout(agent, 4)
            named = rollout.obs if isinstance(rollout.obs, dict) else {"observation": rollout.obs}
            rows = {name: torch.as_tensor(part).float().flatten(0, 1) for name, part in named.items()}
            with torch.no_grad():
                found = agent.get_dist(tensordict.TensorDict(rows, batch_size=[20]))
                logprob = found.log_prob(torch.as_tensor(rollout.actions).flatten(0, 1)).reshape(20, -1).sum(1)
                for parameter in agent.parameters():
                    parameter.add_(0.3 * torch.randn(parameter.shape))
            np.testing.assert_allclose(rollout.logprob.reshape(-1), logprob.numpy(), rtol=1e-4, atol=1e-6)


def test_an_actor_that_says_its_action_acts_by_it() -> None:
    agent = tdn.TensorDictModule(lambda obs: (obs[:, 0] > 0).long(), in_keys=["seen"], out_keys=["action"])
    with ClusterEnv(functools.partial(AnySpace, VECTOR, DISCRETE), 4, num_workers=1) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(agent, 6)
    assert np.array_equal(rollout.actions, rollout.obs[..., 0] > 0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_function_in_a_module_refers_to_reaches_the_workers(num_workers: int) -> None:
    net = nn.Linear(4, 2)
    module = tdn.TensorDictModule(lambda obs: net(obs).argmax(-1), in_keys=["observation"], out_keys=["action"])

    def act(obs: Any) -> Any:
        return module(torch.as_tensor(obs)).numpy()

    with ClusterEnv("CartPole-v1", 2, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        for agent in (module, tdn.TensorDictSequential(module), act):
            for choice in (0, 1, 0):
                with torch.no_grad():
                    net.bias.copy_(torch.tensor([100.0, -100.0] if choice == 0 else [-100.0, 100.0]))
                assert (envs.rollout(agent, 2).actions == choice).all()


def test_q_values_explore_by_epsilon() -> None:
    torch.manual_seed(0)
    body = tdn.TensorDictModule(network(6, 3), in_keys=["observation"], out_keys=["action_value"])
    with ClusterEnv(functools.partial(AnySpace, VECTOR, DISCRETE), 4, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(body, 30, values={"epsilon": 0.0})
        q = body.module(torch.as_tensor(rollout.obs)).detach().numpy()
        assert np.array_equal(rollout.actions, q.argmax(-1))
        assert set(envs.rollout(body, 30, values={"epsilon": 1.0}).actions.ravel().tolist()) == {0, 1, 2}


def test_a_tensordict_actors_divergence_is_measured() -> None:
    torch.manual_seed(0)
    agent = discrete()
    with ClusterEnv(functools.partial(AnySpace, VECTOR, DISCRETE), 4, num_workers=1, sync=AdaptiveSync(0.05)) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, 4)
        with torch.no_grad():
            next(agent.parameters()).add_(1.0)
        envs.rollout(agent, 4)
        assert envs.stats["checks"] == 1


def test_a_module_that_makes_no_action_is_told_of() -> None:
    value = tdn.TensorDictModule(network(6, 1), in_keys=["observation"], out_keys=["state_value"])
    with (
        ClusterEnv(functools.partial(AnySpace, VECTOR, DISCRETE), 1, num_workers=0) as envs,
        pytest.raises(PolicyError, match=r"out_keys \['state_value'\] is not a policy"),
    ):
        envs.rollout(value, 2)


def test_workers_need_no_tensordict_for_agents_without_it() -> None:
    net = network(6, 3)
    code = cloudpickle.dumps(as_policy(lambda obs: net(torch.as_tensor(obs)).argmax(-1).numpy()))
    assert b"clusterenv.adapters.torch" in code
    assert b"clusterenv.adapters.tensordict" not in code
