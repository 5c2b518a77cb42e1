"""The law of policies: what workers return is what the agent itself returns, after any number of updates.

For the same observations, weights and mode: to 1e-4 in float32, 1e-9 in float64, 2e-2 in bfloat16.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, Rollout
from clusterenv.adapters import as_policy
from clusterenv.policy.policy import map_tree
from tests.zoo import (
    DISCRETE,
    RECURRENT,
    VECTOR,
    ZOO,
    AnySpace,
    Branching,
    Dropping,
    Embedded,
    Habitual,
    MixedPrecision,
    OneHot,
    Whimsical,
)

# Environments of the same spaces are shared by their agents, so that a worker starts once for all of them.
ENCLOSURES = [
    (observations, actions, [make for make, *spaces in ZOO if spaces == [observations, actions]])
    for observations, actions in dict.fromkeys((id(o), id(a)) for _, o, a in ZOO)
    for observations, actions in [next((o, a) for _, o, a in ZOO if (id(o), id(a)) == (observations, actions))]
]


def tolerance(agent: nn.Module) -> float:
    return {torch.float64: 1e-9, torch.bfloat16: 2e-2}.get(next(agent.parameters()).dtype, 1e-4)


def opinion(agent: Any, obs: Any, actions: Any) -> tuple[Any, Any]:
    """Return the agent's own log-probabilities and values of one step's actions."""
    norms = [module for module in agent.modules() if isinstance(module, nn.BatchNorm1d)]
    modes = [norm.training for norm in norms]
    for norm in norms:
        norm.training = False
    dtype = next(agent.parameters()).dtype
    x = map_tree(lambda rows: torch.as_tensor(rows).to(dtype), obs)
    with torch.no_grad():
        _, logprob, _, value = agent.get_action_and_value(x, torch.as_tensor(actions))
    for norm, mode in zip(norms, modes, strict=True):
        norm.training = mode
    return logprob.double().numpy(), value.double().numpy().reshape(-1)


def check(agent: Any, rollout: Rollout) -> None:
    bound = tolerance(agent)
    for step in range(rollout.num_steps):
        obs = map_tree(operator.itemgetter(step), rollout.obs)
        logprob, value = opinion(agent, obs, rollout.actions[step])
        np.testing.assert_allclose(rollout.logprob[step], logprob, rtol=bound, atol=bound)
        np.testing.assert_allclose(rollout.value[step].reshape(-1), value, rtol=bound, atol=bound)


def update(agent: nn.Module, rng: torch.Generator, size: float = 0.3) -> None:
    """Change all weights, buffers of batch norms too, as training does."""
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=rng).to(parameter.dtype))
        for module in agent.modules():
            if isinstance(module, nn.BatchNorm1d) and module.running_mean is not None:
                module.running_mean.add_(torch.randn(module.running_mean.shape, generator=rng))


def live(agent: Any, envs: ClusterEnv) -> None:
    """Let an agent act, learn and change its mode and attributes."""
    rng = torch.Generator().manual_seed(1)
    for turn in range(4):
        if not any(isinstance(module, nn.Dropout) and module.p for module in agent.modules()):
            agent.train(turn % 2 == 0)
        else:
            agent.eval()
        if hasattr(agent, "temperature"):
            agent.temperature, agent.is_flipped = 1.0 + turn, turn == 2
        check(agent, envs.rollout(agent, 3))
        update(agent, rng)


@pytest.mark.parametrize("enclosure", ENCLOSURES, ids=lambda enclosure: f"{enclosure[0]} {enclosure[1]}"[:60])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_return_what_the_agent_itself_returns(enclosure: Any, num_workers: int) -> None:
    observations, actions, makers = enclosure
    make_env = functools.partial(AnySpace, observations, actions)
    with ClusterEnv(make_env, 5, num_workers=num_workers, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        for make in makers:
            torch.manual_seed(0)
            live(make(), envs)


@pytest.mark.parametrize("make", [make for make, *_ in ZOO], ids=lambda make: make.__name__)
def test_the_distribution_of_every_agent_can_be_compared(make: Callable[[], Any]) -> None:
    observations = next(observations for other, observations, _ in ZOO if other is make)
    torch.manual_seed(0)
    observations.seed(0)
    samples = [observations.sample() for _ in range(8)]
    agent = make().eval()
    obs = _stack(samples)
    policy = as_policy(agent)
    decision = policy.act(obs)
    distribution = policy.distribution(obs)
    if make is Branching:  # It makes one distribution per row.
        assert distribution is None
        return
    assert distribution is not None
    distribution.check()
    assert isinstance(decision.action, np.ndarray)
    bound = max(1e-3, tolerance(agent))
    np.testing.assert_allclose(distribution.log_prob(decision.action), decision.extras["logprob"], bound, bound)


def _stack(samples: list[Any]) -> Any:
    if isinstance(samples[0], dict):
        return {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
    if isinstance(samples[0], tuple):
        return tuple(_stack(list(parts)) for parts in zip(*samples, strict=True))
    return np.stack(samples)


HABITS: dict[str, Callable[[Any, Any], Any]] = {
    "greedy in eval": lambda actions, logits: actions == logits.argmax(-1),
    "cold": lambda actions, logits: (actions == logits.argmax(-1)) | (np.abs(logits[..., 0] - logits[..., 1]) < 0.1),
    "clipped": lambda actions, _: np.abs(actions) <= 0.1,
    "clipped in place": lambda actions, _: np.abs(actions) <= 0.1,
    "always the first": lambda actions, _: actions == 0,
}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_how_an_agent_chooses_is_its_own_affair(num_workers: int, habit: str) -> None:
    torch.manual_seed(0)
    agent = Habitual().eval()
    agent.habit = habit
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32) if "clip" in habit else spaces.Discrete(2)
    with ClusterEnv(functools.partial(AnySpace, VECTOR, space), 4, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            rollout = envs.rollout(agent, 30)
            with torch.no_grad():
                logits = agent.actor(agent.body(torch.as_tensor(rollout.obs))).numpy()
            assert HABITS[habit](rollout.actions, logits).all()
            update(agent, torch.Generator().manual_seed(1))


def test_a_mode_in_which_it_draws_is_fast_and_one_in_which_it_does_not_is_the_agents_own() -> None:
    agent = Habitual()
    with ClusterEnv(functools.partial(AnySpace, VECTOR, spaces.Discrete(2)), 4, num_workers=0) as envs:
        envs.reset(seed=1)
        fast = []
        for mode in (True, False, True):
            envs.rollout(agent.train(mode), 3)
            fast.append(envs.stats["fast_path"])
    assert fast == [1, 0, 1]


@pytest.mark.parametrize(
    ("make", "observations"), [(Embedded, spaces.Discrete(5)), (OneHot, spaces.Discrete(5)), (MixedPrecision, VECTOR)]
)
@pytest.mark.parametrize("sync", [EveryUpdate(), AdaptiveSync(0.05)], ids=lambda sync: type(sync).__name__)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_observations_come_in_a_dtype_that_the_agent_takes(
    make: Any, observations: Any, sync: Any, num_workers: int
) -> None:
    torch.manual_seed(0)
    agent = make()
    with ClusterEnv(functools.partial(AnySpace, observations, DISCRETE), 4, num_workers=num_workers, sync=sync) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(agent, 6)
    rows, chosen = torch.as_tensor(rollout.obs).flatten(0, 1), torch.as_tensor(rollout.actions).flatten()
    with torch.no_grad():
        _, logprob, _, value = agent.get_action_and_value(rows, chosen)
    np.testing.assert_allclose(rollout.logprob.ravel(), logprob.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rollout.value.ravel(), value.numpy()[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_agent_that_draws_its_own_random_numbers_still_does_on_workers(num_workers: int) -> None:
    make_env = functools.partial(AnySpace, VECTOR, DISCRETE)
    with ClusterEnv(make_env, 2, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(Whimsical(), 60)
        assert envs.stats["fast_path"] == 0
    assert set(rollout.value.ravel().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_agent_with_a_memory_sees_a_rollout_as_its_workers_did(num_workers: int, mode: str) -> None:
    """Run through at once from its first state, as CleanRL's update does, with a new state where an episode starts."""
    make_env = functools.partial(AnySpace, VECTOR, DISCRETE)
    with ClusterEnv(make_env, 3, num_workers=num_workers, autoreset_mode=mode) as envs:
        for make in RECURRENT:
            torch.manual_seed(0)
            agent, rng = make(), torch.Generator().manual_seed(1)
            envs.reset(seed=1)
            starts = np.zeros((1, 3), bool)
            for _ in range(3):
                rollout = envs.rollout(agent, 10)
                ended = rollout.terminations if mode == "SameStep" else ~rollout.valid
                starts = np.concatenate([starts[-1:], ended])  # The row after is the first of an episode.
                parts = [torch.as_tensor(part[0]).swapaxes(0, 1).contiguous() for part in rollout.states.values()]
                with torch.no_grad():
                    _, logprob, _, value, _ = agent.get_action_and_value(
                        torch.as_tensor(rollout.obs).flatten(0, 1),
                        tuple(parts) if len(parts) > 1 else parts[0],
                        torch.as_tensor(starts[:10]).float().flatten(),
                        torch.as_tensor(rollout.actions).flatten(),
                    )
                assert starts.any()
                np.testing.assert_allclose(rollout.logprob.ravel(), logprob.numpy(), rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(rollout.value.ravel(), value[:, 0].numpy(), rtol=1e-4, atol=1e-5)
                update(agent, rng)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dropout_in_train_mode_is_the_agents_own_in_distribution(num_workers: int) -> None:
    always = spaces.Box(0.5, 0.5, (6,), np.float32)
    torch.manual_seed(0)
    agent = Dropping().train()
    with torch.no_grad():
        values = agent.get_action_and_value(torch.full((4000, 6), 0.5))[3].flatten()
    with ClusterEnv(functools.partial(AnySpace, always, DISCRETE), 4, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        found = envs.rollout(agent, 250).value
        # A thousand draws: a fifth of a deviation is six standard errors.
        assert abs(found.mean() - values.mean().item()) < 0.2 * values.std().item()
        assert 0.8 < found.std() / values.std().item() < 1.25
        agent.eval()
        assert envs.rollout(agent, 3).value.std() < 1e-6
