"""A torch agent taken apart: structure travels without weights; weights are noticed, sent and loaded in place."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

from clusterenv.adapters import as_policy
from clusterenv.errors import PolicyError
from clusterenv.policy.contents import VALUES

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  # after importorskip

from clusterenv.adapters.torch import TorchPolicy  # noqa: E402
from tests.torch_agents import (  # noqa: E402
    Agent,
    Discrete,
    Obs,
    TorchCategorical,
    evaluate,
    make,
    mlp,
    on_worker,
)


@pytest.fixture
def obs() -> Obs:
    return np.random.default_rng(2).standard_normal((64, 4)).astype(np.float32)


def test_structure_travels_without_weights() -> None:
    big = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512), nn.Linear(512, 3))
    policy = TorchPolicy(big, output="logits")
    structure = cloudpickle.dumps(policy)
    weights = sum(array.nbytes for array in policy.weights().values())
    assert len(structure) < 10_000 < 0.01 * weights
    twin = pickle.loads(structure)
    assert all((array == 0).all() for name, array in twin.weights().items() if name != VALUES)


def test_tied_weights_stay_tied_and_travel_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight
            self.register_buffer("kept", torch.arange(3))
            self.register_buffer("constant", torch.arange(2), persistent=False)
            self.optimizer = torch.optim.Adam(self.parameters())
            self.place = torch.device("cuda")

        def forward(self, x: Any) -> Any:
            return self.two(self.one(x))

    policy = TorchPolicy(Tied(), output="logits")
    assert sorted(policy.weights()) == [VALUES, "constant", "kept", "one.weight"]
    worker = on_worker(policy)
    assert isinstance(worker, TorchPolicy)
    twin: Agent = worker.module
    assert twin.two.weight is twin.one.weight
    assert twin.constant.tolist() == [0, 1]
    assert twin.kept.tolist() == [0, 1, 2]
    assert twin.optimizer is None
    assert twin.place == torch.device("cpu")


def test_bfloat16_weights_survive(obs: Obs) -> None:
    agent = mlp(4, 3).to(torch.bfloat16)
    policy = TorchPolicy(agent, output="logits")
    worker = on_worker(policy)
    assert isinstance(worker, TorchPolicy)
    for theirs, ours in zip(agent.parameters(), worker.module.parameters(), strict=True):
        assert torch.equal(theirs, ours)
    assert worker.act(obs).extras["logprob"].dtype == np.float32


def test_weights_are_loaded_in_place_and_used_at_once(obs: Obs) -> None:
    agent, other = make("discrete"), Discrete()
    worker = on_worker(as_policy(agent))
    worker.act(obs)
    assert isinstance(worker, TorchPolicy)
    addresses = [parameter.data_ptr() for parameter in worker.module.parameters()]
    worker.load(as_policy(other).weights())
    assert [parameter.data_ptr() for parameter in worker.module.parameters()] == addresses
    decision = worker.act(obs)
    np.testing.assert_allclose(
        decision.extras["logprob"], evaluate(other, obs, decision.action)[0], rtol=1e-4, atol=1e-5
    )


def test_weights_that_do_not_fit_are_refused() -> None:
    worker = on_worker(as_policy(make("discrete")))
    weights = worker.weights()
    for wrong in (
        {name: array for name, array in weights.items() if name != "actor.0.bias"},
        weights | {"actor.0.bias": np.zeros(3, np.float32)},
        weights | {"actor.0.bias": np.zeros(64, np.float64)},
    ):
        with pytest.raises(PolicyError, match=r"actor\.0\.bias"):
            worker.load(wrong)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_an_optimizer_step_is_noticed(options: dict[str, bool], obs: Obs) -> None:
    agent = make("discrete")
    policy = as_policy(agent)
    optimizer = torch.optim.Adam(agent.parameters(), **options)
    stamps = {policy.stamp()}
    for _ in range(3):
        optimizer.zero_grad()
        agent.get_action_and_value(torch.from_numpy(obs))[1].sum().backward()
        assert policy.stamp() in stamps
        optimizer.step()
        stamps.add(policy.stamp())
    assert len(stamps) == 4


def _load(agent: Agent) -> None:
    agent.load_state_dict(Discrete().state_dict())


def _write_data(agent: Agent) -> None:
    for parameter in agent.parameters():
        parameter.data.mul_(0.5)


def _replace_data(agent: Agent) -> None:
    agent.actor[0].weight.data = torch.ones(64, 4)


def _replace_layer(agent: Agent) -> None:
    agent.actor[2] = nn.Linear(64, 64)


def _write_numpy(agent: Agent) -> None:
    agent.actor[4].bias.detach().numpy()[:] += 1


@pytest.mark.parametrize("change", [_load, _write_data, _replace_data, _replace_layer, _write_numpy])
def test_every_way_to_write_weights_is_noticed(change: Callable[[Agent], None]) -> None:
    agent = make("discrete")
    policy = as_policy(agent)
    stamp = policy.stamp()
    assert policy.stamp() == stamp
    change(agent)
    assert policy.stamp() != stamp
    assert policy.stamp() == policy.stamp()


@pytest.mark.parametrize("size", [16, 200], ids=["small", "large"])
@pytest.mark.parametrize("layout", [lambda weight: weight, lambda weight: weight.T], ids=["as made", "transposed"])
def test_numbers_that_are_swapped_unknown_to_torch_are_noticed(size: int, layout: Any) -> None:
    agent = nn.Linear(size, size)
    agent.weight = nn.Parameter(layout(torch.rand(size, size)))
    policy = TorchPolicy(agent, output="logits")
    stamp = policy.stamp()
    agent.weight.data[3, [5, 7]] = agent.weight.data[3, [7, 5]]
    assert policy.stamp() != stamp


def test_acting_changes_neither_the_weights_nor_the_mode_of_the_agent(obs: Obs) -> None:
    class Normed(Discrete):
        def __init__(self) -> None:
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    torch.distributions.Distribution.set_default_validate_args(True)  # SB3, once imported, switches them off.
    agent = Normed().train()
    policy = as_policy(agent)
    stamp = policy.stamp()
    hooks = [len(module._forward_hooks) for module in agent.modules()]
    policy.act(obs)
    policy.distribution(obs)
    assert policy.stamp() == stamp
    assert all(module.training for module in agent.modules())
    assert [len(module._forward_hooks) for module in agent.modules()] == hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in agent.parameters())
    with pytest.raises(ValueError, match="nan"):  # The checks of torch.distributions are on again.
        TorchCategorical(logits=torch.full((2,), torch.nan))


def test_an_agent_that_cannot_travel_says_what_it_may_hold() -> None:
    class Greedy(Discrete):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(PolicyError, match="lock"):
        cloudpickle.dumps(as_policy(Greedy()))


def test_compiled_agents_are_unwrapped() -> None:
    agent = make("discrete")
    assert TorchPolicy(torch.compile(agent)).module is agent
    assert TorchPolicy(nn.DataParallel(mlp(4, 2)), output="logits").module is not None


def test_a_function_that_closes_over_the_agent_means_the_workers_copy(obs: Obs) -> None:
    agent = mlp(4, 3)
    policy = TorchPolicy(agent, distribution=lambda _agent, obs: TorchCategorical(logits=agent(obs)))
    worker = on_worker(policy)
    zeros = {name: np.zeros_like(array) for name, array in policy.weights().items()}
    worker.load(zeros)
    np.testing.assert_allclose(worker.act(obs).extras["logprob"], -np.log(3), rtol=1e-5)


def test_lazy_layers_must_have_seen_an_observation() -> None:
    with pytest.raises(PolicyError, match="lazy"):
        cloudpickle.dumps(TorchPolicy(nn.LazyLinear(3), output="logits"))


def test_only_a_module_is_a_torch_policy() -> None:
    with pytest.raises(PolicyError, match="Tensor"):
        as_policy(torch.zeros(3))
