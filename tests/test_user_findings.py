"""What somebody found who used the library for the first time: each agent went stale, or failed, once."""

from __future__ import annotations

import enum
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clusterenv import ClusterEnv
from clusterenv.errors import PolicyError
from tests.conftest import Backend

torch = pytest.importorskip("torch")

Change = Callable[[], None]


class Settings(dict[str, Any]):
    """A dict whose items are attributes, as many write it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Mode(enum.Enum):
    LEFT = 0
    RIGHT = 1


@dataclass(slots=True)
class Slotted:
    choice: int = 0


Pair = namedtuple("Pair", ["choice", "other"])


class OwnPair(Pair):
    pass


def by(read: Callable[[], int]) -> Callable[[Any], Any]:
    """Return an agent that chooses what is read when it is called."""
    return lambda obs: np.full(len(obs), read())


def rebound_network() -> tuple[Any, Change]:
    networks = [torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]
    for network, bias in zip(networks, ([9.0, -9.0], [-9.0, 9.0]), strict=True):
        network.bias.data[:] = torch.tensor(bias)
    league = SimpleNamespace(pool=networks, active=networks[0])

    def act(obs: Any) -> Any:
        return league.active(torch.as_tensor(obs)).argmax(-1).numpy()

    return act, lambda: setattr(league, "active", league.pool[1])


def rebound_settings() -> tuple[Any, Change]:
    kept = SimpleNamespace(all=[Settings(choice=0), Settings(choice=1)])
    kept.current = kept.all[0]
    return by(lambda: kept.current.choice), lambda: setattr(kept, "current", kept.all[1])


def rebound_function() -> tuple[Any, Change]:
    kept = SimpleNamespace(all={"left": lambda: 0, "right": lambda: 1})
    kept.current = kept.all["left"]
    return by(lambda: kept.current()), lambda: setattr(kept, "current", kept.all["right"])


def rebound_large_array() -> tuple[Any, Change]:
    kept = SimpleNamespace(all=[np.zeros(20_000), np.ones(20_000)])
    kept.current = kept.all[0]
    return by(lambda: int(kept.current[0])), lambda: setattr(kept, "current", kept.all[1])


def member_of_an_enum() -> tuple[Any, Change]:
    kept = SimpleNamespace(mode=Mode.LEFT)
    return by(lambda: 0 if kept.mode is Mode.LEFT else 1), lambda: setattr(kept, "mode", Mode.RIGHT)


def number_in_a_mixed_tuple() -> tuple[Any, Change]:
    kept = SimpleNamespace(pair=((0, 0), (0, None, [1])))
    return by(lambda: kept.pair[1][0]), lambda: setattr(kept, "pair", ((0, 0), (1, None, [1])))


def item_of_a_dict_of_ones_own() -> tuple[Any, Change]:
    settings = Settings(choice=0)
    return by(lambda: settings["choice"]), lambda: settings.update(choice=1)


def item_of_a_named_tuple_of_ones_own() -> tuple[Any, Change]:
    kept = SimpleNamespace(pair=OwnPair(0, 0))
    return by(lambda: kept.pair.choice), lambda: setattr(kept, "pair", OwnPair(1, 0))


def large_array_in_another_order() -> tuple[Any, Change]:
    array = np.zeros((100, 300)).T
    return by(lambda: int(array[0, 0])), lambda: array.fill(1)


def part_of_a_large_array() -> tuple[Any, Change]:
    array = np.zeros((300, 300))[::2, 1:]
    return by(lambda: int(array[0, 0])), lambda: array.fill(1)


def slot_of_a_dataclass() -> tuple[Any, Change]:
    kept = Slotted()
    return by(lambda: kept.choice), lambda: setattr(kept, "choice", 1)


AGENTS = [
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


def test_sparse_changes_of_a_large_array_are_announced_and_published(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    table = np.zeros((16, 5000))
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


def test_a_rollout_with_tensors_may_change_its_device_and_refuses_transitions(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        rollout = envs.rollout(by(lambda: 0), 4).to_torch()
        assert rollout.to_torch("cpu").obs.shape == (4, 2, 4)
        with pytest.raises(TypeError, match="before to_torch"):
            rollout.transitions()
