"""What a policy refers to by value reaches the workers whenever it changes: nothing goes stale in silence."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import importlib
import itertools
import logging
import sys
import threading
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from clusterenv import BasePolicy, ClusterEnv, Decision, EveryUpdate, NeverSync
from clusterenv.adapters.torch import TorchPolicy
from clusterenv.errors import ConfigError, PolicyError
from tests.conftest import Backend

choice_in_a_global = 0
acted: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.fixture(params=[0, 1], ids=["in process", "on a worker"])
def envs(request: pytest.FixtureRequest) -> Iterator[ClusterEnv]:
    with ClusterEnv("CartPole-v1", 2, sync=EveryUpdate(), num_workers=request.param) as made:
        yield made


class Chooser:
    def __init__(self) -> None:
        self.choice = 0

    def act(self, obs: Any) -> Any:
        return np.full(len(obs), self.choice)

    __call__ = act


def note_acting(agent: Any) -> None:
    acted.add(agent)


class Slotted:
    __slots__ = ("choice",)

    def __init__(self) -> None:
        self.choice = 0


def constant(obs: Any, settings: Any) -> Any:
    return np.full(len(obs), settings["choice"])


Change = Callable[[int], None]


def attribute_of_a_callable() -> tuple[Any, Change]:
    agent = Chooser()
    return agent, lambda choice: setattr(agent, "choice", choice)


def object_of_a_bound_method() -> tuple[Any, Change]:
    agent = Chooser()
    return agent.act, lambda choice: setattr(agent, "choice", choice)


def cell_of_a_closure() -> tuple[Any, Change]:
    current = 0

    def change(choice: int) -> None:
        nonlocal current
        current = choice

    return lambda obs: np.full(len(obs), current), change


def global_of_the_script() -> tuple[Any, Change]:
    def change(choice: int) -> None:
        global choice_in_a_global
        choice_in_a_global = choice

    return lambda obs: np.full(len(obs), choice_in_a_global), change


def keyword_of_a_partial() -> tuple[Any, Change]:
    settings = {"choice": 0}
    return functools.partial(constant, settings=settings), lambda choice: settings.update(choice=choice)


def nested_containers() -> tuple[Any, Change]:
    settings: dict[str, Any] = {"deep": [{"choice": [0]}]}

    def change(choice: int) -> None:
        settings["deep"][0]["choice"][0] = choice

    return lambda obs: np.full(len(obs), settings["deep"][0]["choice"][0]), change


def small_array() -> tuple[Any, Change]:
    table = np.zeros(3, np.int64)

    def change(choice: int) -> None:
        table[2] = choice

    return lambda obs: np.full(len(obs), table[2]), change


def large_array() -> tuple[Any, Change]:
    table = np.zeros(100_000, np.int64)

    def change(choice: int) -> None:
        table[:] = choice

    return lambda obs: np.full(len(obs), table[77]), change


def object_with_slots() -> tuple[Any, Change]:
    agent = Slotted()
    return lambda obs: np.full(len(obs), agent.choice), lambda choice: setattr(agent, "choice", choice)


def opaque_object() -> tuple[Any, Change]:
    recent = deque([0], maxlen=1)
    return lambda obs: np.full(len(obs), recent[0]), recent.append


def namespace() -> tuple[Any, Change]:
    settings = SimpleNamespace(choice=0)
    return lambda obs: np.full(len(obs), settings.choice), lambda choice: setattr(settings, "choice", choice)


def attribute_of_a_function() -> tuple[Any, Change]:
    def agent(obs: Any) -> Any:
        return np.full(len(obs), vars(agent)["choice"])

    return agent, lambda choice: setattr(agent, "choice", choice)


def attribute_of_a_function_that_is_called() -> tuple[Any, Change]:
    agent, change = attribute_of_a_function()
    return lambda obs: agent(obs), change


def cached_function() -> tuple[Any, Change]:
    settings = {"choice": 0}

    @functools.lru_cache(maxsize=1)
    def read() -> int:
        return settings["choice"]

    def change(choice: int) -> None:
        settings["choice"] = choice
        read.cache_clear()

    return lambda obs: np.full(len(obs), read()), change


def cached_property() -> tuple[Any, Change]:
    settings = {"choice": 0}

    class Local:
        @functools.cached_property
        def choice(self) -> int:
            return settings["choice"]

        def __call__(self, obs: Any) -> Any:
            return np.full(len(obs), self.choice)

    agent = Local()

    def change(choice: int) -> None:
        settings["choice"] = choice
        vars(agent).pop("choice", None)

    return agent, change


def cached_property_that_the_head_has_read() -> tuple[Any, Change]:
    agent, change = cached_property()

    def change_and_read(choice: int) -> None:
        change(choice)
        assert agent.choice == choice

    return agent, change_and_read


def attribute_of_a_local_class() -> tuple[Any, Change]:
    class Local:
        choice = 0

        def __call__(self, obs: Any) -> Any:
            return np.full(len(obs), self.choice)

    return Local(), lambda choice: setattr(Local, "choice", choice)


def replaced_function() -> tuple[Any, Change]:
    class Switch:
        decide: Any = staticmethod(np.zeros)

        def __call__(self, obs: Any) -> Any:
            return self.decide(len(obs), np.int64)

    agent = Switch()
    return agent, lambda choice: setattr(agent, "decide", np.ones if choice else np.zeros)


def attribute_that_was_not_there() -> tuple[Any, Change]:
    class Late(Chooser):
        def act(self, obs: Any) -> Any:
            return np.full(len(obs), getattr(self, "later", 0))

        __call__ = act

    agent = Late()
    return agent, lambda choice: setattr(agent, "later", choice)


def value_of_growing_size() -> tuple[Any, Change]:
    agent = Chooser()
    named: Any = agent
    named.text = "0"
    agent_act = lambda obs: np.full(len(obs), int(named.text[-1]))  # noqa: E731 - a closure, as users write them

    def change(choice: int) -> None:
        named.text = "x" * 10_000 + str(choice) if choice else "0"

    return agent_act, change


def attribute_of_a_policy() -> tuple[Any, Change]:
    class Own(BasePolicy):
        def __init__(self) -> None:
            self.choice = 0

        def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
            return Decision(np.full(len(obs), self.choice), {})

    agent = Own()
    return agent, lambda choice: setattr(agent, "choice", choice)


def network_in_a_closure() -> tuple[Any, Change]:
    network = nn.Linear(4, 2)

    def change(choice: int) -> None:
        with torch.no_grad():
            network.bias.copy_(torch.tensor([1e3, -1e3] if choice == 0 else [-1e3, 1e3]))

    change(0)
    return lambda obs: network(torch.as_tensor(obs)).argmax(-1).numpy(), change


def tensor_in_a_cell() -> tuple[Any, Change]:
    bias = torch.tensor([1.0, 0.0])

    def change(choice: int) -> None:
        bias.numpy()[:] = [1 - choice, choice]

    return lambda obs: np.full(len(obs), int(bias.argmax())), change


KEPT = [
    attribute_of_a_callable,
    object_of_a_bound_method,
    cell_of_a_closure,
    global_of_the_script,
    keyword_of_a_partial,
    nested_containers,
    small_array,
    large_array,
    object_with_slots,
    opaque_object,
    namespace,
    cached_function,
    cached_property,
    cached_property_that_the_head_has_read,
    attribute_of_a_function,
    attribute_of_a_function_that_is_called,
    attribute_of_a_local_class,
    replaced_function,
    attribute_that_was_not_there,
    value_of_growing_size,
    attribute_of_a_policy,
    network_in_a_closure,
    tensor_in_a_cell,
]


def test_what_changes_on_the_head_is_what_workers_act_by(envs: Any) -> None:
    for make in KEPT:
        agent, change = make()
        change(0)
        envs.reset(seed=1)
        versions = []
        for before, choice in itertools.pairwise((0, 0, 1, 1, 0, 1)):
            if choice != before:
                change(choice)
            rollout = envs.rollout(agent, 2)
            assert (rollout.actions == choice).all(), make.__name__
            versions.append(int(rollout.versions[0]) - int(rollout.ages[0]))
            assert (rollout.ages == 0).all(), make.__name__
        assert versions[1] == versions[2], f"{make.__name__}: what has not changed is not a new version"
        assert len(set(versions)) == 4, make.__name__


def test_what_only_a_worker_has_changed_stays_its_own(envs: Any) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0
            self.weight = np.zeros(1)

        def __call__(self, obs: Any) -> Decision:
            self.calls += 1
            return Decision(np.zeros(len(obs), np.int64), {"calls": np.full(len(obs), self.calls)})

    agent = Counting()
    first = envs.rollout(agent, 3)
    agent.weight[0] = 1.0
    second = envs.rollout(agent, 3)
    assert (second.versions == first.versions + 1).all()
    assert (np.diff(np.concatenate([first.calls, second.calls]), axis=0) == 1).all()


def test_what_python_itself_notes_on_a_class_is_no_change(envs: Any) -> None:
    class Agent(BasePolicy):
        def __init__(self) -> None:
            self.matrix = np.ones((4, 2), np.float32)

        def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
            return Decision(np.argmax(obs @ self.matrix, axis=-1), {})

    agent = Agent()
    first = envs.rollout(agent, 3)
    copy.copy(agent)  # The first copy of an instance adds __slotnames__ to its class.
    assert (envs.rollout(agent, 3).versions == first.versions).all()


def test_every_agent_of_a_class_sees_what_the_class_refers_to(envs: Any) -> None:
    settings = SimpleNamespace(sign=1.0)

    class Function:
        def __call__(self, obs: Any) -> Any:
            return np.full(len(obs), int(settings.sign < 0))

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Linear(4, 1)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            logits = torch.tensor([[100.0, -100.0]]) * settings.sign + 0.0 * x[:, :2]
            distribution: Any = torch.distributions.Categorical(logits=logits)
            action = distribution.sample() if action is None else action
            return action, distribution.log_prob(action), distribution.entropy(), self.critic(x)

    for cls in (Function, Agent):
        methods = {name: value for name, value in vars(cls).items() if callable(value)}
        for _ in range(2):
            agent = cls()
            for settings.sign in (1.0, -1.0):
                assert (envs.rollout(agent, 2).actions == (settings.sign < 0)).all(), cls.__name__
            envs.evaluate(agent, 2, seed=0, max_steps=2)
        assert all(vars(cls)[name] is value for name, value in methods.items()), "the user's own class is not touched"


def test_values_of_a_call_are_of_the_classes_that_the_agent_knows(envs: Any) -> None:
    class Mode(enum.Enum):
        LEFT = 0
        RIGHT = 1

    @dataclass(frozen=True)
    class Settings:
        mode: Mode

    def agent(obs: Any, settings: Any = None, mode: Mode = Mode.LEFT) -> Any:
        is_right = mode is Mode.RIGHT and settings == Settings(Mode.RIGHT)
        return np.full(len(obs), int(is_right))

    values = {"settings": Settings(Mode.RIGHT), "mode": Mode.RIGHT}
    assert (envs.rollout(agent, 2, values=values).actions == 1).all()
    assert (envs.rollout(agent, 2, values={**values, "mode": Mode.LEFT}).actions == 0).all()
    always_right, always_left = envs.evaluate(agent, 1, seed=0, values=values), envs.evaluate(agent, 1, seed=0)
    assert always_right.returns[0] != always_left.returns[0], "which way it leans decides when the pole falls"


def test_caches_are_computed_anew_with_each_version_but_for_generators(envs: Any) -> None:
    @functools.lru_cache
    def generators(seed: int) -> Any:
        return {"torch": torch.Generator().manual_seed(seed)}

    class Agent:
        version = 0

        def __init__(self) -> None:
            self.reads: list[int] = []

        @functools.cached_property
        def rng(self) -> Any:
            return np.random.default_rng(0)

        @functools.cached_property
        def read(self) -> int:
            self.reads.append(self.version)
            return self.version

        def __call__(self, obs: Any) -> Any:
            numbers = self.rng.random(len(obs)), torch.rand(len(obs), generator=generators(0)["torch"]).numpy()
            assert self.read == self.version
            extras = {"numpy": numbers[0], "torch": numbers[1], "reads": np.full(len(obs), len(self.reads))}
            return Decision(np.zeros(len(obs), int), extras)

    agent = Agent()
    rollouts = []
    for version in range(3):
        agent.version = version
        rollouts.append(copy.deepcopy(envs.rollout(agent, 2).extras))
    for name in ("numpy", "torch"):
        numbers = np.concatenate([extras[name].ravel() for extras in rollouts])
        assert len(set(numbers)) == len(numbers), "none is drawn twice"
    assert [extras["reads"].max() for extras in rollouts] == [1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 1], ids=["in process", "on a worker"])
def test_an_agent_that_takes_integers_is_run_once_a_step(num_workers: int) -> None:
    class Agent(nn.Embedding):
        temperature = 1.0
        calls = 0

        def forward(self, obs: Any) -> Any:
            self.calls += 1
            return super().forward(obs)

    def act(agent: Any, obs: Any) -> Any:
        return {"action": agent(obs).argmax(-1), "calls": torch.full((len(obs),), agent.calls)}

    agent = Agent(16, 4)
    policy = TorchPolicy(agent, act=act)
    with ClusterEnv("FrozenLake-v1", 1, sync=EveryUpdate(), num_workers=num_workers) as envs:
        assert envs.rollout(policy, 2).extras["calls"].ravel().tolist() == [1, 2]
        Agent.temperature = 0.5
        assert envs.rollout(policy, 2).extras["calls"].ravel().tolist() == [3, 4]


def test_a_policy_error_is_not_taken_for_a_wrong_dtype() -> None:
    dtypes: list[Any] = []

    def act(agent: Any, obs: Any) -> Any:
        dtypes.append(obs.dtype)
        raise PolicyError("It is closed.")

    with pytest.raises(PolicyError, match="closed"):
        TorchPolicy(nn.Linear(4, 2), act=act).act(np.zeros((2, 4)))
    assert dtypes == [torch.float32]


def test_only_the_copy_that_is_in_use_is_kept() -> None:
    class Agent(nn.Linear):
        def forward(self, obs: Any) -> Any:
            note_acting(self)  # Imported by copies, and so the same function for all of them.
            self.steps = getattr(self, "steps", 0) + 1  # Not to be replaced by numpy.
            return super().forward(obs)

    gc.collect()
    gc.disable()
    try:
        with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs:
            for _ in range(2):
                envs.rollout(TorchPolicy(Agent(4, 2), output="logits"), 2)
                assert [agent.steps for agent in acted] == [2], "the one that was tried is gone, and so is the last one"
    finally:
        gc.enable()


def test_values_that_cannot_be_sent_are_refused(envs: Any) -> None:
    def agent(obs: Any, lock: Any) -> Any:
        return np.zeros(len(obs), int)

    for call in (envs.rollout, envs.evaluate):
        with pytest.raises(ConfigError, match=r"values hold something that cannot be sent to workers: .*lock"):
            call(agent, 2, values={"lock": threading.Lock()})


def test_an_agent_that_remembers_has_seen_nothing_before_its_first_step(envs: Any) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, obs: Any) -> Decision:
            self.calls += 1
            return Decision(np.zeros(len(obs), np.int64), {"calls": np.full(len(obs), self.calls)})

    class CountingPolicy(BasePolicy):
        def __init__(self) -> None:
            self.counting = Counting()

        def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
            return self.counting(obs)

    class CountingModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
            self.calls = torch.zeros(1)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            self.calls = self.calls + 1.0
            distribution: Any = torch.distributions.Categorical(logits=self.actor(x))
            action = distribution.sample() if action is None else action
            logprob = distribution.log_prob(action)
            return action, logprob, distribution.entropy(), 0.0 * self.critic(x) + self.calls

    for agent in (Counting(), CountingPolicy(), CountingModule()):
        rollout = envs.rollout(agent, 3)
        counts = rollout.value if isinstance(agent, nn.Module) else rollout.calls
        assert counts.tolist() == [[1, 1], [2, 2], [3, 3]], type(agent).__name__


def test_a_tuple_that_can_be_called_is_an_agent(envs: Any) -> None:
    class Agent(namedtuple("Settings", ["choice"])):
        def __call__(self, obs: Any) -> Any:
            return np.full(len(obs), self.choice)

    for choice in (0, 1):
        assert envs.step(Agent(choice))[4]["action"].tolist() == [choice, choice]


def test_a_rule_that_never_pulls_keeps_the_first_values_everywhere() -> None:
    for num_workers in (0, 1):
        agent, change = cell_of_a_closure()
        with ClusterEnv("CartPole-v1", 2, num_workers=num_workers, sync=NeverSync()) as envs:
            assert (envs.rollout(agent, 2).actions == 0).all()
            change(1)
            assert (envs.rollout(agent, 2).actions == 0).all()


def test_what_is_too_large_to_compare_is_named_once_and_published(envs: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    data = [0] * 5_000
    agent = lambda obs: np.full(len(obs), data[4_999])  # noqa: E731 - a closure, as users write them
    for _ in range(2):
        assert (envs.rollout(agent, 2).actions == 0).all()
    assert caplog.text.count("data") == 1
    assert "envs.publish(agent)" in caplog.text
    data[4_999] = 1
    envs.publish(agent)
    assert (envs.rollout(agent, 2).actions == 1).all()


def test_values_change_in_a_stream_as_weights_do() -> None:
    agent, change = cell_of_a_closure()
    with ClusterEnv("CartPole-v1", 2, num_workers=1) as envs, envs.stream(agent, 4, max_lag=0) as stream:
        assert (next(stream).actions == 0).all()
        change(1)
        assert (next(stream).actions == 1).all()


def test_a_structure_may_change_in_a_stream() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9))
            self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            hidden = self.body(x)
            probs: Any = torch.distributions.Categorical(logits=self.actor(hidden))
            action = probs.sample() if action is None else action
            return action, probs.log_prob(action), probs.entropy(), self.critic(hidden)

    agent = Agent().eval()
    with ClusterEnv("CartPole-v1", 2, num_workers=1) as envs, envs.stream(agent, 4, max_lag=0) as stream:
        for is_training in (False, True, False):
            agent.train(is_training)
            rollout = next(stream)
            assert envs.stats["fast_path"] == (not is_training), "numpy does not do what draws random numbers"
            tensors = rollout.to_torch()
            with torch.no_grad():
                logprob = agent.eval().get_action_and_value(tensors.obs, tensors.actions)[1]
            agent.train(is_training)
            assert np.allclose(rollout.logprob, logprob, rtol=1e-4, atol=1e-4) == (not is_training)


Rebinding = Callable[[], None]


class Settings(dict[str, Any]):
    """A dict whose items are attributes, as many write it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Mode(enum.Enum):
    LEFT = 0
    RIGHT = 1


@dataclass(slots=True)
class SlottedDataclass:
    choice: int = 0


Pair = namedtuple("Pair", ["choice", "other"])


class OwnPair(Pair):
    pass


def by(read: Callable[[], int]) -> Callable[[Any], Any]:
    """Return an agent that chooses what is read when it is called."""
    return lambda obs: np.full(len(obs), read())


def rebound_network() -> tuple[Any, Rebinding]:
    networks = [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    for network, bias in zip(networks, ([9.0, -9.0], [-9.0, 9.0]), strict=True):
        network.bias.data[:] = torch.tensor(bias)
    league = SimpleNamespace(pool=networks, active=networks[0])

    def act(obs: Any) -> Any:
        return league.active(torch.as_tensor(obs)).argmax(-1).numpy()

    return act, lambda: setattr(league, "active", league.pool[1])


def rebound_settings() -> tuple[Any, Rebinding]:
    kept = SimpleNamespace(all=[Settings(choice=0), Settings(choice=1)])
    kept.current = kept.all[0]
    return by(lambda: kept.current.choice), lambda: setattr(kept, "current", kept.all[1])


def rebound_function() -> tuple[Any, Rebinding]:
    kept = SimpleNamespace(all={"left": lambda: 0, "right": lambda: 1})
    kept.current = kept.all["left"]
    return by(lambda: kept.current()), lambda: setattr(kept, "current", kept.all["right"])


def rebound_large_array() -> tuple[Any, Rebinding]:
    kept = SimpleNamespace(all=[np.zeros(20_000), np.ones(20_000)])
    kept.current = kept.all[0]
    return by(lambda: int(kept.current[0])), lambda: setattr(kept, "current", kept.all[1])


def member_of_an_enum() -> tuple[Any, Rebinding]:
    kept = SimpleNamespace(mode=Mode.LEFT)
    return by(lambda: 0 if kept.mode is Mode.LEFT else 1), lambda: setattr(kept, "mode", Mode.RIGHT)


def number_in_a_mixed_tuple() -> tuple[Any, Rebinding]:
    kept = SimpleNamespace(pair=((0, 0), (0, None, [1])))
    return by(lambda: kept.pair[1][0]), lambda: setattr(kept, "pair", ((0, 0), (1, None, [1])))


def item_of_a_dict_of_ones_own() -> tuple[Any, Rebinding]:
    settings = Settings(choice=0)
    return by(lambda: settings["choice"]), lambda: settings.update(choice=1)


def item_of_a_named_tuple_of_ones_own() -> tuple[Any, Rebinding]:
    kept = SimpleNamespace(pair=OwnPair(0, 0))
    return by(lambda: kept.pair.choice), lambda: setattr(kept, "pair", OwnPair(1, 0))


def large_array_in_another_order() -> tuple[Any, Rebinding]:
    array = np.zeros((100, 300)).T
    return by(lambda: int(array[0, 0])), lambda: array.fill(1)


def part_of_a_large_array() -> tuple[Any, Rebinding]:
    array = np.zeros((300, 300))[::2, 1:]
    return by(lambda: int(array[0, 0])), lambda: array.fill(1)


def slot_of_a_dataclass() -> tuple[Any, Rebinding]:
    kept = SlottedDataclass()
    return by(lambda: kept.choice), lambda: setattr(kept, "choice", 1)


def replaced_method() -> tuple[Any, Rebinding]:
    class Agent:
        def __call__(self, obs: Any) -> Any:
            return np.zeros(len(obs), np.int64)

    def act(self: Agent, obs: Any) -> Any:
        return np.ones(len(obs), np.int64)

    return Agent(), lambda: setattr(Agent, "__call__", act)


def replaced_property_of_a_base() -> tuple[Any, Rebinding]:
    class Base:
        @property
        def choice(self) -> int:
            return 0

    class Agent(Base):
        def __call__(self, obs: Any) -> Any:
            return np.full(len(obs), self.choice)

    return Agent(), lambda: setattr(Base, "choice", property(lambda self: 1))


def another_class() -> tuple[Any, Rebinding]:
    class Agent:
        choice = 0

        def __call__(self, obs: Any) -> Any:
            return np.full(len(obs), self.choice)

    class Other(Agent):
        choice = 1

    agent = Agent()
    return agent, lambda: setattr(agent, "__class__", Other)


def replaced_method_of_a_module() -> tuple[Any, Rebinding]:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Linear(4, 1)

        def logits(self, x: Any) -> Any:
            return torch.tensor([[100.0, -100.0]]) + 0.0 * x[:, :2]

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            distribution: Any = torch.distributions.Categorical(logits=self.logits(x))
            action = distribution.sample() if action is None else action
            return action, distribution.log_prob(action), distribution.entropy(), self.critic(x)

    def other(self: Agent, x: Any) -> Any:
        return torch.tensor([[-100.0, 100.0]]) + 0.0 * x[:, :2]

    return Agent(), lambda: setattr(Agent, "logits", other)


AGENTS = [
    replaced_method,
    replaced_property_of_a_base,
    another_class,
    replaced_method_of_a_module,
    rebound_network,
    rebound_settings,
    rebound_function,
    rebound_large_array,
    member_of_an_enum,
    number_in_a_mixed_tuple,
    item_of_a_dict_of_ones_own,
    item_of_a_named_tuple_of_ones_own,
    large_array_in_another_order,
    part_of_a_large_array,
    slot_of_a_dataclass,
]


def test_whatever_of_an_agent_changes_reaches_the_workers(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        envs.reset(seed=1)
        stale = []
        for make in AGENTS:
            agent, change = make()
            before = envs.rollout(agent, 2).actions
            change()
            after = envs.rollout(agent, 2).actions
            if not ((before == 0).all() and (after == 1).all()):
                stale.append(make.__name__)
        assert stale == []


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_single_number_of_a_large_array_is_noticed(envs: Any, order: Any, caplog: pytest.LogCaptureFixture) -> None:
    table = np.zeros((16, 5001), np.int32, order=order)
    agent = by(lambda: int(table[0, 77]))
    for table[0, 77] in (0, 1, 0):
        assert (envs.rollout(agent, 2).actions == table[0, 77]).all()
    assert caplog.text == ""


@pytest.mark.parametrize("distance", [1, 1021, 10_000])
def test_changes_of_a_large_array_that_cancel_out_are_noticed(envs: Any, distance: int) -> None:
    table = np.zeros(20_000)
    table[101] = 1.0
    there = [101, 101 + distance]
    agent = by(lambda: int(table[101] > 0))
    assert (envs.rollout(agent, 2).actions == 1).all()
    table[there] = table[there[::-1]]
    assert (envs.rollout(agent, 2).actions == 0).all()
    table[there] = table[there[::-1]]
    assert (envs.rollout(agent, 2).actions == 1).all()
    table[there] *= -1.0  # Two signs, the highest bits: these add up to nothing.
    assert (envs.rollout(agent, 2).actions == 0).all()


def test_sparse_changes_of_a_very_large_array_are_announced_and_published(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    table = np.zeros((16, 150_000))
    agent = by(lambda: int(table[0, 77]))
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, 2)
        assert "publish" in caplog.text
        table[0, 77] = 1
        envs.publish(agent)
        assert (envs.rollout(agent, 2).actions == 1).all()


def test_what_cannot_be_sent_is_named_once(backend: Backend) -> None:
    kept = SimpleNamespace(writer=threading.Event())
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        envs.reset(seed=1)
        with pytest.raises(PolicyError, match="writer") as caught:
            envs.rollout(by(lambda: 0 if kept.writer else 1), 2)
        assert str(caught.value).count("cannot be sent") == 1


def test_compiled_methods_travel_as_what_they_were_compiled_from(envs: Any) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

        def get_action_and_value(self, x: Any, action: Any = None) -> Any:
            distribution: Any = torch.distributions.Categorical(logits=self.actor(x))
            action = distribution.sample() if action is None else action
            return action, distribution.log_prob(action), distribution.entropy(), self.critic(x)

    class Decorated(Agent):
        get_action_and_value = torch.compile(Agent.get_action_and_value, backend="eager")

    compiled, patched = Agent(), Agent()
    compiled.compile(backend="eager")
    patched.get_action_and_value = torch.compile(patched.get_action_and_value, backend="eager")  # type: ignore[method-assign]  # as users do
    agents: list[Agent] = [Decorated(), compiled, patched]
    for agent in agents:
        for _ in range(2):
            rollout = envs.rollout(agent, 3)
            with torch.no_grad():
                value = agent.critic(torch.as_tensor(rollout.obs))[..., 0]
                agent.critic.bias.add_(1.0)
            np.testing.assert_allclose(rollout.value, value, rtol=1e-4, atol=1e-6)


def test_parts_of_a_large_parameter_that_torch_does_not_count_are_noticed(envs: Any) -> None:
    agent: Any = nn.Sequential(nn.Linear(4, 20_000), nn.Linear(20_000, 2))
    policy = TorchPolicy(agent, output="logits")
    first = envs.rollout(policy, 1).versions
    agent[0].weight.data[777, 1:3] = 1.0
    assert (envs.rollout(policy, 1).versions > first).all()


NETS = """
import torch
from torch import nn

net = nn.Linear(4, 2)


def choose(obs):
    with torch.no_grad():
        return net(torch.as_tensor(obs)).argmax(-1).numpy()


class Agent(nn.Module):
    temperature = 1.0

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def get_action_and_value(self, x, action=None):
        probs = torch.distributions.Categorical(logits=self.see(x) / self.temperature)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    def see(self, x):
        return self.actor(x)


class Slow(Agent):
    def __init__(self):
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 3, padding=1)

    def see(self, x):
        return self.actor(self.filter(x[:, None])[:, 0])


class Frozen(Agent):
    def see(self, x):
        return net(x)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file of the user's own, which workers import as the script does."""
    (tmp_path / "nets_of_a_user.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("nets_of_a_user")
    del sys.modules["nets_of_a_user"]


@pytest.mark.parametrize("use", ["a function", "through another", "by the module", "in a method"])
def test_a_network_that_is_a_global_of_an_imported_file_is_named_once(
    use: str, nets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def by_the_module(obs: Any) -> Any:
        return nets_of_a_user.net(torch.as_tensor(obs)).argmax(-1).numpy()  # type: ignore[name-defined]  # noqa: F821

    by_the_module.__globals__["nets_of_a_user"] = nets  # As `import nets_of_a_user` at the top of a script.
    agents = {
        "a function": nets.choose,
        "through another": lambda obs: nets.choose(obs),
        "by the module": by_the_module,
        "in a method": nets.Frozen(),
    }
    with ClusterEnv("CartPole-v1", 2, num_workers=1) as envs:
        for _ in range(3):
            envs.rollout(agents[use], 2)
    del by_the_module.__globals__["nets_of_a_user"]
    said = [record.getMessage() for record in caplog.records if "a global of the module" in record.getMessage()]
    assert len(said) == 1
    assert "The policy uses net, a global of the module nets_of_a_user." in said[0]


def test_a_network_that_was_imported_by_name_is_sent_and_nothing_is_said(
    nets: Any, envs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = nets.net

    def choose(obs: Any) -> Any:
        return net(torch.as_tensor(obs)).argmax(-1).numpy()

    for _ in range(3):
        rollout = envs.rollout(choose, 4)
        assert (choose(rollout.obs) == rollout.actions).all()
        with torch.no_grad():
            net.weight.neg_()
    assert "a global of the module" not in caplog.text


@pytest.mark.parametrize("name", ["Agent", "Slow"])
def test_plain_attributes_of_an_imported_class_reach_the_workers(name: str, nets: Any, envs: Any) -> None:
    cls = getattr(nets, name)
    cls.temperature = 0.5  # Before anything starts, as a script's arguments are.
    agent = cls()
    for _ in range(3):
        rollout = envs.rollout(agent, 4)
        with torch.no_grad():
            obs, actions = (torch.as_tensor(part).flatten(0, 1) for part in (rollout.obs, rollout.actions))
            expected = agent.get_action_and_value(obs, actions)[1]
        np.testing.assert_allclose(rollout.logprob.ravel(), expected, rtol=1e-4, atol=1e-5)
        cls.temperature *= 0.5


def test_a_long_chain_of_imported_functions_is_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    links = "".join(f"def link_{index}(obs):\n    return link_{index + 1}(obs)\n" for index in range(3000))
    end = "def link_3000(obs):\n    return net(obs)\n"
    first = "def choose(obs):\n    return np.zeros(len(obs), np.int64) if len(obs) else link_0(obs)\n"
    text = f"import numpy as np\nfrom torch import nn\nnet = nn.Linear(4, 2)\n{links}{end}{first}"
    (tmp_path / "chain_of_a_user.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    chain = importlib.import_module("chain_of_a_user")
    with ClusterEnv("CartPole-v1", 2, num_workers=0) as envs:
        envs.rollout(chain.choose, 2)
    del sys.modules["chain_of_a_user"]
    assert caplog.text.count("The policy uses net, a global of the module chain_of_a_user.") == 1
