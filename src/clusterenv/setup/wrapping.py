"""Wrapping: applies a user's wrappers to each environment, on the worker that makes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import Env
from gymnasium.vector import VectorEnv

from clusterenv.errors import ConfigError
from clusterenv.wire.assignment import EnvFactory
from clusterenv.worker.making import make_env

EnvWrapper = Callable[[Env[Any, Any]], Env[Any, Any]]


def check_wrappers(wrappers: object) -> None:
    """Raise ConfigError unless these are functions from one environment to another."""
    if not isinstance(wrappers, Sequence):
        raise ConfigError(f"wrappers must be a list of functions from one environment to another, got {wrappers!r}.")
    for index, wrapper in enumerate(wrappers):
        if not callable(wrapper):
            raise ConfigError(
                f"wrappers[{index}] must be a function from one environment to another, such as FlattenObservation or "
                f"lambda env: TimeLimit(env, 500), got {wrapper!r}."
            )
        if inspect.isclass(wrapper) and issubclass(wrapper, VectorEnv):
            raise ConfigError(
                f"wrappers[{index}] must wrap one environment, got {wrapper.__name__}, which wraps many: put it around "
                f"the ClusterEnv, {wrapper.__name__}(ClusterEnv(...))."
            )


def wrap_all(plain: list[EnvFactory], wrappers: Sequence[EnvWrapper]) -> list[EnvFactory]:
    """Return factories that also wrap; identical factories stay one object, which is pickled once."""
    wrappers = tuple(wrappers)
    wrapped = {id(factory): functools.partial(_make_wrapped, factory, wrappers) for factory in plain}
    return [wrapped[id(factory)] for factory in plain]


def _make_wrapped(factory: EnvFactory, wrappers: tuple[EnvWrapper, ...]) -> Env[Any, Any]:
    env = make_env(factory)
    for index, wrapper in enumerate(wrappers):
        env = wrapper(env)
        if not isinstance(env, Env):
            raise ConfigError(f"wrappers[{index}], {wrapper!r}, must return a gymnasium.Env, got {env!r}.")
    return env
