"""What adapters do beside an environment, on its worker: functions for `ClusterEnv.apply`.

They are apart from the adapters so that a worker need not have the learner's framework installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import Env, Wrapper


def call_method(env: Env[Any, Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method, looking through wrappers."""
    return env.get_wrapper_attr(name)(*args, **kwargs)


def set_attribute(env: Env[Any, Any], name: str, value: Any) -> None:
    """Set an attribute, on the outermost wrapper that has it or else on the environment itself."""
    env.set_wrapper_attr(name, value)


def has_attribute(env: Env[Any, Any], name: str) -> bool:
    """Tell whether the environment or one of its wrappers has an attribute."""
    return env.has_wrapper_attr(name)


def is_wrapped(env: object, class_name: str) -> bool:
    """Tell whether the environment wears a wrapper of the class that `full_name` calls so.

    A name rather than the class, which may not be importable where the environment lives.
    """
    while isinstance(env, Wrapper):
        if any(full_name(base) == class_name for base in type(env).__mro__):
            return True
        env = env.env
    return False


def full_name(cls: type) -> str:
    """Return a class's name with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
