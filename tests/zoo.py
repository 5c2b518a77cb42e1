"""A zoo of agents as people write them, for the law of policies: one method, `get_action_and_value`, many insides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.nn.utils import parametrizations

from tests.any_space import AnySpace as AnySpace

torch.set_num_threads(1)

td: Any = torch.distributions  # It has no types.

VECTOR = spaces.Box(-1.0, 1.0, (6,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 12, 12), np.uint8)
DICT = spaces.Dict({"body": VECTOR, "mask": spaces.MultiBinary(3)})
TUPLE = spaces.Tuple((VECTOR, spaces.Box(-1.0, 1.0, (2,), np.float32)))
DISCRETE = spaces.Discrete(3)
MULTI = spaces.MultiDiscrete([2, 3])
BINARY = spaces.MultiBinary(3)
CONTINUOUS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Base(nn.Module):
    """An actor-critic; a subclass says what its features and its distribution are."""

    width = 3

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(16, self.width)
        self.critic = nn.Linear(16, 1)
        self.body = self.make_body()

    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh())

    def features(self, x: Any) -> Any:
        return self.body(x)

    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Categorical(logits=self.actor(hidden))

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.features(x)
        probs = self.choose(hidden, x)
        if action is None:
            action = probs.sample()
        logprob, entropy = probs.log_prob(action), probs.entropy()
        if logprob.ndim == 2:
            logprob, entropy = logprob.sum(1), entropy.sum(1)
        return action, logprob, entropy, self.critic(hidden)


class SeparateNetworks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.v = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        probs = td.Categorical(logits=self.pi(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.v(x)


class Convolutions(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(100, 16), nn.ReLU())

    def features(self, x: Any) -> Any:
        return self.body(x / 255.0)


class Normalised(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16), nn.GELU())


class Activations(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(6, 16), nn.ELU(), nn.Linear(16, 16), nn.LeakyReLU(0.1), nn.Linear(16, 16), nn.Softplus()),
            *(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Hardtanh(), nn.Linear(16, 16), nn.Softsign()),
        )


class BatchNormed(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())


class Dropping(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh())


class MaskedByThreshold(Base):
    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Categorical(logits=self.actor(hidden).masked_fill(x[:, :3] > 0.9, -1e9))


class MaskedByObservation(Base):
    def features(self, x: Any) -> Any:
        return self.body(x["body"])

    def choose(self, hidden: Any, x: Any) -> Any:
        logits = self.actor(hidden)
        return td.Categorical(logits=torch.where(x["mask"].bool(), logits, torch.tensor(-1e8)))


class TupleReader(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh())

    def features(self, x: Any) -> Any:
        return self.body(torch.cat([x[0], x[1]], dim=1))


class Functional(Base):
    """Activations in the method, and arithmetic around the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 16)
        self.register_buffer("mean", torch.full((6,), 0.1))

    def features(self, x: Any) -> Any:
        x = ((x - self.mean) / 0.5).clamp(-3, 3)
        return torch.relu(self.two(torch.tanh(self.one(x)))) * 2.0 + 0.1


class Heated(Base):
    """A temperature and a flag that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.is_flipped = False

    def choose(self, hidden: Any, x: Any) -> Any:
        logits = self.actor(hidden) / self.temperature
        return td.Categorical(logits=-logits if self.is_flipped else logits)


class Branching(Base):
    """Does something else on states that may not be among the first it sees."""

    def choose(self, hidden: Any, x: Any) -> Any:
        logits = self.actor(hidden)
        if bool((x[:, 0] > 0.8).any()):
            logits = logits * 2.0
        return td.Categorical(logits=logits)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        if x.ndim == 2 and len(x) > 1:  # Row by row, so that a batch does not matter to the test.
            rows = [
                super(Branching, self).get_action_and_value(x[i : i + 1], None if action is None else action[i : i + 1])
                for i in range(len(x))
            ]
            return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
        return super().get_action_and_value(x, action)


class Whimsical(Base):
    """Branches on random numbers that no observation decides, and says which way it went by its value."""

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        action, logprob, entropy, value = super().get_action_and_value(x, action)
        if float(torch.rand(1)) < 0.5 or random.random() < 0.5:
            return action, logprob, entropy, value * 0.0
        return action, logprob, entropy, value * 0.0 + 1.0


class Probabilities(Base):
    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Categorical(probs=torch.softmax(self.actor(hidden), -1))


class ByHand(Base):
    """Without torch.distributions."""

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.features(x)
        logprobs = torch.log_softmax(self.actor(hidden), -1)
        if action is None:
            action = torch.multinomial(logprobs.exp(), 1)[:, 0]
        chosen = logprobs.gather(1, action.long()[:, None])[:, 0]
        return action, chosen, -(logprobs * logprobs.exp()).sum(-1), self.critic(hidden)


class MultiDiscrete(Base):
    width = 5

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.features(x)
        parts = [td.Categorical(logits=logits) for logits in torch.split(self.actor(hidden), [2, 3], dim=1)]
        if action is None:
            action = torch.stack([part.sample() for part in parts], dim=1)
        logprob = torch.stack([part.log_prob(a) for a, part in zip(action.T, parts, strict=True)])
        entropy = torch.stack([part.entropy() for part in parts])
        return action, logprob.sum(0), entropy.sum(0), self.critic(hidden)


class MultiBinary(Base):
    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Bernoulli(logits=self.actor(hidden))

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        return super().get_action_and_value(x, None if action is None else action.float())


class Gaussian(Base):
    width = 2

    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.tensor([[-0.5, 0.25]]))

    def choose(self, hidden: Any, x: Any) -> Any:
        mean = self.actor(hidden)
        return td.Normal(mean, self.log_std.expand_as(mean).exp())


class Independent(Gaussian):
    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Independent(super().choose(hidden, x), 1)


class StateDependentStd(Base):
    width = 4

    def choose(self, hidden: Any, x: Any) -> Any:
        mean, log_std = self.actor(hidden).chunk(2, dim=-1)
        return td.Normal(mean, log_std.clamp(-5, 2).exp())


class Squashed(Gaussian):
    """By torch's own transform; entropies have no closed form."""

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.features(x)
        normal = self.choose(hidden, x)
        probs = td.TransformedDistribution(normal, [td.TanhTransform(), td.AffineTransform(0.5, 2.0)])
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action).sum(1), normal.entropy().sum(1), self.critic(hidden)


class Transformer(Base):
    def make_body(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.join = nn.Linear(48, 16)

    def features(self, x: Any) -> Any:
        return torch.tanh(self.join(self.body(self.embed(x[..., None])).flatten(1)))


class Hypernetwork(Base):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(6, 96)

    def features(self, x: Any) -> Any:
        return torch.tanh(torch.einsum("ni,nij->nj", x, self.maker(x).view(-1, 6, 16)))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight

    def features(self, x: Any) -> Any:
        return torch.tanh(self.two(torch.tanh(self.one(self.body(x)))))


class Parametrised(Base):
    def make_body(self) -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 16)), nn.Tanh())


class Remembering(nn.Module):
    """CleanRL's recurrent agent: `get_action_and_value(x, state, done, action=None)`."""

    layer: type[nn.LSTM] | type[nn.GRU] = nn.LSTM
    num_layers = 1

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.memory: Any = self.layer(16, 8, self.num_layers)
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def get_states(self, x: Any, state: Any, done: Any) -> Any:
        parts = state if isinstance(state, tuple) else (state,)
        num_envs = parts[0].shape[1]
        hidden = self.encoder(x).reshape(-1, num_envs, 16)
        outputs = []
        for features, starts in zip(hidden, done.reshape(-1, num_envs), strict=True):
            keeps = (1.0 - starts).view(1, -1, 1)
            parts = tuple(keeps * part for part in parts)
            output, new = self.memory(features[None], parts if isinstance(state, tuple) else parts[0])
            parts = new if isinstance(new, tuple) else (new,)
            outputs.append(output)
        return torch.cat(outputs).flatten(0, 1), parts if isinstance(state, tuple) else parts[0]

    def get_action_and_value(self, x: Any, state: Any, done: Any, action: Any = None) -> Any:
        hidden, state = self.get_states(x, state, done)
        probs = td.Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), state


class RememberingByGates(Remembering):
    layer = nn.GRU


class RememberingInLayers(Remembering):
    num_layers = 2


RECURRENT: list[Callable[[], Any]] = [Remembering, RememberingByGates, RememberingInLayers]


def bfloat() -> Base:
    return Base().to(torch.bfloat16)


def double() -> Base:
    return Base().double()


def compiled() -> Any:
    agent: Any = torch.compile(Base())
    return agent


class Habitual(Base):
    """Chooses in its own way from the distribution whose log-probabilities it returns."""

    width = 2
    habit = "greedy in eval"

    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Normal(self.actor(hidden), 0.5) if "clip" in self.habit else td.Categorical(logits=self.actor(hidden))

    def pick(self, probs: Any) -> Any:
        """Return the actions."""
        match self.habit:
            case "greedy in eval":
                return probs.sample() if self.training else probs.logits.argmax(-1)
            case "cold":
                return td.Categorical(logits=100.0 * probs.logits).sample()
            case "clipped":
                return probs.sample().clamp(-0.1, 0.1)
            case "clipped in place":
                return probs.rsample().clamp_(-0.1, 0.1)
            case _:
                return torch.zeros_like(probs.sample())

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        hidden = self.features(x)
        probs = self.choose(hidden, x)
        action = self.pick(probs) if action is None else action
        logprob = probs.log_prob(action)
        logprob = logprob.sum(1) if logprob.ndim == 2 else logprob
        return action, logprob, probs.entropy(), self.critic(hidden)


class Embedded(Base):
    def make_body(self) -> nn.Module:
        return nn.Embedding(5, 16)


class OneHot(Base):
    def make_body(self) -> nn.Module:
        return nn.Linear(5, 16)

    def features(self, x: Any) -> Any:
        return self.body(nn.functional.one_hot(x, 5).float())


class MixedPrecision(Base):
    """A narrow actor beside a critic that needs the observations as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(6, 3).bfloat16()
        self.critic = nn.Linear(6, 1)

    def features(self, x: Any) -> Any:
        return x

    def choose(self, hidden: Any, x: Any) -> Any:
        return td.Categorical(logits=self.actor(x.bfloat16()).float())


ZOO: list[tuple[Callable[[], Any], Any, Any]] = [
    (Base, VECTOR, DISCRETE),
    (SeparateNetworks, VECTOR, DISCRETE),
    (Normalised, VECTOR, DISCRETE),
    (Activations, VECTOR, DISCRETE),
    (BatchNormed, VECTOR, DISCRETE),
    (Dropping, VECTOR, DISCRETE),
    (MaskedByThreshold, VECTOR, DISCRETE),
    (Functional, VECTOR, DISCRETE),
    (Heated, VECTOR, DISCRETE),
    (Branching, VECTOR, DISCRETE),
    (Probabilities, VECTOR, DISCRETE),
    (ByHand, VECTOR, DISCRETE),
    (Transformer, VECTOR, DISCRETE),
    (Hypernetwork, VECTOR, DISCRETE),
    (Tied, VECTOR, DISCRETE),
    (Parametrised, VECTOR, DISCRETE),
    (bfloat, VECTOR, DISCRETE),
    (double, VECTOR, DISCRETE),
    (compiled, VECTOR, DISCRETE),
    (Convolutions, IMAGE, DISCRETE),
    (MaskedByObservation, DICT, DISCRETE),
    (TupleReader, TUPLE, DISCRETE),
    (MultiDiscrete, VECTOR, MULTI),
    (MultiBinary, VECTOR, BINARY),
    (Gaussian, VECTOR, CONTINUOUS),
    (Independent, VECTOR, CONTINUOUS),
    (StateDependentStd, VECTOR, CONTINUOUS),
    (Squashed, VECTOR, CONTINUOUS),
]
