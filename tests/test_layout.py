"""What lies beside the library: who may import whom, and that commands in the docs name modules that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tests", "chaos", "examples", "experiments", "benchmarks")
# What each may import beside the library.
ALLOWED = {
    "tests": {"tests", "chaos", "examples", "experiments"},
    "chaos": {"chaos", "tests"},
    "examples": {"examples"},
    "experiments": {"experiments", "examples"},
    "benchmarks": {"benchmarks", "experiments", "tests"},
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found & set(PACKAGES)


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in sorted((ROOT / package).rglob("*.py"))
        if (found := imports_of(path) - ALLOWED[package])
    }
    assert not wrong


@pytest.mark.quick
def test_every_command_in_the_pages_names_a_module_that_exists() -> None:
    commands = {
        (module, page.name)
        for page in PAGES
        for module in re.findall(rf"python -m ((?:{'|'.join(PACKAGES)})\b[\w.]*\w)", page.read_text())
    }
    assert commands
    assert [each for each in sorted(commands) if importlib.util.find_spec(each[0]) is None] == []
