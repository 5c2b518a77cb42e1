"""Compatibility: package versions that head and worker must agree on, and those of imported packages."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import gymnasium
import numpy as np

import clusterenv

_MAX_CHARACTERS = 100
_MAX_FILES = 500
# How many leading numbers of a version must be equal: pickled policies refer to classes of clusterenv itself, pickled
# code depends on Python's minor version, pickled spaces on Gymnasium's, arrays inside them on NumPy's major version.
_PARTS = {"clusterenv": 3, "python": 2, "gymnasium": 2, "numpy": 1}
_DISTRIBUTIONS = {"clusterenv": "clusterenv-rl"}


def installed_versions() -> dict[str, str]:
    """Return the versions installed in this process."""
    return {
        "clusterenv": clusterenv.__version__,
        "python": platform.python_version(),
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
    }


def imported_packages(before: Collection[str] = ()) -> dict[str, str]:
    """Return the versions of imported modules outside the standard library, by module name.

    For a package that has no version and is not installed, such as a user's own, a digest of its source is used.

    Args:
        before: Modules to leave out.
    """
    names = {name for name in sys.modules if "." not in name and not name.startswith("_")}
    names -= {*before, *sys.stdlib_module_names, "clusterenv"}
    found = {name: version for name in sorted(names) if (version := version_of(name))}
    return {name: version for name, version in found.items() if f"{name}{version}".isascii() and version.isprintable()}


def version_of(name: str) -> str:
    """Return the version of a package, if it is imported or installed here and has one."""
    module = sys.modules.get(name)
    version = None if module is None else vars(module).get("__version__")  # getattr could load a lazy module.
    if isinstance(version, str):
        return version[:_MAX_CHARACTERS]
    from importlib import metadata  # Takes longer to import than half of clusterenv, and most heads never need it.

    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        if version := metadata.version(name):
            return version[:_MAX_CHARACTERS]
    file = None if module is None else vars(module).get("__file__")
    return _digest(file) if isinstance(file, str) else ""


def find_conflict(head: Mapping[str, str], worker: Mapping[str, str]) -> str:
    """Say what to install on the worker's side to match the head; "" if it matches already."""
    wrong = [name for name, parts in _PARTS.items() if _cut(head[name], parts) != _cut(worker.get(name, ""), parts)]
    if not wrong:
        return ""
    has = ", ".join(f"{name} {worker.get(name, 'of an unknown version')}" for name in wrong)
    needs = ", ".join(f"{name} {head[name]}" for name in wrong)
    packages = " ".join(f"{_DISTRIBUTIONS.get(name, name)}=={head[name]}" for name in wrong if name != "python")
    remedy = f"pip install {packages}" if "python" not in wrong else f"use Python {_cut(head['python'], 2)} there"
    return f"it has {has}, the head {needs}: {remedy}"


def _digest(file: str) -> str:
    """Return a digest of a package's source; "" if it is installed, or too large to be a user's own."""
    path = Path(file)
    if path.suffix != ".py" or {"site-packages", "dist-packages"} & set(path.parts):
        return ""
    digest = hashlib.blake2b(digest_size=4)
    files = sorted(path.parent.rglob("*.py"))[: _MAX_FILES + 1] if path.name == "__init__.py" else [path]
    if len(files) > _MAX_FILES:
        return ""
    try:
        for source in files:
            digest.update(os.fsencode(source.relative_to(path.parent)) + source.read_bytes())
    except OSError:
        return ""
    return f"of source {digest.hexdigest()}"


def _cut(text: str, parts: int) -> str:
    return ".".join(text.split(".")[:parts])
