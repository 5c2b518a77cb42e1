"""clusterenv evaluate: the episodes of a policy."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from clusterenv.cli.options import read_count
from clusterenv.config import usable_cores
from clusterenv.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    evaluate = commands.add_parser(
        "evaluate",
        help="let a policy play episodes on this machine, each once, and show what it reaches",
        description="Play whole episodes with a policy on worker processes of this machine, as ClusterEnv.evaluate "
        "does: episode i from the seed SEED + i, none twice, and the same table for any number of workers.",
    )
    evaluate.add_argument("--env", required=True, metavar="ID", help="CartPole-v1, or my_module:MyEnv-v0")
    evaluate.add_argument(
        "--policy",
        required=True,
        metavar="MODULE:NAME",
        help="a function from observations to actions, an agent, or what makes one when it is called without arguments",
    )
    evaluate.add_argument("--episodes", type=read_count, default=100, metavar="N", help="how many (default: 100)")
    evaluate.add_argument("--seed", type=int, default=0, metavar="SEED", help="of the first episode (default: 0)")
    evaluate.add_argument("--max-steps", type=read_count, metavar="N", help="truncate episodes that take longer")
    evaluate.add_argument("--deterministic", action="store_true", help="take the most likely action, or the mean")
    evaluate.add_argument(
        "--resume", type=Path, metavar="FILE", help="write each episode down here, and do not play what it holds again"
    )
    evaluate.add_argument(
        "--workers", type=int, metavar="N", help="how many processes (default: one per core; 0: this one)"
    )
    evaluate.add_argument(
        "--num-envs", type=read_count, metavar="N", help="how many environments at a time (default: 8 per worker)"
    )
    evaluate.add_argument("--json", action="store_true", help="print the table and its manifest as JSON")
    evaluate.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import gymnasium

    from clusterenv.env import ClusterEnv

    agent = find_policy(arguments.policy)
    num_workers = usable_cores() if arguments.workers is None else arguments.workers
    num_envs = arguments.num_envs or 8 * max(1, num_workers)
    try:
        envs = ClusterEnv(arguments.env, num_envs, num_workers=min(num_workers, num_envs))
    except gymnasium.error.Error as error:
        raise ConfigError(f"--env {arguments.env}: {error}") from error
    with envs:
        evaluation = envs.evaluate(
            agent,
            arguments.episodes,
            seed=arguments.seed,
            max_steps=arguments.max_steps,
            deterministic=arguments.deterministic,
            resume=arguments.resume,
        )
    print(json.dumps(evaluation.to_dict()) if arguments.json else evaluation)
    return 0


def find_policy(name: str) -> Any:
    """Return the agent that MODULE:NAME means; a class or a function without arguments is called for it.

    Raises:
        ConfigError: There is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"--policy must be MODULE:NAME, such as my_agent:policy, got {name!r}.")
    here = os.getcwd()
    sys.path.insert(0, here)  # As `python -m` has it.
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ConfigError(f"--policy {name}: the module {module_name} has no {attribute}.")
            found = getattr(found, part)
        return _make_agent(found, name) if _makes_an_agent(found) else found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there: what it imports is not.
        hint = (
            " A module is named without .py."
            if error.name.endswith(".py") or name.startswith(f"{error.name}.py")
            else ""
        )
        raise ConfigError(
            f"--policy {name}: there is no module {error.name!r} here, or where Python looks.{hint}"
        ) from error
    finally:
        sys.path.remove(here)


def _make_agent(make: Any, name: str) -> Any:
    try:
        return make()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"line {last.lineno} of {last.filename}"
        raise ConfigError(f"--policy {name} raised {type(error).__name__}: {error} ({where}).") from error


def _makes_an_agent(found: object) -> bool:
    """Whether something is called without arguments: a policy takes at least the observations."""
    if inspect.isclass(found):
        return True
    if not inspect.isfunction(found):
        return False
    parameters = inspect.signature(found).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
