"""`evaluate`: exactly the episodes that were asked for, with the same table on any number of workers."""

from __future__ import annotations

import functools
import random
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tests.torch_agents as agents
from clusterenv import AdaptiveSync, ClusterEnv, Evaluation, Faults, NativeVector, Network
from clusterenv.adapters.cleanrl import CleanRLView
from clusterenv.adapters.torch import TorchPolicy
from clusterenv.errors import ConfigError, PolicyError, WorkerFailed
from clusterenv.evaluation.manifest import find_commit
from clusterenv.policy.sync import SyncRule
from tests.agents import Agent
from tests.conftest import Backend
from tests.uneven import (
    LONG,
    Chance,
    Dice,
    Endless,
    Floats,
    Masked,
    Raises,
    Uneven,
    act,
    obey,
    play_plainly,
    roll,
    rows_of,
    seed_chance,
)

SEEDS = list(range(100, 160))
# Workers get the agents of this file as they are: to import it for them would take torch, pytest and Hypothesis.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@functools.cache
def plain_table() -> list[Any]:
    return play_plainly(Uneven(), act, SEEDS)


def test_the_table_is_that_of_a_plain_loop(backend: Backend) -> None:
    with ClusterEnv(Uneven, 5, **backend) as envs:
        evaluation = envs.evaluate(act, len(SEEDS), seed=SEEDS[0])
        assert rows_of(evaluation) == plain_table()
        assert {LONG} < set(evaluation.lengths.tolist())
        # The environments are used again, and nothing of the last evaluation is left in them.
        assert rows_of(envs.evaluate(act, seed=SEEDS[::-1])) == plain_table()[::-1]


@pytest.mark.parametrize(("num_workers", "num_envs"), [(0, 1), (0, 19), (1, 8), (3, 3), (3, 11)])
def test_the_table_does_not_depend_on_the_number_of_workers_and_environments(num_workers: int, num_envs: int) -> None:
    with ClusterEnv(Uneven, num_envs, num_workers=num_workers) as envs:
        assert rows_of(envs.evaluate(act, seed=SEEDS)) == plain_table()


def test_what_ended_an_episode_is_told_of_each(backend: Backend) -> None:
    with ClusterEnv(Uneven, 3, **backend) as envs:
        evaluation = envs.evaluate(act, 20)
    env = Uneven()
    for seed, info in zip(evaluation.seeds.tolist(), evaluation.final_infos, strict=True):
        obs, _ = env.reset(seed=seed)
        is_over = False
        while not is_over:
            obs, _, terminated, truncated, expected = env.step(act(obs[None])[0])
            is_over = terminated or truncated
        assert info["success"] is expected["success"]
        np.testing.assert_array_equal(info["state"], expected["state"])


class Network64(nn.Module):
    """A Q-network for `Uneven`."""

    def __init__(self, num_inputs: int = 3, num_actions: int = 3) -> None:
        super().__init__()
        self.body = agents.mlp(num_inputs, num_actions)

    def forward(self, x: Any) -> Any:
        return self.body(x)


def q_network() -> TorchPolicy:
    torch.manual_seed(3)
    return TorchPolicy(Network64(), output="q")


def recurrent_network() -> TorchPolicy:
    torch.manual_seed(4)
    cell, head = nn.GRUCell(3, 32), nn.Linear(32, 3)

    def choose(module: Any, obs: Any, state: Any) -> dict[str, Any]:
        memory = module[0](obs, state["h"])
        return {"action": module[1](memory).argmax(1), "state": {"h": memory}}

    return TorchPolicy(
        nn.ModuleList([cell, head]), act=choose, initial_state=lambda count: {"h": torch.zeros(count, 32)}
    )


def test_a_network_has_the_table_of_a_plain_loop() -> None:
    policy = q_network()

    def choose(obs: Any) -> Any:
        with torch.inference_mode():
            return policy.module(torch.as_tensor(obs)).argmax(1).numpy()

    with ClusterEnv(Uneven, 4, num_workers=2) as envs:
        assert rows_of(envs.evaluate(policy, seed=SEEDS)) == play_plainly(Uneven(), choose, SEEDS)


def continuous_network() -> Any:
    torch.manual_seed(5)
    return TorchPolicy(Network64(num_actions=2), output="action")


@pytest.mark.parametrize(
    ("make", "wrappers"),
    [(q_network, []), (recurrent_network, []), (continuous_network, [Floats])],
    ids=["a Q-network", "a recurrent one", "a continuous one"],
)
def test_a_networks_table_is_the_same_bit_for_bit_whatever_runs_beside_an_episode(make: Any, wrappers: Any) -> None:
    tables = []
    for num_workers, num_envs in ((0, 1), (0, 9), (1, 3)):
        with ClusterEnv(Uneven, num_envs, num_workers=num_workers, wrappers=wrappers) as envs:
            tables.append(rows_of(envs.evaluate(make(), 40, seed=7)))
    assert tables[0] == tables[1] == tables[2]


def tell_row(obs: Any) -> Any:
    """Choose by the row of the batch: kernels may compute some rows in other ways than others."""
    return np.arange(len(obs)) % 3


def test_an_episode_has_the_same_row_of_a_batch_whatever_runs_beside_it() -> None:
    tables = []
    for num_workers, num_envs in ((0, 1), (0, 3), (0, 19), (2, 5)):
        with ClusterEnv(Uneven, num_envs, num_workers=num_workers) as envs:
            tables.append(rows_of(envs.evaluate(tell_row, 60)))
    assert all(table == tables[0] for table in tables)


def by_normal(obs: Any, rng: Any) -> Any:
    return (rng.normal(obs[:, 0], 0.5) > 0).astype(np.int64)


def by_integers(obs: Any, rng: Any) -> Any:
    return rng.integers(0, np.full(len(obs), 3))


def by_uniform(obs: Any, rng: Any) -> Any:
    return (rng.uniform(np.zeros(len(obs)), 1.0) < 0.5).astype(np.int64)


@pytest.mark.parametrize("agent", [by_normal, by_integers, by_uniform])
def test_choices_whose_number_follows_from_their_parameters_follow_from_the_seed(agent: Any) -> None:
    tables = []
    for num_envs in (1, 3, 8):
        with ClusterEnv(Uneven, num_envs, num_workers=0) as envs:
            tables.append(rows_of(envs.evaluate(agent, 20)))
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize("make", [Dice, lambda: roll, lambda: Agent(3, 3)], ids=["a policy", "a function", "a network"])
def test_random_choices_follow_from_an_episodes_seed_alone(make: Any) -> None:
    torch.manual_seed(1)
    agent = make()
    tables = []
    for num_workers, num_envs in ((0, 1), (2, 5)):
        with ClusterEnv(Uneven, num_envs, num_workers=num_workers) as envs:
            tables.append(rows_of(envs.evaluate(agent, 30)))
            assert rows_of(envs.evaluate(agent, 30, seed=1))[:-1] == tables[-1][1:]
    assert tables[0] == tables[1]
    lengths = [row[2] for row in tables[0]]
    assert [row[1] for row in play_plainly(Uneven(), act, range(30))] != [row[1] for row in tables[0]]
    assert lengths == [row[2] for row in play_plainly(Uneven(), act, range(30))]


def draw(logits: Any) -> Any:
    distribution: Any = torch.distributions.Categorical(logits=logits)
    return distribution.sample()


def by_torch(obs: Any) -> Any:
    return draw(torch.as_tensor(obs)).numpy()


def by_numpy(obs: Any) -> Any:
    return np.where(np.random.random(len(obs)) < 0.5, np.random.randint(3, size=len(obs)), np.argmax(obs, axis=1))


def by_python(obs: Any) -> Any:
    return np.array([random.randrange(3) for _ in obs])


def by_several(obs: Any) -> Any:
    return np.array([np.random.randint(3) if random.random() < 0.1 else int(np.argmax(row)) for row in obs])


def by_choice(obs: Any, rng: Any) -> Any:
    return rng.choice(3, size=len(obs))


def sampling_network() -> TorchPolicy:
    torch.manual_seed(6)

    def choose(module: Any, obs: Any) -> Any:
        return draw(module(obs))

    return TorchPolicy(Network64(), act=choose)


def sampling_memory() -> TorchPolicy:
    torch.manual_seed(7)

    def choose(module: Any, obs: Any, state: Any) -> dict[str, Any]:
        memory = module[0](obs, state["h"])
        return {"action": draw(4 * module[1](memory)), "state": {"h": memory}}

    return TorchPolicy(
        nn.ModuleList([nn.GRUCell(3, 8), nn.Linear(8, 3)]),
        act=choose,
        initial_state=lambda count: {"h": torch.zeros(count, 8)},
    )


def forgetful_network() -> TorchPolicy:
    torch.manual_seed(8)
    return TorchPolicy(nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 3)).train(), output="q")


@pytest.mark.parametrize(
    "make",
    [
        *(lambda agent=agent: agent for agent in (by_torch, by_numpy, by_python, by_several, by_choice)),
        *(sampling_network, sampling_memory, forgetful_network),
    ],
    ids=["torch", "numpy", "python", "now and then", "choice", "a network", "a recurrent one", "dropout"],
)
def test_an_agent_whose_own_code_draws_has_the_same_table_whatever_runs_beside_an_episode(make: Any) -> None:
    tables = []
    for num_envs in (1, 9):
        with ClusterEnv(Uneven, num_envs, num_workers=0) as envs:
            evaluation = envs.evaluate(make(), 15, seed=7)
            assert evaluation.is_repeatable
            tables.append(rows_of(evaluation))
            assert rows_of(envs.evaluate(make(), 15, seed=8))[:-1] == tables[-1][1:]
    assert tables[0] == tables[1] != play_plainly(Uneven(), act, range(7, 22))


def test_what_an_agents_own_code_draws_is_the_same_on_workers() -> None:
    tables = []
    for num_workers, num_envs in ((0, 3), (2, 5)):
        with ClusterEnv(Uneven, num_envs, num_workers=num_workers) as envs:
            tables.append([rows_of(envs.evaluate(agent, 15)) for agent in (sampling_memory(), by_numpy, by_choice)])
    assert tables[0] == tables[1]


@pytest.mark.parametrize("agent", [by_numpy, by_python])
def test_an_agent_that_draws_beside_environments_that_do_leaves_them_their_numbers(agent: Any) -> None:
    class Drawing(Uneven):
        def step(self, action: Any) -> Any:
            obs, _, *others = super().step(action)
            return obs, random.random() + float(np.random.random()), *others

    with ClusterEnv(Drawing, 1, num_workers=0) as envs:
        returns = envs.evaluate(agent, 30, seed=7).returns
    assert len(set(returns.tolist())) == 30


def draw_late(obs: Any) -> Any:
    return np.where(obs[:, 0] > 0.5, np.random.randint(3, size=len(obs)), 0) if (obs[:, 0] > 0.5).any() else act(obs)


def test_an_agent_that_begins_to_draw_later_is_said_to_be_not_repeatable(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    seeds = [seed for seed in range(100) if Uneven().reset(seed=seed)[0][0] < 0.5][:40]
    with ClusterEnv(Uneven, 4, num_workers=1) as envs:
        evaluation = envs.evaluate(draw_late, seed=seeds, resume=tmp_path / "eval.jsonl")
        again = envs.evaluate(draw_late, seed=seeds, resume=tmp_path / "eval.jsonl")
    assert again.manifest["resumed_episodes"] == len(seeds)
    for each in (evaluation, again):
        assert not each.is_repeatable
        assert not each.to_dict()["is_repeatable"]
        assert "another evaluation may differ" in str(each)
    assert "drew random numbers that episodes share" in caplog.text


def test_a_deterministic_evaluation_takes_the_most_likely_actions() -> None:
    with ClusterEnv(Uneven, 4, num_workers=2) as envs:
        assert rows_of(envs.evaluate(Dice(), seed=SEEDS, deterministic=True)) == plain_table()


def test_a_policy_that_cannot_act_deterministically_is_refused(backend: Backend) -> None:
    with ClusterEnv(Uneven, 2, **backend) as envs:
        with pytest.raises(PolicyError, match="takes no deterministic"):
            envs.evaluate(roll, 5, deterministic=True)
        assert len(envs.evaluate(roll, 5)) == 5


def test_episodes_may_differ_in_their_options(backend: Backend) -> None:
    options = [{"bonus": float(index)} for index in range(12)]
    seeds = [3] * 12
    with ClusterEnv(Uneven, 3, **backend) as envs:
        evaluation = envs.evaluate(act, seed=seeds, options=options)
        assert rows_of(evaluation) == play_plainly(Uneven(), act, seeds, options)
        same = envs.evaluate(act, 6, options={"bonus": 2.0})
        assert rows_of(same) == play_plainly(Uneven(), act, range(6), [{"bonus": 2.0}] * 6)


def test_max_steps_truncates_what_takes_longer(backend: Backend) -> None:
    with ClusterEnv(Uneven, 3, **backend) as envs:
        evaluation = envs.evaluate(act, seed=SEEDS, max_steps=5)
        assert rows_of(evaluation) == play_plainly(Uneven(), act, SEEDS, max_steps=5)
        assert evaluation.lengths.max() == 5


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    num_envs=st.integers(1, 20),
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40, unique=True),
    max_steps=st.none() | st.integers(1, 20),
)
def test_any_seeds_are_played_once_each_in_any_number_of_environments(
    num_envs: int, seeds: list[int], max_steps: int | None
) -> None:
    with ClusterEnv(Uneven, num_envs, num_workers=0) as envs:
        found = rows_of(envs.evaluate(act, seed=seeds, max_steps=max_steps))
    assert found == play_plainly(Uneven(), act, seeds, max_steps=max_steps)


def test_a_policy_is_given_the_masks_of_its_environments() -> None:
    with ClusterEnv(Uneven, 5, num_workers=2, wrappers=[Masked]) as envs:
        assert len(envs.evaluate(obey, 20)) == 20


class SometimesMasked(Masked):
    """Has masks in some episodes only."""

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        self._has_masks = options["seed"] % 3 != 0
        return obs, info if self._has_masks else {}

    def step(self, action: Any) -> Any:
        if not self._has_masks:
            return self.env.step(action)
        return super().step(action)


def obey_if_told(obs: Any, action_mask: Any = None) -> Any:
    return np.zeros(len(obs), np.int64) if action_mask is None else np.argmax(action_mask, axis=1)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_masks_are_given_though_the_first_episode_has_none(num_envs: int) -> None:
    with ClusterEnv(Uneven, num_envs, num_workers=0, wrappers=[SometimesMasked]) as envs:
        assert len(envs.evaluate(obey_if_told, 20)) == 20


def train(backend: Backend, sync: SyncRule | None, *, evaluates: bool, is_wrapped: bool = False) -> list[Any]:
    """Train a little; returns everything that a learner sees."""
    torch.manual_seed(0)
    seed_chance(None)
    module = Agent(3, 3)
    agent = TorchPolicy(module) if is_wrapped else module
    seen: list[Any] = []
    with ClusterEnv(Uneven, 4, sync=sync, wrappers=[Chance], **backend) as envs:
        envs.reset(seed=5)
        envs.apply(seed_chance, range(4))
        for _ in range(4):
            if evaluates:
                envs.evaluate(agent, 6)
                envs.evaluate(act, 3, deterministic=False)
            rollout = envs.rollout(agent, 16)
            step = envs.step(agent)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            seen += [rollout.obs, rollout.actions, rollout.rewards, rollout.extras["logprob"], rollout.versions]
            seen += [step[0], step[1], step[4]["action"], rollout.divergences, rollout.episodes.returns]
        timed = ("seconds", "per_second", "idle_share", "workers_mean", "worker_hours")
        seen.append({name: value for name, value in envs.stats.items() if not name.endswith(timed)})
    seen += [random.random(), np.random.random(), torch.rand(1).item()]
    return seen


@pytest.mark.parametrize("sync", [None, AdaptiveSync(0.01)], ids=["every update", "adaptive"])
def test_training_goes_on_as_if_there_had_been_no_evaluation(backend: Backend, sync: SyncRule | None) -> None:
    for is_wrapped in (False, True) if backend["num_workers"] == 0 else (False,):
        without, with_them = (
            train(backend, sync, evaluates=evaluates, is_wrapped=is_wrapped) for evaluates in (False, True)
        )
        for expected, got in zip(without, with_them, strict=True):
            np.testing.assert_equal(got, expected)


class TorchChance(Uneven):
    """Draws from torch's own generator."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, float(reward) + torch.rand(1).item(), *rest


def test_torchs_generator_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with ClusterEnv(TorchChance, 2, num_workers=0) as envs:
        envs.evaluate(act, 5)
    assert torch.equal(torch.rand(3), expected)


def test_evaluations_use_as_many_environments_as_they_may(tmp_path: Path) -> None:
    class Counted(Uneven):
        def __init__(self) -> None:
            super().__init__()
            self._mark = tmp_path / f"{id(self)}"
            self._mark.touch()

        def close(self) -> None:
            self._mark.unlink()

    with ClusterEnv(Counted, 6, num_workers=0) as envs:
        envs.evaluate(act, 10, num_envs=2)
        assert len(list(tmp_path.iterdir())) == 6 + 2
        envs.evaluate(act, 10)
        assert len(list(tmp_path.iterdir())) == 6 + 6
        envs.evaluate(act, 10, num_envs=1)
        assert len(list(tmp_path.iterdir())) == 6 + 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"episodes": 0}, "episodes must be an int of at least 1"),
        ({"episodes": 2.5}, "episodes must be an int"),
        ({"seed": [1, 2, 1]}, "Seed 1 is given more than once"),
        ({"seed": []}, "seed is an empty list: give one seed per episode"),
        ({"seed": [1, 2], "episodes": 3}, "there are 2 seeds"),
        ({"seed": -1}, "Seeds must be from 0"),
        ({"seed": 2**63}, "Seeds must be from 0"),
        ({"seed": None}, "seed must be an int"),
        ({"seed": "0"}, "seed must be an int"),
        ({"options": [{}]}, "a list of 100 dicts, one per episode, got a list: 1"),
        ({"options": [{}, 3], "episodes": 2}, "got a list: one with 3 in it"),
        ({"resume": 3}, "resume must be the name of a file, such as 'eval.jsonl', got 3"),
        ({"options": 3}, "options must be a dict"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"num_envs": 0}, "num_envs must be"),
        ({"deterministic": 1}, "deterministic must be"),
        ({"values": 3}, "values must be"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(arguments: dict[str, Any], words: str) -> None:
    with ClusterEnv(Uneven, 1, num_workers=0) as envs, pytest.raises(ConfigError, match=words):
        envs.evaluate(act, **arguments)


def test_native_vector_environments_are_refused() -> None:
    envs = ClusterEnv(NativeVector("CartPole-v1"), 2, num_workers=0)
    with envs, pytest.raises(ConfigError, match="NativeVector"):
        envs.evaluate(act, 2)


def test_environments_that_differ_are_refused() -> None:
    envs = ClusterEnv(Uneven, 2, num_workers=0, observation_mode="different")
    with envs, pytest.raises(ConfigError, match="all alike"):
        envs.evaluate(act, 2)


class Longer(Uneven):
    """Another kind."""


def make_some(index: int) -> Any:
    return lambda: Uneven() if index >= 0 else Longer()


def test_a_list_of_factories_that_make_different_environments_is_refused(backend: Backend) -> None:
    with (
        ClusterEnv([make_some(0), make_some(-1)], **backend) as envs,
        pytest.raises(ConfigError, match=r"environment 0 is .*Uneven .*environment 1 is .*Longer.*for each kind"),
    ):
        envs.evaluate(act, 2)
    makers = [functools.partial(gym.make, "FrozenLake-v1", is_slippery=slips) for slips in (True, False)]
    with (
        ClusterEnv(makers, num_workers=0) as envs,
        pytest.raises(ConfigError, match=r"is_slippery=True.*is_slippery=False"),
    ):
        envs.evaluate(lambda obs: np.zeros(len(obs), np.int64), 2)


def test_factories_that_differ_in_a_number_only_are_taken_for_alike(caplog: pytest.LogCaptureFixture) -> None:
    with ClusterEnv([make_some(index) for index in range(3)], num_workers=0) as envs:
        for _ in range(2):
            assert rows_of(envs.evaluate(act, seed=SEEDS)) == plain_table()
    assert caplog.text.count("evaluate() uses environments that the first factory makes") == 1
    caplog.clear()
    makers = [lambda index=index: gym.make("CartPole-v1") for index in range(3)]
    with ClusterEnv(makers, num_workers=0) as envs:
        assert len(envs.evaluate(lambda obs: np.zeros(len(obs), np.int64), 2)) == 2
    assert not caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_episode_that_never_ends_is_an_error_that_names_max_steps(num_workers: int) -> None:
    with ClusterEnv(Endless, 1, num_workers=num_workers) as envs:
        with pytest.raises(ConfigError, match=r"Episode 0 \(seed 0\) has not ended .* max_steps"):
            envs.evaluate(act, 1)
        assert envs.evaluate(act, 2, max_steps=3).truncated.all()


def test_an_environment_that_raises_is_told_with_its_episode_and_the_next_evaluation_works(remote: Backend) -> None:
    assert play_plainly(Uneven(), act, [7])[0][2] > 2, "it raises before its end"
    with ClusterEnv(Raises, 4, **remote) as envs:
        with pytest.raises(WorkerFailed, match=r"(?s)An environment raised KeyError.*In episode 7 of .* with seed 7"):
            envs.evaluate(act, 30)
        assert rows_of(envs.evaluate(act, seed=SEEDS)) == plain_table()
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))


def test_an_environment_that_may_raise_truncates_its_episode(backend: Backend) -> None:
    with ClusterEnv(Raises, 3, faults=Faults(on_env_error="reset"), **backend) as envs:
        evaluation = envs.evaluate(act, 12)
    expected = play_plainly(Uneven(), act, range(12))
    assert rows_of(evaluation)[:7] + rows_of(evaluation)[8:] == expected[:7] + expected[8:]
    assert (evaluation.lengths[7], evaluation.truncated[7]) == (3, True)
    assert "KeyError" in evaluation.final_infos[7]["env_error"]


class RaisesOften(Uneven):
    """Raises in the first step of many episodes."""

    def step(self, action: Any) -> Any:
        if self.seed < 9:
            raise KeyError("broken")
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_how_often_an_environment_may_raise_is_counted_per_episode(num_envs: int) -> None:
    with ClusterEnv(RaisesOften, num_envs, num_workers=0, faults=Faults(on_env_error="reset")) as envs:
        evaluation = envs.evaluate(act, 15)
    assert evaluation.lengths[:9].tolist() == [1] * 9
    assert rows_of(evaluation)[9:] == play_plainly(Uneven(), act, range(9, 15))


class NeverResets(Uneven):
    """Cannot begin one of its episodes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed == 3:
            raise KeyError("broken")
        return super().reset(seed=seed, options=options)


def test_an_episode_that_cannot_begin_is_not_tried_for_ever() -> None:
    envs = ClusterEnv(NeverResets, 2, num_workers=0, faults=Faults(on_env_error="reset"))
    with envs, pytest.raises(KeyError, match="broken"):
        envs.evaluate(act, 6)


class CannotClose(Uneven):
    """Raises when it is closed, once an episode has begun."""

    def close(self) -> None:
        if self.seed >= 0:
            raise OSError("gone")


def test_environments_that_cannot_be_closed_do_not_end_an_evaluation_that_needs_fewer() -> None:
    with ClusterEnv(CannotClose, 3, num_workers=0) as envs:
        envs.evaluate(act, 5)
        assert len(envs.evaluate(act, 5, num_envs=1)) == 5


def test_a_policy_that_raises_is_told_and_the_next_evaluation_works(remote: Backend) -> None:
    with ClusterEnv(Uneven, 2, **remote) as envs:
        with pytest.raises(WorkerFailed, match="The policy raised ZeroDivisionError"):
            envs.evaluate(lambda obs: 1 // 0, 4)
        assert len(envs.evaluate(act, 4)) == 4


def test_evaluation_of_an_agent_sees_its_newest_weights() -> None:
    policy = q_network()
    with ClusterEnv(Uneven, 2, num_workers=1) as envs:
        first = rows_of(envs.evaluate(policy, 10))
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.neg_()
        assert rows_of(envs.evaluate(policy, 10)) != first


def table_of(returns: list[float]) -> Evaluation:
    count = len(returns)
    return Evaluation(
        returns=np.array(returns),
        lengths=np.arange(1, count + 1),
        seeds=np.arange(count),
        terminated=np.arange(count) % 2 == 0,
        truncated=np.arange(count) % 2 == 1,
        final_infos=[{}] * count,
        manifest={"env": "Uneven"},
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 100])
def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end(count: int) -> None:
    returns = np.random.default_rng(count).standard_normal(count)
    cut = int(0.25 * count)  # scipy.stats.trim_mean(returns, 0.25), which is what rliable calls.
    expected = np.partition(returns, (cut, count - cut - 1))[cut : count - cut].mean()
    assert table_of(returns.tolist()).iqm == pytest.approx(expected, rel=1e-12)


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    returns = np.random.default_rng(0).normal(10.0, 2.0, 400)
    low, high = table_of(returns.tolist()).interval
    assert low < returns.mean() < high
    error = returns.std() / np.sqrt(400)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert table_of(returns.tolist()).interval == (low, high)
    assert table_of([3.0]).interval == (3.0, 3.0)


def test_a_table_prints_what_a_person_wants_to_know() -> None:
    text = str(table_of([1.0, 2.0, 3.0, 4.0]))
    assert "4 episodes of Uneven" in text
    assert "return  2.5  (95 % interval" in text
    assert "2 terminated, 2 truncated" in text
    assert "nan" not in str(table_of([1.0]))


def test_a_table_becomes_a_data_frame_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = table_of([1.0, 2.0])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        table.to_dataframe()
    # A program in pandas' place, where that is not installed: what it is given is what matters.
    (tmp_path / "pandas.py").write_text("DataFrame = dict")
    monkeypatch.delitem(sys.modules, "pandas")
    monkeypatch.syspath_prepend(tmp_path)
    frame = table.to_dataframe()
    assert list(frame) == ["seed", "return", "length", "terminated", "truncated", "final_info"]
    assert frame["return"].tolist() == [1.0, 2.0]
    monkeypatch.delitem(sys.modules, "pandas")


def test_the_manifest_says_what_the_table_was_made_with() -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=1, env_kwargs={"sutton_barto_reward": True}) as envs:
        manifest = envs.evaluate(lambda obs: np.zeros(len(obs), np.int64), 3).manifest
    assert manifest["env"] == "CartPole-v1"
    assert "sutton_barto_reward=True" in manifest["made_by"]
    assert manifest["versions"]["numpy"] == np.__version__
    assert manifest["launcher"] == "LocalLauncher"
    assert (manifest["num_workers"], manifest["num_envs"]) == (1, 2)
    assert manifest["host"]


def test_the_commit_is_found_as_git_keeps_it(tmp_path: Path) -> None:
    git, inner = tmp_path / ".git", tmp_path / "a" / "b"
    (git / "refs" / "heads").mkdir(parents=True)
    inner.mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n" + "1" * 40 + " refs/heads/main\n")
    assert find_commit(inner) == "1" * 40
    (git / "refs" / "heads" / "main").write_text("2" * 40 + "\n")
    assert find_commit(inner) == "2" * 40
    (git / "HEAD").write_text("3" * 40 + "\n")
    assert find_commit(inner) == "3" * 40
    worktree = tmp_path / "worktree"
    worktree.mkdir()
    own = git / "worktrees" / "one"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text("../..\n")
    (worktree / ".git").write_text(f"gitdir: {own}\n")
    assert find_commit(worktree) == "2" * 40


def test_cleanrls_view_evaluates_too() -> None:
    with ClusterEnv(Uneven, 2, num_workers=0, autoreset_mode="SameStep") as envs:
        assert rows_of(CleanRLView(envs).evaluate(act, seed=SEEDS)) == plain_table()


def test_without_workers_the_factory_need_not_be_one_that_can_be_sent(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:

        def make() -> Uneven:
            file.write("made\n")
            return Uneven()

        with ClusterEnv(make, 2, num_workers=0) as envs:
            assert rows_of(envs.evaluate(act, seed=SEEDS)) == plain_table()


def test_an_agent_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()

    def choose(obs: Any) -> Any:
        with lock:
            return act(obs)

    with ClusterEnv(Uneven, 2, num_workers=0) as envs, pytest.raises(PolicyError, match="cannot be sent"):
        envs.evaluate(choose, 2)


def test_a_stream_may_be_followed_by_an_evaluation() -> None:
    with ClusterEnv(Uneven, 4, num_workers=2, network=Network(transport="zmq")) as envs:
        agent = Agent(3, 3)
        next(envs.stream(agent, 8))
        assert len(envs.evaluate(agent, 5)) == 5
        next(envs.stream(agent, 8))
