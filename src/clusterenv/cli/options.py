"""What several commands take: launchers with all their settings, and counts."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterenv.config import usable_cores
from clusterenv.errors import ConfigError
from clusterenv.launchers.kubernetes.launcher import KubernetesLauncher
from clusterenv.launchers.local import LocalLauncher
from clusterenv.launchers.ray import RayLauncher
from clusterenv.launchers.slurm import SlurmLauncher
from clusterenv.launchers.ssh import SSHLauncher

Recipe = Callable[..., Any]  # A launcher's class.

LAUNCHERS: dict[str, tuple[Recipe, str]] = {
    "local": (LocalLauncher, "workers as child processes on this machine"),
    "slurm": (SlurmLauncher, "workers by Slurm, in a job of their own or in the one this runs in"),
    "ssh": (SSHLauncher, "workers on machines you can log in to with ssh"),
    "kubernetes": (KubernetesLauncher, "workers as Pods on Kubernetes"),
    "ray": (RayLauncher, "workers as actors of a Ray cluster"),
}


def add_num_workers(parser: argparse.ArgumentParser) -> None:
    """Give the parser the option `--num-workers`."""
    parser.add_argument(
        "--num-workers",
        type=read_count,
        metavar="N",
        help="how many workers (default: as many as the launcher suggests, or one per core of this machine)",
    )


def count_workers(arguments: argparse.Namespace, launcher: Any) -> int:
    """Return how many workers are asked for, or suggested."""
    return int(arguments.num_workers or launcher.suggested_workers or usable_cores())


def read_count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def add_options(parser: argparse.ArgumentParser, recipe: Recipe, **others: str) -> None:
    """Give the parser an option for each field of a launcher, `--log-dir` for `log_dir`: what it can do, this can.

    Args:
        parser: For the command.
        recipe: The launcher's class.
        others: Other names for options, where the command has one of the field's name itself.
    """
    hints = typing.get_type_hints(recipe)
    texts = _attribute_texts(recipe)
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]  # every launcher is a dataclass
        kinds = _kinds(hints[field.name])
        text = texts.get(field.name, "").replace("%", "%%")
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        if bool in kinds:
            settings |= {"action": argparse.BooleanOptionalAction}
        elif Mapping in kinds and str not in kinds:  # A text in its place is the path of a file.
            values = "NAME[=VALUE]" if Sequence in kinds else "NAME=VALUE"
            settings |= {"action": "extend", "nargs": "+", "metavar": values}
            text += " One or more."
        elif Sequence in kinds:
            settings |= {"action": "extend", "nargs": "+", "metavar": "TEXT"}
            text += " One or more; for one that begins with a dash, repeat the option with an equals sign."
        else:
            settings |= {"type": _scalar(kinds), "metavar": _scalar(kinds).__name__.upper().replace("STR", "TEXT")}
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        name = others.get(field.name, field.name).replace("_", "-")
        parser.add_argument(f"--{name}", help=text, required=is_required, **settings)


def make_launcher(recipe: Recipe, arguments: argparse.Namespace) -> Any:
    """Make the launcher from what the parser read.

    Raises:
        ConfigError: The launcher refuses a value.
    """
    hints = typing.get_type_hints(recipe)
    settings = {}
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]  # every launcher is a dataclass
        if not hasattr(arguments, field.name):
            continue
        value = getattr(arguments, field.name)
        kinds = _kinds(hints[field.name])
        if Mapping in kinds and str not in kinds and (Sequence not in kinds or any("=" in item for item in value)):
            value = dict(_read_pair(item, hints[field.name], field.name) for item in value)
        settings[field.name] = value
    return recipe(**settings)


def _kinds(hint: Any) -> set[Any]:
    """Return what a field may hold: classes of scalars, and `Sequence` or `Mapping` for whatever is one."""
    kinds = set()
    for member in _members(hint):
        kind = typing.get_origin(member) or member
        if kind is types.NoneType:
            continue
        if isinstance(kind, type) and issubclass(kind, Mapping):
            kind = Mapping
        elif isinstance(kind, type) and issubclass(kind, Sequence) and not issubclass(kind, str):
            kind = Sequence
        kinds.add(kind)
    return kinds


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _scalar(kinds: set[Any]) -> type:
    for kind in (str, Path, float, int):
        if kind in kinds:
            return kind
    raise TypeError(f"There is no option for a field that holds {kinds}.")


def _read_pair(text: str, hint: Any, name: str) -> tuple[str, Any]:
    """Read NAME=VALUE; NAME alone stands for one, or for true."""
    mapping = next(member for member in _members(hint) if _kinds(member) == {Mapping})
    value_kinds = _kinds(typing.get_args(mapping)[1])
    key, separator, value = text.partition("=")
    if str in value_kinds:
        return key, value if separator else True
    try:
        return key, (float if float in value_kinds else int)(value) if separator else 1
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text}: {value!r} is not a number.") from None


def _attribute_texts(recipe: Recipe) -> dict[str, str]:
    """Read what the class's docstring says about each attribute."""
    _, _, attributes = (inspect.getdoc(recipe) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
