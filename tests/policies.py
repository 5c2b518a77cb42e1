"""Policies in numpy whose choices can be checked. Workers need no torch for them, and start at once."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from clusterenv import BasePolicy, Decision
from clusterenv.policy import Categorical


class Linear(BasePolicy):
    """A linear actor and critic for CartPole."""

    def __init__(self, seed: int = 0) -> None:
        self.source = np.random.default_rng(seed)
        self.matrix = self.source.normal(size=(4, 2)).astype(np.float32)
        self.critic = self.source.normal(size=4).astype(np.float32)

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        return Categorical(logits=obs @ self.matrix)

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        decision = super().act(obs, state)
        return decision._replace(extras={**decision.extras, "value": obs @ self.critic})

    def weights(self) -> dict[str, NDArray[Any]]:
        return {"matrix": self.matrix, "critic": self.critic}

    def nudge(self, size: float = 0.1) -> None:
        """Change the weights as an optimiser would."""
        for array in self.weights().values():
            array += self.source.normal(scale=size, size=array.shape).astype(np.float32)

    def evaluate(self, obs: Any, actions: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the log-probabilities of actions, and the values of observations."""
        logits = (obs @ self.matrix).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return np.take_along_axis(logprobs, actions[..., None], axis=-1)[..., 0], obs @ self.critic


class Hashing:
    """Chooses any space's actions as a function of the observation alone, so that a test can choose them too."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space

    def __call__(self, obs: Any) -> Any:
        flat = np.concatenate([np.asarray(part, np.float64).reshape(len(part), -1) for part in _parts(obs)], axis=1)
        digits = np.abs(flat).sum(axis=1) * 7919 % 1.0
        return _stack([self._sample(int(digit * 1e6)) for digit in digits])

    def _sample(self, seed: int) -> Any:
        self._space.seed(seed)
        return self._space.sample()


class Table(BasePolicy):
    """A numpy policy that cannot notice its own changes."""

    def __init__(self) -> None:
        self.logits = np.zeros((1, 2), np.float32)

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        return Categorical(logits=np.repeat(self.logits, len(obs), axis=0))

    def weights(self) -> dict[str, NDArray[Any]]:
        return {"logits": self.logits}

    def stamp(self) -> None:
        return None


class StepCounter(BasePolicy):
    """A recurrent policy whose state is the number of its decisions in this episode; it also returns it as an extra."""

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        count = state["count"] + 1
        return Decision(np.zeros(len(count), np.int64), {"count": count[:, 0]}, {"count": count})

    def initial_state(self, num_envs: int) -> dict[str, NDArray[np.int64]]:
        return {"count": np.zeros((num_envs, 1), np.int64)}


class Forgetful(Linear):
    """A recurrent policy that forgets to return its state."""

    def initial_state(self, num_envs: int) -> dict[str, NDArray[np.int64]]:
        return {"count": np.zeros((num_envs, 1), np.int64)}


class Calendar(gym.Env[NDArray[np.int64], np.int64]):
    """Observes (its index, the episode's number, the step's number); episodes are 1 to 4 steps long."""

    def __init__(self, index: int = 0) -> None:
        self.observation_space = spaces.Box(0, 10_000, (3,), np.int64)
        self.action_space = spaces.Discrete(5)
        self._index = index
        self._episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        self._length = int(self.np_random.integers(1, 5))
        return self._observe(), {}

    def step(self, action: np.int64) -> Any:
        self._step += 1
        is_last = self._step == self._length
        info = {"episode_number": self._episode} if is_last else {}
        return (
            self._observe(),
            float(self._step),
            is_last and self._length % 2 == 0,
            is_last and self._length % 2 == 1,
            info,
        )

    def _observe(self) -> NDArray[np.int64]:
        return np.array([self._index, self._episode, self._step])


def _parts(obs: Any) -> list[Any]:
    if isinstance(obs, dict):
        return [part for value in obs.values() for part in _parts(value)]
    if isinstance(obs, tuple):
        return [part for value in obs for part in _parts(value)]
    return [obs]


def _stack(actions: list[Any]) -> Any:
    if isinstance(actions[0], dict):
        return {key: _stack([action[key] for action in actions]) for key in actions[0]}
    if isinstance(actions[0], tuple):
        return tuple(_stack(list(part)) for part in zip(*actions, strict=True))
    return np.stack([np.asarray(action) for action in actions])
