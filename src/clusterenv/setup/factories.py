"""Factories: turns what a user may pass as `env` into factories that workers make environments with."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from clusterenv.config import whole_number
from clusterenv.errors import ConfigError
from clusterenv.setup.arguments import check_mapping
from clusterenv.setup.wrapping import EnvWrapper, check_wrappers, wrap_all
from clusterenv.wire.assignment import EnvFactory, VectorFactory

log = logging.getLogger(__name__)

_EXAMPLE = '{"gravity": 9.0}'


class NativeVector:
    """Runs a native vector environment on each worker, as large as the worker's shard.

    Results then depend on how that environment uses its seed: many (including Gymnasium's own CartPole) use one random
    generator for all sub-environments, so a different number of workers gives different episodes.
    """

    def __init__(self, env: str | EnvSpec | Callable[[int], VectorEnv[Any, Any, Any]], **kwargs: Any) -> None:
        """Take an id with a vector implementation, or a callable.

        Args:
            env: An id or spec with a `vector_entry_point`; or a callable that takes the number of environments and
                returns a `VectorEnv` of that size.
            kwargs: Passed to the vector implementation of an id or spec.
        """
        if isinstance(env, str | EnvSpec):
            spec = gym.spec(env) if isinstance(env, str) else env
            if spec.vector_entry_point is None:
                raise ConfigError(
                    f"{spec.id} has no vector implementation (its spec has no vector_entry_point). "
                    f"Pass the id itself, ClusterEnv({spec.id!r}, ...), to run single environments side by side."
                )
            self.spec: EnvSpec | None = spec
            self.make: VectorFactory = functools.partial(_make_native, _portable(spec), kwargs)
        elif callable(env):
            if kwargs:
                raise ConfigError("NativeVector takes keyword arguments only with an id; put them into the callable.")
            self.spec = None
            self.make = env
        else:
            raise ConfigError(f"NativeVector takes an id, a spec or a callable, got {type(env)}.")


EnvArgument = str | EnvSpec | EnvFactory | Sequence[EnvFactory] | NativeVector


@dataclass(frozen=True, eq=False, repr=False)
class Factories:
    """How to make the environments of a run.

    Attributes:
        plain: One factory per environment; None if environments are native.
        native: Makes a vector environment of a given size; None if environments are plain.
        spec: The spec, if the user gave an id or a spec.
    """

    plain: list[EnvFactory] | None
    native: VectorFactory | None
    num_envs: int
    spec: EnvSpec | None

    def for_shard(self, start: int, stop: int) -> list[EnvFactory] | VectorFactory:
        """Return the factories, or the native factory, of one shard's environments."""
        if self.plain is not None:
            return self.plain[start:stop]
        assert self.native is not None
        return self.native


def resolve(
    env: EnvArgument,
    num_envs: int | None,
    env_kwargs: dict[str, Any] | None = None,
    render_mode: str | None = None,
    wrappers: Sequence[EnvWrapper] | None = None,
) -> Factories:
    """Turn a user's `env` argument, and those that belong to it, into factories.

    Raises:
        ConfigError: `env` is of an unsupported type, or does not fit the other arguments.
    """
    env_kwargs = _with_render_mode(env, env_kwargs, render_mode)
    factories = _resolve_plain(env, num_envs, env_kwargs)
    if wrappers is None:
        return factories
    check_wrappers(wrappers)
    if factories.plain is None:
        raise ConfigError(
            f"wrappers={wrappers!r} are for single environments: wrap what the NativeVector's callable makes."
        )
    return replace(factories, plain=wrap_all(factories.plain, wrappers)) if wrappers else factories


def _resolve_plain(env: EnvArgument, num_envs: int | None, env_kwargs: dict[str, Any] | None) -> Factories:
    if num_envs is not None:
        num_envs = whole_number("num_envs", num_envs, least=1)
    check_mapping("env_kwargs", env_kwargs, _EXAMPLE)
    if env_kwargs is not None and not isinstance(env, str | EnvSpec):
        raise ConfigError(
            f"env_kwargs goes with an id or a spec, got {env_kwargs!r} with {env!r}: put the arguments into the "
            "factory."
        )
    if isinstance(env, NativeVector):
        return Factories(None, env.make, num_envs or 1, env.spec)
    if isinstance(env, str | EnvSpec):
        # Copied, because gymnasium.make writes some of its arguments into the spec it is given.
        spec = copy.deepcopy(gym.spec(env) if isinstance(env, str) else env)
        factory = functools.partial(gym.make, _portable(spec), **(env_kwargs or {}))
        count = num_envs or 1
        return Factories([factory] * count, None, count, spec)
    if callable(env):
        _check_factory(env, 0)
        return Factories([env] * (num_envs or 1), None, num_envs or 1, None)
    if isinstance(env, Env | VectorEnv):
        raise ConfigError(
            f"env must be something that makes environments, not an environment: got {env!r}. Pass its id, or a "
            "function that makes one, and num_envs: ClusterEnv(lambda: ..., num_envs=8)."
        )
    if not isinstance(env, Sequence) or not env:
        hint = " Make it a list: ClusterEnv(list(...))." if isinstance(env, Iterable) and env else ""
        raise ConfigError(
            "env must be an environment's id, an EnvSpec, a factory, a non-empty sequence of factories or a "
            f"NativeVector, got {env!r}.{hint}"
        )
    for index, item in enumerate(env):
        _check_factory(item, index)
    if num_envs not in (None, len(env)):
        raise ConfigError(f"num_envs={num_envs}, but {len(env)} factories were given. Leave num_envs out.")
    return Factories([factory for factory in env if not isinstance(factory, str)], None, len(env), None)


def describe_factory(part: object) -> str:
    """Describe what a factory makes, in a text that is the same in every process."""
    match part:
        case functools.partial():
            named = [f"{name}={describe_factory(value)}" for name, value in sorted(part.keywords.items())]
            given = ", ".join([*map(describe_factory, part.args), *named])
            return given if part.func is gym.make else f"{describe_factory(part.func)}({given})"
        case EnvSpec():
            return ", ".join(
                [part.id, *(f"{name}={describe_factory(part.kwargs[name])}" for name in sorted(part.kwargs))]
            )
        case list() | tuple():
            return f"[{', '.join(map(describe_factory, part))}]"
        case dict():
            return f"{{{', '.join(f'{name!r}: {describe_factory(value)}' for name, value in part.items())}}}"
        case None | bool() | int() | float() | str():
            return repr(part)
        case _:
            return str(getattr(part, "__qualname__", type(part).__qualname__))


def pickle_code(value: object, what: str) -> bytes:
    """Pickle code for the workers; `what` names it in the error message.

    Raises:
        ConfigError: The code holds something that cannot be pickled.
    """
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]  # cloudpickle is untyped
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be sent to a worker: {type(error).__name__}: {error}. Whatever it holds (an open file, a "
            "lock, a running environment) must be made inside the factory; with num_workers=0 nothing is sent."
        ) from error


def local_registry() -> list[bytes]:
    """Pickle the registrations of environments that are not Gymnasium's own, so that workers know them too."""
    registry = []
    for spec in gym.registry.values():
        if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium."):
            continue
        try:
            registry.append(cloudpickle.dumps(_portable(spec)))
        except Exception:
            log.debug("the registration of %s cannot be sent to workers", spec.id, exc_info=True)
    return registry


def _portable(spec: EnvSpec) -> EnvSpec:
    """Replace entry points that name a script's `__main__` by the objects: on a worker, it is another module."""
    found = {}
    for name in ("entry_point", "vector_entry_point"):
        module, _, attribute = str(getattr(spec, name)).partition(":")
        if module == "__main__" and hasattr(sys.modules["__main__"], attribute):
            found[name] = getattr(sys.modules["__main__"], attribute)
    if not found:
        return spec
    portable = copy.copy(spec)
    for name, value in found.items():
        setattr(portable, name, value)
    return portable


def _with_render_mode(
    env: EnvArgument, env_kwargs: dict[str, Any] | None, render_mode: str | None
) -> dict[str, Any] | None:
    if render_mode is None:
        return env_kwargs
    if not isinstance(env, str | EnvSpec):
        raise ConfigError(
            f"render_mode goes with an id or a spec, got {render_mode!r} with {env!r}: pass it on in the factory, "
            "gymnasium.make(..., render_mode=...)."
        )
    check_mapping("env_kwargs", env_kwargs, _EXAMPLE)
    if (env_kwargs or {}).get("render_mode", render_mode) != render_mode:
        raise ConfigError(f"render_mode={render_mode!r}, but env_kwargs has {env_kwargs!r}: leave one of them out.")
    return {**(env_kwargs or {}), "render_mode": render_mode}


def _make_native(spec: EnvSpec, kwargs: dict[str, Any], num_envs: int) -> VectorEnv[Any, Any, Any]:
    return gym.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **kwargs)


def _check_factory(factory: object, index: int) -> None:
    if isinstance(factory, Env | VectorEnv):
        raise ConfigError(
            f"Factory {index} is an environment ({factory}): pass a function that makes one, lambda: ...."
        )
    if not callable(factory):
        raise ConfigError(f"Factory {index} must be callable, got {type(factory)}.")
    if inspect.isclass(factory) and issubclass(factory, VectorEnv):
        raise ConfigError(
            f"Factory {index} is a vector environment's class: wrap it, NativeVector({factory.__name__})."
        )
