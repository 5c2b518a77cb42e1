"""Torch agents on workers draw from the same distribution, and say the same of it, as where they were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clusterenv.adapters import as_policy
from clusterenv.errors import PolicyError
from clusterenv.policy import Categorical
from clusterenv.policy.distribution import Call, divergence

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  # after importorskip

from tests.torch_agents import (  # noqa: E402
    AGENTS,
    Agent,
    Annealed,
    Clipping,
    Decorated,
    Discrete,
    Masked,
    MultiDiscrete,
    Normal,
    Obs,
    QNetwork,
    Recurrent,
    SharedTrunk,
    TorchCategorical,
    evaluate,
    is_fast,
    make,
    on_worker,
)

method_agents = pytest.mark.parametrize("name", AGENTS)


@pytest.fixture
def obs() -> Obs:
    return np.random.default_rng(2).standard_normal((64, 4)).astype(np.float32)


@method_agents
def test_logprobs_and_values_are_those_of_the_agent(name: str, obs: Obs) -> None:
    agent = make(name)
    for policy in (as_policy(agent), on_worker(as_policy(agent)), on_worker(as_policy(agent), obs=obs)):
        decision = policy.act(obs)
        logprob, value = evaluate(agent, obs, decision.action)
        np.testing.assert_allclose(decision.extras["logprob"], logprob, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(decision.extras["value"], value, rtol=1e-4, atol=1e-5)
        assert decision.state is None


@method_agents
def test_the_distribution_is_read_without_being_told_how(name: str, obs: Obs) -> None:
    agent = make(name)
    for policy in (as_policy(agent), on_worker(as_policy(agent)), on_worker(as_policy(agent), obs=obs)):
        distribution = policy.distribution(obs)
        assert type(distribution) is AGENTS[name][1]
        distribution.check()
        action = policy.act(obs).action
        assert isinstance(action, np.ndarray)
        np.testing.assert_allclose(distribution.log_prob(action), evaluate(agent, obs, action)[0], rtol=1e-3, atol=1e-4)


@method_agents
def test_head_and_worker_agree_on_the_divergence_of_equal_weights(name: str, obs: Obs) -> None:
    head = as_policy(make(name))
    newest, own = head.distribution(obs), on_worker(head, obs=obs).distribution(obs)
    assert newest is not None
    assert own is not None
    assert divergence(own, newest).max() < 1e-7


@pytest.mark.parametrize("name", ["discrete", "shared trunk", "gelu", "paper"])
def test_a_worker_draws_actions_with_the_agents_probabilities(name: str) -> None:
    agent = make(name)
    single = np.array([[0.3, -0.5, 1.0, 0.2]], np.float32)
    actions = on_worker(as_policy(agent), obs=single).act(np.repeat(single, 100_000, axis=0)).action
    assert isinstance(actions, np.ndarray)
    with torch.no_grad():
        hidden = torch.from_numpy(single)
        if hasattr(agent, "network"):
            hidden = agent.network(hidden / 255.0)
        expected = torch.softmax(agent.actor(hidden), -1)[0].numpy() * len(actions)
    chi_square = np.sum((np.bincount(actions, minlength=3) - expected) ** 2 / expected)
    assert chi_square < 13.8  # The 0.1 % point for 2 degrees of freedom.


def test_a_worker_draws_continuous_actions_from_the_agents_normal_distribution() -> None:
    agent = make("continuous")
    single = np.array([[0.3, -0.5, 1.0, 0.2]], np.float32)
    actions = on_worker(as_policy(agent), obs=single).act(np.repeat(single, 20_000, axis=0)).action
    with torch.no_grad():
        normal = Normal(agent.actor_mean(torch.from_numpy(single)), agent.actor_logstd.exp())
        ranks = normal.cdf(torch.from_numpy(actions)).numpy()
    grid = np.arange(1, 20_001)[:, None] / 20_000
    distance = np.abs(np.sort(ranks, axis=0) - grid).max(axis=0)
    assert (distance * np.sqrt(20_000) < 1.95).all()  # Kolmogorov-Smirnov, 0.1 % point.


@method_agents
def test_equal_seeds_give_equal_actions_and_leave_torchs_own_generator_alone(name: str, obs: Obs) -> None:
    one, two = on_worker(as_policy(make(name)), seed=4), on_worker(as_policy(make(name)), seed=4)
    other = on_worker(as_policy(make(name)), seed=5)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first = [one.act(obs).action for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    second = [two.act(obs).action for _ in range(3)]
    np.testing.assert_array_equal(np.array(first), np.array(second))
    assert not np.array_equal(np.array(first), np.array([other.act(obs).action for _ in range(3)]))


@method_agents
def test_agents_of_known_layers_need_no_torch_on_workers(name: str, obs: Obs) -> None:
    head = as_policy(make(name))
    assert is_fast(on_worker(head, obs=obs))
    assert not is_fast(head)  # The learner may replace its tensors at any time.


def test_a_learners_agent_is_read_anew_each_time(obs: Obs) -> None:
    agent = make("discrete")
    head = as_policy(agent)
    for _ in range(2):
        with torch.no_grad():
            truth = torch.log_softmax(agent.actor(torch.from_numpy(obs)), -1).numpy()
        distribution = head.distribution(obs)
        assert isinstance(distribution, Categorical)
        logprobs = [distribution.log_prob(np.full(len(obs), action)) for action in range(3)]
        np.testing.assert_allclose(np.stack(logprobs, axis=1), truth, rtol=1e-4, atol=1e-5)
        agent.actor[-1].weight = nn.Parameter(torch.randn_like(agent.actor[-1].weight))
        agent.actor[0].weight.data = torch.randn_like(agent.actor[0].weight)


@pytest.mark.parametrize("kind", [SharedTrunk, Masked, Annealed, Decorated, MultiDiscrete, Clipping])
def test_agents_that_do_more_than_call_their_networks_are_followed_or_left_alone(kind: type[Agent], obs: Obs) -> None:
    torch.manual_seed(0)
    agent = kind()
    worker = on_worker(as_policy(agent), obs=obs)
    assert is_fast(worker) == (kind is not Masked), "only one that branches on what it sees cannot be followed"
    obs[0, 0] = 200.0  # Where that one takes the other branch.
    decision = worker.act(obs)
    np.testing.assert_allclose(
        decision.extras["logprob"], evaluate(agent, obs, decision.action)[0], rtol=1e-4, atol=1e-5
    )


def test_per_call_values_work_for_agents_that_never_heard_of_them(obs: Obs) -> None:
    for name in ("discrete", "shared trunk"):
        worker = on_worker(as_policy(make(name)), obs=obs)
        distribution = worker.distribution(obs)
        assert isinstance(distribution, Categorical)
        decision = worker.act(obs, call={"deterministic": True})
        np.testing.assert_array_equal(decision.action, distribution.logits.argmax(axis=1))
        assert decision.extras.keys() == {"logprob", "value"}
        with pytest.raises(PolicyError, match="epsilon"):
            worker.act(obs, call={"epsilon": 0.1})


def test_per_call_values_reach_an_agents_own_parameters(obs: Obs) -> None:
    class Hot(Discrete):
        def get_action_and_value(self, x: Any, action: Any = None, heat: float = 1.0) -> Any:
            probs = TorchCategorical(logits=self.actor(x) / heat)
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    hot = on_worker(as_policy(Hot())).act(obs, call={"heat": 1e9})
    np.testing.assert_allclose(hot.extras["logprob"], -np.log(3.0), rtol=1e-5)


def test_a_recurrent_agent_carries_its_state_and_trains_on_what_it_did() -> None:
    torch.manual_seed(0)
    agent = Recurrent()
    worker = on_worker(as_policy(agent))
    steps = np.random.default_rng(0).standard_normal((5, 7, 4)).astype(np.float32)
    state = worker.initial_state(7)
    assert state is not None
    assert state["h"].shape == state["c"].shape == (7, 1, 8)
    decisions = []
    for obs in steps:
        probed = worker.distribution(obs, state)
        decision = worker.act(obs, state)
        assert isinstance(decision.action, np.ndarray)
        assert probed is not None
        np.testing.assert_allclose(probed.log_prob(decision.action), decision.extras["logprob"], rtol=1e-4, atol=1e-5)
        state = decision.state
        decisions.append(decision)
    zeros = torch.zeros(1, 7, 8)
    actions = np.concatenate([np.asarray(decision.action) for decision in decisions])
    with torch.no_grad():  # As CleanRL trains: the whole sequence at once.
        _, logprob, _, value, _ = agent.get_action_and_value(
            torch.from_numpy(steps.reshape(-1, 4)), (zeros, zeros), torch.zeros(35), torch.from_numpy(actions)
        )
    np.testing.assert_allclose(np.concatenate([d.extras["logprob"] for d in decisions]), logprob, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([d.extras["value"] for d in decisions]), value[:, 0], rtol=1e-4, atol=1e-5
    )


def test_an_agent_whose_method_returns_something_else_is_refused(obs: Obs) -> None:
    class Short(Discrete):
        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            return self.actor(x).argmax(1), self.critic(x)

    with pytest.raises(PolicyError, match="2 values"):
        as_policy(Short()).act(obs)


def test_images_and_read_only_observations_are_taken() -> None:
    class Cnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 16))
            self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            hidden = self.network(x / 255.0)
            probs = TorchCategorical(logits=self.actor(hidden))
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)

    images = np.random.default_rng(0).integers(0, 255, (6, 1, 8, 8), np.uint8)
    images.flags.writeable = False
    policy = as_policy(Cnn())
    decision = on_worker(policy).act(images)
    assert decision.extras["value"].shape == (6,)
    assert isinstance(policy.distribution(images), Categorical)


def test_one_environment_is_enough_to_understand_an_agent() -> None:
    single = np.zeros((1, 4), np.float32)
    worker = on_worker(as_policy(make("discrete")), obs=single)
    assert np.asarray(worker.act(single).action).shape == (1,)
    assert is_fast(worker)


def test_a_freshly_initialised_agent_is_not_misread(obs: Obs) -> None:
    """All logits of a new CleanRL agent are nearly 0, so any submodule of the right width would look right."""
    torch.manual_seed(0)
    agent: Agent = Discrete()
    agent.decoy = nn.Linear(4, 3)
    with torch.no_grad():
        for module in (agent.actor[4], agent.decoy):
            module.weight.mul_(1e-6)
            module.bias.zero_()
    worker = on_worker(as_policy(agent))
    worker.distribution(obs)
    trained = Discrete()
    trained.decoy = nn.Linear(4, 3)
    worker.load(as_policy(trained).weights())
    decision = worker.act(obs)
    np.testing.assert_allclose(
        decision.extras["logprob"], evaluate(trained, obs, decision.action)[0], rtol=1e-4, atol=1e-5
    )


def test_unknown_call_values_and_nan_weights_are_reported(obs: Obs) -> None:
    call: Call = {"epsilom": 0.1}
    with pytest.raises(PolicyError, match="epsilom"):
        on_worker(as_policy(QNetwork())).act(obs, call=call)
    worker = on_worker(as_policy(make("discrete")), obs=obs)
    worker.act(obs)
    worker.load({name: np.full_like(array, np.nan) for name, array in worker.weights().items()})
    with pytest.raises(PolicyError, match="NaN"):
        worker.act(obs)


def test_a_method_that_needs_more_than_observations_is_refused_with_a_way_out() -> None:
    class WithMask(Discrete):
        def get_action_and_value(self, x: Any, goal: Any, action: Any = None) -> Any:  # type: ignore[override]  # as users do
            return super().get_action_and_value(x, action)

    with pytest.raises(PolicyError, match=r"goal.*act=lambda"):
        as_policy(WithMask())


def test_a_critic_with_two_heads_keeps_both(obs: Obs) -> None:
    torch.manual_seed(0)
    agent: Agent = Discrete()
    agent.critic = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    decision = on_worker(as_policy(agent), obs=obs).act(obs)
    with torch.no_grad():
        np.testing.assert_allclose(
            decision.extras["value"], agent.critic(torch.from_numpy(obs)).numpy(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("trunk", ["body", "trunk", "shared", "encoder", "backbone", "features", "cnn", "network"])
@pytest.mark.parametrize("head", ["actor", "actor_mean", "pi"])
def test_a_shared_trunk_may_have_any_name(trunk: str, head: str, obs: Obs) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, trunk, nn.Sequential(nn.Linear(4, 16), nn.Tanh()))
            setattr(self, head, nn.Linear(16, 3))
            self.critic = nn.Linear(16, 1)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            hidden = getattr(self, trunk)(x)
            probs = TorchCategorical(logits=getattr(self, head)(hidden))
            if action is None:
                action = probs.sample()
            return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)

    torch.manual_seed(0)
    agent = Shared()
    for shown in (None, obs):
        worker = on_worker(as_policy(agent), obs=shown)
        assert is_fast(worker) == (shown is not None)
        decision = worker.act(obs)
        logprob, value = evaluate(agent, obs, decision.action)
        np.testing.assert_allclose(decision.extras["logprob"], logprob, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(decision.extras["value"], value, rtol=1e-4, atol=1e-5)
