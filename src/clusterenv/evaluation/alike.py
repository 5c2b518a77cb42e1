"""Alike: whether the environments of a run are all of one kind, which an evaluation requires."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from clusterenv.errors import ConfigError
from clusterenv.evaluation.digest import digest_of_code

log = logging.getLogger(__name__)


def check_alike(factories: Sequence[Any], ask: Callable[[Callable[[Any], Any]], Sequence[Any]]) -> None:
    """Check that all factories make environments of one kind: an evaluation uses only the first factory.

    Factories that differ only in a number they hold, such as `[make_env(i) for i in range(8)]`, usually do.

    Args:
        factories: The run's factories.
        ask: Runs a function on every environment, and returns the results.

    Raises:
        ConfigError: The environments are of different kinds.
    """
    different = {id(factory): factory for factory in factories}.values()
    if len({digest_of_code(factory, has_state=True) for factory in different}) == 1:
        return
    kinds = [tuple(kind) for kind in ask(_describe)]
    if odd := [index for index, kind in enumerate(kinds) if kind != kinds[0]]:
        raise ConfigError(
            f"evaluate() needs environments of one kind, but environment 0 is {' '.join(kinds[0])} and environment "
            f"{odd[0]} is {' '.join(kinds[odd[0]])}: make a ClusterEnv for each kind."
        )
    if not kinds[0][1]:
        log.warning(
            "evaluate() uses environments that the first factory makes. The factories differ, and of %s, which is not "
            "registered, cannot be told whether its environments do: if so, make a ClusterEnv for each kind.",
            kinds[0][0],
        )


def _describe(env: Any) -> list[str]:
    """Return an environment's class and, if it was registered, its id and arguments."""
    kind, spec = type(env.unwrapped), env.spec
    arguments = "" if spec is None else ", ".join(f"{name}={spec.kwargs[name]!r}" for name in sorted(spec.kwargs))
    arguments = re.sub(r" at 0x[0-9a-f]+", "", arguments)  # Addresses differ between processes and mean nothing.
    return [f"{kind.__module__}.{kind.__qualname__}", "" if spec is None else f"({spec.id}: {arguments})"]
