"""The pages of docs/reference are complete: names, errors, statistics, commands and their options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clusterenv
from clusterenv import AdaptiveSync, ClusterEnv, errors
from clusterenv.cli import make_parser
from clusterenv.policy.sync import Reason
from tests.policies import Linear

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
COMMANDS = REFERENCE / "cli.md"
NO_PULLS = {Reason.CURRENT, Reason.BELOW, Reason.WAITING}


def read(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


@pytest.mark.quick
def test_every_public_name_is_on_the_page_of_the_api() -> None:
    shown = set(re.findall(r"^::: clusterenv\.(?:errors\.)?(\w+)$", read("api"), re.MULTILINE))
    shown |= {name for names in re.findall(r"members: \[([^\]]*)\]", read("api")) for name in names.split(", ")}
    assert set(clusterenv.__all__) - shown == set()


@pytest.mark.quick
def test_every_distribution_is_on_the_page_of_the_api() -> None:
    families = {name for name in clusterenv.policy.__all__ if name[0].isupper()}
    named = set(re.findall(r"\w+", read("api")))
    assert families - named == {"FunctionPolicy", "SyncRule"}, "these two are what other things are made of"


@pytest.mark.quick
def test_every_error_has_a_cause_and_a_cure() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ClusterEnvError)
    }
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", read("errors"), re.DOTALL | re.MULTILINE))
    assert classes - set(sections) == set()
    assert [name for name in sorted(classes - {"ClusterEnvError"}) if "**Cure.**" not in sections[name]] == []
    for name in classes - {"ClusterEnvError"}:
        also = {base.__name__ for base in getattr(errors, name).__mro__[1:]} & {"ValueError", "RuntimeError", "OSError"}
        assert {kind for kind in also if f"`{kind}`" not in sections[name]} - {"OSError"} == set(), name


def test_every_statistic_is_explained() -> None:
    with ClusterEnv("CartPole-v1", num_envs=2, num_workers=1, sync=AdaptiveSync(0.05)) as envs:
        policy = Linear(seed=1)
        for _ in range(2):
            envs.rollout(policy, 8)
            policy.matrix = policy.matrix + np.float32(0.1)
        keys = set(envs.stats)
    keys |= {f"pulls_{reason.value}" for reason in set(Reason) - NO_PULLS}
    explained = {
        name
        for line in read("statistics").splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert explained == keys


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                if not any(isinstance(each, argparse._SubParsersAction) for each in child._actions):
                    yield child
                yield from parsers_of(child)


def rewritten() -> str:
    """The page as the parsers have it."""
    lines = [
        "# Command line",
        "",
        "`clusterenv COMMAND --help` says the same. `python -m clusterenv` is the same command. The exit status is 0",
        "if all is well, 1 if what was asked for failed, 2 if the command itself is wrong.",
        "",
        "This page is made from the commands: `python -m tests.test_reference_pages` brings it up to date.",
    ]
    for parser in parsers_of(make_parser()):
        lines += ["", f"## {parser.prog}", "", " ".join((parser.description or "").split()), ""]
        lines += ["| argument | |", "|---|---|"]
        for action in parser._actions:
            if "--help" in action.option_strings or action.help == argparse.SUPPRESS:
                continue
            lines.append(f"| {spelling(action)} | {explain(action)} |")
    return "\n".join(lines) + "\n"


def spelling(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
    if isinstance(action, argparse.BooleanOptionalAction):
        value = ""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)


def explain(action: argparse.Action) -> str:
    text = " ".join((action.help or "").replace("%%", "%").split())
    if "%(default)s" in text:
        text = text.replace("%(default)s", str(action.default))
    return text.replace("|", "\\|")


def test_the_page_of_commands_says_what_the_commands_say() -> None:
    assert COMMANDS.read_text() == rewritten(), "`python -m tests.test_reference_pages` brings the page up to date"


if __name__ == "__main__":
    COMMANDS.write_text(rewritten())
