"""Options: a launcher's fields as options of a command line, so that whatever a launcher can do, the command can."""

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

from clusterenv.errors import ConfigError

Recipe = Callable[..., Any]  # A launcher's class.


def add_options(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    """Give the parser an option for each field of a launcher: `--workers-per-host` for `workers_per_host`."""
    hints = typing.get_type_hints(recipe)
    texts = _attribute_texts(recipe)
    for field in dataclasses.fields(recipe):  # type: ignore[arg-type]  # every launcher is a dataclass
        kinds = _kinds(hints[field.name])
        text = texts.get(field.name, "").replace("%", "%%")
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        if bool in kinds:
            settings |= {"action": argparse.BooleanOptionalAction}
        elif Mapping in kinds:
            values = "NAME[=VALUE]" if Sequence in kinds else "NAME=VALUE"
            settings |= {"action": "append", "metavar": values}
            text += " May be repeated."
        elif Sequence in kinds:
            settings |= {"action": "append", "metavar": "TEXT"}
            text += " May be repeated; a value that begins with a dash is written with an equals sign."
        else:
            settings |= {"type": _scalar(kinds), "metavar": _scalar(kinds).__name__.upper().replace("STR", "TEXT")}
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, required=is_required, **settings)


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
        if Mapping in kinds and (Sequence not in kinds or any("=" in item for item in value)):
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
        return key, int(value) if separator else 1
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} {text}: {value!r} is no number.") from None


def _attribute_texts(recipe: Recipe) -> dict[str, str]:
    """Read what the class's docstring says about each attribute."""
    _, _, attributes = (inspect.getdoc(recipe) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
