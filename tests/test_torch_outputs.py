"""Torch modules whose user says, in a word or in three lines, how they choose actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from clusterenv import ClusterEnv
from clusterenv.adapters import as_policy
from clusterenv.errors import ConfigError, PolicyError, WorkerFailed
from clusterenv.policy import (
    Bernoulli,
    Categorical,
    Deterministic,
    DiagonalGaussian,
    MultiCategorical,
    QValues,
    SquashedGaussian,
)
from clusterenv.policy.distribution import Distribution
from clusterenv.policy.policy import Tree

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  # after importorskip

from clusterenv.adapters.torch import TorchPolicy  # noqa: E402
from tests.any_space import AnySpace  # noqa: E402
from tests.torch_agents import (  # noqa: E402
    Actor,
    Agent,
    Normal,
    Obs,
    QNetwork,
    SacActor,
    TorchBernoulli,
    TorchCategorical,
    is_fast,
    mlp,
    on_worker,
)


@pytest.fixture
def obs() -> Obs:
    return np.random.default_rng(2).standard_normal((64, 4)).astype(np.float32)


def test_a_q_network_is_greedy_but_for_epsilon(obs: Obs) -> None:
    agent = QNetwork()
    worker = on_worker(as_policy(agent), obs=obs)
    with torch.no_grad():
        best = agent(torch.from_numpy(obs)).argmax(1).numpy()
    np.testing.assert_array_equal(worker.act(obs).action, best)
    assert is_fast(worker)
    assert isinstance(worker.distribution(obs), QValues)
    many = np.repeat(obs, 200, axis=0)
    explored = np.mean(np.asarray(worker.act(many, call={"epsilon": 0.3}).action) != np.repeat(best, 200))
    np.testing.assert_allclose(explored, 0.2, atol=0.015)


def test_a_deterministic_actor_adds_noise_only_when_asked(obs: Obs) -> None:
    agent = Actor()
    worker = on_worker(as_policy(agent), obs=obs)
    with torch.no_grad():
        expected = agent(torch.from_numpy(obs)).numpy()
    decision = worker.act(obs)
    np.testing.assert_allclose(np.asarray(decision.action), expected, rtol=1e-4, atol=1e-6)
    assert decision.extras == {}
    noisy = np.asarray(worker.act(obs, call={"noise": 10.0}).action)
    assert (np.abs(noisy - [0.0, 1.0]) <= [2.0, 0.5]).all()
    distribution = worker.distribution(obs)
    assert isinstance(distribution, Deterministic)
    np.testing.assert_array_equal(distribution.scale, [2.0, 0.5])


def test_a_sac_actor_is_sampled_as_it_samples_itself(obs: Obs) -> None:
    torch.manual_seed(0)
    agent = SacActor()
    worker = on_worker(as_policy(agent), obs=obs)
    distribution = worker.distribution(obs)
    assert isinstance(distribution, SquashedGaussian)
    with torch.no_grad():
        action, logprob, _ = agent.get_action(torch.from_numpy(obs))
    inside = (np.abs((action.numpy() - [0.0, 1.0]) / [2.0, 0.5]) < 0.99).all(axis=1)
    assert inside.sum() > 5
    ours = distribution.log_prob(action.numpy())
    np.testing.assert_allclose(ours[inside], logprob[:, 0].numpy()[inside], rtol=1e-2, atol=1e-2)
    decision = worker.act(obs)
    assert decision.extras["logprob"].shape == (64,)
    assert (np.abs(np.asarray(decision.action) - [0.0, 1.0]) <= [2.0, 0.5]).all()


def test_a_module_that_returns_logits_needs_one_word(obs: Obs) -> None:
    network = mlp(4, 3)
    with pytest.raises(PolicyError, match=r"TorchPolicy\(agent, output="):
        as_policy(network)
    worker = on_worker(TorchPolicy(network, output="logits"), obs=obs)
    decision = worker.act(obs)
    with torch.no_grad():
        expected = torch.log_softmax(network(torch.from_numpy(obs)), -1).numpy()
    np.testing.assert_allclose(
        decision.extras["logprob"], expected[np.arange(64), np.asarray(decision.action)], rtol=1e-4, atol=1e-5
    )
    assert is_fast(worker)
    with pytest.raises(ConfigError, match="logits"):
        TorchPolicy(network, output="logit")  # type: ignore[arg-type]  # that is the point


def test_logits_may_come_with_a_value(obs: Obs) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pi, self.v = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Any) -> Any:
            x = torch.tanh(self.body(x))
            return self.pi(x), self.v(x)

    agent = Both()
    decision = on_worker(TorchPolicy(agent, output="logits"), obs=obs).act(obs)
    with torch.no_grad():
        expected = agent(torch.from_numpy(obs))[1][:, 0]
    np.testing.assert_allclose(decision.extras["value"], expected, rtol=1e-4, atol=1e-6)


def test_three_lines_describe_any_other_agent() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eye, self.pi, self.v = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 1)

        def look(self, obs: Any) -> Any:
            return torch.relu(self.eye(torch.cat([obs["left"], obs["right"]], dim=1)))

    agent = Odd()
    policy = TorchPolicy(
        agent,
        distribution=lambda agent, obs: TorchCategorical(logits=agent.pi(agent.look(obs))),
        value=lambda agent, obs: agent.v(agent.look(obs)),
    )
    obs: Tree = {"left": np.ones((5, 3), np.float64), "right": np.zeros((5, 3), np.uint8)}
    decision = on_worker(policy).act(obs)
    assert decision.extras.keys() == {"logprob", "value"}
    assert decision.extras["value"].shape == (5,)


def test_act_may_return_anything_by_name_and_read_state_and_call() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

    def act(agent: Agent, obs: Any, state: Any, bonus: float = 0.0) -> dict[str, Any]:
        count = state["count"] + 1
        return {"action": obs * agent.gain + bonus, "seen": count[:, 0], "state": {"count": count}}

    policy = TorchPolicy(Counter(), act=act, initial_state=lambda n: {"count": torch.zeros(n, 1)})
    worker = on_worker(policy)
    state = worker.initial_state(2)
    obs = np.ones((2, 1), np.float32)
    first = worker.act(obs, state)
    second = worker.act(obs, first.state, {"bonus": 0.5})
    np.testing.assert_array_equal(second.action, [[2.5], [2.5]])
    np.testing.assert_array_equal(second.extras["seen"], [2, 2])
    assert worker.distribution(obs, state) is None
    with pytest.raises(ConfigError, match="act"):
        TorchPolicy(Counter(), value=lambda _agent, obs: obs)


@pytest.mark.parametrize(
    ("make_distribution", "family"),
    [
        (lambda rows: TorchCategorical(logits=rows), Categorical),
        (lambda rows: [TorchCategorical(logits=rows[:, :2]), TorchCategorical(logits=rows[:, 2:])], MultiCategorical),
        (lambda rows: TorchBernoulli(logits=rows), Bernoulli),
        (lambda rows: Normal(rows, 1.0 + rows**2), DiagonalGaussian),
        (lambda rows: torch.distributions.Independent(Normal(rows, 1.0 + rows**2), 1), DiagonalGaussian),
        (
            lambda rows: torch.distributions.TransformedDistribution(
                Normal(rows, 1.0 + rows**2),
                [torch.distributions.TanhTransform(), torch.distributions.AffineTransform(1.0, 2.0)],
            ),
            SquashedGaussian,
        ),
    ],
)
def test_torch_distributions_become_ours(
    make_distribution: Callable[[Any], Any], family: type[Distribution], obs: Obs
) -> None:
    torch.manual_seed(0)
    policy = TorchPolicy(nn.Linear(4, 4), distribution=lambda agent, obs: make_distribution(agent(obs)))
    policy.seed(0)
    decision = policy.act(obs)
    ours = policy.distribution(obs)
    assert type(ours) is family
    with torch.no_grad():
        theirs = make_distribution(policy.module(torch.from_numpy(obs)))
        action = torch.from_numpy(np.asarray(decision.action))
        if isinstance(theirs, list):
            logprob = sum(part.log_prob(action[:, i]) for i, part in enumerate(theirs))
        else:
            logprob = theirs.log_prob(action.float())
    expected = logprob.numpy() if logprob.ndim == 1 else logprob.numpy().sum(axis=1)
    # Where tanh is nearly 1 it has no digits left for torch to invert.
    distance = np.abs(np.asarray(decision.action).reshape(len(obs), -1) - 1.0).max(axis=1)
    inside = (distance < 1.99) | (family is not SquashedGaussian)
    assert inside.sum() > 5
    np.testing.assert_allclose(decision.extras["logprob"][inside], expected[inside], rtol=1e-3, atol=1e-3)


def test_a_distribution_nobody_can_compare_is_refused_with_a_way_out(obs: Obs) -> None:
    policy = TorchPolicy(nn.Linear(4, 4), distribution=lambda agent, obs: torch.distributions.Laplace(agent(obs), 1.0))
    with pytest.raises(PolicyError, match="Custom"):
        policy.act(obs)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.GRUCell, nn.LSTMCell])
def test_a_forward_that_takes_a_state_carries_it(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.pi, self.v = kind(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Any, h: Any) -> Any:
            if issubclass(kind, nn.RNNBase):
                out, h = self.memory(x[None], h)
                return self.pi(out[0]), self.v(out[0]), h
            h = self.memory(x, h)
            out = h[0] if isinstance(h, tuple) else h
            return self.pi(out), self.v(out), h

    torch.manual_seed(0)
    agent = Recurrent()
    worker = on_worker(TorchPolicy(agent, output="logits"))
    steps = np.random.default_rng(0).standard_normal((4, 5, 4)).astype(np.float32)
    state = worker.initial_state(5)
    shape = (1, 5, 8) if issubclass(kind, nn.RNNBase) else (5, 8)
    own: Any = torch.zeros(shape)
    own = (own, own) if kind in (nn.LSTM, nn.LSTMCell) else own
    for obs in steps:
        decision = worker.act(obs, state)
        probed = worker.distribution(obs, state)
        with torch.no_grad():
            logits, value, own = agent(torch.from_numpy(obs), own)
        expected = torch.log_softmax(logits, -1).numpy()[np.arange(5), np.asarray(decision.action)]
        np.testing.assert_allclose(decision.extras["logprob"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(decision.extras["value"], value[:, 0], rtol=1e-4, atol=1e-5)
        assert probed is not None
        np.testing.assert_allclose(probed.log_prob(np.asarray(decision.action)), expected, rtol=1e-4, atol=1e-5)
        state = decision.state


def test_initial_states_may_be_numpy_arrays(obs: Obs) -> None:
    def act(agent: Agent, obs: Any, state: Any) -> dict[str, Any]:
        return {"action": obs[:, :2], "state": {"count": state["count"] + 1}}

    policy = TorchPolicy(nn.Linear(4, 2), act=act, initial_state=lambda n: {"count": np.zeros((n, 1), np.float32)})
    worker = on_worker(policy)
    decision = worker.act(obs, worker.initial_state(64))
    assert decision.state is not None
    assert (decision.state["count"] == 1).all()


SEEN = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Wrapped(nn.Module):
    """A network with an operation that numpy programs lack, so that workers run it in torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = mlp(4, width)

    def forward(self, x: Any) -> Any:
        return nn.functional.conv1d(self.network(x)[:, None], torch.ones(1, 1, 1))[:, 0]


class WideQNetwork(QNetwork):
    def forward(self, x: Any) -> Any:
        return torch.cat([super().forward(x), super().forward(x)], dim=1)


@pytest.mark.parametrize(
    ("make_policy", "message"),
    [
        (lambda: TorchPolicy(mlp(4, 2), output="logits"), "returns 2 values per row"),
        (lambda: TorchPolicy(mlp(4, 5), output="logits"), "returns 5 values per row"),
        (lambda: TorchPolicy(mlp(4, 1), output="q"), "returns 1 value per row"),
        (lambda: TorchPolicy(Wrapped(2), output="q"), "returns 2 values per row"),
        (WideQNetwork, "of WideQNetwork returns 6 values per row"),
    ],
)
def test_another_number_of_values_than_actions_is_refused_at_the_first_call(
    make_policy: Callable[[], Any], message: str
) -> None:
    with ClusterEnv(lambda: AnySpace(SEEN, spaces.Discrete(4)), 2, num_workers=0) as envs:
        envs.reset(seed=1)
        with pytest.raises(PolicyError, match=rf"{message}, but the action space Discrete\(4\) has 4 actions"):
            envs.rollout(make_policy(), 2)


def test_a_mistake_that_a_worker_finds_is_caught_by_either_name() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=1) as envs:
        envs.reset(seed=1)
        with pytest.raises(PolicyError, match="returns 3 values per row") as caught:
            envs.rollout(TorchPolicy(mlp(4, 3), output="logits"), 2)
    assert isinstance(caught.value, WorkerFailed)


def test_values_with_an_axis_too_many_are_refused_with_their_shape() -> None:
    class C51(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp(4, 2 * 51)

        def forward(self, x: Any) -> Any:
            return self.network(x).reshape(-1, 2, 51)

    with ClusterEnv("CartPole-v1", 3, num_workers=0) as envs:
        envs.reset(seed=1)
        with pytest.raises(PolicyError, match=r"shape \(3, 2, 51\).*one value per action, shape \(3, 2\)"):
            envs.rollout(TorchPolicy(C51(), output="q"), 2)


def test_logits_of_several_choices_may_lie_side_by_side() -> None:
    torch.manual_seed(0)
    network = mlp(4, 5)
    with ClusterEnv(lambda: AnySpace(SEEN, spaces.MultiDiscrete([2, 3])), 2, num_workers=0) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(TorchPolicy(network, output="logits"), 50)
        assert envs.stats["fast_path"] == 1
        with pytest.raises(PolicyError, match=r"returns 4 values per row.* has 2 \+ 3 actions"):
            envs.rollout(TorchPolicy(mlp(4, 4), output="logits"), 2)
    assert rollout.actions.reshape(-1, 2).max(axis=0).tolist() == [1, 2]
    with torch.no_grad():
        parts = network(torch.from_numpy(rollout.obs)).split([2, 3], dim=-1)
        actions = torch.from_numpy(rollout.actions)
        expected = sum(TorchCategorical(logits=part).log_prob(actions[..., i]) for i, part in enumerate(parts))
    np.testing.assert_allclose(rollout.logprob, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("output", ["logits", "q"])
def test_actions_are_counted_from_where_the_space_starts(output: Any) -> None:
    torch.manual_seed(0)
    network = mlp(4, 3)
    with ClusterEnv(lambda: AnySpace(SEEN, spaces.Discrete(3, start=5)), 2, num_workers=0) as envs:
        envs.reset(seed=1)
        values = {"epsilon": 1.0} if output == "q" else {}
        rollout = envs.rollout(TorchPolicy(network, output=output), 50, values=values)
        greedy = envs.rollout(TorchPolicy(network, output=output), 4, values={"deterministic": True})
    assert np.unique(rollout.actions).tolist() == [5, 6, 7]
    with torch.no_grad():
        best = network(torch.from_numpy(greedy.obs)).argmax(-1).numpy()
    np.testing.assert_array_equal(greedy.actions, best + 5)


@pytest.mark.parametrize("given", ["act", "distribution"])
def test_saying_twice_how_a_module_acts_is_refused(given: str) -> None:
    functions: dict[str, Any] = {given: lambda agent, obs: agent(obs)}
    with pytest.raises(ConfigError, match=rf"give one of output=\.\.\. and {given}="):
        TorchPolicy(mlp(4, 2), output="q", **functions)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("output", ["gaussian", "squashed"])
def test_means_and_deviations_may_come_with_a_value(obs: Obs, output: Any, is_nested: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.v = nn.Linear(4, 2), nn.Linear(4, 1)
            self.log_std = nn.Parameter(torch.full((2,), -1.0))

        def forward(self, x: Any) -> Any:
            parts = self.mean(x), self.log_std
            return (parts, self.v(x)) if is_nested else (*parts, self.v(x))

    agent = Both()
    worker = on_worker(TorchPolicy(agent, output=output), obs=obs)
    decision = worker.act(obs)
    with torch.no_grad():
        expected = agent.v(torch.from_numpy(obs))[:, 0]
    np.testing.assert_allclose(decision.extras["value"], expected, rtol=1e-4, atol=1e-6)
    assert decision.extras.keys() == {"logprob", "value"}
    assert is_fast(worker)


def test_a_gaussian_of_one_result_is_told_what_is_expected(obs: Obs) -> None:
    expected = r"should return \(mean, log_std\) or \(mean, log_std, value\), as tensors.*got a Tensor"
    with pytest.raises(PolicyError, match=expected):
        TorchPolicy(mlp(4, 2), output="gaussian").act(obs)


def test_a_wrapper_around_an_agent_is_answered_with_what_is_inside() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(mlp(4, 2))
    with pytest.raises(PolicyError, match=r"AveragedModel around a Sequential .*its \.module"):
        as_policy(averaged)
